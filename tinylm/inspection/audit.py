"""Was every record trained on as often as it should have been? Checks what `--record_audit` has written.

What a step had to see is computed anew from seed, epoch and global batch (`tinylm.data.order`), for the steps that were
taken: an epoch that the run did not finish owes only the records of its steps. Nothing here needs torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from tinylm.data.order import GlobalBatches
from tinylm.training.record_audit import AuditedOrder

_NAMED = 10  # records that are named one by one


@dataclass(frozen=True)
class EpochAudit:
    """Counts of records, and int64 arrays of those that stand out.

    A record that is several examples counts as seen once where each of them was. `filled_up` are the records with which
    the end of the epoch fills its last step; `missed` and `repeated` are those that nothing explains.
    """

    epoch: int
    num_steps: int
    steps_per_epoch: int
    expected: int
    once: int
    more_than_once: int
    never: int
    examples_per_rank: dict[int, int]
    filled_up: np.ndarray
    missed: np.ndarray
    repeated: np.ndarray

    @property
    def is_clean(self) -> bool:
        return not len(self.missed) and not len(self.repeated)

    def lines(self) -> Iterator[str]:
        """The epoch in words."""
        part = "" if self.num_steps == self.steps_per_epoch else f" ({self.num_steps} of {self.steps_per_epoch} steps)"
        yield (
            f"epoch {self.epoch}{part}: {self.expected:,} records expected; {self.once:,} seen once,"
            f" {self.more_than_once:,} more than once, {self.never:,} never"
        )
        counts = self.examples_per_rank
        even = "even" if len(set(counts.values())) == 1 else "UNEVEN"
        yield f"  examples per rank: {', '.join(f'{count:,} on {rank}' for rank, count in counts.items())} ({even})"
        if len(self.filled_up):
            yield f"  the epoch's last step is filled up with {_names(self.filled_up)} once more"
        if len(self.missed):
            yield f"  MISSED: {_names(self.missed)}"
        if len(self.repeated):
            yield f"  REPEATED without reason: {_names(self.repeated)}"


def audit_run(output_dir: str | Path) -> list[EpochAudit]:
    """The audit of each epoch of the run in `output_dir`, in order.

    Raises:
        FileNotFoundError: the run was not audited.
        ValueError: a part cannot be read, or names a record that the data does not have.
    """
    folder = Path(output_dir, "audit")
    if not (folder / "about.json").is_file() or not any(folder.glob("rank-*/step-*.parquet")):
        raise FileNotFoundError(
            f"There is no audit of a run in `{output_dir}`. Train with `--record_audit true`; the first part is written"
            " at the first checkpoint or at the end."
        )
    order = AuditedOrder.read(folder)
    rows = _read_rows(folder, order.num_records)
    first, last = order.first_step, int(rows["step"].max())
    steps_per_epoch = GlobalBatches(order.num_examples, per_rank_batch_size=order.global_batch_size).steps_per_epoch
    epochs = {*range((first - 1) // steps_per_epoch, (last - 1) // steps_per_epoch + 1), *rows["epoch"].tolist()}
    record_of_example = np.arange(order.num_examples)
    if (folder / "examples.parquet").is_file():
        record_of_example = _read(folder / "examples.parquet")["record_id"]
    return [
        _audit_epoch(
            epoch,
            {name: column[rows["epoch"] == epoch] for name, column in rows.items()},
            order,
            record_of_example,
            range(max(first - 1, epoch * steps_per_epoch), min(last, (epoch + 1) * steps_per_epoch)),
        )
        for epoch in sorted(epochs)
    ]


def _audit_epoch(
    epoch: int, rows: dict[str, np.ndarray], order: AuditedOrder, record_of_example: np.ndarray, steps: range
) -> EpochAudit:
    """`steps` are those of the epoch that the run has taken, counted from 0 over all epochs."""
    batches = GlobalBatches(
        order.num_examples, per_rank_batch_size=order.global_batch_size, seed=order.seed, start_step=steps.start
    )
    batches.set_epoch(epoch)
    begin = (steps.start - epoch * batches.steps_per_epoch) * order.global_batch_size
    examples = np.array(list(islice(batches, len(steps))), dtype=np.int64).reshape(-1)[: order.num_examples - begin]
    ends = steps.stop == (epoch + 1) * batches.steps_per_epoch
    filled_up = record_of_example[batches.repeated()] if ends else np.empty(0, dtype=np.int64)

    def times(record_ids: np.ndarray) -> np.ndarray:
        return np.bincount(record_ids, minlength=order.num_records)

    due, seen = times(record_of_example[examples]), times(rows["record_id"])
    ranks, counts = np.unique(rows["rank"], return_counts=True)
    return EpochAudit(
        epoch=epoch,
        num_steps=len(steps),
        steps_per_epoch=batches.steps_per_epoch,
        expected=int((due > 0).sum()),
        once=int(((seen == due) & (due > 0)).sum()),
        more_than_once=int((seen > due).sum()),
        never=int((seen < due).sum()),
        examples_per_rank=dict(zip(ranks.tolist(), counts.tolist(), strict=True)),
        filled_up=filled_up,
        missed=np.flatnonzero(seen < due),
        repeated=np.flatnonzero(seen > due + times(filled_up)),
    )


def _read_rows(folder: Path, num_records: int) -> dict[str, np.ndarray]:
    """All parts of all ranks as columns (int64), with the `rank` of each row."""
    parts = []
    for path in sorted(folder.glob("rank-*/step-*.parquet")):
        part = _read(path)
        if len(outside := part["record_id"][(part["record_id"] < 0) | (part["record_id"] >= num_records)]):
            raise ValueError(
                f"Record ids are 0 to {num_records - 1}, and `{path}` names {_names(outside)}. The audit belongs to"
                " other data than its `about.json` says."
            )
        rank = int(path.parent.name.removeprefix("rank-"))
        parts.append({**part, "rank": np.full(len(part["step"]), rank)})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        table = pa.parquet.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"`{path}` is damaged: {error}. What it said is lost; train again.") from error
    return {name: table[name].to_numpy() for name in table.column_names}


def _names(record_ids: np.ndarray) -> str:
    """
    >>> _names(np.array([4])), _names(np.array([4, 9]))
    ('record 4', 'records 4, 9')
    """
    named = ", ".join(map(str, record_ids[:_NAMED].tolist()))
    more = f" and {len(record_ids) - _NAMED:,} more" if len(record_ids) > _NAMED else ""
    return f"record{'s' if len(record_ids) > 1 else ''} {named}{more}"
