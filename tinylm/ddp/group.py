"""Joining the process group of the lab."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from tinylm.ddp.failure import announce_rank

_PATIENCE = timedelta(seconds=25)  # NCCL does not see that a peer is gone; Gloo's sockets do, at once


def join_group(*, use_cpu: bool) -> torch.device:
    """Joins the launcher's group (without one, a group of one): NCCL on GPUs, Gloo on CPUs; the rank's device."""
    on_gpu = torch.cuda.is_available() and not use_cpu
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    where = {} if "WORLD_SIZE" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=_PATIENCE if on_gpu else None, **where)
    announce_rank()
    return device
