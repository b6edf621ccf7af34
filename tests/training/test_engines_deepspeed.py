"""DeepSpeed on two Gloo ranks through `accelerate launch`, ZeRO-2 and ZeRO-3: the runs of plain data parallelism.

Slow, and skipped where the extra `deepspeed` is not installed (`make test-slow` installs it).
"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
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
    assert_same_optimizer,
    assert_same_weights,
    start_run,
    write_chat_run,
)
from tests.training.tiny_run import write_tiny_run
from tinylm.cli import app

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="the extra `deepspeed` is not installed"),
]

ENGINES = ("deepspeed_zero2", "deepspeed_zero3")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run under each of `ddp` and the two of DeepSpeed."""
    folder = tmp_path_factory.mktemp("deepspeed")
    config = write_tiny_run(folder)
    output_of(start_run("cpu_gloo", PRETRAIN, config, folder / "ddp", "--record_audit", "true"))
    for engine in ENGINES:
        printed = output_of(start_run(engine, PRETRAIN, config, folder / engine, "--record_audit", "true"))
        (folder / f"printed-{engine}").write_text(printed)
    return folder


@pytest.mark.parametrize("engine", ENGINES)
def test_pretraining_is_that_of_ddp(runs: Path, engine: str) -> None:
    record = json.loads((runs / engine / "run.json").read_text())
    assert (record["world_size"], record["backend"], record["engine"]) == (2, "gloo", "deepspeed")
    assert_same_course(runs / engine, runs / "ddp")
    assert_same_weights(runs / engine, runs / "ddp")
    assert_same_checkpoints(runs / engine, runs / "ddp")
    AutoModelForCausalLM.from_pretrained(runs / engine)
    assert (runs / f"printed-{engine}").read_text().count("--- sample") == 3
    audits = [CliRunner().invoke(app, ["audit", str(runs / each)]) for each in (engine, "ddp")]
    assert audits[0].exit_code == 0 and audits[0].output == audits[1].output


@pytest.mark.parametrize("engine", ENGINES)
def test_ddp_goes_on_from_deepspeed_and_deepspeed_from_ddp(
    runs: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process from two ranks of DeepSpeed; two ranks of DeepSpeed from two of DDP, and from their own."""
    assert_one_process_goes_on_from(runs / engine, monkeypatch)
    for before in ("ddp", engine):
        folder = runs / f"{engine}-from-{before}"
        resume = ("--resume_from_checkpoint", runs / before / "checkpoint-3")
        output_of(start_run(engine, PRETRAIN, runs / "run.yaml", folder, *resume))
        assert_same_course(folder, runs / engine)
        assert_same_weights(folder, runs / engine, tolerance=0.0 if before == engine else 1e-5)
        assert_same_optimizer(folder / "checkpoint-6", runs / engine / "checkpoint-6")


def test_a_step_that_is_not_a_number_leaves_the_weights_and_lost_numbers_are_found(tmp_path: Path) -> None:
    script = ROOT / "tests" / "training" / "sharded_run.py"
    for engine in ENGINES:
        folder = tmp_path / engine
        folder.mkdir()
        output_of(launch("--config_file", ROOT / "accelerate_configs" / f"{engine}.yaml", script, folder))
        for rank in range(2):
            one = json.loads((folder / f"facts-{rank}.json").read_text())
            assert one["cut"]["engine"] == "deepspeed" and one["cut"]["of_all_ranks"] == one["cut"]["all"]
            assert 0.3 * one["cut"]["all"] < one["cut"]["own"] < 0.7 * one["cut"]["all"]
            assert "norm" in one["cut"]["refusals"][0] and one["cut"]["refusals"][1] and one["cut"]["saved"] == []
            assert one["bad"]["differ"] == 0 and one["bad"]["num_bad_steps"] == 1


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_run(tmp_path_factory.mktemp("chats"))


@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
@pytest.mark.parametrize("engine", ENGINES)
def test_fine_tuning_is_that_of_ddp(chats: Path, engine: str, full: bool) -> None:
    assert_fine_tuning_is_that_of_ddp(chats, engine, full=full)
