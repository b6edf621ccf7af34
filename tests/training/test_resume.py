"""A run that is interrupted and gone on with ends in the bytes of the undisturbed one (case S3)."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from tests.training.tiny import UnevenRows, run_arguments, stack, tiny_model
from tinylm.models import TinyTransformerConfig, TinyTransformerForCausalLM
from tinylm.training import precision
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


def history(folder: Path) -> list[dict[str, float]]:
    """All that a checkpoint's run had logged, without how long it took."""
    entries = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [{name: entry[name] for name in entry if not name.endswith(TIMES)} for entry in entries]


def contents(folder: Path) -> dict[str, object]:
    """What decides how a run goes on from a checkpoint, bit for bit."""
    found: dict[str, object] = {"history": history(folder), "progress": (folder / "progress.json").read_text()}
    found["weights"] = (folder / "model.safetensors").read_bytes()
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


@pytest.mark.parametrize("build", [tlm, tiny_transformer])
@pytest.mark.parametrize("numbers", ["fp32", "bf16"])
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
