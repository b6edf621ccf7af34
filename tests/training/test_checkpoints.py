"""Where a run may start, and what it may go on from."""

import itertools
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from transformers import TrainerCallback, modeling_utils

from tests.training.tiny import UnevenRows, run_arguments, tiny_model, trainer_for
from tinylm.training import checkpoints
from tinylm.training.checkpoints import (
    STATE_NAME,
    check_room,
    check_saving,
    check_space,
    checkpoint_to_resume,
    complete,
    find_fault,
    is_done,
    place_for,
    remove_leftovers,
    remove_older,
)
from tinylm.training.launch import RunStopped
from tinylm.training.manifest import write_manifest
from tinylm.training.run_record import read_status, write_status
from tinylm.training.timing import TIMING_NAME


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


@pytest.mark.parametrize("damaged", ["", '{"status": "fini', "7", "\0\0\0"])
def test_a_damaged_status_counts_as_none_and_is_said_once(run_folder, caplog, damaged):
    (run_folder / "STATUS").write_text(damaged)
    for _ in range(2):
        assert checkpoint_to_resume(str(run_folder), "auto") == str(run_folder / "checkpoint-4")
    assert caplog.messages == [f"`{run_folder / 'STATUS'}` is damaged, and is taken for missing."]
    write_status(str(run_folder), "running", 4)
    assert read_status(run_folder)["step"] == 4


def test_a_path_that_is_no_checkpoint_is_refused_with_the_reason(tmp_path, run_folder):
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        checkpoint_to_resume(str(tmp_path), str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError, match=r"`manifest.json` is missing, so it was not completed"):
        checkpoint_to_resume(str(tmp_path), str(tmp_path))
    assert find_fault(run_folder / "checkpoint-4") is None


def test_a_disk_without_room_is_refused_with_both_numbers(tmp_path, monkeypatch):
    config = tiny_model().config
    run = run_arguments(tmp_path / "a" / "b")
    check_space(run, config)
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1000})())
    with pytest.raises(OSError, match=r"0 MB of space left"):
        check_space(run, config)
    assert not (tmp_path / "a").exists()


def test_the_room_asked_for_is_that_of_the_checkpoints_that_a_save_leaves_and_of_the_one_it_writes(
    run_folder, monkeypatch
):
    free = [0]
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": free[0]})())

    def needed(folder: Path, **settings: object) -> int:
        """MB for a million weights."""
        run = run_arguments(folder, **settings)
        for free[0] in range(0, 200_000_000, 1_000_000):
            with suppress(OSError):
                said = check_room(run, 1_000_000)
                assert f"{free[0] / 1e6:.0f} MB" in said and ("all are kept" in said) == ("limit" not in str(settings))
                return free[0] // 1_000_000
        raise AssertionError("never enough")

    new = run_folder / "new"
    (run_folder / "checkpoint-6").mkdir()
    assert len(list(run_folder.glob("checkpoint-*"))) == 2
    assert needed(new, save_strategy="steps", save_total_limit=3) == 4 + 12 * 4
    assert needed(run_folder, save_strategy="steps", save_total_limit=3) == 4 + 12 * 2
    assert needed(run_folder, save_strategy="steps", save_total_limit=1) == 4 + 12
    assert needed(new, save_strategy="steps") == 4 + 12


