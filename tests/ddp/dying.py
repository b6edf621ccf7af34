"""Ranks of which one dies in a step; each writes into the folder how it ended."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tinylm.ddp.failure import announce_rank, named_failure

FATAL_STEP = 3


def train(way: str) -> None:
    rank = dist.get_rank()
    for step in range(FATAL_STEP + 1):
        with named_failure(f"step {step}"):
            if step == FATAL_STEP and rank == 1:
                if way == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("row 7 is empty")
            if step == FATAL_STEP and rank == 0:  # busy with its own work when it happens
                stop = time.monotonic() + 3
                while time.monotonic() < stop:
                    torch.ones(1000).sum()
            dist.all_reduce(torch.ones(1000))


def main(way: str, folder: str) -> None:
    dist.init_process_group("gloo")
    announce_rank()
    dist.barrier()
    try:
        train(way)
    except Exception as error:
        Path(folder, str(dist.get_rank())).write_text(f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
