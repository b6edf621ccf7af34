"""The process group of the lab: joined here, and when a rank is lost, told which one and in which step."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_PATIENCE = timedelta(seconds=25)  # NCCL does not see that a peer is gone; Gloo's sockets do, at once


def join_group(*, use_cpu: bool) -> torch.device:
    """Joins the launcher's group (without one, a group of one): NCCL on GPUs, Gloo on CPUs; the rank's device."""
    on_gpu = torch.cuda.is_available() and not use_cpu
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    where = {} if "WORLD_SIZE" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=_PATIENCE if on_gpu else None, **where)
    _get_default_store().set(f"tinylm/process/{dist.get_rank()}", f"{socket.gethostname()} {os.getpid()}")
    return device


@contextmanager
def naming_lost_ranks(what: str) -> Iterator[None]:
    """Where the block fails because a rank has died, says which one, and that it was in `what`.

    Raises:
        ConnectionError: a rank is lost.
    """
    try:
        yield
    except RuntimeError as error:
        lost = [rank for rank in range(dist.get_world_size()) if not _lives(rank)]
        if not lost and "onnection" not in str(error) and "imed out" not in str(error):
            raise
        named = f"Rank {', '.join(map(str, lost))} has" if lost else "A rank, perhaps on another machine, has"
        raise ConnectionError(
            f"{named} died or left the group: rank {dist.get_rank()} was in {what}. Nothing of this run is written; the"
            f" lost rank's own output says why it ended. ({str(error).splitlines()[0]})"
        ) from error


def _lives(rank: int) -> bool:
    """Whether the process of a rank of this machine still runs; True for a rank of another machine."""
    host, pid = _get_default_store().get(f"tinylm/process/{rank}").decode().split()
    if host != socket.gethostname():
        return True
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
