"""What a run leaves about itself: `run.json` (how it was made) and `STATUS` (how it stands)."""

import json
import logging
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

from .launch import Launch, name_of_launch
from .manifest import flush

logger = logging.getLogger(__name__)

HOW_TO_GO_ON = "the same command with --resume_from_checkpoint auto"

_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "tokenizers", "sentencepiece", "numpy")
_SECRET = re.compile(r"(token|key|secret|password)", re.IGNORECASE)
_TOKEN = re.compile(r"\b(hf_|sk-|gh[pousr]_|github_pat_)[\w-]{8,}")


def write_atomically(path: Path, text: str) -> None:
    """Writes `text` beside `path` and renames it: a reader sees the old file or the new one, after a power cut too."""
    beside = path.with_name(f".{path.name}.being-written-{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        flush(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def redact(words: Sequence[str]) -> list[str]:
    """A command line without its secrets: values of flags named token, key, ... and anything that looks like one.

    >>> redact(["train.py", "--hub_token", "hf_abcdefghijk", "--seed=1"])
    ['train.py', '--hub_token', '***', '--seed=1']
    """
    shown, hide = [], False
    for word in words:
        flag, equals, _ = word.partition("=")
        is_secret_flag = flag.startswith("--") and bool(_SECRET.search(flag)) and not flag.startswith("--tokenizer")
        is_secret_flag = is_secret_flag and not flag.endswith("_tokens")
        if hide and not word.startswith("--"):
            word = "***"
        elif is_secret_flag and equals:
            word = f"{flag}=***"
        hide = is_secret_flag and not equals
        shown.append(_TOKEN.sub("***", word))
    return shown


def write_run_json(
    output_dir: str,
    launch: Launch,
    *,
    precision: str,
    seed: int,
    data_source: str,
    parameters: dict[str, int],
    training: dict[str, float | int | str],
    base_model: dict[str, str] | None = None,
) -> None:
    """`run.json`: what somebody needs to make this run again, and to believe its numbers.

    Args:
        parameters: counts, such as `{"total": 19831296, "trainable": 19831296}`.
        training: settings of the optimizer.
        base_model: of fine-tuning: where it lies, `base_model`, and what it is called, `base_model_id`.
    """
    record = {
        "command": redact(sys.argv),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}},
        "commit": current_commit(),
        **asdict(launch),
        "hardware": describe_hardware(launch.device),
        "precision": precision,
        "seed": seed,
        "data_source": data_source,
        "parameters": parameters,
        "training": training,
        **(base_model or {}),
    }
    del record["rank"]
    write_atomically(Path(output_dir, "run.json"), json.dumps(record, indent=2) + "\n")


def write_status(output_dir: str, status: str, step: int, how_to_go_on: str = "", because: str = "") -> None:
    """`STATUS`: one JSON object; `status` is running, interrupted (`because` says by what), finished or failed."""
    record = {
        "status": status,
        "step": step,
        "because": because,
        "how_to_go_on": how_to_go_on,
        "launch": name_of_launch(),
    }
    write_atomically(Path(output_dir, "STATUS"), json.dumps(record) + "\n")


def read_status(folder: Path) -> dict[str, str | int | None]:
    """What `STATUS` says; empty if there is none, or a damaged one, of which there is a warning."""
    path = folder / "STATUS"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError):
        _warn_of_damage(path.absolute())
        return {}


@cache
def _warn_of_damage(path: Path) -> None:
    """Once for each file."""
    logger.warning("`%s` is damaged, and is taken for missing.", path)


def current_commit() -> str | None:
    """The commit of the checkout that this package is imported from; None outside a checkout.

    With `-dirty` behind it if a file is not as it was committed; results that a benchmark has just added do not count.
    """
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit, changed = (
            subprocess.run([*git, *command], capture_output=True, text=True, check=True).stdout.strip()
            for command in (
                ["describe", "--always", "--abbrev=12"],
                ["status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)recipes/results"],
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}-dirty" if changed else commit


def describe_hardware(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
        name = match[1] if match else name
    return f"{name}, {os.cpu_count()} cores"
