"""A run's folder as a place to start in, to go on from and to save into; nothing of another run is overwritten.

Choices:
- A checkpoint is written under a name that starts with a dot, flushed, listed in a manifest and then renamed. So what
  is called `checkpoint-N` was whole once, and a kill at any moment leaves the one before it as it was.
- What a kill leaves behind (`.saving-*`, `.old-*`) is deleted when the next run begins in the folder; a checkpoint that
  was to be replaced by one that never got its name has its own back before.
- Only the process that holds the folder's lock changes anything in it (`run_lock.py`).
"""

import json
import logging
import os
import re
import shutil
import tempfile
from itertools import count
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.utils import load_peft_weights
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, TrainingArguments

from .launch import RunInterrupted, decided_by_rank_zero, is_restarted, name_of_launch
from .manifest import find_difference, flush
from .run_lock import hold
from .run_record import read_status

logger = logging.getLogger(__name__)

STATE_NAME = "trainer_state.json"


def checkpoint_to_resume(output_dir: str, resume_from_checkpoint: str | None) -> str | None:
    """The checkpoint that a run in `output_dir` goes on from; None if it starts. Rank 0 looks for all.

    Args:
        resume_from_checkpoint: `auto` (the newest complete checkpoint if there is one), a path, or None. A launcher
            that has restarted the ranks of this run means `auto`, and a path where there is no checkpoint yet.

    Raises:
        FileExistsError: the folder holds a run and no leave was given to go on.
        FileNotFoundError: the path given is not a complete checkpoint, or another rank does not see it.
        RunStopped: another process trains in the folder.
        RunInterrupted: the ranks were stopped on purpose, and the launcher has restarted them all the same.
    """
    found = stopped = None
    if int(os.environ.get("RANK", "0")) == 0:
        folder = Path(output_dir)
        if folder.is_dir():  # else `begin_run` makes it, when nothing is left to be refused
            hold(folder)
            bring_back_replaced(folder)
            _forget_failure(folder)
        stopped = _was_stopped_before_restart(folder)
        found = None if stopped else find_checkpoint(folder, resume_from_checkpoint)
    stopped, found = decided_by_rank_zero(stopped), decided_by_rank_zero(found)
    if stopped:
        raise RunInterrupted(f"The run was stopped on purpose, so it is not restarted. Go on with {stopped}.")
    if found is not None and not Path(found, STATE_NAME).is_file():
        raise FileNotFoundError(
            f"Rank 0 goes on from `{found}`, which this rank does not see. Set `--output_dir` to a folder that all"
            " machines share."
        )
    return found


def find_checkpoint(folder: Path, resume_from_checkpoint: str | None) -> str | None:
    """What `checkpoint_to_resume` finds, looked for by one process, which changes nothing in the folder."""
    is_ours = is_restarted() and read_status(folder).get("launch") == name_of_launch()
    if is_ours:
        found = latest_complete_checkpoint(folder)
        if found is not None or resume_from_checkpoint in (None, "auto"):
            return found
    if resume_from_checkpoint not in (None, "auto"):
        fault = find_fault(Path(resume_from_checkpoint))
        if fault:
            raise FileNotFoundError(
                f"`resume_from_checkpoint` needs a complete checkpoint; `{resume_from_checkpoint}` is not one: {fault}."
            )
        if not is_ours and Path(resume_from_checkpoint).resolve().parent != folder.resolve():
            _refuse_another_run(folder)
        return resume_from_checkpoint
    found = latest_complete_checkpoint(folder) if resume_from_checkpoint == "auto" else None
    if found is None and (resume_from_checkpoint is None or _is_finished(folder)):
        _refuse_another_run(folder)
    return found


def _forget_failure(folder: Path) -> None:
    """Takes away what the ranks of an earlier launch have noted: its processes are gone (`phases.py`)."""
    for path in [*folder.glob(".rank-*"), *folder.glob(".failure")]:
        path.unlink(missing_ok=True)


