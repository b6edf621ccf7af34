"""The benchmark's rows, in CSV files that only grow: one file a machine, one row a configuration and run."""

import csv
import fcntl
import io
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TypeVar

WRONG = "wrong"


@dataclass(frozen=True)
class Circumstances:
    """What rows must share before they may be compared: the first columns of every row.

    `run` is the UTC time at which a run began: only what was measured in one run met the same drift of the machine.
    """

    run: str
    commit: str
    hardware: str
    world_size: int
    backend: str
    threads: int


@dataclass(frozen=True)
class StepRow(Circumstances):
    """The optimizer step of one configuration; times are milliseconds of the slowest rank.

    `exposed_ms` is the median over the rounds of this step less the same step without exchange. `processor_ms` is the
    processor time of a step, all threads of the busiest rank together (None in rows from before it was measured): where
    it fills the wall time, nothing is left that an exchange could hide behind. `bytes` (None where the
    backend hides them), `collectives` and `messages` are the busiest rank's in one step, as observed.
    A configuration that is proven WRONG has no times.
    """

    model: str
    batch_size: int  # rows a rank
    sequence_length: int
    precision: str
    algorithm: str
    mode: str
    warmup_steps: int
    steps: int
    rounds: int
    median_ms: float | None
    p10_ms: float | None
    p90_ms: float | None
    exposed_ms: float | None
    processor_ms: float | None
    tokens_per_second: float | None
    bytes: int | None
    collectives: int
    messages: int
    proven: str  # yes, WRONG or "no exchange"
    gradient_difference: float | None  # of the proof


@dataclass(frozen=True)
class SizeRow(Circumstances):
    """The sum of one tensor by one algorithm; times are milliseconds of the slowest rank, `bytes` the tensor's."""

    algorithm: str
    bytes: int
    repeats: int
    median_ms: float
    p10_ms: float
    p90_ms: float


AnyRow = TypeVar("AnyRow", StepRow, SizeRow)


def file_name(text: str) -> str:
    """`text` as part of a file name.

    >>> file_name("Intel(R) Xeon(R) Processor, 2 cores")
    'intel-r-xeon-r-processor-2-cores'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def check_can_append(path: Path, row_type: type[AnyRow]) -> None:
    """Tries what `append_rows` will do, and makes the folder, so that a run does not end with nowhere to write.

    Raises:
        ValueError: the file holds other columns.
        OSError: the file cannot be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        trial = _beside(path)
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise OSError(
            f"The rows are appended to a CSV file; `{path}` cannot be written ({error}). Set `--output_file`."
        ) from error
    if path.exists():
        read_rows(path, row_type)


def append_rows(path: Path, rows: Sequence[AnyRow]) -> None:
    """Adds `rows` below those of `path`; a reader sees the old file or the new one, and other writers wait.

    Raises:
        ValueError: the file holds other columns.
    """
    with _only_writer(path):
        _append(path, rows)


@contextmanager
def _only_writer(path: Path) -> Iterator[None]:
    """Waits until nobody else writes `path`. The lock's file is gone afterwards; a killed process holds no lock."""
    lock = path.with_name(f".{path.name}.lock")
    file = lock.open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    while os.fstat(file.fileno()).st_nlink == 0:  # the one before has removed what this one waited for
        file.close()
        file = lock.open("w")
        fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        lock.unlink()
        file.close()


def _append(path: Path, rows: Sequence[AnyRow]) -> None:
    row_type = type(rows[0])
    known = read_rows(path, row_type) if path.exists() else []
    text = io.StringIO()
    writer = csv.DictWriter(text, [column.name for column in fields(row_type)], lineterminator="\n")
    writer.writeheader()
    for row in [*known, *rows]:
        cells = asdict(row).items()
        writer.writerow({name: f"{cell:.6g}" if isinstance(cell, float) else cell for name, cell in cells})
    beside = _beside(path)
    beside.write_text(text.getvalue(), encoding="utf-8")
    os.replace(beside, path)


def read_rows(path: Path, row_type: type[AnyRow]) -> list[AnyRow]:
    """The rows of a file that `append_rows` has written.

    Raises:
        ValueError: the file holds other columns.
    """
    columns = [column.name for column in fields(row_type)]
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if list(reader.fieldnames or []) != columns:
            raise ValueError(
                f"Rows are appended to a file with the columns {', '.join(columns)}; `{path}` has"
                f" {', '.join(reader.fieldnames or ['none'])}. Set `--output_file` to another file."
            )
        return [
            row_type(**{column.name: _value(column.type, row[column.name]) for column in fields(row_type)})
            for row in reader
        ]


def _value(kind: object, word: str) -> str | int | float | None:
    if not word and kind in (int | None, float | None):
        return None
    return {str: str, int | None: int, int: int}.get(kind, float)(word)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")
