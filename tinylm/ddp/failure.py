"""When a rank is lost, the others end soon and say which rank it was, and in which step.

Gloo notices a closed connection at once, but names an address; and every rank that ends because of it closes its own
connections, so that soon each seems to be the culprit. So the first to find the cause writes it into the store, before
it ends, and all others report what stands there. The launcher, too, ends all ranks a tenth of a second after one is
lost: its SIGTERM is held back until the cause is told. (NCCL's own watchdog ends a rank whose peer is gone, when the
group's time-out is over; then the launcher's report names the lost rank.)
"""

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import psutil
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

SECONDS_TO_FIND = 5.0  # a process has closed its connections some time before it is gone
CAUSE = "tinylm/cause_of_the_end"


class _Terminated(BaseException):
    """SIGTERM, as an exception."""


def announce_rank() -> None:
    """Tells the other ranks which process this is; once, after the group is joined."""
    _get_default_store().set(f"tinylm/process/{dist.get_rank()}", f"{socket.gethostname()} {os.getpid()}")


@contextmanager
def named_failure(where: str) -> Iterator[None]:
    """Around a step, on the main thread: turns the error that a lost rank causes into one that names it.

    An error of this rank's own passes as it is, and the other ranks report it. SIGTERM acts as it did before, unless a
    rank is lost; then it is ignored from here on, for the process is ending, and its message shall be seen.

    Args:
        where: as the message shall say it: `step 7`.

    Raises:
        ConnectionError: another rank died or failed; the message names it and the step.
    """
    before = signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        yield
    except (Exception, _Terminated) as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if isinstance(error, _Terminated) or _is_of_the_exchange(error):
            _name_lost_rank(where, error)
        else:
            _published(f"Rank {dist.get_rank()} failed in {where} with {type(error).__name__}: {error}")
        signal.signal(signal.SIGTERM, before)
        if isinstance(error, _Terminated):
            os.kill(os.getpid(), signal.SIGTERM)
        raise
    signal.signal(signal.SIGTERM, before)


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    raise _Terminated


def _is_of_the_exchange(error: BaseException) -> bool:
    """Gloo's errors are bare `RuntimeError`s that tell the line of its source."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _name_lost_rank(where: str, error: BaseException) -> None:
    """Raises ConnectionError with the cause, if one is found in time."""
    deadline = time.monotonic() + SECONDS_TO_FIND
    while time.monotonic() < deadline:
        lost = [str(rank) for rank in range(dist.get_world_size()) if not _lives(rank)]
        cause = _published(f"Rank {', '.join(lost)} died in {where}" if lost else "")
        if cause:
            raise ConnectionError(
                f"{cause.rstrip('.')}. So rank {dist.get_rank()}, which was in {where}, ends too. See the output "
                "of the lost rank or of the launcher, and start again."
            ) from error
        time.sleep(0.05)


def _published(cause: str) -> str:
    """The cause that the first rank to find one has published: `cause`, if none had before; empty where none has."""
    store = _get_default_store()
    if cause:
        return store.compare_set(CAUSE, "", cause).decode()
    return store.get(CAUSE).decode() if store.check([CAUSE]) else ""


def _lives(rank: int) -> bool:
    """Whether the process of a rank runs; of another machine's rank it is not known, and True."""
    host, pid = _get_default_store().get(f"tinylm/process/{rank}").decode().split()
    if host != socket.gethostname():
        return True
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
