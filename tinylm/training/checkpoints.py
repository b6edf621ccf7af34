"""A run's folder as a place to start in and to go on from; nothing in it is ever overwritten by another run."""

import json
import logging
import re
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, TrainingArguments

logger = logging.getLogger(__name__)

# A checkpoint without these cannot be gone on with; the weights are checked on their own.
_NEEDED = ("trainer_state.json", "optimizer.pt", "scheduler.pt")
_WEIGHTS = ("model.safetensors", "adapter_model.safetensors", "model.safetensors.index.json")


def checkpoint_to_resume(output_dir: str, resume_from_checkpoint: str | None) -> str | None:
    """The checkpoint that a run in `output_dir` goes on from; None if it starts.

    Args:
        resume_from_checkpoint: `auto` (the newest complete checkpoint if there is one), a path, or None.

    Raises:
        FileExistsError: the folder holds a run and no leave was given to go on.
        FileNotFoundError: the path given is not a complete checkpoint.
    """
    folder = Path(output_dir)
    if resume_from_checkpoint not in (None, "auto"):
        fault = find_fault(Path(resume_from_checkpoint))
        if fault:
            raise FileNotFoundError(
                f"`resume_from_checkpoint` needs a complete checkpoint; `{resume_from_checkpoint}` is not one: {fault}."
            )
        if Path(resume_from_checkpoint).resolve().parent != folder.resolve():
            _refuse_another_run(folder)
        return resume_from_checkpoint
    found = latest_complete_checkpoint(folder) if resume_from_checkpoint == "auto" else None
    if found is None and (resume_from_checkpoint is None or _is_finished(folder)):
        _refuse_another_run(folder)
    return found


def is_done(checkpoint: str | None, run: TrainingArguments) -> bool:
    """Whether `checkpoint` belongs to a finished run that was asked for no further step."""
    if checkpoint is None or not _is_finished(Path(run.output_dir)):
        return False
    state = json.loads(Path(checkpoint, "trainer_state.json").read_text(encoding="utf-8"))
    if run.max_steps > 0:
        return state["global_step"] >= run.max_steps
    return run.num_train_epochs <= state["num_train_epochs"]


def _is_finished(folder: Path) -> bool:
    path = folder / "STATUS"
    return path.is_file() and json.loads(path.read_text(encoding="utf-8"))["status"] == "finished"


def _refuse_another_run(folder: Path) -> None:
    if any(folder.glob("checkpoint-*")) or (folder / "run.json").exists():
        raise FileExistsError(
            f"`{folder}` holds another run, which is never overwritten. Set `--resume_from_checkpoint auto`"
            " to go on with it, or another `--output_dir`."
        )


def latest_complete_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that a run can go on from; those that are not complete are named and passed over."""
    numbered = [(int(match[1]), path) for path in folder.glob("checkpoint-*") if (match := _number(path))]
    for _, path in sorted(numbered, reverse=True):
        fault = find_fault(path)
        if fault is None:
            return str(path)
        logger.warning("Passing over `%s`: %s.", path, fault)
    return None


def _number(path: Path) -> re.Match[str] | None:
    return re.fullmatch(r"checkpoint-(\d+)", path.name)


def find_fault(checkpoint: Path) -> str | None:
    """Why a run cannot go on from `checkpoint`; None if it can."""
    if not checkpoint.is_dir():
        return "there is no such folder"
    missing = [name for name in _NEEDED if not (checkpoint / name).is_file()]
    if missing:
        return f"{missing[0]} is missing"
    weights = [checkpoint / name for name in _WEIGHTS if (checkpoint / name).is_file()]
    if not weights:
        return "the weights are missing"
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        for path in weights:
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt"):  # reads the header and checks the file's length against it
                    pass
    except (ValueError, SafetensorError) as error:
        return f"it is damaged ({error})"
    return None


def check_space(output_dir: str, config: PreTrainedConfig) -> None:
    """Refuses a run whose model, with one checkpoint (weights and AdamW's two moments, fp32), does not fit the disk.

    Raises:
        OSError: too little space; both numbers are named.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    needed = 4 * 4 * sum(weight.numel() for weight in model.parameters())
    folder = Path(output_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"A run keeps its model and at least one checkpoint, {needed / 1e6:,.0f} MB; `{output_dir}` has"
            f" {free / 1e6:,.0f} MB of space left. Free some, or set `--output_dir`."
        )


def check_saving(model: PreTrainedModel, output_dir: str) -> None:
    """Saves the fresh model beside the run and loads it again, so that no training is lost to a fault in saving.

    Raises:
        OSError: no space, no right to write.
        ValueError: the model that was loaded is not the one that was saved.
    """
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output_dir, prefix=".saving-") as folder:
        model.save_pretrained(folder)
        again = type(model).from_pretrained(folder, dtype=next(model.parameters()).dtype)
        mine, theirs = model.state_dict(), again.state_dict()
        lost = [name for name in mine if name not in theirs or not torch.equal(mine[name].cpu(), theirs[name].cpu())]
        if lost:
            raise ValueError(f"Saving and loading changes the model: `{lost[0]}` and {len(lost) - 1} more differ.")
