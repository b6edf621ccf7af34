"""The times of a run, over its interruptions."""

import time
from pathlib import Path

import pytest

from tests.training.tiny import UnevenRows, run_arguments, tiny_model, trainer_for
from tinylm.training.timing import TIMING_NAME, read_timing


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at it is a second later."""
    seconds = iter(range(10**9))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))


def train(folder: Path, resume: str | None = None, **settings: object) -> None:
    settings = {"max_steps": 9, "logging_steps": 2, "save_strategy": "steps", "save_steps": 3, **settings}
    trainer_for(tiny_model(), UnevenRows(), run_arguments(folder, **settings)).train(resume)


def test_a_run_that_goes_on_counts_its_seconds_on_and_drops_those_of_lost_steps(tmp_path: Path, clock: None) -> None:
    train(tmp_path)
    whole = read_timing(tmp_path)
    assert list(whole) == [2, 3, 4, 6, 8, 9]
    assert list(whole.values()) == sorted(set(whole.values())), "every step is later than the one before"
    (tmp_path / TIMING_NAME).write_text((tmp_path / TIMING_NAME).read_text() + '{"step": 9, "sec')
    train(tmp_path, resume=str(tmp_path / "checkpoint-6"))
    again = read_timing(tmp_path)
    assert list(again) == list(whole)
    assert [again[step] for step in (2, 3, 4, 6)] == [whole[step] for step in (2, 3, 4, 6)]
    assert again[6] < again[8] < again[9]


def test_a_run_that_begins_anew_begins_its_times_anew(tmp_path: Path, clock: None) -> None:
    train(tmp_path)
    first = read_timing(tmp_path)
    train(tmp_path, max_steps=4)
    assert list(read_timing(tmp_path)) == [2, 3, 4] and read_timing(tmp_path)[2] < first[9]
