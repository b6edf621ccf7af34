"""Files as streams of bytes, decompressed, and of UTF-8 text whose errors name the byte.

Offsets count bytes of the decompressed file.
"""

import bz2
import codecs
import gzip
import lzma
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

CHUNK = 1 << 20
"""Bytes that are read at a time where there are no lines."""


def _open_zstd(path: Path) -> BinaryIO:
    return BufferedReader(pa.input_stream(str(path), compression="zstd"))


COMPRESSIONS: dict[str, Callable[[Path], BinaryIO]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstd,
}


def open_bytes(path: Path) -> BinaryIO:
    """The file's bytes, decompressed if its name says that it is compressed."""
    decompress = COMPRESSIONS.get(path.suffix.lower())
    return decompress(path) if decompress else path.open("rb")


def decoded_chunks(path: Path) -> Iterator[str]:
    """The text without a byte order mark, in pieces of about `CHUNK`; line ends stay as they are."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    offset = 0
    with open_bytes(path) as stream:
        while True:
            data = stream.read(CHUNK)
            held_back = len(decoder.getstate()[0])  # bytes of a character, or of a mark, that the last chunk cut
            try:
                yield decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                mark = len(codecs.BOM_UTF8) if _lost_its_mark(error, held_back + len(data)) else 0
                raise _not_utf8(path, error, offset - held_back + mark) from error
            offset += len(data)
            if not data:
                return


def _lost_its_mark(error: UnicodeDecodeError, given: int) -> bool:
    """The decoder cuts the byte order mark off before it decodes, and then counts from there."""
    return len(error.object) == given - len(codecs.BOM_UTF8)


def numbered_lines(path: Path, skip: int = 0) -> Iterator[tuple[int, int, bytes]]:
    """(number from 1, byte offset, line with its end), without a byte order mark.

    Args:
        skip: leave out so many lines that are not blank, and the blank ones between them; a million takes about 0.3 s.
    """
    offset = 0
    with open_bytes(path) as stream:
        for number, line in enumerate(stream, 1):
            if number == 1 and line.startswith(codecs.BOM_UTF8):
                offset = len(codecs.BOM_UTF8)
                line = line[offset:]
            if skip:
                skip -= not line.isspace()
            else:
                yield number, offset, line
            offset += len(line)


def decoded(path: Path, offset: int, line: bytes) -> str:
    """The text of a line that begins at `offset`.

    Raises:
        ValueError: not UTF-8.
    """
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error, offset) from error


def _not_utf8(path: Path, error: UnicodeDecodeError, offset: int) -> ValueError:
    """`offset`: where the bytes that were to be decoded begin in the file."""
    return ValueError(
        f"`{path}` is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {offset + error.start}. "
        "Convert it, for instance with `iconv -f latin1 -t utf-8`."
    )
