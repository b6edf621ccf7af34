"""The same small runs under one engine after another, through the real launcher."""

import json
import math
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.data.chats import answer, question
from tests.distributed import ROOT
from tests.models.gguf_files import save_base
from tests.recipes.running import launch, output_of, run_here

PRETRAIN, FINETUNE = ROOT / "recipes" / "pretrain_tlm.py", ROOT / "recipes" / "finetune_qwen.py"
SETTINGS = ("--max_steps", 6, "--save_steps", 3, "--logging_steps", 1, "--eval_strategy", "steps", "--eval_steps", 3)
SETTINGS += ("--precision", "fp32", "--warmup_steps", 2, "--save_total_limit", 5)
TWO_RANKS = ("--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 2)
ONE_RANK = ("--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 2)


def start_run(engine: str, recipe: Path, config: Path, folder: Path, *flags: object) -> subprocess.Popen:
    """A run on two ranks under `accelerate_configs/{engine}.yaml`; the last flags win."""
    words = ["--config_file", ROOT / "accelerate_configs" / f"{engine}.yaml", recipe, "--config", config]
    return launch(*words, "--output_dir", folder, *SETTINGS, *TWO_RANKS, *flags)


def entries(folder: Path, name: str) -> dict[int, float]:
    """`{step: value}` of what the run in `folder` has logged under `name`."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry[name] for entry in history if name in entry}


def assert_same_course(mine: Path, other: Path, *, tolerance: float = 1e-5) -> None:
    """Losses, norms of gradients and validations of two runs, step by step."""
    for name in ("loss", "eval_loss", "grad_norm"):
        ours, theirs = entries(mine, name), entries(other, name)
        assert ours.keys() == theirs.keys() and ours, name
        for step, value in ours.items():
            assert math.isclose(value, theirs[step], rel_tol=tolerance), (name, step, value, theirs[step])


def assert_same_weights(mine: Path, other: Path, file: str = "model.safetensors", *, tolerance: float = 1e-5) -> None:
    ours, theirs = load_file(mine / file), load_file(other / file)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        torch.testing.assert_close(tensor, theirs[name], rtol=tolerance, atol=tolerance)


def optimizer_of(checkpoint: Path) -> Mapping[str, object]:
    return torch.load(checkpoint / "optimizer.pt", weights_only=True)


def assert_same_optimizer(mine: Path, other: Path, *, tolerance: float = 1e-5) -> None:
    ours, theirs = optimizer_of(mine), optimizer_of(other)
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in ours["state"].items():
        assert state.keys() == theirs["state"][number].keys()
        for key, value in state.items():
            torch.testing.assert_close(value, theirs["state"][number][key], rtol=tolerance, atol=tolerance)


def assert_same_checkpoints(mine: Path, other: Path) -> None:
    """The same files in each checkpoint of two runs, with the same weights and optimizers."""
    for step in (3, 6):
        ours, theirs = (run / f"checkpoint-{step}" for run in (mine, other))
        assert sorted(path.name for path in ours.iterdir()) == sorted(path.name for path in theirs.iterdir())
        assert_same_weights(ours, theirs)
        assert_same_optimizer(ours, theirs)


def assert_one_process_goes_on_from(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first checkpoint of a run on two ranks, to that run's end."""
    folder = run.with_name(f"alone-from-{run.name}")
    flags = ["--config", run.with_name("run.yaml"), "--output_dir", folder, *SETTINGS, *ONE_RANK]
    assert run_here(monkeypatch, "pretrain_tlm", *flags, "--resume_from_checkpoint", run / "checkpoint-3") == 0
    assert json.loads((folder / "run.json").read_text())["engine"] == "none"
    assert entries(folder, "loss").keys() == set(range(1, 7))
    assert_same_course(folder, run)
    assert_same_weights(folder, run)
    assert_same_optimizer(folder / "checkpoint-6", run / "checkpoint-6")


def write_chat_run(folder: Path) -> Path:
    """The run file of a fine-tuning, written into `folder` beside its base model and conversations."""
    save_base(folder / "base")
    rows = [{"messages": [question(f"What is {n}?"), answer(f"It is {n * n}.")]} for n in range(60)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = {"model_name_or_path": str(folder / "base"), "data_files": str(folder / "chats.jsonl"), "use_cpu": True}
    run |= {"data_shape": "messages", "max_length": 200, "row_tokens": 200, "max_eval_examples": 8}
    run |= {"learning_rate": 1e-2, "max_grad_norm": 1.0}
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return folder / "run.yaml"


def assert_fine_tuning_is_that_of_ddp(config: Path, engine: str, *, full: bool) -> None:
    """Of LoRA, or of all weights; the run of DDP is made once."""
    kind = "full" if full else "lora"
    mine, other = (config.parent / f"{each}-{kind}" for each in (engine, "cpu_gloo"))
    for each, folder in (("cpu_gloo", other), (engine, mine)):
        if not folder.exists():
            output_of(start_run(each, FINETUNE, config, folder, "--full", str(full).lower()))
    assert json.loads((mine / "run.json").read_text())["engine"] == engine.partition("_")[0]
    assert_same_course(mine, other)
    assert_same_weights(mine, other, "model.safetensors" if full else "adapter_model.safetensors")
    assert_same_optimizer(mine / "checkpoint-6", other / "checkpoint-6")
    assert len(json.loads((mine / "answers.json").read_text())) > 0
    (AutoModelForCausalLM if full else AutoPeftModelForCausalLM).from_pretrained(mine)
