"""Being stopped on purpose: signals, the files SAVE and STOP in the run's folder, `--max_time`.

Choices:
- A wish is noted when it comes and looked at once a step, by all ranks together: they save after the same step.
- A signal that comes again within five seconds is the same one: a launcher and a process group deliver it twice, and
  the kernel once more when the launcher has died.
"""

import ctypes
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import psutil

logger = logging.getLogger(__name__)

SAVE_NAME, STOP_NAME = "SAVE", "STOP"
MAX_TIME, ANOTHER_RANK = "max_time", "another rank"
LAUNCHERS_GRACE = 30.0
"""Seconds from a launcher's SIGTERM to its SIGKILL (torchrun and `accelerate launch` on several ranks)."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SAME_SIGNAL_WITHIN = 5.0  # seconds


def parse_duration(text: str) -> float:
    """Seconds of `11h30m`, `2d`, `45s` or plain seconds.

    >>> parse_duration("11h30m"), parse_duration("1d2h3m4s"), parse_duration("90")
    (41400.0, 93784.0, 90.0)

    Raises:
        ValueError: something else.
    """
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    match = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text)
    if not text or match is None:
        raise ValueError(f"`--max_time` is a time such as 11h30m, 90m or 2d, and not `{text}`.")
    days, hours, minutes, seconds = (int(number or 0) for number in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


class StopRequests:
    """What somebody wants of this rank; a context in which signals are wishes.

    A wish to stop stays until it is `fulfilled`, in a later context too.

    Args:
        folder: the run's folder, in which rank 0 looks for `SAVE` and `STOP`.
        max_seconds: since the `beginning_of_launch`.
        leave_at_once: asked at the first signal: another rank has failed, so there is nothing to finish.
        before_dying: called when a second signal ends the process at once.
    """

    def __init__(
        self,
        folder: Path,
        *,
        is_rank_zero: bool,
        max_seconds: float | None,
        leave_at_once: Callable[[], bool],
        before_dying: Callable[[], None],
    ) -> None:
        self.folder, self.is_rank_zero = folder, is_rank_zero
        self._leave_at_once, self._before_dying = leave_at_once, before_dying
        self.ends_at = None if max_seconds is None else beginning_of_launch() + max_seconds
        self.is_listening = False
        self.reason = ""  # of the wish to stop: `MAX_TIME`, `STOP_NAME` or the name of a signal
        self._signalled_at: float | None = None
        self._handlers_before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequests":
        self._handlers_before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        self.is_listening = True
        return self

    def __exit__(self, *_: object) -> None:
        self.is_listening = False
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)

    def wishes(self) -> tuple[bool, bool]:
        """Whether this rank was asked to save, and to stop."""
        if not self.is_rank_zero:
            return False, bool(self.reason)
        if self.ends_at is not None and time.time() >= self.ends_at:
            self.reason = self.reason or MAX_TIME
        if self.reason in ("", MAX_TIME) and (self.folder / STOP_NAME).exists():
            self.reason = STOP_NAME  # somebody's wish, though the time is up as well
        return (self.folder / SAVE_NAME).exists(), bool(self.reason)

    def describe(self) -> str:
        """The reason to stop, in words."""
        words = {
            "": "another rank was asked to",
            MAX_TIME: "`--max_time` is over",
            STOP_NAME: f"the file `{STOP_NAME}`",
        }
        return words.get(self.reason, self.reason)

    def fulfilled(self, *, stopped: bool) -> None:
        """Forgets the wish to save, and to stop if the run has `stopped`; rank 0 takes away the files that ask."""
        if stopped:
            self.reason, self._signalled_at = "", None
        for name in (SAVE_NAME, STOP_NAME) if stopped else (SAVE_NAME,):
            if self.is_rank_zero:
                (self.folder / name).unlink(missing_ok=True)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._leave_at_once():
            os._exit(1)
        if self._signalled_at is None:
            self._signalled_at, self.reason = now, signal.Signals(number).name
        elif now - self._signalled_at > _SAME_SIGNAL_WITHIN:
            self._before_dying()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def beginning_of_launch() -> float:
    """When the launch began that this process belongs to (seconds since the epoch).

    A launcher that starts the ranks again after a failure is older than they are, and its time limit goes on.
    """
    process = psutil.Process()
    launcher = process.parent() if "TORCHELASTIC_RUN_ID" in os.environ else None
    return (launcher or process).create_time()


def die_with_launcher() -> None:
    """Asks Linux for a SIGTERM when the launcher that started this process is gone, so that no orphan trains on.

    A process that no launcher started is left alone: its shell may well go before it.
    """
    if not sys.platform.startswith("linux") or not ({"RANK", "ACCELERATE_MIXED_PRECISION"} & os.environ.keys()):
        return
    pr_set_pdeathsig, launcher = 1, os.getppid()
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() != launcher:  # it went a moment before
        os.kill(os.getpid(), signal.SIGTERM)
