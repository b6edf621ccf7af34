"""Whole runs, started with `accelerate launch` as a user starts them and watched from outside."""

import logging
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from threading import Event
from time import perf_counter

import psutil

from ..launch import RunStopped
from .report import Measurement
from .setting import BATCH_SIZE, open_setting

logger = logging.getLogger(__name__)

_LAUNCHES = 3
_PAIRS = 2
_STEPS = 16
_WARM_UP = 3
_TARGET = 0.95
_SECONDS_BETWEEN_LOOKS = 0.25  # at the memory: a look takes some ms of one core
_PROGRESS = re.compile(r"step +(\d+)/\d+ .* ([\d,]+) tokens/s")
# What comes after training is not measured: one validation document, one sample.
SHORT_END = ("--max_eval_tokens", "1", "--sample_prompts", "The")


@dataclass(frozen=True)
class Launched:
    """What a launch printed, with the seconds since its start, and the most memory of one process (bytes, resident)."""

    lines: list[tuple[float, str]]
    peak_memory: int


def launch_and_watch(words: Sequence[object]) -> Launched:
    """Runs `accelerate launch WORDS...` to its end.

    Raises:
        RunStopped: it failed; the message holds the end of what it printed.
    """
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *map(str, words)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    lines, ended = [], Event()
    began = perf_counter()
    with (
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
        ThreadPoolExecutor(1) as watcher,
    ):
        peak_memory = watcher.submit(_peak_memory, psutil.Process(process.pid), ended)
        try:
            lines = [(perf_counter() - began, line.rstrip()) for line in process.stdout]
        finally:
            ended.set()
    if process.returncode:
        raise RunStopped(f"`{' '.join(command)}` failed: {' '.join(line for _, line in lines[-20:])}")
    return Launched(lines, peak_memory.result())


def _peak_memory(launcher: psutil.Process, ended: Event) -> int:
    """The largest resident memory (bytes) that a process below the launcher has had, looked at every quarter second."""
    peak = 0
    while not ended.wait(_SECONDS_BETWEEN_LOOKS):
        try:
            peak = max([peak, *(child.memory_info().rss for child in launcher.children(recursive=True))])
        except psutil.NoSuchProcess:
            continue  # one ended between the list and the look
    return peak


def progress(lines: Sequence[tuple[float, str]]) -> list[tuple[int, float, float]]:
    """`(step, seconds since the launch, tokens/s)` of each progress line."""
    matches = [(seconds, _PROGRESS.match(line)) for seconds, line in lines]
    return [(int(match[1]), seconds, float(match[2].replace(",", ""))) for seconds, match in matches if match]


def measure_launch(recipe: Path, run_config: str, scratch: str) -> list[Measurement]:
    """The time from `accelerate launch` to the end of the first step, and the run's memory."""
    seconds, memory = [], []
    for number in range(_LAUNCHES):
        words = [recipe, "--config", run_config, "--max_steps", 1, "--output_dir", Path(scratch, f"launch-{number}")]
        launched = launch_and_watch([*words, "--logging_first_step", "true", *SHORT_END])
        seconds.append(progress(launched.lines)[0][1])
        memory.append(launched.peak_memory)
        logger.info("launch %d of %d: first step after %.1f s", number + 1, _LAUNCHES, seconds[-1])
    return [
        Measurement(
            "From `accelerate launch` to the end of the first step",
            f"{median(seconds):.1f} s (median of {_LAUNCHES}; {min(seconds):.1f} to {max(seconds):.1f})",
            {"seconds": seconds},
        ),
        Measurement(
            f"Peak memory of the process, `{Path(run_config).name}`",
            f"{max(memory) / 1e6:,.0f} MB",
            {"bytes": max(memory)},
        ),
    ]


def measure_ranks(recipe: Path, run_config: str, scratch: str) -> list[Measurement]:
    """Two ranks of one thread beside one rank of two threads, launched by turns, at 8 rows of the context a step."""
    context = open_setting(run_config, scratch).model.config.max_position_embeddings
    speeds: dict[int, list[list[float]]] = {1: [], 2: []}
    memory = {1: 0, 2: 0}
    for number in range(_PAIRS):
        for ranks, launch_file in ((1, "cpu.yaml"), (2, "cpu_gloo.yaml")):
            words = ["--config_file", recipe.parent.parent / "accelerate_configs" / launch_file, recipe]
            words += ["--config", run_config, "--output_dir", Path(scratch, f"ranks-{number}-{ranks}")]
            words += ["--per_device_train_batch_size", BATCH_SIZE // ranks, "--block_size", context, *SHORT_END]
            words += ["--num_threads", 2 // ranks, "--max_steps", _STEPS, "--logging_steps", 1, "--save_strategy", "no"]
            launched = launch_and_watch(words)
            speeds[ranks].append([speed for step, _, speed in progress(launched.lines) if step > _WARM_UP])
            memory[ranks] = max(memory[ranks], launched.peak_memory)
            logger.info("%d rank(s): %s tokens/s", ranks, f"{median(speeds[ranks][-1]):,.0f}")
    return compare_ranks(speeds[1], speeds[2], memory)


def compare_ranks(one: list[list[float]], two: list[list[float]], memory: dict[int, int]) -> list[Measurement]:
    """From tokens/s of each step of each launch, with one rank and with two, and bytes by the number of ranks."""
    medians = [median(speed for launch in launches for speed in launch) for launches in (one, two)]
    pairs = [median(with_two) / median(with_one) for with_one, with_two in zip(one, two, strict=True)]
    ratio = medians[1] / medians[0]
    return [
        Measurement(
            "Tokens/s of two ranks of one thread over one rank of two",
            f"{ratio:.3f} ({len(pairs)} pairs of launches, {min(pairs):.3f} to {max(pairs):.3f};"
            f" {medians[1]:,.0f} and {medians[0]:,.0f})",
            {
                "ratio": ratio,
                "ratios_of_pairs": pairs,
                "one_rank_tokens_per_second": medians[0],
                "two_ranks_tokens_per_second": medians[1],
            },
            target=f"at least {_TARGET}",
            met=ratio >= _TARGET,
        ),
        Measurement(
            "Peak memory of one rank of 8 rows, and of each of two ranks of 4",
            f"{memory[1] / 1e6:,.0f} MB and {memory[2] / 1e6:,.0f} MB",
            {"one_rank_bytes": memory[1], "two_ranks_bytes_each": memory[2]},
        ),
    ]
