"""Local files as rows of text: `.txt`, `.jsonl`/`.json`, `.csv`, `.parquet` and MediaWiki `.xml`, plain or compressed.

Everything is read as a stream: one document, or one parquet batch, is in memory at a time. Errors name the file and the
place in it.
"""

import csv
import json
import logging
import lzma
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from pyarrow import ArrowException
from pyarrow.parquet import ParquetFile

from tinylm.data.columns import check_column, strided_texts, text_of
from tinylm.data.documents import blanked
from tinylm.data.mediawiki import pages
from tinylm.data.text_streams import CHUNK, COMPRESSIONS, decoded, decoded_chunks, numbered_lines, open_bytes
from tinylm.data.wikitext import clean

logger = logging.getLogger(__name__)

BATCH = 256
"""Rows of a parquet file that are decoded at a time."""


@dataclass(frozen=True)
class FileReader:
    """`Shard.rows` of one file.

    Rows are: the lines of JSON lines, the records of CSV and parquet, the articles of a dump, the pieces of a text file
    between `document_separator` (without one, the whole file is one row).
    """

    path: Path
    text_column: str = "text"
    document_separator: str | None = None

    def __call__(self, start: int, step: int) -> Iterator[str]:
        """The documents of rows `start, start + step, ...`, "" for a row that has none. Raises what `rows` raises."""
        prepared = clean if format_of(self.path) == ".xml" else str
        return blanked(map(prepared, self.rows(start, step)))

    def rows(self, start: int, step: int) -> Iterator[str]:
        """Rows as they lie in the file, empty ones too, and wikitext as it is.

        Raises:
            ValueError: the file is corrupt, not UTF-8, lacks the column, or holds a row that is not text.
        """
        try:
            yield from _FORMATS[format_of(self.path)](self, start, step)
        except (EOFError, OSError, zlib.error, lzma.LZMAError, ArrowException) as error:
            raise ValueError(
                f"`{self.path}` cannot be read: {error}. If it is truncated or corrupt, fetch it again."
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


def _read_text(file: FileReader, start: int, step: int) -> Iterator[str]:
    return islice(_text_pieces(file), start, None, step)


def _text_pieces(file: FileReader) -> Iterator[str]:
    if file.document_separator is None:
        yield "".join(decoded_chunks(file.path))
        return
    rest = ""
    for chunk in decoded_chunks(file.path):
        *pieces, rest = (rest + chunk).split(file.document_separator)
        yield from pieces
    yield rest


def _read_json_lines(file: FileReader, start: int, step: int) -> Iterator[str]:
    records = (numbered for numbered in numbered_lines(file.path, skip=start) if numbered[2].strip())
    for number, offset, line in islice(records, 0, None, step):
        where = f"`{file.path}`, line {number}"
        try:
            record = json.loads(decoded(file.path, offset, line))
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{where}: not JSON ({error}). Each line must be one JSON object.") from error
        if not isinstance(record, dict):
            raise ValueError(f"{where}: {line[:40]!r} is not a JSON object. Each line must be one.")
        check_column(file.text_column, record, where)
        yield text_of(record[file.text_column], file.text_column, where)


def _read_csv(file: FileReader, start: int, step: int) -> Iterator[str]:
    csv.field_size_limit(2**31 - 1)  # the default of 128 KiB is less than a long article
    lines = (decoded(file.path, offset, line) for _, offset, line in numbered_lines(file.path))
    records = csv.reader(lines, strict=True)
    try:
        header = next(records, None)
        if header is None:
            return
        check_column(file.text_column, header, f"`{file.path}`")
        column = header.index(file.text_column)
        for record in islice(filter(None, records), start, None, step):
            if len(record) != len(header):
                raise ValueError(
                    f"`{file.path}`, row that ends at line {records.line_num}: {len(record)} fields, but the header "
                    f"has {len(header)}. Quote fields that hold commas or line ends."
                )
            yield record[column]
    except csv.Error as error:
        raise ValueError(
            f"`{file.path}`, line {records.line_num}: not CSV ({error}). Quote fields that hold commas or line ends."
        ) from error


def _read_parquet(file: FileReader, start: int, step: int) -> Iterator[str]:
    with _seekable(file.path) as stream, ParquetFile(stream) as parquet:
        check_column(file.text_column, parquet.schema_arrow.names, f"`{file.path}`")
        group_sizes = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
        skipped = first = 0  # whole groups before `start` are not read; `first` row behind them
        while skipped < len(group_sizes) and first + group_sizes[skipped] <= start:
            first += group_sizes[skipped]
            skipped += 1
        groups = range(skipped, len(group_sizes))
        batches = parquet.iter_batches(BATCH, row_groups=groups, columns=[file.text_column])
        arrays = (batch.column(0) for batch in batches)
        where = f"`{file.path}`"
        yield from strided_texts(arrays, start, step, text_column=file.text_column, where=where, first=first)


def _seekable(path: Path) -> BinaryIO:
    """Parquet is read from its end: a compressed one is unpacked into a temporary file."""
    if path.suffix.lower() not in COMPRESSIONS:
        return path.open("rb")
    unpacked = tempfile.TemporaryFile()  # noqa: SIM115 -- the caller closes it
    with open_bytes(path) as stream:
        shutil.copyfileobj(stream, unpacked, CHUNK)
    unpacked.seek(0)
    return unpacked


def _read_dump(file: FileReader, start: int, step: int) -> Iterator[str]:
    counts: Counter[str] = Counter()
    with open_bytes(file.path) as stream:
        yield from islice(pages(stream, file.path, counts), start, None, step)
    _log_once(
        f"`{file.path}`: {counts['article']:,} articles; skipped {counts['redirect']:,} redirects and "
        f"{counts['other']:,} pages outside the article namespace"
    )


@lru_cache(maxsize=1024)
def _log_once(message: str) -> None:
    """A dump is read once an epoch, and more; its counts are news once a process."""
    logger.info(message)


_FORMATS: dict[str, Callable[[FileReader, int, int], Iterator[str]]] = {
    ".txt": _read_text,
    ".jsonl": _read_json_lines,
    ".json": _read_json_lines,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".xml": _read_dump,
}
