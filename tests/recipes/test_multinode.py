"""Two machines, as network namespaces with a bridge between them, and one run over both.

They share this machine's files, as the machines of a cluster share those of a run; host names, addresses and network
are their own. Needs root.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.distributed import ROOT, rank_environment
from tests.namespaces import Machine, two_machines, why_impossible
from tests.recipes.running import CPU_GLOO, launch, output_of
from tests.training.chaos import STEPS
from tests.training.test_resume import contents
from tests.training.tiny_run import write_tiny_run
from tinylm.training.checkpoints import find_fault
from tinylm.training.run_record import read_status

MULTINODE = ROOT / "accelerate_configs" / "cpu_gloo_multinode.yaml"
PORT = yaml.safe_load(MULTINODE.read_text())["main_process_port"]
LAUNCHERS_WAIT = 50  # seconds, for a machine that does not come: what the launch files' head lines say
UNTIL_ALL_ENDED = 90  # seconds; the launchers give their ranks 30 to go

pytestmark = pytest.mark.slow


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    reason = why_impossible()
    if reason:
        pytest.skip(reason)
    with two_machines() as made:
        yield made


class Job:
    """One command on each machine, with its output in a file."""

    def __init__(self, folder: Path, machines: tuple[Machine, Machine], *words: object, **environment: str) -> None:
        self.machines, self.words = machines, words
        self.folder, self.address, self.launchers_wait = folder, machines[0].address, LAUNCHERS_WAIT
        self.environment = {**rank_environment(), "OMP_NUM_THREADS": "1", **environment}
        self.processes: list[subprocess.Popen | None] = [None, None]

    def start(self, rank: int) -> None:
        command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", MULTINODE]
        command += ["--main_process_ip", self.address, "--machine_rank", rank]
        command += ["--rdzv_conf", f"timeout={self.launchers_wait}", *self.words]
        self.processes[rank] = self.machines[rank].start(command, self.environment, self.log(rank))

    def log(self, rank: int) -> Path:
        return self.folder / f"machine-{rank}.log"

    def said(self, rank: int) -> str:
        return self.log(rank).read_text(errors="replace")

    def both(self) -> "Job":
        self.start(0)
        self.start(1)
        return self

    def wait(self, timeout: float = 240) -> list[int]:
        """The exit codes, when both have ended."""
        try:
            return [process.wait(timeout) for process in self.processes if process is not None]
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running: {self.said(0)[-3000:]}\n---\n{self.said(1)[-3000:]}")

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        """Returns when `is_so`; fails if a launcher ends before, or it takes three minutes."""
        deadline = time.monotonic() + 180
        while not is_so():
            ended = [process.poll() for process in self.processes if process is not None]
            assert ended.count(None) == len(ended), f"{what}: {self.said(0)[-3000:]}"
            assert time.monotonic() < deadline, f"{what} did not come"
            time.sleep(0.05)


def chaos(machines: tuple[Machine, Machine], folder: Path, *flags: str, **environment: str) -> Job:
    """The small run of tests/training/chaos.py over both machines; logs beside its folder."""
    folder.mkdir(exist_ok=True)
    return Job(folder.parent, machines, *flags, "--module", "tests.training.chaos", folder, **environment)


def test_a_run_over_two_machines_is_the_run_of_two_ranks_on_one(tmp_path, machines):
    config = write_tiny_run(tmp_path)
    words = [ROOT / "recipes" / "pretrain_tlm.py", "--config", config, "--logging_steps", 1, "--num_threads", 1]
    job = Job(tmp_path, machines, *words, "--output_dir", tmp_path / "two").both()
    assert job.wait() == [0, 0], job.said(0) + job.said(1)
    output_of(launch("--config_file", CPU_GLOO, *words, "--output_dir", tmp_path / "one"))
    records = [json.loads((tmp_path / run / "run.json").read_text()) for run in ("two", "one")]
    assert [(record["world_size"], record["backend"], record["engine"]) for record in records] == [
        (2, "gloo", "ddp")
    ] * 2
    assert (tmp_path / "two" / "model.safetensors").read_bytes() == (
        tmp_path / "one" / "model.safetensors"
    ).read_bytes()
    losses = [
        [line["loss"] for line in json.loads((tmp_path / run / "trainer_state.json").read_text())["log_history"][:5]]
        for run in ("two", "one")
    ]
    assert losses[0] == losses[1] and len(set(losses[0])) == 5


def test_a_machine_whose_power_goes_ends_the_others_and_the_same_command_goes_on_exactly(tmp_path, machines):
    whole = chaos(machines, tmp_path / "whole").both()
    assert whole.wait() == [0, 0], whole.said(0)
    broken = chaos(machines, tmp_path / "broken", DDP_TIMEOUT="60").both()
    broken.until((tmp_path / "broken" / "checkpoint-10").exists, "checkpoint-10")
    machines[1].kill()
    codes = broken.wait(UNTIL_ALL_ENDED)
    assert 0 not in codes
    [line] = [line for line in broken.said(0).splitlines() if "ank 1, process" in line]
    assert "on node-b, in phase `" in line and "of step " in line
    assert read_status(tmp_path / "broken")["status"] == "failed"
    again = chaos(machines, tmp_path / "broken").both()
    assert again.wait() == [0, 0], again.said(0)
    assert "Going on from" in again.said(0)
    assert contents(tmp_path / "broken" / f"checkpoint-{STEPS}") == contents(tmp_path / "whole" / f"checkpoint-{STEPS}")


def test_a_cable_that_is_drawn_ends_the_run_within_its_time_out_with_the_rank_named(tmp_path, machines):
    job = chaos(machines, tmp_path / "run", STEPS="100000", DDP_TIMEOUT="10").both()
    job.until((tmp_path / "run" / "checkpoint-10").exists, "checkpoint-10")
    machines[1].unplug()
    assert 0 not in job.wait(UNTIL_ALL_ENDED)
    said = job.said(0) + job.said(1)
    assert "has not answered for" in said, said
    [line] = [line for line in said.splitlines() if "has not answered for" in line]
    assert "on node-" in line and "in phase `" in line and "of step " in line
    status = read_status(tmp_path / "run")
    assert status["status"] == "failed"
    newest = max((tmp_path / "run").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    assert find_fault(newest) is None


def test_a_rank_that_is_killed_on_one_machine_is_started_again_on_both(tmp_path, machines):
    job = chaos(machines, tmp_path / "run", "--max_restarts", "1", STEPS="20", FAULT="kill:1:12").both()
    assert job.wait() == [0, 0], job.said(0) + job.said(1)
    assert job.said(0).count("Going on from") == 1 and "checkpoint-10" in job.said(0).split("Going on from")[1]
    assert find_fault(tmp_path / "run" / "checkpoint-20") is None


@pytest.mark.parametrize("first", [0, 1])
def test_a_machine_that_comes_late_is_waited_for(tmp_path, machines, first):
    job = chaos(machines, tmp_path / "run", STEPS="5")
    job.start(first)
    job.until(machines[1].has_called if first else lambda: machines[0].is_listening(PORT), "the first machine")
    job.start(1 - first)
    assert job.wait() == [0, 0], job.said(0) + job.said(1)
    assert find_fault(tmp_path / "run" / "checkpoint-5") is None


def test_a_wrong_address_ends_both_launchers_with_the_address(tmp_path, machines):
    job = chaos(machines, tmp_path / "run", STEPS="5")
    job.launchers_wait = 10
    job.start(0)
    job.address = "10.77.0.9"  # nobody's
    job.start(1)
    assert 0 not in job.wait(job.launchers_wait + 50)
    assert "10.77.0.9" in job.said(1) and str(PORT) in job.said(1)
    assert "1/2 clients joined" in job.said(0)
    assert not list((tmp_path / "run").iterdir())


def test_an_interface_that_is_not_there_is_refused_before_the_ranks_meet(tmp_path, machines):
    job = chaos(machines, tmp_path / "run", STEPS="5", GLOO_SOCKET_IFNAME="ib7").both()
    assert 0 not in job.wait(UNTIL_ALL_ENDED)
    assert "node-b has eth0, lo, and not ib7" in job.said(1)


def test_namespaces_and_what_runs_in_them_are_gone_afterwards(machines):
    def made() -> str:
        return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout

    with two_machines() as more:
        process = more[0].start(["sleep", "600"], rank_environment(), Path("/dev/null"))
        assert more[0].namespace in made() and machines[0].namespace in made()
        assert more[0].address == machines[0].address, "and yet they do not meet"
    assert process.wait(10) != 0
    assert more[0].namespace not in made() and machines[0].namespace in made()
