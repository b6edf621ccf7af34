"""Being stopped on purpose, in one process; through launchers in test_chaos."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.training.test_resume import At
from tests.training.tiny import UnevenRows, run_arguments, tiny_model, trainer_for
from tinylm.training import stopping
from tinylm.training.launch import NOT_FINISHED, RunInterrupted, run_recipe
from tinylm.training.run_record import read_status
from tinylm.training.stopping import StopRequests, parse_duration


def train(folder, callbacks=(), **settings):
    trainer = trainer_for(tiny_model(), UnevenRows(), run_arguments(folder, **settings), callbacks=list(callbacks))
    trainer.train()
    return trainer


def checkpoints(folder):
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def test_a_file_named_save_saves_once_and_the_run_goes_on(tmp_path):
    save = At(2, (tmp_path / "SAVE").touch)
    assert train(tmp_path, [save]).state.global_step == 4
    assert checkpoints(tmp_path) == ["checkpoint-2"]
    assert not (tmp_path / "SAVE").exists()


def test_a_file_named_stop_saves_and_stops_and_does_not_stop_the_next_run(tmp_path):
    with pytest.raises(RunInterrupted, match=r"after step 3 of 4 and saved \(the file `STOP`\)"):
        train(tmp_path, [At(3, (tmp_path / "STOP").touch)])
    assert checkpoints(tmp_path) == ["checkpoint-3"]
    assert not (tmp_path / "STOP").exists()
    status = read_status(tmp_path)
    assert (status["status"], status["because"]) == ("interrupted", "STOP")


def test_a_time_limit_counts_from_the_start_of_the_process(tmp_path):
    with pytest.raises(RunInterrupted, match=r"after step 1 of 4 and saved \(`--max_time` is over\)"):
        train(tmp_path / "short", max_time="0.1")
    assert read_status(tmp_path / "short")["because"] == "max_time"
    assert train(tmp_path / "long", max_time="30d").state.global_step == 4


def test_somebodys_stop_counts_more_than_the_time_limit(tmp_path):
    with pytest.raises(RunInterrupted, match=r"after step 1 of 4"):
        train(tmp_path, [At(1, (tmp_path / "STOP").touch)], max_time="0.1")
    assert read_status(tmp_path)["because"] == "STOP" and not (tmp_path / "STOP").exists()


def test_a_time_limit_goes_on_when_the_launcher_starts_the_ranks_again():
    child = "import psutil; from tinylm.training.stopping import beginning_of_launch as began;"
    child += "print(began(), psutil.Process().create_time())"
    launcher = f"import psutil, subprocess, sys; [subprocess.run([sys.executable, '-c', {child!r}]) for _ in 'ab'];"
    launcher += "print(psutil.Process().create_time())"

    def times(**environment):
        command = [sys.executable, "-c", launcher]
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
        first, second, own = (line.split() for line in done.stdout.splitlines())
        assert first[1] != second[1]
        return first, second, own[0]

    first, second, own = times(TORCHELASTIC_RUN_ID="1")
    assert first[0] == second[0] == own
    first, second, own = times()
    assert (first[0], second[0]) == (first[1], second[1])


@pytest.mark.parametrize("text", ["", "soon", "1h30", "h", "-3", "1m1h"])
def test_a_time_limit_that_is_no_time_is_refused(tmp_path, text):
    with pytest.raises(ValueError, match="such as 11h30m"):
        parse_duration(text)
    if text:
        with pytest.raises(ValueError, match="such as 11h30m"):
            run_arguments(tmp_path, max_time=text)


def test_a_stop_in_the_last_step_changes_nothing(tmp_path):
    trainer = train(tmp_path, [At(4, lambda: os.kill(os.getpid(), signal.SIGTERM))])
    assert trainer.state.global_step == 4
    assert "train_loss" in trainer.state.log_history[-1]


@pytest.fixture
def requests(tmp_path, monkeypatch):
    """Stop requests whose clock and kill are the test's; `deaths` lists what happened."""
    deaths: list[str] = []
    now = [100.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(stopping.os, "kill", lambda pid, number: deaths.append(signal.Signals(number).name))
    monkeypatch.setattr(stopping.os, "_exit", lambda code: deaths.append(f"exit {code}"))
    failed = [False]
    with StopRequests(
        tmp_path,
        is_rank_zero=False,
        max_seconds=None,
        leave_at_once=lambda: failed[0],
        before_dying=lambda: deaths.append("status"),
    ) as requests:
        yield requests, now, deaths, failed


def test_the_first_signal_is_a_wish_its_echo_is_the_same_and_a_second_one_ends_the_process(requests):
    requests, now, deaths, _ = requests
    assert requests.wishes() == (False, False)
    signal.raise_signal(signal.SIGINT)
    assert requests.wishes() == (False, True)
    now[0] += 0.5  # the launcher has died and the kernel says so
    signal.raise_signal(signal.SIGTERM)
    assert deaths == []
    now[0] += 60
    signal.raise_signal(signal.SIGTERM)
    assert deaths == ["status", "SIGTERM"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_rank_whose_peer_has_failed_has_nothing_to_finish(requests):
    requests, _, deaths, failed = requests
    failed[0] = True
    signal.raise_signal(signal.SIGTERM)
    assert deaths[0] == "exit 1"


def test_a_recipe_that_was_stopped_ends_with_85_and_says_how_to_go_on(monkeypatch, capsys):
    def main():
        raise RunInterrupted("Stopped after step 3. Go on with X.")

    monkeypatch.setattr(sys, "argv", ["recipe.py"])
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        run_recipe(main)
    signal.signal(signal.SIGTERM, before)
    assert ended.value.code == NOT_FINISHED == 85
    assert "Stopped after step 3. Go on with X." in capsys.readouterr().out


def test_a_step_and_a_save_over_the_launchers_grace_are_warned_of_once(tmp_path, caplog):
    trainer = trainer_for(tiny_model(), UnevenRows(), run_arguments(tmp_path))
    trainer._times["step"] = 20.0
    for seconds in (5.0, 12.0, 13.0):
        trainer.note_save_time(seconds)
    [warning] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "up to 20 s and a save 12 s" in warning and "`STOP`" in warning and "--max_time" in warning


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")
def test_a_process_is_told_when_its_launcher_is_gone():
    """A launcher that starts a sleeping child and is killed: the child ends too."""
    child = "from tinylm.training.stopping import die_with_launcher; die_with_launcher(); print(1, flush=1); input()"
    start = f"subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE)"
    launcher = f"import subprocess, sys; process = {start}; print(process.pid, flush=1); process.wait()"
    process = subprocess.Popen(
        [sys.executable, "-c", launcher], env={**os.environ, "RANK": "0"}, stdout=subprocess.PIPE, text=True
    )
    pid = int(process.stdout.readline())
    assert process.stdout.readline() == "1\n"
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while is_running(pid):
        assert time.monotonic() < deadline, "an orphan lives on"


def is_running(pid):
    try:
        return stopping.psutil.Process(pid).status() != stopping.psutil.STATUS_ZOMBIE
    except stopping.psutil.NoSuchProcess:
        return False
