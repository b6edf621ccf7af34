"""`tinylm doctor --run`: sound runs pass, and each thing that can be wrong is named."""

import json
import shutil
from importlib.metadata import version

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.training.test_stream_resume import shards, train
from tests.training.tiny import UnevenRows, run_arguments, tiny_model, trainer_for
from tinylm import cli
from tinylm.inspection.doctor import examine_run, table
from tinylm.training.manifest import write_manifest
from tinylm.training.run_record import write_status


@pytest.fixture(scope="module")
def sound_run(tmp_path_factory):
    """Two checkpoints of a run in one process."""
    folder = tmp_path_factory.mktemp("doctor") / "run"
    trainer_for(tiny_model(), UnevenRows(), run_arguments(folder, save_strategy="steps", save_steps=2)).train()
    write_status(str(folder), "finished", 4)
    record = {"world_size": 1, "device": "cpu", "precision": "fp32", "versions": {"torch": version("torch")}}
    (folder / "run.json").write_text(json.dumps(record))
    return folder


@pytest.fixture
def run(sound_run, tmp_path):
    shutil.copytree(sound_run, tmp_path / "run")
    return tmp_path / "run"


def levels(folder, *ranks):
    return {finding.subject: (finding.level, finding.detail) for finding in examine_run(folder, *ranks)}


def test_a_sound_run_has_no_problem_and_is_not_changed(run):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    found = levels(run)
    assert {level for level, _ in found.values()} == {"ok"}, "\n".join(table(examine_run(run)))
    assert found["STATUS"][1] == "finished at step 4"
    assert found["going on with 1 rank(s)"][1] == "from step 4, bit for bit"
    assert "weights, all finite" in found["checkpoint-4/model.safetensors"][1]
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*")}


def test_a_changed_byte_is_named_and_the_checkpoint_before_is_looked_into(run):
    path = run / "checkpoint-4" / "optimizer.pt"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    found = levels(run)
    assert found["checkpoint-4"] == ("problem", "`optimizer.pt` is damaged: its sha256 is another; it is passed over")
    assert found["checkpoint-2"][0] == found["checkpoint-2/optimizer.pt"][0] == "ok"
    shutil.rmtree(run / "checkpoint-2")
    assert levels(run)["going on"] == ("problem", "no checkpoint is complete: the run can only begin anew")


def test_weights_that_are_not_finite_and_states_that_cannot_be_read_are_problems(run):
    """Files that are as they were written, but no good."""
    weights = load_file(run / "checkpoint-4" / "model.safetensors")
    weights["lm_head.weight"][3, 5] = float("nan")
    save_file(weights, run / "checkpoint-4" / "model.safetensors")
    torch.save({"anything": print}, run / "checkpoint-4" / "scheduler.pt")
    (run / "checkpoint-4" / "manifest.json").unlink()
    write_manifest(run / "checkpoint-4", 4)
    found = levels(run)
    assert found["checkpoint-4/model.safetensors"] == ("problem", "`lm_head.weight` holds values that are not finite")
    level, detail = found["checkpoint-4/scheduler.pt"]
    assert level == "problem" and "weights_only" in detail
    assert found["checkpoint-4"][0] == "ok"


def test_a_checkpoint_under_another_number_is_a_problem(run):
    (run / "checkpoint-4").rename(run / "checkpoint-9")
    level, detail = levels(run)["checkpoint-9/trainer_state.json"]
    assert (level, detail) == ("problem", "the folder is step 9, the state 4, the data 4")


def test_another_number_of_ranks_is_possible_where_it_divides_the_global_batch(run):
    assert levels(run, 4)["going on with 4 rank(s)"][0] == "warning"
    assert "has to be 2" in levels(run, 4)["going on with 4 rank(s)"][1]
    assert levels(run, 3)["going on with 3 rank(s)"] == ("problem", "the global batch of 8 cannot be divided by them")


def test_ranks_that_cannot_share_the_readers_of_a_stream_are_a_problem(tmp_path):
    train(tmp_path, shards(), 4, workers=2, per_device_train_batch_size=6)
    assert levels(tmp_path, 2)["position in the stream"][0] == "ok"
    found = levels(tmp_path, 3)
    assert found["going on with 3 rank(s)"][0] == "warning", "the global batch of 12 can be divided"
    level, detail = found["position in the stream"]
    assert level == "problem" and "among 2 readers, which 3 ranks cannot share" in detail


def test_what_a_kill_left_is_a_warning(run):
    (run / ".saving-checkpoint-6").mkdir()
    write_status(str(run), "running", 5)
    (run / "run.json").unlink()
    found = levels(run)
    assert [found[name][0] for name in (".saving-checkpoint-6", "STATUS", "run.json")] == ["warning"] * 3


def test_the_command_prints_a_table_or_json_and_exits_with_1_on_a_problem(run):
    runner = CliRunner()
    done = runner.invoke(cli.app, ["doctor", "--run", str(run)])
    assert done.exit_code == 0, done.output
    assert any(line.startswith("ok       checkpoint-4 ") for line in done.stdout.splitlines())
    done = runner.invoke(cli.app, ["doctor", "--run", str(run), "--ranks", "3", "--json"])
    assert done.exit_code == 1
    assert {"level": "problem", "subject": "going on with 3 rank(s)"}.items() <= json.loads(done.stdout)[-2].items()
    with pytest.raises(FileNotFoundError, match="holds no run"):
        examine_run(run.parent)
