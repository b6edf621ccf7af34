"""How long a run has taken, in a file of its own: times differ from run to run, and all else that a run logs does not.

`timing.jsonl` in a run's folder has a line wherever the loss was logged, a checkpoint was saved or training ended:

    {"step": 25, "seconds": 31.4}

Seconds are counted from the beginning of training, validation and saving included, over all processes that the run has
had. Of a run that goes on from step N, the lines behind step N are dropped with the steps themselves.
"""

import json
import time
from contextlib import suppress
from pathlib import Path

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .run_record import write_atomically

TIMING_NAME = "timing.jsonl"


class TimingFile(TrainerCallback):
    """Keeps `timing.jsonl`; rank 0 writes."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._path = Path(args.output_dir, TIMING_NAME)
        times = {step: seconds for step, seconds in read_timing(self._path.parent).items() if step <= state.global_step}
        if not state.global_step:
            times = {}
        self._before = max(times.values(), default=0.0)
        self._began = time.perf_counter()
        if state.is_world_process_zero:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, "".join(_line(step, seconds) for step, seconds in times.items()))

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict, **kwargs: object
    ) -> None:
        if "loss" in logs:
            self._note(state)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._note(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._note(state)

    def _note(self, state: TrainerState) -> None:
        if state.is_world_process_zero:
            with suppress(OSError), self._path.open("a", encoding="utf-8") as file:  # a full disk is told by a save
                file.write(_line(state.global_step, self._before + time.perf_counter() - self._began))


def read_timing(folder: Path) -> dict[int, float]:
    """Seconds of training until each step that was noted, ascending; empty where nothing was noted.

    A line that a kill has cut off is left out.
    """
    path = folder / TIMING_NAME
    times: dict[int, float] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        times.setdefault(row["step"], row["seconds"])
    return times


def _line(step: int, seconds: float) -> str:
    return json.dumps({"step": step, "seconds": round(seconds, 3)}) + "\n"
