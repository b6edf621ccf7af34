"""Local files as rows of text: `.txt`, `.jsonl`/`.json`, `.csv`, `.parquet` and MediaWiki `.xml`, plain or compressed.

Everything is read as a stream: one document, or one parquet batch, is in memory at a time. Errors name the file and
the place: a byte offset (in the decompressed file), a line or a row.
"""

import bz2
import codecs
import csv
import gzip
import json
import lzma
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
from pyarrow.parquet import ParquetFile

from tinylm.data.mediawiki import page_texts
from tinylm.data.wikitext import clean

CHUNK = 1 << 20
"""Bytes of a text file that are decoded at a time."""
BATCH = 256
"""Rows of a parquet file that are decoded at a time."""


def _open_zstd(path: Path) -> BinaryIO:
    return BufferedReader(pa.input_stream(str(path), compression="zstd"))


COMPRESSIONS: dict[str, Callable[[Path], BinaryIO]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstd,
}


@dataclass(frozen=True)
class FileReader:
    """`Shard.read` of one file.

    Rows are: the lines of JSON lines, the records of CSV and parquet, the articles of a dump, the pieces of a text file
    between `document_separator` (without one, the whole file is one row).
    """

    path: Path
    text_column: str
    document_separator: str | None

    def __call__(self, start: int, step: int) -> Iterator[str]:
        """Documents of rows `start, start + step, ...`.

        Raises:
            ValueError: the file is corrupt, not UTF-8, lacks the column, or holds a row that is not text.
        """
        try:
            for text in _FORMATS[format_of(self.path)](self, start, step):
                if text.strip():
                    yield text
        except (EOFError, OSError, zlib.error, lzma.LZMAError, pa.ArrowException) as error:
            raise ValueError(
                f"`{self.path}` cannot be read to its end: it is truncated or corrupt ({error}). Fetch it again."
            ) from error


