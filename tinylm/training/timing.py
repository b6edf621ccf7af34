"""How long a run has taken, in a file of its own: times differ from run to run, and all else that a run logs does not.

`timing.jsonl` in a run's folder has a line wherever the loss was logged, a checkpoint was saved or training ended:

    {"step": 25, "seconds": 31.4, "phases": {"data": [0.001, 0.002], "compute": [0.9, 0.9], "exchange": [0.3, 0.3]}}

With `--log_timing`, and always on several ranks, `phases` has each rank's seconds a step since the last logged loss.
Seconds are counted from the beginning of training, validation and saving included, over all processes that the run has
had. Of a run that goes on from step N, the lines behind step N are dropped with the steps themselves.
"""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .phase_times import PHASES, Table
from .run_record import write_atomically

TIMING_NAME = "timing.jsonl"


class TimingFile(TrainerCallback):
    """Keeps `timing.jsonl`; rank 0 writes.

    Args:
        table: the ranks' times since the last logged loss, if they were taken.
    """

    def __init__(self, table: Callable[[], Table | None] = lambda: None) -> None:
        self._table = table

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._path = Path(args.output_dir, TIMING_NAME)
        rows = [row for row in _rows(self._path) if row["step"] <= state.global_step] if state.global_step else []
        self._before = max((row["seconds"] for row in rows), default=0.0)
        self._began = time.perf_counter()
        if state.is_world_process_zero:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, "".join(json.dumps(row) + "\n" for row in rows))

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict, **kwargs: object
    ) -> None:
        if "loss" in logs:
            table = self._table()
            self._note(state, {} if table is None else {"phases": _by_phase(table)})

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._note(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._note(state)

    def _note(self, state: TrainerState, more: dict[str, object] | None = None) -> None:
        if state.is_world_process_zero:
            seconds = self._before + time.perf_counter() - self._began
            row = {"step": state.global_step, "seconds": round(seconds, 3), **(more or {})}
            with suppress(OSError), self._path.open("a", encoding="utf-8") as file:  # a full disk is told by a save
                file.write(json.dumps(row) + "\n")


def read_timing(folder: Path) -> dict[int, float]:
    """Seconds of training until each step that was noted, ascending; empty where nothing was noted."""
    times: dict[int, float] = {}
    for row in _rows(folder / TIMING_NAME):
        times.setdefault(row["step"], row["seconds"])
    return times


def _rows(path: Path) -> list[dict[str, Any]]:
    """The lines of the file; one that a kill has cut off is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def _by_phase(table: Table) -> dict[str, list[float]]:
    return {phase: [round(row[column], 6) for row in table] for column, phase in enumerate(PHASES)}
