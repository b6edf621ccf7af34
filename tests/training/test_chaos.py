"""Cases S14 and S15: runs that are killed or stopped, that hang or fail, in one process and under launchers."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.distributed import ROOT, rank_environment
from tests.recipes.running import CPU_GLOO, launch
from tests.training.chaos import SAVE_STEPS, STEPS
from tests.training.test_resume import contents
from tinylm.inspection.audit import audit_run
from tinylm.training.checkpoints import find_fault
from tinylm.training.run_record import read_status

CPU = ROOT / "accelerate_configs" / "cpu.yaml"
ENDLESS = {"STEPS": "100000", "DDP_TIMEOUT": "60"}


def kill_again_and_again(folder: Path, world_size: int, kills: int) -> None:
    command = [sys.executable, "-m", "tests.training.chaos", folder, world_size, kills, 7]
    environment = {**rank_environment(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(map(str, command), cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"{world_size} rank(s): {found}")
    assert (found["kills"], found["finished"]) == (kills, world_size)
    assert max(found["lost"]) <= SAVE_STEPS
    expected = contents(folder / "whole" / f"checkpoint-{STEPS}")
    assert contents(folder / "killed" / f"checkpoint-{STEPS}") == expected
    audited = audit_run(folder / "killed")
    assert sum(epoch.num_steps for epoch in audited) == STEPS
    assert all(epoch.is_clean for epoch in audited)
    assert [epoch.examples_per_rank for epoch in audited] == [
        epoch.examples_per_rank for epoch in audit_run(folder / "whole")
    ]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_that_is_killed_four_times_ends_in_the_bytes_of_the_undisturbed_one(tmp_path, world_size):
    kill_again_and_again(tmp_path, world_size, kills=4)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_that_is_killed_fifty_times_ends_in_the_bytes_of_the_undisturbed_one(tmp_path, world_size):
    kill_again_and_again(tmp_path, world_size, kills=50)


def launched(folder: Path, world_size: int, *flags: str, **environment: str) -> subprocess.Popen:
    """The run under `accelerate launch`, on one process or two ranks."""
    config = CPU_GLOO if world_size == 2 else CPU
    words = ("--config_file", config, *flags, "--module", "tests.training.chaos", folder)
    return launch(*words, **{"OMP_NUM_THREADS": "1", **environment})


def wait_for(path: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 180
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"{path.name} did not come"
        time.sleep(0.05)


def ranks_of(process: subprocess.Popen) -> list[psutil.Process]:
    """The processes that train, below a launcher."""
    below = psutil.Process(process.pid).children(recursive=True)
    return [each for each in below if "tests.training.chaos" in each.cmdline() and not each.children()]


def assert_interrupted(folder: Path) -> int:
    """`STATUS` says how to go on, and a checkpoint is there of the very step; the step."""
    status = read_status(folder)
    assert status["status"] == "interrupted"
    assert status["how_to_go_on"] == "the same command with --resume_from_checkpoint auto"
    assert find_fault(folder / f"checkpoint-{status['step']}") is None
    return int(status["step"])


def test_a_process_that_gets_sigterm_saves_within_a_step_and_exits_with_85(tmp_path):
    command = [sys.executable, "-m", "tests.training.chaos", str(tmp_path)]
    process = subprocess.Popen(
        command, cwd=ROOT, env={**rank_environment(), **ENDLESS}, stdout=subprocess.PIPE, text=True
    )
    wait_for(tmp_path / "checkpoint-10", process)
    process.terminate()
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 85
    step = assert_interrupted(tmp_path)
    assert f"Stopped after step {step} of 100000 and saved (SIGTERM)" in printed


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("target", ["launcher", "rank", "group"])
def test_sigterm_to_a_launcher_or_a_rank_saves_and_leaves_no_process(tmp_path, world_size, target):
    process = launched(tmp_path, world_size, **ENDLESS)
    wait_for(tmp_path / "checkpoint-10", process)
    ranks = ranks_of(process)
    assert len(ranks) == world_size
    told = {"launcher": [process], "rank": ranks[-1:], "group": [process, *ranks]}[target]
    for each in told:
        each.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert psutil.wait_procs(ranks, timeout=60)[1] == []
    assert process.returncode != 0
    assert assert_interrupted(tmp_path) >= 10


@pytest.mark.slow
def test_a_planned_stop_is_not_restarted(tmp_path):
    process = launched(tmp_path, 2, "--max_restarts", "2", **ENDLESS)
    wait_for(tmp_path / "checkpoint-10", process)
    (tmp_path / "STOP").touch()
    printed, _ = process.communicate(timeout=240)
    step = assert_interrupted(tmp_path)
    assert printed.count(f"Stopped after step {step} of") == 1
    assert "Going on from" not in printed
    assert process.returncode != 0


@pytest.mark.slow
def test_the_launcher_restarts_the_ranks_and_they_go_on_exactly(tmp_path):
    """Rank 1 is killed in step 12; the second life begins at 10."""
    undisturbed = launched(tmp_path / "whole", 2, STEPS="20")
    assert undisturbed.communicate(timeout=240) and undisturbed.returncode == 0
    process = launched(tmp_path / "killed", 2, "--max_restarts", "1", STEPS="20", FAULT="kill:1:12")
    printed, _ = process.communicate(timeout=240)
    assert process.returncode == 0, printed
    assert printed.count("Going on from") == 1 and "checkpoint-10" in printed.split("Going on from")[1]
    assert contents(tmp_path / "killed" / "checkpoint-20") == contents(tmp_path / "whole" / "checkpoint-20")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "what"),
    [("kill", "was killed"), ("raise", "KeyError: 'a fault of this rank'"), ("sleep", "has not answered for")],
)
def test_a_rank_that_fails_ends_the_others_and_one_message_names_it(tmp_path, fault, what):
    process = launched(tmp_path, 2, STEPS="100000", FAULT=f"{fault}:1:12", DDP_TIMEOUT="10")
    printed, _ = process.communicate(timeout=240)
    assert process.returncode != 0
    lines = [line for line in printed.splitlines() if "ank 1, process" in line]
    assert len(lines) == 1, printed
    assert "of step 12, " in lines[0] and f"on {socket.gethostname()}, in phase `" in lines[0]
    assert what in printed
    status = read_status(tmp_path)
    assert (status["status"], status["step"]) == ("failed", 11)
    assert find_fault(tmp_path / "checkpoint-10") is None


@pytest.mark.slow
def test_a_rank_that_is_killed_while_all_save_is_named_and_no_disk_is_blamed(tmp_path):
    process = launched(tmp_path, 2, STEPS="100000", FAULT="kill_in_save:1:10", DDP_TIMEOUT="10")
    printed, _ = process.communicate(timeout=240)
    assert process.returncode != 0
    [line] = [line for line in printed.splitlines() if "ank 1, process" in line]
    assert "in phase `save` of step 10, was killed" in line
    assert "could not be written" not in printed
    assert find_fault(tmp_path / "checkpoint-5") is None and not (tmp_path / "checkpoint-10").exists()


@pytest.mark.slow
def test_a_fault_of_all_ranks_is_told_as_what_it_is(tmp_path):
    process = launched(tmp_path, 2, STEPS="100000", FAULT="shapes:both:12", DDP_TIMEOUT="10")
    printed, _ = process.communicate(timeout=240)
    assert process.returncode != 0
    assert "RuntimeError: shapes 3 and 5 do not fit" in printed
    assert "has not answered" not in printed and "was killed" not in printed
    assert printed.count("in phase `compute` of step 12, failed.") == 1