def is_done(checkpoint: str | None, run: TrainingArguments) -> bool:
    """Whether `checkpoint` belongs to a finished run that was asked for no further step.

    What the finished run was asked for counts, and not how far the checkpoint came: it may have stopped early, or kept
    its best checkpoint alone. A checkpoint that was named is gone on from, unless it is the end itself.
    """
    if checkpoint is None or not _is_finished(Path(run.output_dir)):
        return False
    if checkpoint == run.resume_from_checkpoint:
        state = _read_state(Path(checkpoint))
        steps, epochs = state["global_step"], state["epoch"]
    else:
        has_own = Path(run.output_dir, STATE_NAME).is_file()
        state = _read_state(Path(run.output_dir if has_own else checkpoint))
        steps, epochs = state["max_steps"], state["num_train_epochs"]
    return run.max_steps <= steps if run.max_steps > 0 else run.num_train_epochs <= epochs


def _read_state(folder: Path) -> dict[str, float]:
    return json.loads((folder / STATE_NAME).read_text(encoding="utf-8"))


def _is_finished(folder: Path) -> bool:
    return read_status(folder).get("status") == "finished"


def _was_stopped_before_restart(folder: Path) -> str | None:
    """How to go on with a run that this very launch has stopped on purpose, or None. The launcher restarts it all the
    same, because it takes any exit code but 0 for a failure."""
    status = read_status(folder)
    is_ours = is_restarted() and status.get("launch") == name_of_launch()
    return status["how_to_go_on"] if is_ours and status["status"] == "interrupted" else None


def _refuse_another_run(folder: Path) -> None:
    if any(folder.glob("checkpoint-*")) or (folder / "run.json").exists():
        raise FileExistsError(
            f"`{folder}` holds another run, which is never overwritten. Set `--resume_from_checkpoint auto`"
            " to go on with it, or another `--output_dir`."
        )


def latest_complete_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that a run can go on from; those that are not complete are named and passed over."""
    for path in numbered_checkpoints(folder)[::-1]:
        fault = find_fault(path)
        if fault is None:
            return str(path)
        logger.warning("Passing over `%s`: %s.", path, fault)
    return None


def numbered_checkpoints(folder: Path) -> list[Path]:
    """All that is called `checkpoint-N`, by N."""
    paths = [path for path in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(paths, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def find_fault(checkpoint: Path) -> str | None:
    """Why a run cannot go on from `checkpoint`; None if it can. Reads every file of it."""
    if not checkpoint.is_dir():
        return "there is no such folder"
    fault = find_difference(checkpoint, read_contents=True)
    if fault:
        return fault
    if not any(checkpoint.glob("rng_state*.pth")):
        return "it holds the model alone (`save_only_model`)"
    return None


def place_for(checkpoint: Path) -> Path:
    """An empty folder beside `checkpoint`, to be filled and then given its name by `complete`."""
    beside = checkpoint.with_name(f".saving-{checkpoint.name}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    return beside


def complete(beside: Path, checkpoint: Path) -> None:
    """Gives the filled folder its name, in the place of what had it."""
    old = checkpoint.with_name(f".old-{checkpoint.name}")
    if checkpoint.exists():
        checkpoint.rename(old)
    beside.rename(checkpoint)
    flush(checkpoint.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_older(folder: Path, newest: Path, best: str | None, limit: int | None) -> None:
    """Leaves `limit` complete checkpoints, `newest` and `best` among them; None leaves all."""
    if not limit:
        return
    kept = {newest} | ({Path(best)} if best else set())
    others = [path for path in numbered_checkpoints(folder) if path not in kept]
    others = [path for path in others if find_difference(path, read_contents=False) is None]
    for path in others[: max(0, len(others) + len(kept) - limit)]:
        _remove(path)


def _remove(checkpoint: Path) -> None:
    """Deletes a checkpoint; at no moment does half of one have its name."""
    old = checkpoint.with_name(f".old-{checkpoint.name}")
    checkpoint.rename(old)
    shutil.rmtree(old)


def set_aside_newer(folder: Path, checkpoint: Path, step: int) -> None:
    """Calls what is newer than `step` in a run's folder `abandoned-checkpoint-N`, where the run goes on from
    `checkpoint` of that step: a later `auto` would take up what has been abandoned."""
    if checkpoint.parent.resolve() != folder.resolve():
        return
    for newer in numbered_checkpoints(folder):
        if int(newer.name.removeprefix("checkpoint-")) > step and find_difference(newer, read_contents=False) is None:
            names = (folder / f"abandoned-{newer.name}{f'.{n}' if n else ''}" for n in count())
            aside = next(path for path in names if not path.exists())
            newer.rename(aside)
            logger.info("The run goes on from step %d, so `%s` is called `%s` now.", step, newer, aside.name)


def bring_back_replaced(folder: Path) -> None:
    """Gives a whole checkpoint its name again that a run, killed then, had moved away for another of that name."""
    for old in folder.glob(".old-checkpoint-*"):
        checkpoint = old.with_name(old.name.removeprefix(".old-"))
        if not checkpoint.exists() and find_difference(old, read_contents=False) is None:
            logger.info("`%s` is back: a run was killed while it replaced it.", checkpoint)
            old.rename(checkpoint)


def remove_leftovers(folder: Path) -> None:
    """Deletes what an earlier run in this folder was writing or deleting when it was killed."""
    bring_back_replaced(folder)
    for path in [*folder.glob(".saving-*"), *folder.glob(".old-*"), *folder.glob(".*.being-written-*")]:
        logger.info("Deleting `%s`, which an interrupted run has left.", path)
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def check_space(run: TrainingArguments, config: PreTrainedConfig) -> None:
    """`check_room` for a model of `config` that is trained whole."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    check_room(run, sum(weight.numel() for weight in model.parameters()))


