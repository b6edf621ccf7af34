"""A run that is interrupted and gone on with ends in the bytes of the undisturbed one (case S3)."""

import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import EarlyStoppingCallback, TrainerCallback

from tests.distributed import run_on_ranks
from tests.training.tiny import UnevenRows, run_arguments, stack, tiny_model
from tinylm.models import TinyTransformerConfig, TinyTransformerForCausalLM
from tinylm.training import precision, run_folder
from tinylm.training.launch import RunInterrupted
from tinylm.training.run_record import read_status
from tinylm.training.trainer import LanguageModelTrainer

# 22 rows in global batches of 4: 6 steps an epoch. Nothing falls on the same steps as something else.
SETTINGS = {
    "max_steps": 14,
    "logging_steps": 3,
    "eval_strategy": "steps",
    "eval_steps": 4,
    "save_strategy": "steps",
    "save_steps": 5,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "warmup_steps": 2,
    "dataloader_num_workers": 0,
}
TIMES = ("runtime", "per_second", "total_flos")


def tlm(**changes: object) -> torch.nn.Module:
    return tiny_model(attention_dropout=0.2, **changes)


def tiny_transformer(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return TinyTransformerForCausalLM(TinyTransformerConfig(max_position_embeddings=37, dropout=0.1))


def lora(seed: int = 0) -> torch.nn.Module:
    """Adapters with dropout; the base is the same for every seed."""
    base = tiny_model()
    torch.manual_seed(seed)
    return get_peft_model(base, LoraConfig(r=3, lora_dropout=0.2, target_modules=["q_proj", "v_proj"]))


def train(folder: object, model: torch.nn.Module, resume: str | None = None, callbacks=(), **settings: object):
    rows = UnevenRows(22)
    trainer = LanguageModelTrainer(
        model=model,
        args=run_arguments(folder, **{**SETTINGS, **settings}),
        train_dataset=rows,
        eval_dataset=UnevenRows(5),
        data_collator=stack,
        callbacks=list(callbacks),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


class At(TrainerCallback):
    """Does something when a step begins."""

    def __init__(self, step: int, what: Callable[[], None]) -> None:
        self.step, self.what = step, what

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            self.what()


class InValidation(TrainerCallback):
    """Does something in the n-th forward of all validations; `forwards` counts them."""

    def __init__(self, forward: int, what: Callable[[], None]) -> None:
        self.forward, self.what, self.forwards = forward, what, 0

    def on_train_begin(self, args, state, control, model, **kwargs):
        model.register_forward_pre_hook(self.count)

    def count(self, model, _):
        self.forwards += not model.training
        if self.forwards == self.forward and not model.training:
            self.what()


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def history(folder: Path) -> list[dict[str, float]]:
    """All that a checkpoint's run had logged, without how long it took."""
    entries = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [{name: entry[name] for name in entry if not name.endswith(TIMES)} for entry in entries]


def contents(folder: Path) -> dict[str, object]:
    """What decides how a run goes on from a checkpoint, bit for bit."""
    found: dict[str, object] = {"history": history(folder), "progress": (folder / "progress.json").read_text()}
    found["weights"] = [path.read_bytes() for path in sorted(folder.glob("*model.safetensors"))]
    for path in sorted(folder.glob("*.pt*")):
        with torch.serialization.safe_globals([]):
            found[path.name] = flat(torch.load(path, weights_only=False))
    return found


def flat(state: object) -> object:
    """Nested states with their tensors as bytes, to be compared with ==."""
    if isinstance(state, torch.Tensor):
        return str(state.dtype), tuple(state.shape), state.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(state, dict):
        return {name: flat(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return [flat(value) for value in state]
    return state.tobytes() if hasattr(state, "tobytes") else state


def resumed_copy(whole: Path, name: str, folder: Path) -> str:
    """A checkpoint of a run as the only one of another folder."""
    shutil.copytree(whole / name, folder / name)
    return str(folder / name)


@pytest.mark.parametrize(
    ("build", "numbers"),
    [
        (tlm, "fp32"),
        (lora, "bf16"),
        *[
            pytest.param(build, numbers, marks=pytest.mark.slow)
            for build, numbers in (
                (tlm, "bf16"),
                (lora, "fp32"),
                (tiny_transformer, "fp32"),
                (tiny_transformer, "bf16"),
            )
        ],
    ],
)
def test_weights_optimizer_schedule_and_logged_losses_are_those_of_the_undisturbed_run(
    tmp_path, monkeypatch, build, numbers
):
    monkeypatch.setattr(precision, "_cpu_has_bf16", lambda: True)
    train(tmp_path / "whole", build(), precision=numbers)
    expected = contents(tmp_path / "whole" / "checkpoint-14")
    losses = [entry["loss"] for entry in expected["history"] if "loss" in entry]
    assert len(losses) == 4 and all(map(math.isfinite, losses))
    for step in (5, 10):
        checkpoint = resumed_copy(tmp_path / "whole", f"checkpoint-{step}", tmp_path / f"from-{step}")
        train(tmp_path / f"from-{step}", build(seed=1), resume=checkpoint, precision=numbers)
        assert contents(tmp_path / f"from-{step}" / "checkpoint-14") == expected, f"gone on with from step {step}"
    other = train(tmp_path / "other", build(), precision=numbers, seed=43)
    assert contents(tmp_path / "other" / "checkpoint-14")["weights"] != expected["weights"]
    assert other.state.global_step == 14


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The undisturbed run, validated and logged at the ends of epochs too."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder, tlm())
    return folder


@pytest.mark.parametrize("step", [4, 12, *[pytest.param(step, marks=pytest.mark.slow) for step in (6, 7)]])
def test_a_stop_saves_before_the_validation_that_is_due_and_the_run_goes_on_with_it(tmp_path, whole, step):
    """Step 4 is validated, 6 ends an epoch and is logged, 7 is nothing, 12 is all of it."""
    with pytest.raises(RunInterrupted, match=rf"Stopped after step {step} of 14 and saved \(SIGTERM\)"):
        train(tmp_path, tlm(), callbacks=[At(step, lambda: os.kill(os.getpid(), signal.SIGTERM))])
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    status = read_status(tmp_path)
    assert (status["status"], status["step"], status["because"]) == ("interrupted", step, "SIGTERM")
    assert status["how_to_go_on"] == "the same command with --resume_from_checkpoint auto"
    checkpoint = tmp_path / f"checkpoint-{step}"
    assert not [entry for entry in history(checkpoint) if entry["step"] == step]
    train(tmp_path, tlm(seed=1), resume=str(checkpoint))
    assert contents(tmp_path / "checkpoint-14") == contents(whole / "checkpoint-14")


@pytest.mark.parametrize("forward", [2, 8])
def test_a_validation_in_which_the_run_is_stopped_is_left_and_done_again(tmp_path, forward):
    """Three batches a validation: in step 4, and in step 12, which is logged and ends an epoch."""
    settings = {"per_device_eval_batch_size": 2}
    train(tmp_path / "whole", tlm(), **settings)
    step, stop = (4, 12)[forward // 6], InValidation(forward, terminate)
    with pytest.raises(RunInterrupted, match=rf"Stopped after step {step} of 14 and saved \(SIGTERM\)"):
        train(tmp_path / "run", tlm(), callbacks=[stop], **settings)
    assert stop.forwards == forward, "the batch that was begun was the last"
    checkpoint = tmp_path / "run" / f"checkpoint-{step}"
    assert not [entry for entry in history(checkpoint) if entry["step"] == step and "eval_loss" in entry]
    again = InValidation(2, terminate)
    with pytest.raises(RunInterrupted, match=rf"after step {step} "):
        train(tmp_path / "run", tlm(seed=1), resume=str(checkpoint), callbacks=[again], **settings)
    train(tmp_path / "run", tlm(seed=1), resume=str(checkpoint), **settings)
    assert contents(tmp_path / "run" / "checkpoint-14") == contents(tmp_path / "whole" / "checkpoint-14")


def test_a_stop_in_the_validation_before_the_first_step_leaves_nothing_to_go_on_from(tmp_path):
    with pytest.raises(RunInterrupted, match=r"before the first step \(SIGTERM\).*Begin again with"):
        train(tmp_path, tlm(), callbacks=[InValidation(1, terminate)], eval_on_start=True, per_device_eval_batch_size=2)
    assert not list(tmp_path.glob("checkpoint-*"))
    assert read_status(tmp_path)["status"] == "interrupted"


@pytest.fixture
def finish(monkeypatch):
    """The end of a recipe's run, as far as it needs no tokenizer."""
    monkeypatch.setattr(run_folder, "draw_loss_curves", lambda *_: None)
    monkeypatch.setattr(run_folder, "save_tokenizer", lambda *_: None)
    return lambda trainer: run_folder.finish_run(trainer, {})


@pytest.mark.parametrize("save_strategy", ["steps", "no"])
def test_a_stop_in_the_validation_after_the_last_step_is_gone_on_with_to_the_end(tmp_path, finish, save_strategy):
    settings = {"eval_strategy": "no", "per_device_eval_batch_size": 2, "save_strategy": save_strategy}
    trainer = train(tmp_path, tlm(), callbacks=[InValidation(1, terminate)], **settings)
    with pytest.raises(RunInterrupted, match=r"after step 14 of 14 and saved \(SIGTERM\)"):
        finish(trainer)
    assert read_status(tmp_path)["status"] == "interrupted"
    assert not (tmp_path / "all_results.json").exists()
    metrics = finish(train(tmp_path, tlm(seed=1), resume=str(tmp_path / "checkpoint-14"), **settings))
    assert read_status(tmp_path)["status"] == "finished"
    assert metrics == json.loads((tmp_path / "all_results.json").read_text())
    undisturbed = finish(train(tmp_path / "whole", tlm(), **settings))
    assert metrics["eval_loss"] == undisturbed["eval_loss"]


def test_a_stop_that_comes_too_late_is_taken_away_when_the_run_finishes(tmp_path, finish):
    """In the last batch of the last validation."""
    stop = InValidation(6, (tmp_path / "STOP").touch)
    trainer = train(tmp_path, tlm(), callbacks=[stop], eval_steps=7, per_device_eval_batch_size=2)
    assert (tmp_path / "STOP").exists()
    finish(trainer)
    assert read_status(tmp_path)["status"] == "finished"
    assert not (tmp_path / "STOP").exists()


def test_a_stop_that_comes_while_another_wish_is_fulfilled_is_not_forgotten(tmp_path):
    def wish() -> None:
        (tmp_path / "SAVE").touch()

    class WhileSaving(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            if state.global_step == 2:
                (tmp_path / "STOP").touch()

    with pytest.raises(RunInterrupted, match="after step 3 of 14"):
        train(tmp_path, tlm(), callbacks=[At(2, wish), WhileSaving()])
    assert not (tmp_path / "STOP").exists() and not (tmp_path / "SAVE").exists()


def test_what_comes_after_training_has_phases_too(tmp_path, finish, monkeypatch):
    trainer = train(tmp_path, tlm(), eval_strategy="no", per_device_eval_batch_size=2)
    entered: list[tuple[str, int]] = []
    monkeypatch.setattr(trainer.phases, "enter", lambda phase, step: entered.append((phase, step)))
    finish(trainer)
    assert entered == [("validation", 14)] * 4 + [("save", 14)]


def test_epochs_that_are_logged_validated_and_saved_at_their_ends_are_resumed_exactly(tmp_path):
    settings = {"logging_strategy": "epoch", "eval_strategy": "epoch", "save_strategy": "epoch"}
    settings |= {"max_steps": -1, "num_train_epochs": 3}
    train(tmp_path / "whole", tlm(), **settings)
    expected = contents(tmp_path / "whole" / "checkpoint-18")
    assert [entry["step"] for entry in expected["history"]] == [6, 6, 12, 12, 18, 18]
    for step in (6, 9):
        folder = tmp_path / f"at-{step}"
        with pytest.raises(RunInterrupted):
            train(folder, tlm(), callbacks=[At(step, lambda: os.kill(os.getpid(), signal.SIGINT))], **settings)
        train(folder, tlm(seed=1), resume=str(folder / f"checkpoint-{step}"), **settings)
        assert contents(folder / "checkpoint-18") == expected


def test_early_stopping_counts_on_and_the_best_model_is_the_same(tmp_path):
    """Patience 3 of validations that get worse: two before the interruption."""
    settings = {
        "learning_rate": 3.0,
        "lr_scheduler_type": "constant",
        "max_steps": 40,
        "eval_steps": 2,
        "save_steps": 2,
    }
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "warmup_steps": 0}
    undisturbed = train(tmp_path / "whole", tlm(), callbacks=[EarlyStoppingCallback(3)], **settings)
    last = undisturbed.state.global_step
    assert last < 40
    for step in (last - 2, last):
        checkpoint = resumed_copy(tmp_path / "whole", f"checkpoint-{step}", tmp_path / f"{step}")
        best = undisturbed.state.best_global_step
        resumed_copy(tmp_path / "whole", f"checkpoint-{best}", tmp_path / f"{step}") if best != step else None
        resumed = train(
            tmp_path / f"{step}", tlm(seed=1), resume=checkpoint, callbacks=[EarlyStoppingCallback(3)], **settings
        )
        assert resumed.state.global_step == last
        assert resumed.state.best_model_checkpoint == str(tmp_path / f"{step}" / f"checkpoint-{best}")
        for mine, other in zip(resumed.model.parameters(), undisturbed.model.parameters(), strict=True):
            assert torch.equal(mine, other)
        losses = [
            [e["train_loss"] for e in trainer.state.log_history if "train_loss" in e]
            for trainer in (resumed, undisturbed)
        ]
        assert losses[0] == losses[1]


def test_a_run_that_had_taken_its_last_step_goes_on_to_its_end_without_another(tmp_path, whole):
    checkpoint = resumed_copy(whole, "checkpoint-14", tmp_path)
    trainer = train(tmp_path, tlm(seed=1), resume=checkpoint)
    assert trainer.state.global_step == 14
    assert "train_loss" in trainer.state.log_history[-1]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-14"]


def test_a_failure_between_the_last_step_and_the_end_is_a_failed_run(tmp_path, whole, monkeypatch):
    trainer = train(tmp_path, tlm(), resume=resumed_copy(whole, "checkpoint-14", tmp_path))
    assert read_status(tmp_path)["status"] == "running"
    monkeypatch.setattr(run_folder, "draw_loss_curves", lambda *_: 1 / 0)
    monkeypatch.setattr(run_folder, "save_tokenizer", lambda *_: None)
    with pytest.raises(ZeroDivisionError):
        run_folder.finish_run(trainer, {})
    assert read_status(tmp_path)["status"] == "failed"


def test_a_position_costs_no_look_at_the_examples_before_it(tmp_path, whole):
    class Watched(UnevenRows):
        looked_at = 0

        def __getitem__(self, index):
            type(self).looked_at += 1
            return super().__getitem__(index)

    checkpoint = resumed_copy(whole, "checkpoint-10", tmp_path)
    args = run_arguments(tmp_path, **{**SETTINGS, "eval_strategy": "no"})
    trainer = LanguageModelTrainer(model=tlm(), args=args, train_dataset=Watched(22), data_collator=stack)
    trainer.train(resume_from_checkpoint=checkpoint)
    assert Watched.looked_at == 4 * 4


def two_rank_checks(rank: int, world_size: int, payload: dict) -> dict[str, object]:
    """An undisturbed run and two in which a single rank is asked to stop, gone on with: in a step and in a validation,
    of which each rank has three batches."""
    assert world_size == 2
    folder = Path(payload["folder"])
    settings = {"gradient_accumulation_steps": 1, "per_device_eval_batch_size": 1}
    train(folder / "whole", tlm(), **settings)
    found: dict[str, object] = {"world_size": torch.distributed.get_world_size()}
    in_step, in_validation = At(7, terminate), InValidation(5, terminate)
    for name, step, stop in (("stopped", 7, in_step), ("left", 8, in_validation)):
        try:
            train(folder / name, tlm(), callbacks=[stop] if rank == 1 else [], **settings)
        except RunInterrupted as interrupted:
            found[name] = str(interrupted)
        train(folder / name, tlm(seed=1), resume=str(folder / name / f"checkpoint-{step}"), **settings)
    return {**found, "forwards": in_validation.forwards}


def test_two_ranks_agree_on_the_step_and_go_on_as_if_nothing_had_happened(tmp_path):
    found = run_on_ranks("tests.training.test_resume", "two_rank_checks", 2, {"folder": str(tmp_path)})
    assert [each["world_size"] for each in found] == [2, 2]
    expected = contents(tmp_path / "whole" / "checkpoint-14")
    assert {"rng_state_0.pth", "rng_state_1.pth"} < expected.keys()
    for name, step in (("stopped", 7), ("left", 8)):
        assert all(each[name].startswith(f"Stopped after step {step} of 14 and saved") for each in found)
        assert contents(tmp_path / name / "checkpoint-14") == expected
        assert not list((tmp_path / name).glob(".*"))
    assert found[1]["forwards"] == 5
