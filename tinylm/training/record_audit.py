"""Who trained on what: with `--record_audit`, every rank notes the records of each of its steps.

    audit/about.json              what `tinylm audit` checks the rest against
    audit/examples.parquet        example, record_id: what each example holds; only where that is not its own number
    audit/rank-R/step-F.parquet   step, micro_step, epoch, record_id, example (int64), from step F on: a row for each
                                  record of each example

Choices:
- An *example* is one row of the dataset. A long record may be several examples and a packed row hold several records,
  so both numbers are noted: of two examples of one record, one could be seen twice and the other never.
- A part is kept in memory (40 bytes a row) and appears under its name when it is whole, just before the checkpoint that
  it belongs to. So every checkpoint has all parts before it, and a resumed run deletes the parts behind it.
- Steps are numbered from 1, as in the log; micro-steps and epochs from 0. The epoch is the one that the order was
  computed for.

The module imports neither torch nor transformers, so that reading an audit starts at once.
"""

import json
import os
from array import array
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from tinylm.data.order import GlobalBatches

COLUMNS = ("step", "micro_step", "epoch", "record_id", "example")


@dataclass(frozen=True)
class AuditedOrder:
    """`audit/about.json`: what decides which records a step has to see. `first_step` is the first one noted."""

    num_records: int
    num_examples: int
    seed: int
    global_batch_size: int
    first_step: int

    @classmethod
    def read(cls, folder: Path) -> "AuditedOrder":
        return cls(**json.loads((folder / "about.json").read_text(encoding="utf-8")))

    def same_data_as(self, other: "AuditedOrder") -> bool:
        return {**asdict(self), "first_step": 0} == {**asdict(other), "first_step": 0}


class RecordAudit:
    """Notes the records of one rank.

    Args:
        output_dir: the run's folder.
        batches: this rank's order of the examples.
        contents: `(examples, record_ids)`, int64, in the order of the examples: which records each of them holds. None
            where each example is a record of its own.
    """

    def __init__(
        self, output_dir: str, batches: GlobalBatches, contents: tuple[np.ndarray, np.ndarray] | None = None
    ) -> None:
        self.folder, self.batches, self.contents = Path(output_dir, "audit"), batches, contents
        self._rows = {name: array("q") for name in COLUMNS}

    def begin(self, steps_done: int) -> None:
        """Deletes the parts of steps that will be taken again. Every rank calls it; rank 0 says what is audited.

        Raises:
            ValueError: the run that is gone on with had other data, another seed or another global batch.
        """
        batches = self.batches
        num_records = batches.length if self.contents is None else int(self.contents[1].max()) + 1
        order = AuditedOrder(num_records, batches.length, batches.seed, batches.global_batch_size, steps_done + 1)
        if steps_done and (self.folder / "about.json").is_file():
            before = AuditedOrder.read(self.folder)
            if not order.same_data_as(before):
                raise ValueError(
                    "An audit follows one order of records, and this run goes on with another than it began with: it"
                    f" was {before}, and is {order}. Give the batch size, seed and data of the beginning, or set"
                    " `--record_audit false` and delete the folder `audit`."
                )
            order = before
        for path in self.folder.glob("rank-*/*step-*.parquet*"):
            if path.name.startswith(".") or int(path.stem.removeprefix("step-")) > steps_done:
                path.unlink(missing_ok=True)  # another rank may have been quicker
        self._rows = {name: array("q") for name in COLUMNS}
        if batches.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.contents is not None:
                columns = dict(zip(("example", "record_id"), self.contents, strict=True))
                _write_whole(pa.table(columns), self.folder / "examples.parquet")
            beside = self.folder / ".about.json"  # another rank may be reading it
            beside.write_text(json.dumps(asdict(order), indent=2) + "\n", encoding="utf-8")
            os.replace(beside, self.folder / "about.json")

    def add(self, step: int, record_ids: list[int], examples: list[int]) -> None:
        """The records of this rank's next micro-batch, which belongs to `step`, and the example that each came in."""
        rows = self._rows
        micro_step = rows["micro_step"][-1] + 1 if rows["step"] and rows["step"][-1] == step else 0
        columns = ([value] * len(record_ids) for value in (step, micro_step, self.batches.epoch))
        for name, column in zip(COLUMNS, (*columns, record_ids, examples), strict=True):
            rows[name].extend(column)

    def close_part(self) -> None:
        """Writes what was noted since the last part; nothing if that is nothing."""
        if not self._rows["step"]:
            return
        folder = self.folder / f"rank-{self.batches.rank}"
        folder.mkdir(parents=True, exist_ok=True)
        columns = {name: np.frombuffer(rows, dtype=np.int64) for name, rows in self._rows.items()}
        _write_whole(pa.table(columns), folder / f"step-{self._rows['step'][0]}.parquet")
        self._rows = {name: array("q") for name in COLUMNS}


def _write_whole(table: pa.Table, path: Path) -> None:
    beside = path.with_name(f".{path.name}")
    pa.parquet.write_table(table, beside)
    os.replace(beside, path)
