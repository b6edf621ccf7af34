"""How long each algorithm takes to sum a tensor of each size: the cost model's data."""

import logging
import statistics
from collections.abc import Sequence
from dataclasses import asdict

import torch
import torch.distributed as dist

from tinylm.ddp.clock import finished_at, percentile, slowest_rank
from tinylm.ddp.collectives import named_algorithm
from tinylm.ddp.failure import named_failure
from tinylm.ddp.table import Circumstances, SizeRow

logger = logging.getLogger(__name__)

SIZES = (*(2**power for power in range(10, 27)), 80_000_000)  # bytes: 1 KiB to 64 MiB, and a model of 20 M weights
_WARMUP = 2


def measure_sizes(
    algorithms: Sequence[str],
    circumstances: Circumstances,
    device: torch.device,
    *,
    rounds: int,
    sizes: Sequence[int] = SIZES,
) -> list[SizeRow]:
    """One row an algorithm and size (fp32). In each round every algorithm sums every size, so drift hits all alike.

    Every rank has to call it. One rank alone sums nothing: no rows.
    """
    if circumstances.world_size == 1:
        logger.warning("There is one rank: nothing is exchanged, and there is no cost to model.")
        return []
    seconds: dict[tuple[str, int], list[float]] = {(name, size): [] for size in sizes for name in algorithms}
    for number in range(rounds):
        for (name, size), of_one in seconds.items():
            with named_failure(f"the sum of {size:,} bytes by `{name}`"):
                of_one += _repeat(name, size, device)
        logger.info("round %d of %d", number + 1, rounds)
    return [
        SizeRow(
            **asdict(circumstances),
            algorithm=name,
            bytes=size,
            repeats=len(of_one),
            median_ms=1000 * statistics.median(of_one),
            p10_ms=1000 * percentile(of_one, 10),
            p90_ms=1000 * percentile(of_one, 90),
        )
        for (name, size), of_one in seconds.items()
    ]


def _repeat(name: str, size: int, device: torch.device) -> list[float]:
    """Seconds of the slowest rank, of 3 to 20 sums: short ones scatter more and cost less."""
    all_reduce, tensor = named_algorithm(name), torch.zeros(size // 4, device=device)
    seconds = []
    for _ in range(_WARMUP + min(20, max(3, 10_000_000 // size))):
        dist.barrier()
        began = finished_at(device)
        all_reduce(tensor)
        seconds.append(finished_at(device) - began)
    return slowest_rank(seconds[_WARMUP:], device)
