"""Launch files of `accelerate`, looked at before anything is loaded: what the launcher itself passes over in silence.

Choices:
- Keys are compared with accelerate's own: those of a file with the fields of its `ClusterConfig`, those of a part such
  as `fsdp_config` with the options of its launcher, to which it copies them. A key that names none has no effect there,
  and nobody is told.
- A launch file says nothing of training: precision, accumulation and clipping belong to the run file.
- A recipe finds the file through the command line of the launcher that started it.
"""

import os
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import fields
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch
import yaml

_KINDS = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED")
_PARTS = {"fsdp_config": "fsdp_", "deepspeed_config": ""}
"""Parts of a file that this kit's engines read, and what accelerate puts before their keys."""
_OF_THE_COMMAND = ("num_processes", "num_machines", "machine_rank", "main_process_port")
"""What the launcher's command line may say in the place of its file."""
_OF_THE_RUN = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
}


def read_launch_file(path: Path) -> dict[str, object]:
    """A launch file of `accelerate` that means what it says.

    Raises:
        FileNotFoundError: no such file.
        ImportError: its engine is not installed.
        ValueError: it is no mapping, holds a key that accelerate does not know, an engine that this kit does not run,
            an impossible number of ranks, or a setting of training.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no launch file `{path}`. Set `--launch_config` to one of accelerate_configs/."
        )
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"The launch file `{path}` is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"A launch file is a mapping; `{path}` holds a {type(values).__name__}.")
    faults = [*_wrong_keys(values), *_wrong_kind(values), *_wrong_ranks(values), *_settings_of_training(values)]
    if faults:
        raise ValueError(f"The launch file `{path}` cannot be used: {' '.join(faults)}")
    if values["distributed_type"] == "DEEPSPEED" and find_spec("deepspeed") is None:
        raise ImportError(
            f"The launch file `{path}` asks for the engine DeepSpeed, which is not installed: pip install"
            " 'tinylm[deepspeed]', or take fsdp2.yaml, which needs nothing more."
        )
    return values


def ranks_here(launch: dict[str, object]) -> int:
    """How many ranks a launch file asks for on each machine."""
    return max(1, int(launch.get("num_processes") or 1) // max(1, int(launch.get("num_machines") or 1)))


def _wrong_keys(values: dict[str, object]) -> Iterator[str]:
    from accelerate.commands.config.config_args import ClusterConfig

    yield from _not_among("keys", values, [field.name for field in fields(ClusterConfig)])
    options = vars(_parse(["script.py"]))
    for part, prefix in _PARTS.items():
        inside = values.get(part) or {}
        if not isinstance(inside, dict):
            yield f"`{part}` is a mapping, and here it is {inside!r}."
            continue
        known = [name for name in options if name.startswith(prefix)]
        named = {key if key.startswith(prefix) else f"{prefix}{key}": value for key, value in inside.items()}
        yield from _not_among(f"`{part}`", named, known)


def _not_among(where: str, values: dict[str, object], known: list[str]) -> Iterator[str]:
    for key in values:
        if key not in known:
            close = get_close_matches(str(key), known, n=1)
            hint = f"Did you mean `{close[0]}`?" if close else "Take it out."
            yield f"accelerate knows no `{key}` among its {where}. {hint}"


def _wrong_kind(values: dict[str, object]) -> Iterator[str]:
    kind = values.get("distributed_type")
    if kind not in _KINDS:
        yield f"`distributed_type` is one of {', '.join(_KINDS)}, and here it is {kind!r} (NO needs quotation marks)."
    if values.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        yield f"`compute_environment` is LOCAL_MACHINE, and here it is {values['compute_environment']!r}."
    yield from _wrong_engine(kind, values)


def _wrong_engine(kind: object, values: dict[str, object]) -> Iterator[str]:
    sharding = values.get("fsdp_config")
    if kind == "FSDP" and isinstance(sharding, dict | None):
        version = (sharding or {}).get("fsdp_version", 1)
        if str(version) != "2":
            yield f"`fsdp_version` in `fsdp_config` is 2, and here it is {version} (1 if it is left out)."
    zero = values.get("deepspeed_config")
    if kind == "DEEPSPEED" and isinstance(zero, dict | None):
        stage = (zero or {}).get("zero_stage", 2)
        if str(stage) not in ("2", "3"):
            yield f"`zero_stage` is 2 or 3, and here it is {stage}. Without sharding, take ddp_nccl.yaml."
        if (zero or {}).get("deepspeed_config_file"):
            yield "`deepspeed_config_file` holds settings of training too: write the engine's into `deepspeed_config`."


def _wrong_ranks(values: dict[str, object]) -> Iterator[str]:
    ranks, machines = values.get("num_processes"), values.get("num_machines", 1)
    for name, value in {"num_processes": ranks, "num_machines": machines}.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield f"`{name}` is a whole number from 1 on, and here it is {value!r}."
            return
    if ranks % machines:
        yield f"{ranks} ranks (`num_processes`, of all machines) cannot be shared alike by {machines} machines."
    place = values.get("machine_rank", 0)
    if not isinstance(place, int) or not 0 <= place < machines:
        yield f"`machine_rank` is 0 to {machines - 1} with {machines} machines, and here it is {place!r}."
    if machines > 1 and values.get("main_process_port", 29500) == 0:
        yield "`main_process_port: 0` takes a free port, another on each machine: give the same one to all."


def _settings_of_training(values: dict[str, object]) -> Iterator[str]:
    inside = values.get("deepspeed_config")
    for name, flag in _OF_THE_RUN.items():
        value = inside.get(name, "auto") if isinstance(inside, dict) else "auto"
        if value != "auto":
            yield f"`{name}: {value}` belongs to the run file (`--{flag}`): take it out, or write `auto`."


def launch_in_use() -> Namespace | None:
    """What the command line of the `accelerate launch` that started this process asked for; None without one."""
    parent = psutil.Process().parent()
    words = parent.cmdline() if parent and "ACCELERATE_MIXED_PRECISION" in os.environ else []
    return _parse(words[words.index("launch") + 1 :]) if "launch" in words else None


def launch_file_of(launch: Namespace) -> Path | None:
    """The file that a launch reads: the one named, or the one that `accelerate config` has written."""
    from accelerate.commands.config.config_args import default_config_file

    path = Path(launch.config_file or default_config_file)
    return path if path.is_file() else None


def check_launch_in_use() -> None:
    """Refuses to start under a launch file that does not mean what it says, or with more ranks than GPUs.

    Raises:
        ValueError, ImportError: as `read_launch_file`; more ranks than GPUs, both named.
    """
    launch = launch_in_use()
    if launch is not None and launch.config_file:
        values = read_launch_file(Path(launch.config_file))
        given = {name: getattr(launch, name) for name in _OF_THE_COMMAND if getattr(launch, name) is not None}
        faults = list(_wrong_ranks(values | given))
        if faults:
            raise ValueError(f"The launch file `{launch.config_file}` with {given} cannot be used: {' '.join(faults)}")
    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if launch is not None and ranks > 1 and 0 < gpus < ranks:
        raise ValueError(
            f"Each rank has a GPU of its own: the launcher has started {ranks} ranks here, and torch sees {gpus} GPUs."
            " Lower `num_processes`, or look at `gpu_ids`."
        )


def _parse(words: list[str]) -> Namespace:
    from accelerate.commands.launch import launch_command_parser

    return launch_command_parser().parse_known_args(words)[0]
