"""One process trains in a run's folder: rank 0 holds a lock on `.lock` in it until it ends, however it ends.

The lock is a POSIX one (`lockf`): the kernel frees it with the process, so a kill leaves none behind; processes that
are forked for the data do not inherit it, and would keep a `flock` for the seconds that they outlive their parent; NFS
carries it to other machines. The file itself stays. It says who held it last.
"""

import fcntl
import logging
import os
import socket
from pathlib import Path

from .launch import RunStopped

logger = logging.getLogger(__name__)

LOCK_NAME = ".lock"

_held: dict[tuple[int, int], int] = {}
"""Descriptors by device and inode. Closing any descriptor of the file would free the lock, so none is opened twice."""


def hold(folder: Path) -> None:
    """Takes the lock of a folder that is there, for the life of this process; one that has it keeps it.

    Where the file system knows no locks, that is said and nothing is held.

    Raises:
        RunStopped: another process has it; which one, where.
    """
    path = folder / LOCK_NAME
    if path.exists() and _identity(path) in _held:
        return
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:  # a folder that may not be written is told of by what writes into it
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(file, 200, 0).decode(errors="replace").strip()
        os.close(file)
        if not isinstance(error, BlockingIOError | PermissionError):
            logger.warning("`%s` cannot be locked (%s): start no second run in its folder.", path, error)
            return
        raise RunStopped(
            f"A run's folder is trained in by one launch at a time, and `{folder}` is in use by {holder or 'another'}."
            " Wait until it ends, or stop it (a file `STOP` in the folder), or set another `--output_dir`."
        ) from error
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    _held[_identity(path)] = file


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino
