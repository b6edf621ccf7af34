"""Where the time of a step goes on each rank, and which rank the others wait for.

Choices:
- A rank's own time is `data` and `compute`; in `exchange` it waits for the others, or for the wires. Ranks that are
  fast wait for the one that is slow, so all steps are equally long: only the own times tell them apart.
- After each of the two, all ranks meet (the count of targets, the gradients). So a rank is late in one phase by what it
  takes longer than the others in that phase, whatever it makes up for in the next.
- Sums over a logging window: a rank that is late now and then costs little and is not named.
- A GPU computes while Python has gone on: there the phases are measured between events on its stream, and no step
  waits for it more than before.

FSDP2 and DeepSpeed exchange inside forward and backward too. Their `compute` holds some waiting, so of theirs `data` is
told apart best.
"""

import time
from dataclasses import dataclass
from statistics import median

import torch

PHASES = ("data", "compute", "exchange")
WORTH_NAMING = 0.1  # the share of a step by which a rank has to be late
MUCH = 0.25  # the share of a step from which on a wait that all ranks have in common is told

Table = list[list[float]]
"""Seconds a step, a row for each rank, a column for each of `PHASES`."""


class PhaseTimes:
    """Seconds that this rank has spent in each phase since the last `take`."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []
        self._seconds: dict[str, float] = {}
        self._steps = 0

    def enter(self, phase: str) -> None:
        """This rank begins a phase; with `data`, a step."""
        if phase == "data":
            self._settle()  # the events of the step before have happened: its ranks have agreed on what they want
            self._steps += 1
        self._marks.append((phase, self._now()))

    def take(self) -> list[float]:
        """Seconds a step in each of `PHASES`; begins a new window. Zeros if there was no step."""
        self._settle()
        mean = [self._seconds.get(phase, 0.0) / max(self._steps, 1) for phase in PHASES]
        self._seconds, self._steps = {}, 0
        return mean

    def _settle(self) -> None:
        if self._on_gpu and self._marks:
            self._marks[-1][1].synchronize()
        for (phase, begun), (_, ended) in zip(self._marks, self._marks[1:], strict=False):
            seconds = begun.elapsed_time(ended) / 1e3 if self._on_gpu else ended - begun
            self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
        del self._marks[:-1]

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for: `seconds` a step, `share` of a step, in which phase."""

    rank: int
    phase: str
    seconds: float
    share: float


def straggler(table: Table) -> Straggler | None:
    """Who is late the most, against the median of the other ranks; None if nobody is by `WORTH_NAMING`."""
    found = [
        Straggler(rank, phase, late, late / step)
        for column, phase in enumerate(PHASES)
        if phase != "exchange" and len(table) > 1 and (step := step_seconds(table))
        for rank, row in enumerate(table)
        for late in [row[column] - median(other[column] for each, other in enumerate(table) if each != rank)]
    ]
    worst = max(found, key=lambda each: each.seconds, default=None)
    return worst if worst is not None and worst.share >= WORTH_NAMING else None


def common_wait(table: Table) -> tuple[str, float] | None:
    """In which phase every rank waits, and for which share of a step; None if for less than `MUCH`.

    The rank that comes last waits for nobody, so the least `exchange` of all ranks is what the exchange itself takes.
    """
    step = step_seconds(table)
    shares = {phase: min(row[PHASES.index(phase)] for row in table) / step for phase in ("data", "exchange") if step}
    phase = max(shares, key=lambda each: shares[each], default=None)
    return None if phase is None or shares[phase] < MUCH else (phase, shares[phase])


def step_seconds(table: Table) -> float:
    """How long a step takes, validation and saving aside: the mean over the ranks."""
    return sum(map(sum, table)) / len(table)


def in_words(table: Table, hosts: list[str]) -> str:
    """What there is to say of a logging window; empty if the ranks are equal and hardly wait.

    Args:
        hosts: of each rank; named where there are several.
    """
    late = straggler(table)
    if late is not None:
        where = f" on {hosts[late.rank]}" if len(set(hosts)) > 1 else ""
        return (
            f"rank {late.rank}{where} is the slowest: {seconds_in_words(late.seconds)} more a step ({late.share:.0%})"
            f" in {late.phase}"
        )
    waits = common_wait(table)
    return "" if waits is None else f"{waits[1]:.0%} of a step waits in {waits[0]}"


def as_lines(step: int, table: Table, hosts: list[str]) -> list[str]:
    """The whole table, seconds a step."""
    names = [f"rank {rank} on {host}" for rank, host in enumerate(hosts)]
    width = max(map(len, names))
    head = f"step {step}  seconds a step".ljust(width + 2) + "".join(f"{phase:>10}" for phase in PHASES)
    indent = len(head) - 10 * len(PHASES)
    rows = zip(names, table, strict=True)
    return [head, *("  " + name.ljust(indent - 2) + "".join(f"{each:10.4f}" for each in row) for name, row in rows)]


def seconds_in_words(seconds: float) -> str:
    """
    >>> seconds_in_words(0.2134), seconds_in_words(12.34)
    ('213 ms', '12.3 s')
    """
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
