"""Measured seconds: taken when the device is done, of the slowest rank, and their percentiles."""

import time
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist


def finished_at(device: torch.device) -> float:
    """`time.perf_counter()` (seconds) once the device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def processor_time() -> float:
    """Seconds that the threads of this process, the backend's among them, have had a processor."""
    return time.process_time()


def slowest_rank(seconds: Sequence[float], device: torch.device) -> list[float]:
    """Each of `seconds` as the rank that needed longest measured it; every rank has to call it."""
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


def percentile(seconds: Sequence[float], percent: float) -> float:
    return float(np.percentile(seconds, percent))
