"""`tinylm doctor`: is this machine what a run and its launch file expect? Versions, devices, threads, ranks."""

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tinylm.inspection.doctor import Finding
from tinylm.training.launch_files import ranks_here

_CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
_NVIDIA = (Path("/dev/nvidia0"), Path("/proc/driver/nvidia/version"))


def check_versions(constraints: Path = _CONSTRAINTS) -> Iterator[Finding]:
    """Python and the packages that this one requires, against the versions that the tests ran with; where their list
    is not there (an installed package), against what is required."""
    python = metadata("tinylm")["Requires-Python"] or ">=3.11"
    here = platform.python_version()
    if here not in SpecifierSet(python):
        yield Finding("problem", "Python", f"{here}, and {python} is required: make an environment with another one")
    else:
        yield Finding("ok", "Python", here)
    tested = _tested_versions(constraints)
    required = [each for each in map(Requirement, requires("tinylm") or []) if "extra" not in str(each.marker)]
    other = []
    for requirement in required:
        try:
            found = version(requirement.name).partition("+")[0]
        except PackageNotFoundError:
            yield Finding("problem", requirement.name, f"is not installed: pip install '{requirement}'")
            continue
        if found not in requirement.specifier:
            yield Finding(
                "problem", requirement.name, f"{found}, and {requirement} is required: pip install '{requirement}'"
            )
        elif tested.get(requirement.name, found) != found:
            other.append(f"{requirement.name} {found} (tested: {tested[requirement.name]})")
    if other:
        yield Finding("warning", "packages", f"{', '.join(other)}; pip install --constraint constraints.txt")
    else:
        yield Finding("ok", "packages", f"{len(required)}, in the versions {'tested' if tested else 'required'}")


def _tested_versions(constraints: Path) -> dict[str, str]:
    if not constraints.is_file():
        return {}
    lines = constraints.read_text(encoding="utf-8").splitlines()
    return {name: number for name, equals, number in (line.partition("==") for line in lines) if equals}


def check_devices() -> Finding:
    """The accelerators that torch sees, or why it sees none."""
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        return Finding("ok", "devices", ", ".join(names))
    if torch.accelerator.is_available():
        return Finding("ok", "devices", f"one {torch.accelerator.current_accelerator()}")
    if any(path.exists() for path in _NVIDIA):
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        why = (
            "`CUDA_VISIBLE_DEVICES` hides it: unset it"
            if hidden
            else f"torch {torch.__version__} cannot use it: install a build of torch for CUDA, or a newer driver"
        )
        return Finding("warning", "devices", f"there is an NVIDIA GPU, and {why}; runs use the CPU")
    return Finding("ok", "devices", "the CPU alone")


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_threads(num_threads: int | None, num_ranks: int) -> Finding:
    """The threads of a rank; `num_threads` is what the run file says."""
    cores = num_cores()
    threads = num_threads or max(1, cores // num_ranks)
    said = f"{threads} a rank, {num_ranks} rank{'s' if num_ranks > 1 else ''} on {cores} cores"
    if threads * num_ranks > cores:
        return Finding(
            "warning", "threads", f"{said}: they get in each other's way; lower `--num_threads` or the ranks"
        )
    return Finding("ok", "threads", said)


def check_launch(launch: dict[str, object]) -> Iterator[Finding]:
    """What a launch file asks for, against what accelerate makes of it and against the machine."""
    ranks, kind = ranks_here(launch), str(launch.get("distributed_type", "NO")).upper()
    use_cpu = bool(launch.get("use_cpu"))
    on_gpus = not use_cpu and kind in ("MULTI_GPU", "FSDP", "DEEPSPEED")
    said = f"{ranks} rank{'s' if ranks > 1 else ''} on a machine, `{kind}`{', on the CPU' if use_cpu else ''}"
    if ranks > 1 and kind in ("MULTI_CPU", "NO"):
        yield Finding(
            "problem", "launch file", f"{said}: accelerate starts a single process. Take cpu_gloo.yaml or ddp_nccl.yaml"
        )
    elif on_gpus and ranks > torch.cuda.device_count():
        yield Finding(
            "problem", "launch file", f"{said}, and torch sees {torch.cuda.device_count()} GPUs: lower `num_processes`"
        )
    elif not on_gpus and ranks > num_cores():
        yield Finding("warning", "launch file", f"{said} of {num_cores()} cores: lower `num_processes`")
    else:
        yield Finding("ok", "launch file", said)
    if launch.get("mixed_precision", "no") not in (None, "no"):
        said = f"it says `mixed_precision: {launch['mixed_precision']}`, and precision belongs to the run file"
        yield Finding("warning", "launch file", f"{said}: take it out; a run file that says otherwise is refused")
