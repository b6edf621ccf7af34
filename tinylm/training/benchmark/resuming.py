"""What going on costs, by how far a run had come: from the launch to the end of the first step.

Choices:
- The same launch goes on at a near and at a far position, by turns. Nobody waits for a million steps, so a checkpoint
  of the first step is told that it is of another: its numbers are changed, its weights and states are as they were.
- The prepared corpus has more blocks than the far position, so that both positions lie in its first epoch. The rows of
  the stream lie in one file of JSON lines.
- Blocks and batches are as small as can be: what is measured is all but the step.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from tinylm.data.prepare import write_store
from tinylm.data.sources import open_source
from tinylm.data.stream_files import load_stream_state, save_stream_state
from tinylm.tokenizers.byte import byte_tokenizer

from ..checkpointing import PROGRESS_NAME
from ..checkpoints import STATE_NAME
from ..manifest import MANIFEST_NAME, write_manifest
from .launches import SHORT_END, launch_and_watch, progress
from .report import Measurement

logger = logging.getLogger(__name__)

POSITIONS = (1_000, 1_000_000)
_PAIRS = 3
_BLOCK_SIZE = 8
_TARGET_RATIO = 1.2
_TARGET_SECONDS = 1.0
_STREAM_NAME = "data-rank-0.safetensors"
_CHANGED = (STATE_NAME, PROGRESS_NAME, _STREAM_NAME)  # the files that say where a run is


def measure_resuming(recipe: Path, run_config: str, scratch: str) -> list[Measurement]:
    """How much later the first step ends at the far position: on a prepared corpus a ratio, on a stream seconds."""
    rows = Path(scratch, "rows.jsonl")
    write_rows(rows, POSITIONS[1] + 10_000)
    store = Path(scratch, "corpus")
    tokens = _BLOCK_SIZE * (POSITIONS[1] + 1_000)
    write_store(open_source(data_files=[str(rows)]), byte_tokenizer(), store, max_tokens=tokens)
    words = [recipe, "--config", run_config, "--tokenizer_name_or_path", "bytes", "--block_size", _BLOCK_SIZE]
    words += ["--per_device_train_batch_size", 1, "--gradient_accumulation_steps", 1, "--shuffle_window", 100]
    words += ["--resume_from_checkpoint", "auto", "--logging_steps", 1, "--eval_strategy", "no", *SHORT_END]
    found = {}
    for name, flags, move in (
        ("corpus", ["--prepared_corpus", store], move_in_corpus),
        ("stream", ["--data_files", rows], move_in_stream),
    ):
        found[name] = _first_steps([*words, *flags], Path(scratch, name), move)
    return compare_positions(found["corpus"], found["stream"])


def write_rows(path: Path, num_rows: int) -> None:
    """JSON lines of 65 bytes that all differ."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_rows):
            file.write(json.dumps({"text": f"{number:07d} some words of a row, always the same"}) + "\n")


def _first_steps(
    words: Sequence[object], folder: Path, move: Callable[[Path, Path, int], None]
) -> dict[int, list[float]]:
    """Seconds from the launch to the end of the first step, of each launch, by the position that it goes on from."""
    seed = folder / "seed"
    launch_and_watch([*words, "--output_dir", seed, "--max_steps", 1, "--save_strategy", "steps"])
    seconds: dict[int, list[float]] = {position: [] for position in POSITIONS}
    for number in range(_PAIRS):
        for position in POSITIONS[:: 1 if number % 2 else -1]:
            run = folder / f"run-{number}-{position}"
            move(seed / "checkpoint-1", run / f"checkpoint-{position}", position)
            flags = ["--output_dir", run, "--max_steps", position + 1, "--save_strategy", "no"]
            launched = launch_and_watch([*words, *flags])
            [(step, second, _)] = progress(launched.lines)
            assert step == position + 1, "the run did not go on"
            seconds[position].append(second)
            logger.info("%s at %s: first step after %.1f s", folder.name, f"{position:,}", second)
            shutil.rmtree(run)
    return seconds


def move_in_corpus(checkpoint: Path, moved: Path, position: int) -> None:
    """A checkpoint of step 1 as one of step `position`; what does not change is shared with it on the disk."""
    _copy(checkpoint, moved, position)
    write_manifest(moved, position)


def move_in_stream(checkpoint: Path, moved: Path, position: int) -> None:
    """As `move_in_corpus`, and the one reader has read `position` rows, of which nothing waits to be trained on."""
    _copy(checkpoint, moved, position)
    state = load_stream_state(checkpoint, 0, 1)
    [(number, reader)] = state.readers.items()
    tokens = {**reader.tokens, "rest": [np.empty(0, dtype=np.int32)], "window": []}
    reader = replace(reader, numbers={**reader.numbers, "num_rows": position}, tokens=tokens)
    save_stream_state(replace(state, readers={number: reader}), moved, 0)
    write_manifest(moved, position)


def _copy(checkpoint: Path, moved: Path, position: int) -> None:
    def link_or_copy(source: str, target: str) -> None:
        (shutil.copyfile if Path(source).name in _CHANGED else os.link)(source, target)

    shutil.copytree(checkpoint, moved, copy_function=link_or_copy, ignore=shutil.ignore_patterns(MANIFEST_NAME))
    for name, key in ((STATE_NAME, "global_step"), (PROGRESS_NAME, "step")):
        values = json.loads((moved / name).read_text(encoding="utf-8"))
        (moved / name).write_text(json.dumps({**values, key: position}), encoding="utf-8")


def compare_positions(corpus: dict[int, list[float]], stream: dict[int, list[float]]) -> list[Measurement]:
    """The table's rows, from the seconds of launches by position (steps of a prepared corpus, rows of a stream)."""
    near, far = POSITIONS
    medians = [median(seconds) for seconds in (corpus[near], corpus[far], stream[near], stream[far])]
    ratio = medians[1] / medians[0]
    more = (medians[3] - medians[2]) / (far - near) * 1e6
    numbers = [{"near_seconds": seconds[near], "far_seconds": seconds[far]} for seconds in (corpus, stream)]
    return [
        Measurement(
            f"From a launch to its first step, going on at step {far:,} over step {near:,}, prepared corpus",
            f"{ratio:.3f} ({medians[1]:.1f} and {medians[0]:.1f} s, medians of {len(corpus[near])})",
            {"ratio": ratio, **numbers[0]},
            target=f"below {_TARGET_RATIO}",
            met=ratio < _TARGET_RATIO,
        ),
        Measurement(
            "From a launch to its first step, more for each million rows passed over, streamed JSON lines",
            f"{more:.2f} s ({medians[3]:.1f} and {medians[2]:.1f} s, medians of {len(stream[near])})",
            {"seconds_a_million_rows": more, **numbers[1]},
            target=f"below {_TARGET_SECONDS:.0f} s",
            met=more < _TARGET_SECONDS,
        ),
    ]
