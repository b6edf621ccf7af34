"""What a run's folder tells of its course, whatever state the run is in: finished, interrupted, or at work now."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tinylm.training.checkpoints import STATE_NAME, numbered_checkpoints
from tinylm.training.run_record import read_status
from tinylm.training.timing import read_timing

Points = tuple[np.ndarray, np.ndarray]
"""x and y of a curve, float64, equally long."""


@dataclass(frozen=True)
class RunLog:
    """A run: `entries` are those of its `log_history`, `times` the seconds of training until steps that were noted.

    `results` is its `all_results.json` and `record` its `run.json`; both are empty where the file is missing.
    """

    name: str
    step: int
    max_steps: int
    status: str
    entries: Sequence[dict[str, float]]
    times: dict[int, float]
    results: dict[str, float]
    record: dict[str, object]

    def against_tokens(self, key: str) -> Points:
        """What was logged as `key`, against the tokens that were read until then."""
        known = [(entry["step"], entry["num_tokens_read"]) for entry in self.entries if "num_tokens_read" in entry]
        return self._against(key, [(0, 0), *known])

    def against_seconds(self, key: str) -> Points:
        """What was logged as `key`, against the seconds of training; no points if the times were not noted."""
        return self._against(key, [(0, 0.0), *self.times.items()]) if self.times else (np.empty(0), np.empty(0))

    def throughput(self) -> Points:
        """Tokens a second between one log and the next, without the validations between them; against tokens read.

        No points if the times were not noted.
        """
        logged = [entry for entry in self.entries if "loss" in entry and entry["step"] in self.times]
        step, tokens, seconds = 0, 0, 0.0
        points = []
        for entry in logged:
            scored = [each for each in self.entries if "eval_runtime" in each and step <= each["step"] < entry["step"]]
            validating = sum(each["eval_runtime"] for each in scored if each["step"])  # one at step 0 comes before
            now = self.times[entry["step"]]
            spent = now - seconds - validating
            if spent > 0:
                points.append((entry["num_tokens_read"], (entry["num_tokens_read"] - tokens) / spent))
            step, tokens, seconds = entry["step"], entry["num_tokens_read"], now
        return _arrays(points)

    def last(self, key: str) -> float | None:
        """The last value that was logged as `key`; None if there is none."""
        return next((entry[key] for entry in reversed(self.entries) if key in entry), None)

    def best(self, key: str) -> tuple[float, int] | None:
        """The lowest value that was logged as `key`, and its step."""
        found = [(entry[key], entry["step"]) for entry in self.entries if key in entry]
        return min(found) if found else None

    def _against(self, key: str, places: Sequence[tuple[int, float]]) -> Points:
        """Places between two that are known are interpolated."""
        logged = [(entry["step"], entry[key]) for entry in self.entries if entry.get(key) is not None]
        steps, values = _arrays(logged)
        return np.interp(steps, *_arrays(places)), values


def read_run_log(folder: Path) -> RunLog:
    """The course of the run in `folder`, from the `trainer_state.json` that is furthest on: its own or a checkpoint's.

    Raises:
        FileNotFoundError: no such folder, or no run in it.
        ValueError: a file of the run that cannot be read.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder `{folder}`. Give the `--output_dir` of a run.")
    paths = [folder / STATE_NAME, *(checkpoint / STATE_NAME for checkpoint in numbered_checkpoints(folder))]
    states = [_read(path) for path in paths if path.is_file()]
    if not states:
        held = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise FileNotFoundError(
            f"A run's folder holds `{STATE_NAME}`, by itself or in a `checkpoint-N`; `{folder}` holds {held}. Give the"
            " `--output_dir` of a run that has saved at least one checkpoint."
        )
    state = max(states, key=lambda state: state["global_step"])
    return RunLog(
        name=folder.resolve().name,
        step=state["global_step"],
        max_steps=state["max_steps"],
        status=str(read_status(folder).get("status", "not known")),
        entries=state["log_history"],
        times={step: seconds for step, seconds in read_timing(folder).items() if step <= state["global_step"]},
        results=_read_if_there(folder / "all_results.json"),
        record=_read_if_there(folder / "run.json"),
    )


def read_run_logs(folders: Sequence[Path]) -> list[RunLog]:
    """The course of each run; those whose folders are called the same are told apart by the folder above."""
    logs = [read_run_log(folder) for folder in folders]
    names = [log.name for log in logs]
    return [
        log if names.count(log.name) == 1 else RunLog(**{**vars(log), "name": "/".join(folder.resolve().parts[-2:])})
        for log, folder in zip(logs, folders, strict=True)
    ]


def _read_if_there(path: Path) -> dict:
    return _read(path) if path.is_file() else {}


def _read(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"`{path}` is damaged ({error}). Delete it; a checkpoint holds another.") from error


def _arrays(points: Iterable[tuple[float, float]]) -> Points:
    table = np.array(list(points), dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def duration(seconds: float) -> str:
    """
    >>> duration(42.4), duration(125), duration(90_000)
    ('42 s', '2 min 05 s', '25 h 00 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
