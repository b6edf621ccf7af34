"""Where a run may start, and what it may go on from."""

import json

import pytest
import torch

from tests.training.tiny import UnevenRows, run_arguments, tiny_model, trainer_for
from tinylm.training import checkpoints
from tinylm.training.checkpoints import check_saving, check_space, checkpoint_to_resume, find_fault
from tinylm.training.run_record import write_status


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """A run of 4 steps with checkpoints at 2 and 4."""
    folder = tmp_path_factory.mktemp("run")
    trainer_for(tiny_model(), UnevenRows(), run_arguments(folder, save_strategy="steps", save_steps=2)).train()
    return folder


@pytest.fixture
def run_folder(finished_run, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "checkpoint-4").symlink_to(finished_run / "checkpoint-4")
    return folder


def test_a_folder_that_holds_a_run_is_never_started_in_again(run_folder):
    with pytest.raises(FileExistsError, match=r"holds another run.*--resume_from_checkpoint auto"):
        checkpoint_to_resume(str(run_folder), None)


def test_auto_starts_in_an_empty_folder_and_goes_on_in_a_run(run_folder, tmp_path):
    assert checkpoint_to_resume(str(tmp_path / "new"), "auto") is None
    assert checkpoint_to_resume(str(tmp_path / "new"), None) is None
    assert checkpoint_to_resume(str(run_folder), "auto") == str(run_folder / "checkpoint-4")


def test_the_newest_complete_checkpoint_is_found_beside_broken_ones(run_folder, finished_run, caplog):
    """Case S11: an empty checkpoint-6, one with truncated weights, and folders that only look like checkpoints."""
    (run_folder / "checkpoint-6").mkdir()
    (run_folder / "checkpoint-old").mkdir()
    truncated = run_folder / "checkpoint-8"
    truncated.mkdir()
    for path in (finished_run / "checkpoint-4").iterdir():
        content = path.read_bytes()
        (truncated / path.name).write_bytes(content[:-7] if path.name == "model.safetensors" else content)
    assert checkpoint_to_resume(str(run_folder), "auto") == str(run_folder / "checkpoint-4")
    assert ["checkpoint-8" in record.message for record in caplog.records] == [True, False]
    assert "checkpoint-6" in caplog.records[1].message


def test_a_path_does_not_open_the_folder_of_another_run(run_folder, finished_run, tmp_path):
    checkpoint = str(finished_run / "checkpoint-4")
    with pytest.raises(FileExistsError, match="holds another run"):
        checkpoint_to_resume(str(run_folder), checkpoint)
    assert checkpoint_to_resume(str(tmp_path / "new"), checkpoint) == checkpoint


def test_auto_does_not_start_over_a_finished_run_without_checkpoints(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    write_status(str(tmp_path), "running", 3)
    assert checkpoint_to_resume(str(tmp_path), "auto") is None
    write_status(str(tmp_path), "finished", 3)
    with pytest.raises(FileExistsError, match="holds another run"):
        checkpoint_to_resume(str(tmp_path), "auto")


def test_a_path_that_is_no_checkpoint_is_refused_with_the_reason(tmp_path, run_folder):
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        checkpoint_to_resume(str(tmp_path), str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError, match=r"trainer_state.json is missing"):
        checkpoint_to_resume(str(tmp_path), str(tmp_path))
    assert find_fault(run_folder / "checkpoint-4") is None


def test_a_disk_without_room_is_refused_with_both_numbers(tmp_path, monkeypatch):
    config = tiny_model().config
    check_space(str(tmp_path / "a" / "b"), config)
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1000})())
    with pytest.raises(OSError, match=r"0 MB of space left"):
        check_space(str(tmp_path / "a" / "b"), config)
    assert not (tmp_path / "a").exists()


def test_saving_is_tried_before_the_first_step(tmp_path):
    """Case E1: tied weights survive; a model that saving would change is refused; nothing is left behind."""
    check_saving(tiny_model(tie_word_embeddings=True), str(tmp_path))
    model = tiny_model()
    model.model.register_buffer("unsaved", torch.ones(3))
    with pytest.raises(ValueError, match=r"`model.unsaved` and 0 more differ"):
        check_saving(model, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_equals_the_undisturbed_one(tmp_path, finished_run):
    """Case S3 for data in memory: same weights, same logged losses, bit for bit."""
    args = run_arguments(tmp_path / "resumed", save_strategy="steps", save_steps=2)
    trainer = trainer_for(tiny_model(seed=1), UnevenRows(), args)
    trainer.train(resume_from_checkpoint=str(finished_run / "checkpoint-2"))
    state = json.loads((finished_run / "checkpoint-4" / "trainer_state.json").read_text())
    expected = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] == expected
    mine = (tmp_path / "resumed" / "checkpoint-4" / "model.safetensors").read_bytes()
    assert mine == (finished_run / "checkpoint-4" / "model.safetensors").read_bytes()