def test_saving_is_tried_before_the_first_step(tmp_path):
    """Case E1: tied weights survive; a model that saving would change is refused; nothing is left behind."""
    check_saving(tiny_model(tie_word_embeddings=True), str(tmp_path))
    model = tiny_model()
    model.model.register_buffer("unsaved", torch.ones(3))
    with pytest.raises(ValueError, match=r"`model.unsaved` and 0 more differ"):
        check_saving(model, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_each_damaged_file_of_a_checkpoint_is_named_and_the_one_before_is_taken(finished_run, tmp_path, caplog):
    """One byte is changed in each file in turn."""
    folder = tmp_path / "run"
    shutil.copytree(finished_run / "checkpoint-2", folder / "checkpoint-2")
    shutil.copytree(finished_run / "checkpoint-4", folder / "checkpoint-4")
    names = [path.name for path in (folder / "checkpoint-4").iterdir()]
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"} < set(names)
    for name in names:
        path = folder / "checkpoint-4" / name
        content = path.read_bytes()
        path.write_bytes(
            content[: len(content) // 2] + bytes([content[len(content) // 2] ^ 1]) + content[len(content) // 2 + 1 :]
        )
        caplog.clear()
        assert checkpoint_to_resume(str(folder), "auto") == str(folder / "checkpoint-2"), name
        assert name in caplog.messages[0] or (name == "manifest.json" and "its sha256 is another" in caplog.messages[0])
        path.write_bytes(content)
    assert checkpoint_to_resume(str(folder), "auto") == str(folder / "checkpoint-4")


def fails_at(function: Callable, call: int, error: type[Exception], *reason: object) -> Callable:
    """`function`, but its n-th call raises."""
    calls = itertools.count(1)

    def fail(*args, **kwargs):
        if next(calls) == call:
            raise error(*reason)
        return function(*args, **kwargs)

    return fail


FULL = (OSError, 28, "No space left on device")
WRITES = {  # what is called, which of its calls after the first step has begun, and how it fails
    "torch.save": (torch, "save", [1, 2, 3], (RuntimeError, "PytorchStreamWriter failed writing file")),
    "safetensors": (modeling_utils, "safe_save_file", [1], (SafetensorError, "I/O error: No space left on device")),
    "fsync": (os, "fsync", [1, 4, 10], FULL),
    "mkdir": (Path, "mkdir", [1], (OSError, 30, "Read-only file system")),
    "write_text": (Path, "write_text", [1, 2], FULL),
    "rename": (Path, "rename", [1], (OSError, 13, "Permission denied")),
}


class OnceTraining(TrainerCallback):
    """Does something when the first step begins."""

    def __init__(self, what: Callable[[], None]) -> None:
        self.what = what

    def on_step_begin(self, args, state, control, **kwargs):
        self.what()
        self.what = lambda: None


@pytest.mark.parametrize("what", WRITES)
def test_a_checkpoint_that_cannot_be_written_leaves_nothing_and_says_why(what, tmp_path, monkeypatch):
    place, name, calls, error = WRITES[what]
    args = run_arguments(tmp_path, save_strategy="steps", save_steps=2, save_total_limit=1)
    trainer_for(tiny_model(), UnevenRows(), args).train()
    shutil.rmtree(tmp_path / "checkpoint-4", ignore_errors=True)
    trainer_for(
        tiny_model(), UnevenRows(), run_arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    ).train()
    before = {path: path.read_bytes() for path in (tmp_path / "checkpoint-2").iterdir()}
    for call in calls:
        args = run_arguments(tmp_path, save_strategy="steps", save_steps=4, save_total_limit=1)
        with monkeypatch.context() as patched:
            fail = partial(patched.setattr, place, name, fails_at(getattr(place, name), call, *error))
            trainer = trainer_for(tiny_model(), UnevenRows(), args, callbacks=[OnceTraining(fail)])
            with pytest.raises(
                RunStopped, match=r"checkpoint-4` could not be written: .*--resume_from_checkpoint auto"
            ):
                trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["checkpoint-2"], f"call {call}"
        assert before == {path: path.read_bytes() for path in (tmp_path / "checkpoint-2").iterdir()}
        assert read_status(tmp_path)["status"] == "failed"


def test_older_checkpoints_go_when_the_new_one_is_there(tmp_path):
    for step in (3, 20, 100):
        write_checkpoint(tmp_path / f"checkpoint-{step}", step)
    (tmp_path / "checkpoint-7").mkdir()  # not complete: not ours to delete, and no reason to delete another
    newest = tmp_path / "checkpoint-100"
    remove_older(tmp_path, newest, None, limit=None)
    remove_older(tmp_path, newest, None, limit=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"checkpoint-{n}" for n in (100, 20, 3, 7)]
    remove_older(tmp_path, newest, str(tmp_path / "checkpoint-3"), limit=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"checkpoint-{n}" for n in (100, 3, 7)]
    remove_older(tmp_path, newest, None, limit=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-100", "checkpoint-7"]


def test_an_older_checkpoint_that_cannot_be_deleted_stays_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    def fail(checkpoint: Path) -> None:
        raise PermissionError(13, "Permission denied", str(checkpoint))

    monkeypatch.setattr(checkpoints, "_remove", fail)
    args = run_arguments(tmp_path, save_strategy="steps", save_steps=2, save_total_limit=1)
    trainer_for(tiny_model(), UnevenRows(), args).train()
    assert [find_fault(tmp_path / f"checkpoint-{step}") for step in (2, 4)] == [None, None]
    [said] = [message for message in caplog.messages if "could not be deleted" in message]
    assert f"`{tmp_path / 'checkpoint-4'}` is saved" in said and "checkpoint-2" in said


def write_checkpoint(folder: Path, step: int) -> None:
    folder.mkdir()
    (folder / "rng_state.pth").write_bytes(b"r")
    (folder / "trainer_state.json").write_text("{}")
    write_manifest(folder, step)


def test_what_a_kill_leaves_is_deleted_when_the_next_run_begins(tmp_path):
    args = run_arguments(tmp_path, save_strategy="steps", save_steps=4)
    (tmp_path / ".saving-checkpoint-2").mkdir()
    (tmp_path / ".saving-checkpoint-2" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".old-checkpoint-1").mkdir()
    (tmp_path / ".STATUS.being-written-77").write_text("")
    trainer_for(tiny_model(), UnevenRows(), args).train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["STATUS", "checkpoint-4", TIMING_NAME]


def test_a_checkpoint_takes_the_place_of_one_of_its_name(tmp_path):
    checkpoint = tmp_path / "checkpoint-5"
    write_checkpoint(checkpoint, 5)
    beside = place_for(checkpoint)
    (beside / "new").write_text("new")
    complete(beside, checkpoint)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]
    assert [path.name for path in checkpoint.iterdir()] == ["new"]


@pytest.mark.parametrize("look", [remove_leftovers, lambda folder: checkpoint_to_resume(str(folder), "auto")])
def test_a_kill_between_the_two_renames_loses_no_checkpoint(look, tmp_path, monkeypatch):
    checkpoint = tmp_path / "checkpoint-5"
    write_checkpoint(checkpoint, 5)
    beside = place_for(checkpoint)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", fails_at(Path.rename, 2, KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            complete(beside, checkpoint)
    assert not checkpoint.exists()
    (tmp_path / ".old-checkpoint-3").mkdir()  # half deleted: it stays without the name
    look(tmp_path)
    assert find_fault(checkpoint) is None
    assert not (tmp_path / "checkpoint-3").exists()


def test_the_best_checkpoint_is_kept_and_loaded_at_the_end(tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 1, "max_steps": 8}
    args = run_arguments(tmp_path, learning_rate=3.0, lr_scheduler_type="constant", **settings)
    trainer = trainer_for(tiny_model(), UnevenRows(), args, eval_dataset=UnevenRows(4))
    trainer.train()
    scores = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    best = min(scores, key=scores.get)
    assert best != 8, "a learning rate of 3 was to spoil the last steps"
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    assert trainer.evaluate()["eval_loss"] == pytest.approx(scores[best], rel=1e-6)
    assert trainer.evaluate()["eval_loss"] != pytest.approx(scores[8], rel=1e-3)


def test_a_restart_by_the_launcher_goes_on_with_this_launch_and_no_other(run_folder, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    write_status(str(run_folder), "running", 4)
    assert checkpoint_to_resume(str(run_folder), None) == str(run_folder / "checkpoint-4")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    with pytest.raises(FileExistsError, match="holds another run"):
        checkpoint_to_resume(str(run_folder), None)


def test_a_restart_of_a_run_that_began_from_a_path_takes_its_own_checkpoints_first(finished_run, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    (tmp_path / "run.json").write_text("{}")
    write_status(str(tmp_path), "running", 2)
    begun_from = str(finished_run / "checkpoint-2")
    assert checkpoint_to_resume(str(tmp_path), begun_from) == begun_from
    (tmp_path / "checkpoint-4").symlink_to(finished_run / "checkpoint-4")
    assert checkpoint_to_resume(str(tmp_path), begun_from) == str(tmp_path / "checkpoint-4")


def test_a_finished_run_of_which_an_older_checkpoint_is_left_is_done(run_folder, finished_run):
    """It stopped early at step 6 of 8, and kept its best checkpoint, that of step 4."""
    checkpoint = str(run_folder / "checkpoint-4")
    state = json.loads((finished_run / "checkpoint-4" / STATE_NAME).read_text())
    state |= {"global_step": 6, "max_steps": 8, "num_train_epochs": 2}
    (run_folder / STATE_NAME).write_text(json.dumps(state))
    write_status(str(run_folder), "finished", 6)

    def done(**settings: object) -> bool:
        return is_done(checkpoint, run_arguments(run_folder, **{"resume_from_checkpoint": "auto", **settings}))

    assert done(max_steps=8) and not done(max_steps=9)
    assert done(max_steps=-1, num_train_epochs=2) and not done(max_steps=-1, num_train_epochs=3)
    assert not done(max_steps=8, resume_from_checkpoint=checkpoint), "a checkpoint that is named is gone on from"
    assert done(max_steps=4, resume_from_checkpoint=checkpoint)
    write_status(str(run_folder), "running", 6)
    assert not done(max_steps=8)


def test_what_is_newer_than_the_checkpoint_gone_on_from_is_set_aside_and_not_taken_up_again(
    finished_run, tmp_path, caplog
):
    caplog.set_level("INFO", logger="tinylm")
    for step in (2, 4):
        shutil.copytree(finished_run / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    abandoned = (tmp_path / "checkpoint-4" / "model.safetensors").read_bytes()
    for _ in range(2):  # the second time, the name is taken
        args = run_arguments(tmp_path, max_steps=3)
        trainer_for(tiny_model(), UnevenRows(), args).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert checkpoint_to_resume(str(tmp_path), "auto") == str(tmp_path / "checkpoint-2")
        assert "is called `abandoned-checkpoint-4" in caplog.text
        caplog.clear()
        shutil.copytree(tmp_path / "abandoned-checkpoint-4", tmp_path / "checkpoint-4")
    assert (tmp_path / "abandoned-checkpoint-4.1" / "model.safetensors").read_bytes() == abandoned
    args = run_arguments(tmp_path / "elsewhere", max_steps=3)
    trainer_for(tiny_model(), UnevenRows(), args).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert (tmp_path / "checkpoint-4").is_dir(), "another run's folder stays as it is"


class Told(UnevenRows):
    """Rows that can tell whether they are the same."""

    def __init__(self, told: str) -> None:
        super().__init__()
        self.told = told

    def fingerprint(self) -> str:
        return self.told


def test_a_run_does_not_go_on_with_as_many_rows_of_other_data(tmp_path, finished_run):
    args = run_arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    trainer_for(tiny_model(), Told("ab"), args).train()
    args, checkpoint = run_arguments(tmp_path, max_steps=3), str(tmp_path / "checkpoint-2")
    with pytest.raises(ValueError, match=r"its fingerprint of data was ab and is cd now.*another `--output_dir`"):
        trainer_for(tiny_model(), Told("cd"), args).train(resume_from_checkpoint=checkpoint)
    trainer = trainer_for(tiny_model(), Told("ab"), args)
    trainer.train(resume_from_checkpoint=checkpoint)
    assert trainer.state.global_step == 3


def test_a_checkpoint_from_before_fingerprints_is_gone_on_from(tmp_path, finished_run):
    shutil.copytree(finished_run / "checkpoint-2", tmp_path / "checkpoint-2")
    progress = json.loads((tmp_path / "checkpoint-2" / "progress.json").read_text())
    assert progress["order"].pop("fingerprint_of_data") is None
    (tmp_path / "checkpoint-2" / "progress.json").write_text(json.dumps(progress))
    trainer = trainer_for(tiny_model(), Told("ab"), run_arguments(tmp_path, max_steps=3))
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainer.state.global_step == 3
