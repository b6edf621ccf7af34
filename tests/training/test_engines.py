"""FSDP2 on two Gloo ranks through `accelerate launch`: the run, and the files, of plain data parallelism.

Negative controls are in the facts of `sharded_run.py`: a number lost while weights are gathered or written is found.
Slow: three launches come before the first test.
"""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import tinylm.models  # noqa: F401
from tests.distributed import ROOT
from tests.recipes.running import launch, output_of
from tests.training.engine_runs import (
    PRETRAIN,
    assert_fine_tuning_is_that_of_ddp,
    assert_one_process_goes_on_from,
    assert_same_checkpoints,
    assert_same_course,
    assert_same_weights,
    start_run,
    write_chat_run,
)
from tests.training.tiny_run import write_tiny_run
from tinylm.cli import app

pytestmark = pytest.mark.slow

FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run under `ddp` and one under `fsdp2`, started at once, and the facts of `sharded_run.py`."""
    folder = tmp_path_factory.mktemp("engines")
    config = write_tiny_run(folder)
    audited = ("--record_audit", "true")
    ddp = start_run("cpu_gloo", PRETRAIN, config, folder / "ddp", *audited)
    fsdp2 = start_run("fsdp2", PRETRAIN, config, folder / "fsdp2", *audited)
    (folder / "printed").write_text(output_of(ddp) and output_of(fsdp2))
    script = ROOT / "tests" / "training" / "sharded_run.py"
    output_of(launch("--config_file", ROOT / "accelerate_configs" / "fsdp2.yaml", script, folder))
    return folder


@pytest.fixture(scope="module")
def facts(runs: Path) -> list[dict[str, dict]]:
    """What each of two ranks saw."""
    return [json.loads((runs / f"facts-{rank}.json").read_text()) for rank in range(2)]


def test_the_engine_that_runs_is_recorded(runs: Path) -> None:
    for engine in ("ddp", "fsdp2"):
        record = json.loads((runs / engine / "run.json").read_text())
        assert (record["world_size"], record["backend"], record["engine"]) == (2, "gloo", engine)


def test_the_ranks_hold_parts_of_every_weight(facts: list[dict[str, dict]]) -> None:
    for one in facts:
        cut = one["cut"]
        assert cut["engine"] == "fsdp2" and cut["are_dtensors"]
        assert cut["of_all_ranks"] == cut["all"] and 0.3 * cut["all"] < cut["own"] < 0.7 * cut["all"]


def test_losses_norms_validations_and_weights_are_those_of_ddp(runs: Path) -> None:
    assert_same_course(runs / "fsdp2", runs / "ddp")
    assert_same_weights(runs / "fsdp2", runs / "ddp")
    start, trained = (load_file(runs / "ddp" / f"checkpoint-{step}" / FILES[0]) for step in (3, 6))
    assert any((trained[name] - start[name]).abs().max() > 1e-3 for name in start), "this would prove nothing"


def test_a_checkpoint_holds_the_files_of_ddp(runs: Path) -> None:
    assert_same_checkpoints(runs / "fsdp2", runs / "ddp")
    for step in (3, 6):
        mine, other = (runs / engine / f"checkpoint-{step}" for engine in ("fsdp2", "ddp"))
        assert set(FILES) < {path.name for path in mine.iterdir()}
        assert json.loads((mine / "config.json").read_text()) == json.loads((other / "config.json").read_text())


def test_the_model_loads_and_samples_and_audit_are_there(runs: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(runs / "fsdp2")
    assert sum(weight.numel() for weight in model.parameters()) > 1000
    assert (runs / "printed").read_text().count("--- sample") == 3
    audits = [CliRunner().invoke(app, ["audit", str(runs / engine)]) for engine in ("fsdp2", "ddp")]
    assert audits[0].exit_code == 0 and audits[0].output.replace("fsdp2", "ddp") == audits[1].output


@pytest.mark.parametrize("which", [0, 1])
def test_a_checkpoint_that_lost_a_number_does_not_count(facts: list[dict[str, dict]], which: int) -> None:
    """Gathered wrongly: both ranks name the weight. Written wrongly: the rank that wrote does."""
    for rank, one in enumerate(facts):
        refusal = one["cut"]["refusals"][which]
        assert "could not be written" in refusal
        if which == 0:
            assert "norm" in refusal and "was gathered with the sum" in refusal
        else:
            assert ("was written as" if rank == 0 else "another rank could not write; see its message") in refusal
        assert one["cut"]["saved"] == []


def test_a_step_that_is_not_a_number_leaves_the_weights(facts: list[dict[str, dict]]) -> None:
    for one in facts:
        assert one["bad"]["differ"] == 0 and one["bad"]["num_bad_steps"] == 1
        assert one["bad"]["norms"][0] > 0 and one["bad"]["norms"][1] != one["bad"]["norms"][1]


def test_one_process_goes_on_from_two_ranks_of_fsdp2(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_one_process_goes_on_from(runs / "fsdp2", monkeypatch)


@pytest.mark.parametrize("before", ["ddp", "fsdp2"])
def test_fsdp2_goes_on_from_ddp_and_from_itself(runs: Path, before: str) -> None:
    folder, checkpoint = runs / f"from-{before}", runs / before / "checkpoint-3"
    output_of(start_run("fsdp2", PRETRAIN, runs / "run.yaml", folder, "--resume_from_checkpoint", checkpoint))
    assert_same_course(folder, runs / "fsdp2")
    assert_same_weights(folder, runs / "fsdp2", tolerance=0.0 if before == "fsdp2" else 1e-5)


def test_fine_tuning_under_fsdp2_is_that_of_ddp(tmp_path: Path) -> None:
    config = write_chat_run(tmp_path)
    for full in (False, True):
        assert_fine_tuning_is_that_of_ddp(config, "fsdp2", full=full)