def format_of(path: Path) -> str:
    """The suffix that tells the format: `.jsonl` of `a.jsonl.gz`; may be one that is not known.

    Parts of a dump have their page ids behind it: `enwiki-pages-articles1.xml-p1p41242.bz2`.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    suffix = suffixes[-1] if suffixes else ""
    return ".xml" if suffix.startswith(".xml-p") else suffix


def is_known(path: Path) -> bool:
    """Whether the name ends like a file that can be read."""
    return format_of(path) in _FORMATS


def known_names() -> str:
    """The endings that are read, for messages."""
    return f"{', '.join(_FORMATS)} (each also with {', '.join(COMPRESSIONS)})"


def _open(path: Path) -> BinaryIO:
    return COMPRESSIONS.get(path.suffix.lower(), lambda path: path.open("rb"))(path)


def _not_utf8(path: Path, error: UnicodeDecodeError, offset: int) -> ValueError:
    """`offset`: where the bytes that could not be decoded begin in the file."""
    byte = error.object[error.start]
    return ValueError(
        f"`{path}` is not UTF-8: byte 0x{byte:02x} at offset {offset + error.start}. "
        "Convert it, for instance with `iconv -f latin1 -t utf-8`."
    )


def _read_text(file: FileReader, start: int, step: int) -> Iterator[str]:
    return islice(_text_pieces(file), start, None, step)


def _text_pieces(file: FileReader) -> Iterator[str]:
    if file.document_separator is None:
        yield "".join(_decoded_chunks(file.path))
        return
    rest = ""
    for chunk in _decoded_chunks(file.path):
        *pieces, rest = (rest + chunk).split(file.document_separator)
        yield from pieces
    yield rest


def _decoded_chunks(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    offset = 0
    with _open(path) as stream:
        while True:
            data = stream.read(CHUNK)
            held_back = len(decoder.getstate()[0])  # bytes of an unfinished character, or of a byte order mark
            try:
                yield decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                raise _not_utf8(path, error, offset - held_back) from error
            offset += len(data)
            if not data:
                return


def _lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """Lines with their byte offsets, without the byte order mark."""
    with _open(path) as stream:
        offset = 0
        for line in stream:
            yield (
                (line.removeprefix(codecs.BOM_UTF8), len(codecs.BOM_UTF8))
                if _has_mark(line, offset)
                else (line, offset)
            )
            offset += len(line)


def _has_mark(line: bytes, offset: int) -> bool:
    return offset == 0 and line.startswith(codecs.BOM_UTF8)


def _decode(path: Path, line: bytes, offset: int) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error, offset) from error


def _read_json_lines(file: FileReader, start: int, step: int) -> Iterator[str]:
    numbered = ((number, line, offset) for number, (line, offset) in enumerate(_lines(file.path), 1) if line.strip())
    for number, line, offset in islice(numbered, start, None, step):
        where = f"`{file.path}`, line {number}"
        try:
            record = json.loads(_decode(file.path, line, offset))
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON ({error}). Each line must be one JSON object.") from error
        except RecursionError as error:
            raise ValueError(f"{where}: JSON nested too deeply.") from error
        if not isinstance(record, dict):
            raise ValueError(f"{where}: a {type(record).__name__}, but each line must be one JSON object.")
        check_column(file.text_column, record, where)
        yield text_of(record[file.text_column], file.text_column, where)


def _read_csv(file: FileReader, start: int, step: int) -> Iterator[str]:
    csv.field_size_limit(2**31 - 1)  # the default of 128 KiB is less than a long article
    rows = csv.reader((_decode(file.path, line, offset) for line, offset in _lines(file.path)), strict=True)
    try:
        header = next(rows, None)
        if header is None:
            return
        check_column(file.text_column, header, f"`{file.path}`")
        column = header.index(file.text_column)
        for number, row in islice(enumerate(filter(None, rows), 1), start, None, step):
            if len(row) != len(header):
                raise ValueError(
                    f"`{file.path}`, row {number} (to line {rows.line_num}): {len(row)} fields, "
                    f"but the header has {len(header)}. Quote fields that hold commas or line ends."
                )
            yield row[column]
    except csv.Error as error:
        raise ValueError(f"`{file.path}`, line {rows.line_num}: not CSV ({error}).") from error


def _read_parquet(file: FileReader, start: int, step: int) -> Iterator[str]:
    with _seekable(file.path) as stream, ParquetFile(stream) as parquet:
        check_column(file.text_column, parquet.schema_arrow.names, f"`{file.path}`")
        first = 0  # number of the first row of this group
        for group in range(parquet.num_row_groups):
            rows = parquet.metadata.row_group(group).num_rows
            if start < first + rows:
                batches = parquet.iter_batches(BATCH, row_groups=[group], columns=[file.text_column])
                columns = (batch.column(0) for batch in batches)
                for number, value in strided(columns, start - first, step):
                    yield text_of(value, file.text_column, f"`{file.path}`, row {first + number}")
                    start = first + number + step
            first += rows


def _seekable(path: Path) -> BinaryIO:
    """Parquet is read from its end: a compressed one is unpacked into a temporary file."""
    if path.suffix.lower() not in COMPRESSIONS:
        return path.open("rb")
    unpacked = tempfile.TemporaryFile()  # noqa: SIM115 -- the caller closes it
    with _open(path) as stream:
        shutil.copyfileobj(stream, unpacked, CHUNK)
    unpacked.seek(0)
    return unpacked


def _read_dump(file: FileReader, start: int, step: int) -> Iterator[str]:
    with _open(file.path) as stream:
        articles = (text for text in page_texts(stream, str(file.path)) if text is not None)
        for text in islice(articles, start, None, step):
            yield clean(text)


def strided(columns: Iterator[pa.Array], start: int, step: int) -> Iterator[tuple[int, object]]:
    """(number, value) of rows `start, start + step, ...` of Arrow columns in a row; other rows are not decoded."""
    first = 0
    for column in columns:
        if start < first + len(column):
            values = column[start - first :: step].to_pylist()
            yield from zip(range(start, first + len(column), step), values, strict=True)
            start += step * len(values)
        first += len(column)


def check_column(text_column: str, columns: "list[str] | dict[str, object]", where: str) -> None:
    """Raises ValueError, with the columns that are there, if `text_column` is not among them."""
    if text_column not in columns:
        raise ValueError(f"{where} has no column `{text_column}`; it has {sorted(columns)}. Set `--text_column`.")


def text_of(value: object, text_column: str, where: str) -> str:
    """A row's text; null is an empty document. Raises ValueError for what is not text."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(
            f"{where}: column `{text_column}` holds {value!r:.80}, which is not a string. "
            "Mend the row, or set `--text_column`."
        )
    return value


_FORMATS: dict[str, Callable[[FileReader, int, int], Iterator[str]]] = {
    ".txt": _read_text,
    ".jsonl": _read_json_lines,
    ".json": _read_json_lines,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".xml": _read_dump,
}
