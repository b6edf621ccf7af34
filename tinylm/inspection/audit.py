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

    A record that is several examples counts as seen once where each of them was, as missed where one of them was, and
    as repeated likewise. `filled_up` are the records with which the end of the epoch fills its last step; `missed` and
    `repeated` are those that nothing explains.
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
    contents = _contents(folder, order)
    rows = _read_rows(folder, contents)
    first, last = order.first_step, int(rows["step"].max())
    steps_per_epoch = GlobalBatches(order.num_examples, per_rank_batch_size=order.global_batch_size).steps_per_epoch
    epochs = {*range((first - 1) // steps_per_epoch, (last - 1) // steps_per_epoch + 1), *rows["epoch"].tolist()}
    return [
        _audit_epoch(
            epoch,
            {name: column[rows["epoch"] == epoch] for name, column in rows.items()},
            order,
            contents,
            range(max(first - 1, epoch * steps_per_epoch), min(last, (epoch + 1) * steps_per_epoch)),
        )
        for epoch in sorted(epochs)
    ]


@dataclass(frozen=True)
class _Contents:
    """Which records each example holds: parallel arrays (int64), a *piece* an entry, in the order of the examples."""

    examples: np.ndarray
    record_ids: np.ndarray

    def pieces(self, examples: np.ndarray) -> np.ndarray:
        """How often each piece is among `examples`: `[pieces]` int64."""
        return np.bincount(examples, minlength=int(self.examples[-1]) + 1)[self.examples]

    def pieces_of(self, examples: np.ndarray) -> np.ndarray:
        """How many pieces each of `examples` has."""
        return np.bincount(self.examples)[examples]

    def find(self, examples: np.ndarray, record_ids: np.ndarray) -> np.ndarray:
        """The piece of each `(example, record_id)`; -1 where the data has no such piece."""
        width = 1 + max(int(self.record_ids.max()), int(record_ids.max(initial=0)))
        keys = self.examples * width + self.record_ids
        order = np.argsort(keys)
        wanted = examples * width + record_ids
        places = order[np.minimum(np.searchsorted(keys, wanted, sorter=order), len(keys) - 1)]
        return np.where(keys[places] == wanted, places, -1)


def _contents(folder: Path, order: AuditedOrder) -> _Contents:
    if not (folder / "examples.parquet").is_file():
        return _Contents(np.arange(order.num_examples), np.arange(order.num_examples))
    table = _read(folder / "examples.parquet")
    return _Contents(table["example"], table["record_id"])


def _audit_epoch(
    epoch: int, rows: dict[str, np.ndarray], order: AuditedOrder, contents: _Contents, steps: range
) -> EpochAudit:
    """`steps` are those of the epoch that the run has taken, counted from 0 over all epochs."""
    batches = GlobalBatches(
        order.num_examples, per_rank_batch_size=order.global_batch_size, seed=order.seed, start_step=steps.start
    )
    batches.set_epoch(epoch)
    begin = (steps.start - epoch * batches.steps_per_epoch) * order.global_batch_size
    examples = np.array(list(islice(batches, len(steps))), dtype=np.int64).reshape(-1)[: order.num_examples - begin]
    ends = steps.stop == (epoch + 1) * batches.steps_per_epoch
    due = contents.pieces(examples)
    filled_up = contents.pieces(batches.repeated() if ends else np.empty(0, dtype=np.int64))
    seen = np.bincount(rows["piece"], minlength=len(due))

    def records(pieces: np.ndarray) -> np.ndarray:
        return np.unique(contents.record_ids[pieces])

    more, never = records(seen > due), records(seen < due)
    examples_of_ranks = np.bincount(rows["rank"], weights=1 / contents.pieces_of(rows["example"]))
    return EpochAudit(
        epoch=epoch,
        num_steps=len(steps),
        steps_per_epoch=batches.steps_per_epoch,
        expected=len(records(due > 0)),
        once=len(np.setdiff1d(records(due > 0), np.union1d(more, never))),
        more_than_once=len(more),
        never=len(never),
        examples_per_rank={rank: round(count) for rank, count in enumerate(examples_of_ranks.tolist()) if count},
        filled_up=records(filled_up > 0),
        missed=never,
        repeated=records(seen > due + filled_up),
    )


def _read_rows(folder: Path, contents: _Contents) -> dict[str, np.ndarray]:
    """All parts of all ranks as columns (int64), with the `rank` of each row and the `piece` that it is."""
    parts = []
    for path in sorted(folder.glob("rank-*/step-*.parquet")):
        part = _read(path)
        pieces = contents.find(part["example"], part["record_id"])
        if len(unknown := part["record_id"][pieces < 0]):
            raise ValueError(
                f"`{path}` names {_names(np.unique(unknown))} in an example where the data has none. The audit belongs"
                " to other data than its `about.json` says."
            )
        rank = int(path.parent.name.removeprefix("rank-"))
        parts.append({**part, "piece": pieces, "rank": np.full(len(pieces), rank)})
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
