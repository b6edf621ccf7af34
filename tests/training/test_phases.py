"""Which rank is blamed for the error of a collective, and that a rank's own error is told as what it is."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tinylm.training import phases
from tinylm.training.checkpoints import checkpoint_to_resume
from tinylm.training.launch import RunStopped
from tinylm.training.phases import Phases


@pytest.fixture(autouse=True)
def nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "time", SimpleNamespace(time=time.time, sleep=lambda seconds: None))


def two_ranks(folder: Path, *places: str) -> tuple[Phases, Phases]:
    """Both in step 7, each in the phase that is named; both of this process, which lives."""
    ranks = Phases(folder, 0, 2), Phases(folder, 1, 2)
    for rank, place in zip(ranks, places, strict=True):
        rank.__enter__()
        for phase in ("data", "compute", "exchange", "validation"):
            rank.enter(phase, 7)
            if phase == place:
                break
    return ranks


def fail(rank: Phases, error: Exception) -> str:
    """What the rank raises in the end, in words."""
    try:
        rank.__exit__(type(error), error, None)
    except RunStopped as stopped:
        return str(stopped)
    return f"{type(error).__name__}: {error}"


SHAPES = RuntimeError("shapes 3 and 5 do not fit")


@pytest.mark.parametrize("error", [SHAPES, torch.OutOfMemoryError("no memory")])
def test_an_error_that_both_ranks_have_in_their_own_work_is_blamed_on_nobody(tmp_path, error):
    for rank in two_ranks(tmp_path, "compute", "compute"):
        assert fail(rank, error) == f"{type(error).__name__}: {error}"


def test_an_error_of_ones_own_work_is_not_blamed_on_a_rank_that_works_on(tmp_path):
    assert fail(two_ranks(tmp_path, "compute", "compute")[0], SHAPES) == "RuntimeError: shapes 3 and 5 do not fit"


def test_memory_that_runs_out_is_not_blamed_on_a_rank_that_is_behind(tmp_path):
    error = torch.OutOfMemoryError("no memory")
    assert fail(two_ranks(tmp_path, "compute", "data")[0], error) == "OutOfMemoryError: no memory"


def test_who_waits_names_the_rank_that_failed_before_with_both_errors(tmp_path):
    waiting, working = two_ranks(tmp_path, "exchange", "compute")
    fail(working, SHAPES)
    (tmp_path / ".failure").unlink()
    told = fail(waiting, RuntimeError("Connection closed by peer"))
    assert told.startswith("Rank 1, process ")
    assert "in phase `compute` of step 7, failed: RuntimeError: shapes 3 and 5 do not fit. The run's checkp" in told
    assert told.endswith("by rank 0, in phase `exchange` of step 7, which got RuntimeError: Connection closed by peer")


@pytest.mark.parametrize("place", ["data", "exchange", "validation"])
def test_who_waits_names_the_rank_that_does_not_answer(tmp_path, place):
    waits_in = "validation" if place == "validation" else "exchange"
    waiting, silent = two_ranks(tmp_path, waits_in, place)
    told = fail(waiting, RuntimeError("timed out"))
    assert f"Rank 1, process {silent._note['pid']}" in told
    assert f"in phase `{place}` of step 7, has not answered for " in told
    assert told.endswith(", which got RuntimeError: timed out")


def test_a_note_of_an_earlier_launch_is_not_taken_for_one_of_this(tmp_path, monkeypatch):
    """Rank 1 of this launch has no note yet; that of the last one was killed."""
    two_ranks(tmp_path, "data", "data")
    monkeypatch.setattr(phases, "_is_alive", lambda pid: False)
    checkpoint_to_resume(str(tmp_path), "auto")
    rank = Phases(tmp_path, 0, 2)
    rank.__enter__()
    rank.enter("compute", 1)
    assert fail(rank, SHAPES) == "RuntimeError: shapes 3 and 5 do not fit"
