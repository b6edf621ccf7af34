"""What each rank is doing, noted where the others can read it when one of them no longer answers.

    .rank-R     rank R's process, host, step and phase, overwritten in place (a few microseconds); gone at the end
    .failure    made by the rank that reports a failure, so that it is told once

Phases: `data`, `compute` (forward, this rank's own part of backward, weights), `exchange` (waiting for the gradients of
the others, or for them to agree), `validation`, `save`.

A collective only says that a peer is gone or late. The notes say which, and what it was doing. Its error and one of
this rank's own (memory, shapes) are RuntimeErrors alike, so each rank notes its error before it looks for somebody to
blame, and tells of it too.
"""

import json
import logging
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from .launch import RunInterrupted, RunStopped
from .phase_times import PhaseTimes
from .run_record import HOW_TO_GO_ON

logger = logging.getLogger(__name__)

_OWN = (RunInterrupted, RunStopped, torch.OutOfMemoryError)  # no collective raises them
_WAITING = ("exchange", "validation", "save")  # phases in which a rank may wait for one that is in the same
_BYTES = 1024


class Phases:
    """The notes of one rank; of a single process, nothing is written.

    Args:
        times: told of each phase.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, times: PhaseTimes | None = None) -> None:
        self.folder, self.rank, self.world_size, self.times = folder, rank, world_size, times
        self._note = {"rank": rank, "pid": os.getpid(), "host": socket.gethostname()}
        self._note |= {"step": 0, "phase": "start", "since": time.time(), "moves": 0, "error": "", "is_own": False}
        self._file: int | None = None

    def __enter__(self) -> None:
        if self.world_size == 1:
            return
        if self.rank == 0:
            self.folder.joinpath(".failure").unlink(missing_ok=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path(self.rank), os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        """Turns the error of a collective into one that tells which rank is to blame; tells the others of its own.

        Raises:
            RunStopped: another rank failed.
            SystemExit: another rank failed, and a third one has told of it.
        """
        if self._file is None:
            return
        if error is None or isinstance(error, RunInterrupted):
            self._path(self.rank).unlink(missing_ok=True)
            self._close()
            return
        is_own = not isinstance(error, RuntimeError) or isinstance(error, _OWN)
        words = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        self._write(error=words, is_own=is_own)
        self._close()
        blamed = None if is_own else self.blame()
        if blamed is None:
            if self.claim():
                logger.error("%s, failed.", _place(self._note))
            return
        if not self.claim():
            sys.exit(1)
        raise RunStopped(
            f"{blamed[0].upper()}{blamed[1:]}. The run's checkpoints are whole: go on with {HOW_TO_GO_ON}. This is told"
            f" by rank {self.rank}, in phase `{self._note['phase']}` of step {self._note['step']}, which got {words}"
        ) from error

    def enter(self, phase: str, step: int) -> None:
        """This rank begins `phase` of optimizer step `step`."""
        if self.times is not None:
            self.times.enter(phase)
        self._write(phase=phase, step=step, since=time.time(), moves=self._note["moves"] + 1)

    def blame(self) -> str | None:
        """What happened to the other ranks, of the one that is to blame; None if all of them are well, or none of them
        failed or fell behind before this one."""
        for _ in range(20):  # a process that is dying closes its connections first
            others = [note for rank in range(self.world_size) if rank != self.rank and (note := self._read(rank))]
            for note in others:
                if not note["error"] and note["host"] == self._note["host"] and not _is_alive(note["pid"]):
                    return f"{_place(note)}, was killed"
                if note["is_own"]:
                    return f"{_place(note)}, failed: {note['error']}"
            time.sleep(0.1)
        behind = min(others, key=lambda note: note["moves"], default=None)  # ranks make the same moves
        if behind is None or behind["moves"] > self._note["moves"]:
            return None
        failed = f"failed: {behind['error']}" if behind["error"] else ""
        silent = f"has not answered for {time.time() - behind['since']:.0f} s"
        if behind["moves"] < self._note["moves"]:
            return f"{_place(behind)}, {failed or silent}"
        if self._note["phase"] in _WAITING:  # both waited, for one another
            return f"{_place(behind)}, {silent}{failed and f' and {failed}'}"
        return None

    def hosts(self) -> list[str]:
        """The machine of each rank, as far as their notes can be read from here."""
        hosts = ["another machine"] * self.world_size
        for rank in range(self.world_size):
            with suppress(ValueError):  # a note that is being written
                note = self._note if rank == self.rank else self._read(rank)
                hosts[rank] = hosts[rank] if note is None else note["host"]
        return hosts

    def claim(self) -> bool:
        """Whether this rank is the one that tells of the failure."""
        try:
            os.close(os.open(self.folder / ".failure", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def somebody_failed(self) -> bool:
        return self.world_size > 1 and (self.folder / ".failure").exists()

    def _path(self, rank: int) -> Path:
        return self.folder / f".rank-{rank}"

    def _write(self, **changes: object) -> None:
        self._note |= changes
        if self._file is not None:
            os.pwrite(self._file, json.dumps(self._note).encode().ljust(_BYTES), 0)

    def _close(self) -> None:
        os.close(self._file)
        self._file = None

    def _read(self, rank: int) -> dict | None:
        path = self._path(rank)
        return json.loads(path.read_bytes()) if path.is_file() and path.stat().st_size else None


def _place(note: dict) -> str:
    where = f"rank {note['rank']}, process {note['pid']} on {note['host']}"
    return f"{where}, in phase `{note['phase']}` of step {note['step']}"


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
