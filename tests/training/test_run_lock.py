"""One launch at a time trains in a run's folder."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tinylm.training import run_lock
from tinylm.training.checkpoints import checkpoint_to_resume, find_checkpoint
from tinylm.training.launch import RunStopped
from tinylm.training.run_lock import hold


@contextmanager
def other_process(what: Callable[[], None]) -> Iterator[int]:
    """A process that has done something and lives until the block ends, when it is killed; its id."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        what()
        os.write(writing, b"done")
        os.close(writing)
        while True:
            signal.pause()
    assert os.read(reading, 4) == b"done"
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)


def test_a_folder_in_use_is_refused_with_process_and_host_and_stays_as_it_is(tmp_path):
    with other_process(lambda: hold(tmp_path)) as pid:
        half = tmp_path / ".rank-1"
        half.touch()
        who = rf"in use by process {pid} on {socket.gethostname()}\. Wait until it ends, or stop it.*`--output_dir`"
        with pytest.raises(RunStopped, match=who):
            checkpoint_to_resume(str(tmp_path), "auto")
        assert half.exists()
        assert find_checkpoint(tmp_path, "auto") is None, "who only looks may look"
    assert checkpoint_to_resume(str(tmp_path), "auto") is None
    hold(tmp_path)  # again, by the process that has it
    with pytest.raises(RunStopped, match=f"process {os.getpid()} on"):
        hold_elsewhere(tmp_path)


def hold_elsewhere(folder: Path) -> None:
    """`hold` in a process of its own, whose refusal is raised here."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        run_lock._held.clear()
        try:
            hold(folder)
        except RunStopped as stopped:
            os.write(writing, str(stopped).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading) as said:
        refusal = said.read()
    if refusal:
        raise RunStopped(refusal)


def test_processes_forked_for_the_data_do_not_keep_the_lock_of_a_rank_that_was_killed(tmp_path):
    reading, writing = os.pipe()

    def hold_and_fork() -> None:
        hold(tmp_path)
        child = os.fork()
        if not child:
            while True:
                signal.pause()
        os.write(writing, f"{child:9}".encode())

    with other_process(hold_and_fork):
        worker = int(os.read(reading, 9))
    try:
        os.kill(worker, 0)  # it lives
        hold(tmp_path)
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_file_system_without_locks_is_said_and_refuses_nothing(tmp_path, monkeypatch, caplog):
    def fail(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(run_lock.fcntl, "lockf", fail)
    hold(tmp_path)
    assert "cannot be locked" in caplog.text and "start no second run" in caplog.text
