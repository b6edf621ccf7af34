"""Running a recipe: in this process, or through the real launcher."""

import logging
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import ROOT, rank_environment

CPU_GLOO = str(ROOT / "accelerate_configs" / "cpu_gloo.yaml")


def run_here(monkeypatch: pytest.MonkeyPatch, recipe: str, *flags: object) -> int:
    """Runs `recipes/{recipe}.py` in this process with `flags`; the exit code. Puts the package's logging back."""
    package = logging.getLogger("tinylm")
    before = package.handlers[:], package.level, package.propagate
    path = str(ROOT / "recipes" / f"{recipe}.py")
    monkeypatch.setattr(sys, "argv", [path, *map(str, flags)])
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        package.handlers[:], package.level, package.propagate = before
    return 0


def launch(*words: object, cwd: Path | str = ROOT, **environment: str) -> subprocess.Popen:
    """Starts `accelerate launch WORDS...` with standard input closed; offline, on the CPU."""
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *map(str, words)]
    return subprocess.Popen(
        command,
        env={**rank_environment(), **environment},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output_of(process: subprocess.Popen, timeout: float = 240) -> str:
    """What a launch printed; fails the test with it if the launch failed."""
    try:
        printed, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 0, f"{printed[:4000]}\n[...]\n{printed[-3000:]}"
    return printed
