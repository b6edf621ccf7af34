"""`tinylm doctor --run X`: can this run be gone on with, here, with so many ranks, and is what it has left sound?"""

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tinylm.data.stream_files import load_stream_state
from tinylm.training.checkpoints import STATE_NAME, numbered_checkpoints
from tinylm.training.manifest import find_difference, read_manifest
from tinylm.training.resumable import PROGRESS_NAME
from tinylm.training.run_record import read_status

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `level` is ok, warning or problem."""

    level: Level
    subject: str
    detail: str


def examine_run(folder: Path, num_ranks: int | None = None) -> list[Finding]:
    """What is sound and what is not in a run's folder. Reads every file of every checkpoint; changes nothing.

    Args:
        num_ranks: with how many ranks the run is to go on; None for as many as it had.

    Raises:
        FileNotFoundError: there is no such folder, or no run in it.
    """
    checkpoints = numbered_checkpoints(folder)
    if not checkpoints and not (folder / "STATUS").is_file():
        raise FileNotFoundError(f"`{folder}` holds no run: neither `STATUS` nor a `checkpoint-N`.")
    compared = {path: _compared(path) for path in checkpoints}
    complete = [path for path in checkpoints if compared[path].level == "ok"]
    findings = [*_status(folder), *_run_json(folder), *compared.values()]
    findings += _leftovers(folder)
    if not complete:
        return [*findings, Finding("problem", "going on", "no checkpoint is complete: the run can only begin anew")]
    newest = complete[-1]
    findings += _contents(newest)
    return findings + list(_going_on(newest, num_ranks or _ranks_before(newest), _ranks_before(newest)))


def _status(folder: Path) -> Iterator[Finding]:
    try:
        status = read_status(folder)
        word, step = status["status"], status["step"]
    except (ValueError, KeyError, TypeError) as error:
        yield Finding("problem", "STATUS", f"is missing or damaged ({error})")
        return
    detail = f"{word} at step {step}"
    if word == "running":
        yield Finding("warning", "STATUS", f"{detail}: either it is at work now, or it was killed")
    else:
        yield Finding("warning" if word == "failed" else "ok", "STATUS", detail)


def _run_json(folder: Path) -> Iterator[Finding]:
    path = folder / "run.json"
    if not path.is_file():
        yield Finding("warning", "run.json", "is missing: how the run was made is not known")
        return
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        made_with, here = record["versions"]["torch"], version("torch")
        detail = f"{record['world_size']} rank(s) on {record['device']}, {record['precision']}, torch {made_with}"
        no_gpu = record["device"] == "cuda" and not torch.cuda.is_available()
    except (ValueError, KeyError, TypeError) as error:
        yield Finding("problem", "run.json", f"is damaged ({error})")
        return
    if made_with == here and not no_gpu:
        yield Finding("ok", "run.json", detail)
    else:
        differs = f"here torch {here}{' and no GPU' if no_gpu else ''}, so that the bytes may differ"
        yield Finding("warning", "run.json", f"{detail}; {differs}")


def _compared(checkpoint: Path) -> Finding:
    fault = find_difference(checkpoint, read_contents=True)
    if fault:
        return Finding("problem", checkpoint.name, f"{fault}; it is passed over")
    files = read_manifest(checkpoint)
    size = sum(entry["bytes"] for entry in files.values())
    return Finding("ok", checkpoint.name, f"{len(files)} files, {size / 1e6:,.1f} MB, as the manifest lists them")


def _leftovers(folder: Path) -> Iterator[Finding]:
    for path in [*folder.glob(".saving-*"), *folder.glob(".old-*")]:
        yield Finding("warning", path.name, "was left by a kill; it is deleted when the run goes on")


def _contents(checkpoint: Path) -> Iterator[Finding]:
    """Whether what the files hold is what they are for: the manifest only says that they are as they were written."""
    for path in sorted(checkpoint.glob("*.safetensors")):
        if not path.name.startswith("data-rank-"):
            yield _looked_into(f"{checkpoint.name}/{path.name}", lambda path=path: _weights(path))
    for name in ("optimizer.pt", "scheduler.pt"):
        if (checkpoint / name).is_file():
            yield _looked_into(f"{checkpoint.name}/{name}", lambda name=name: _torch_state(checkpoint / name))
    yield _looked_into(f"{checkpoint.name}/{STATE_NAME}", lambda: _step(checkpoint))


def _looked_into(subject: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding("ok", subject, look())
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        return Finding("problem", subject, " ".join(str(error).split()))


def _weights(path: Path) -> str:
    numbers = 0
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 -- it is no dict
            tensor = file.get_tensor(name)
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise ValueError(f"`{name}` holds values that are not finite")
            numbers += tensor.numel()
    return f"{numbers:,} weights, all finite"


def _torch_state(path: Path) -> str:
    try:
        tensors = list(_tensors(torch.load(path, map_location="cpu", weights_only=True)))
    except pickle.UnpicklingError as error:
        raise ValueError("it holds more than tensors and numbers, so it is not loaded (`weights_only`)") from error
    if not all(torch.isfinite(tensor).all() for tensor in tensors):
        raise ValueError("it holds values that are not finite")
    return f"{sum(tensor.numel() for tensor in tensors):,} numbers, all finite" if tensors else "readable"


def _tensors(state: object) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _tensors(value)


def _step(checkpoint: Path) -> str:
    state = json.loads((checkpoint / STATE_NAME).read_text(encoding="utf-8"))
    progress = json.loads((checkpoint / PROGRESS_NAME).read_text(encoding="utf-8"))
    named = int(checkpoint.name.removeprefix("checkpoint-"))
    if not named == state["global_step"] == progress["step"]:
        raise ValueError(f"the folder is step {named}, the state {state['global_step']}, the data {progress['step']}")
    return f"step {named} of {state['max_steps']}"


def _ranks_before(checkpoint: Path) -> int:
    return len(list(checkpoint.glob("rng_state*.pth")))


def _going_on(checkpoint: Path, num_ranks: int, num_ranks_before: int) -> Iterator[Finding]:
    """With the ranks that are asked for, on this machine's disk."""
    order = json.loads((checkpoint / PROGRESS_NAME).read_text(encoding="utf-8"))["order"]
    subject, batch, readers = f"going on with {num_ranks} rank(s)", order["global_batch_size"], order["readers"]
    if batch % num_ranks:
        yield Finding("problem", subject, f"the global batch of {batch} cannot be divided by them")
    elif readers and readers % num_ranks:
        yield Finding("problem", subject, f"its stream was divided among {readers} readers, which they cannot share")
    elif num_ranks != num_ranks_before:
        share = f"`--per_device_train_batch_size` x `--gradient_accumulation_steps` has to be {batch // num_ranks}"
        yield Finding("warning", subject, f"it had {num_ranks_before}: {share}, and dropout draws other numbers")
    else:
        yield Finding("ok", subject, f"from step {checkpoint.name.removeprefix('checkpoint-')}, bit for bit")
    if any(checkpoint.glob("data-rank-*.safetensors")):
        yield _looked_into("position in the stream", lambda: _positions(checkpoint, num_ranks))
    needed = sum(entry["bytes"] for entry in read_manifest(checkpoint).values())
    free = shutil.disk_usage(checkpoint).free
    room = f"a checkpoint takes {needed / 1e6:,.1f} MB, {free / 1e6:,.0f} MB are free"
    if not os.access(checkpoint.parent, os.W_OK):
        yield Finding("problem", "disk", f"`{checkpoint.parent}` may not be written")
    else:
        yield Finding("ok" if free > needed else "problem", "disk", room)


def _positions(checkpoint: Path, num_ranks: int) -> str:
    states = [load_stream_state(checkpoint, rank, num_ranks) for rank in range(num_ranks)]
    num_readers = states[0].num_readers
    if num_readers % num_ranks:
        raise ValueError(
            f"the stream was divided among {num_readers} readers, which {num_ranks} ranks cannot share equally"
        )
    return f"epoch {states[0].epoch}, {num_readers} reader(s)"


def table(findings: list[Finding]) -> list[str]:
    """A line each: level, subject, detail."""
    width = max(len(finding.subject) for finding in findings)
    return [f"{finding.level:8} {finding.subject:{width}}  {finding.detail}" for finding in findings]
