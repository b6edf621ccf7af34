"""What is refused before a run's first step, and that a refusal leaves the folder as it was."""

import shutil
from dataclasses import replace

import pytest

from tests.training.tiny import UnevenRows, run_arguments, tiny_model, trainer_for
from tinylm.training import run_folder
from tinylm.training.launch import Launch, RunStopped
from tinylm.training.run_folder import begin_run, check_folder_is_shared

LAUNCH = Launch(rank=0, world_size=1, backend=None, engine="none", device="cpu", threads=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 4 steps with checkpoints at 2 and 4."""
    folder = tmp_path_factory.mktemp("run")
    trainer_for(tiny_model(), UnevenRows(), run_arguments(folder, save_strategy="steps", save_steps=2)).train()
    return folder


def test_a_run_that_is_refused_renames_no_checkpoint_and_one_that_starts_does(trained, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    checkpoint = str(folder / "checkpoint-2")
    trainer = trainer_for(tiny_model(), UnevenRows(), run_arguments(folder, max_steps=3))
    before = sorted(folder.rglob("*"))
    with pytest.raises(RunStopped, match="asks for the engine `fsdp2`"):
        begin_run(trainer, replace(LAUNCH, engine="fsdp2"), "rows", checkpoint)
    assert sorted(folder.rglob("*")) == before and trainer.steps_done == 0

    def refuse(*_: object) -> None:
        raise ValueError("Saving and loading changes the model")

    with monkeypatch.context() as patched, pytest.raises(ValueError, match="changes the model"):
        patched.setattr(run_folder, "check_saving", refuse)
        begin_run(trainer, LAUNCH, "rows", checkpoint)
    assert sorted(path.name for path in folder.glob("*checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    begin_run(trainer, LAUNCH, "rows", checkpoint)
    trainer.train(resume_from_checkpoint=checkpoint)
    assert sorted(path.name for path in folder.glob("*checkpoint-*")) == ["abandoned-checkpoint-4", "checkpoint-2"]


def test_a_folder_that_a_rank_does_not_share_with_rank_zero_is_refused(tmp_path, monkeypatch):
    check_folder_is_shared(tmp_path / "run", is_rank_zero=True)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    monkeypatch.setattr(run_folder, "decided_by_rank_zero", lambda token: ".seen-elsewhere")
    with pytest.raises(RunStopped, match=r"1 rank\(s\), this one among them,.*a folder that all machines share"):
        check_folder_is_shared(tmp_path / "run", is_rank_zero=False)
    (tmp_path / "run" / ".seen-elsewhere").touch()
    check_folder_is_shared(tmp_path / "run", is_rank_zero=False)