def check_room(run: TrainingArguments, num_trained: int) -> str:
    """Refuses a run whose `num_trained` weights do not fit the disk; says what it found room for.

    They are saved once in fp32, and in each checkpoint with AdamW's two moments. A save writes its checkpoint before
    it deletes the oldest, so for a moment there is one more than `save_total_limit`; those that are there need no room.

    Raises:
        OSError: too little space; both numbers are named.
    """
    there, limit = len(numbered_checkpoints(Path(run.output_dir))), run.save_total_limit
    num_checkpoints = max(1, limit + 1 - there) if limit and run.save_strategy != "no" else 1
    needed = (4 + 12 * num_checkpoints) * num_trained
    kept = f"the model and {num_checkpoints} checkpoint{'s' if num_checkpoints > 1 else ''}, {needed / 1e6:,.0f} MB"
    if not limit and run.save_strategy != "no":
        kept += f" (all are kept, {12 * num_trained / 1e6:,.0f} MB each, unless `--save_total_limit` is set)"
    folder = Path(run.output_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"A run needs room for {kept}; `{run.output_dir}` has {free / 1e6:,.0f} MB of space left. Free some, lower"
            " `--save_total_limit`, or set `--output_dir`."
        )
    return kept


def check_saving(model: PreTrainedModel | PeftModel, output_dir: str) -> None:
    """Saves the fresh model beside the run and loads it again, so that no training is lost to a fault in saving.

    Raises:
        OSError: no space, no right to write.
        ValueError: the model that was loaded is not the one that was saved.
    """
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output_dir, prefix=".saving-") as folder:
        model.save_pretrained(folder)
        if isinstance(model, PeftModel):
            mine, theirs = (
                get_peft_model_state_dict(model, save_embedding_layers=False),
                load_peft_weights(folder, "cpu"),
            )
        else:
            again = type(model).from_pretrained(folder, dtype=next(model.parameters()).dtype)
            mine, theirs = model.state_dict(), again.state_dict()
        lost = [name for name in mine if name not in theirs or not torch.equal(mine[name].cpu(), theirs[name].cpu())]
        if lost:
            raise ValueError(f"Saving and loading changes the model: `{lost[0]}` and {len(lost) - 1} more differ.")
