"""Local files, globs and folders as a source."""

import logging
from collections.abc import Iterable, Sequence
from glob import glob, has_magic
from pathlib import Path

from tinylm.data.documents import Shard, Source, fingerprint
from tinylm.data.file_formats import FileReader, format_of, is_known, known_names
from tinylm.data.wikitext import CLEANING_VERSION

logger = logging.getLogger(__name__)

CHECKED_BYTES = 16 << 20
"""Files of up to this size together are read to their end at opening (about a second): what is wrong in them ends the
run before anything is built, and their documents are counted. Of the others, only the first document is read."""


def open_local_files(data_files: Sequence[str], text_column: str, document_separator: str | None) -> Source:
    """One shard a file, in the order of `data_files`; within a glob or folder sorted by path.

    Raises:
        FileNotFoundError: nothing there.
        ValueError: a file that cannot be read, or no document in any.
    """
    paths = list({path.resolve(): path for pattern in data_files for path in matching_files(pattern)}.values())
    readers = [FileReader(path, text_column, document_separator) for path in paths]
    states = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    cleaning = CLEANING_VERSION if any(format_of(path) == ".xml" for path in paths) else None
    total = sum(size for _, size, _ in states)
    documents = sum(_check(reader, to_the_end=total <= CHECKED_BYTES) for reader in readers)
    if not documents:
        raise ValueError(f"There is no document in {_names(paths)}: only empty ones. Set `--data_files`.")
    counted = f", {documents:,} document{'s' if documents > 1 else ''}" if total <= CHECKED_BYTES else ""
    return Source(
        description=f"{_names(paths)}, {total / 1e6:,.3g} MB{counted}",
        fingerprint=fingerprint(states, text_column, document_separator, cleaning),
        shards=tuple(Shard(str(reader.path), reader) for reader in readers),
        identity=fingerprint(names_and_sizes(paths), text_column, document_separator, cleaning),
    )


def _check(reader: FileReader, *, to_the_end: bool) -> int:
    """How many documents were seen: all, or at most one. Articles of a dump are not cleaned for that."""
    seen = 0
    for row in reader.rows(0, 1):
        seen += bool(row.strip())
        if seen and not to_the_end:
            break
    if not seen:
        logger.warning("`%s` holds no document.", reader.path)
    return seen


def matching_files(pattern: str) -> list[Path]:
    """The files that a path, glob or folder names, those of a glob or folder sorted.

    Raises:
        FileNotFoundError: nothing there.
        ValueError: a file with an ending that is not known.
    """
    path = Path(pattern).expanduser()
    if path.is_file():
        if not is_known(path):
            raise ValueError(f"`{path}` has an ending that is not known. Files must end in {known_names()}.")
        return [path]
    candidates: Iterable[Path]
    if path.is_dir():
        candidates = path.rglob("*")
    elif has_magic(pattern):
        candidates = map(Path, glob(str(path), recursive=True))
    else:
        raise FileNotFoundError(f"`{path}` does not exist. Set `--data_files` to files, globs or folders.")
    found = sorted(candidate for candidate in candidates if candidate.is_file() and is_known(candidate))
    if not found:
        kind = "The folder" if path.is_dir() else "The glob"
        raise FileNotFoundError(f"{kind} `{path}` holds no file that ends in {known_names()}. Set `--data_files`.")
    return found


def names_and_sizes(paths: Sequence[Path]) -> list[tuple[str, int]]:
    """What files are known by where they may have been moved: names without folders, and bytes."""
    return [(path.name, path.stat().st_size) for path in paths]


def _names(paths: list[Path]) -> str:
    if len(paths) == 1:
        return f"`{paths[0]}`"
    formats = ", ".join(sorted({format_of(path) for path in paths}))
    return f"{len(paths):,} local files ({formats})"
