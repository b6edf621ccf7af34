"""Which rank the others wait for, and in what: planted delays on two real ranks, and tables by hand."""

import doctest
import itertools
import json
import logging
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

from tests.distributed import run_on_ranks
from tests.training.tiny import UnevenRows, run_arguments, stack, tiny_model, trainer_for
from tinylm.training import phase_times
from tinylm.training.phase_times import PhaseTimes, as_lines, common_wait, in_words, straggler
from tinylm.training.timing import TIMING_NAME

WINDOW = 3  # steps from one line of progress to the next
BASE, LATE = 0.1, 0.15  # seconds a step that every rank spends on data; that the planted rank is late

PLANTED = ["warm-up", "nobody", "1 data", "0 forward", "1 backward"]
"""Which rank is late in what, a window each."""


class Endless(IterableDataset):
    """The same rows on each rank, for ever."""

    def set_epoch(self, epoch: int) -> None:
        pass

    def __iter__(self):
        return itertools.cycle(UnevenRows())


class Hears(TrainerCallback):
    """What a line of progress would say of the ranks, with the table it comes from."""

    def __init__(self) -> None:
        self.trainer, self.heard = None, []

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            self.heard.append((self.trainer.time_in_words(), self.trainer.time_table))


def train_with_delays(folder: str, rank: int, rows: object, planted: list[str]) -> list[tuple[str, list[list[float]]]]:
    """What was heard of each window; every rank takes `BASE` for its data, and the planted one `LATE` more."""

    def rest(what: str) -> None:
        window = trainer.state.global_step // WINDOW
        if window < len(planted) and planted[window] == f"{rank} {what}":
            time.sleep(LATE)

    def collate(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        time.sleep(BASE)
        rest("data")
        return stack(batch)

    model, hears = tiny_model(), Hears()
    model.register_forward_pre_hook(lambda *_: rest("forward"))
    model.model.norm.register_full_backward_pre_hook(lambda *_: rest("backward"))
    args = run_arguments(folder, max_steps=WINDOW * len(planted), logging_steps=WINDOW, num_threads=1)
    trainer = trainer_for(model, rows, args, data_collator=collate, callbacks=[hears])
    hears.trainer = trainer
    trainer.train()
    assert trainer.args.world_size == 2
    return hears.heard


def planted_delays(rank: int, world_size: int, payload: dict) -> list:
    assert world_size == 2
    return [
        train_with_delays(f"{payload['folder']}/rows", rank, UnevenRows(), PLANTED),
        train_with_delays(f"{payload['folder']}/stream", rank, Endless(), ["warm-up", "1 data"]),
    ]


@pytest.mark.slow
def test_a_planted_slow_rank_is_named_with_its_phase_and_equal_ranks_are_not(tmp_path):
    results = run_on_ranks("tests.training.test_phase_times", "planted_delays", 2, {"folder": str(tmp_path)})
    assert results[0] == results[1], "all ranks see the same table"
    rows, stream = results[0]
    said = dict(zip(PLANTED, (words for words, _ in rows), strict=True))
    assert straggler(rows[1][1]) is None and said["nobody"].endswith("% of a step waits in data")
    assert said["1 data"].startswith("rank 1 is the slowest: ") and said["1 data"].endswith("in data")
    assert said["0 forward"].startswith("rank 0 is the slowest: ") and said["0 forward"].endswith("in compute")
    assert said["1 backward"].startswith("rank 1 is the slowest: ") and said["1 backward"].endswith("in compute")
    assert stream[1][0].startswith("rank 1 is the slowest: ") and stream[1][0].endswith("in data")
    lines = [json.loads(line) for line in (tmp_path / "rows" / TIMING_NAME).read_text().splitlines()]
    phases = next(line["phases"] for line in lines if line["step"] == 3 * WINDOW)
    assert phases["data"][1] - phases["data"][0] > LATE / 2
    assert phases["exchange"][0] - phases["exchange"][1] > LATE / 2, "the other one waited for it"


def test_a_rank_that_is_late_by_a_tenth_of_a_step_is_named_and_no_other():
    assert in_words([[0.010, 0.50, 0.10], [0.012, 0.49, 0.11]], ["a", "a"]) == ""
    late = straggler([[0.1, 0.5, 0.4], [0.1, 0.9, 0.0], [0.1, 0.5, 0.4]])
    assert (late.rank, late.phase) == (1, "compute")
    assert (late.seconds, late.share) == pytest.approx((0.4, 0.4))
    assert straggler([[0.1, 0.59, 0.31], [0.1, 0.5, 0.4]]) is None
    assert straggler([[0.1, 0.61, 0.29], [0.1, 0.5, 0.4]]).rank == 0


def test_of_two_late_ranks_the_one_that_costs_more_is_named_with_its_machine():
    table = [[0.3, 0.2, 0.4], [0.0, 0.4, 0.5]]
    assert in_words(table, ["a", "b"]) == "rank 0 on a is the slowest: 300 ms more a step (33%) in data"
    assert in_words(table, ["a", "a"]) == "rank 0 is the slowest: 300 ms more a step (33%) in data"


def test_a_wait_that_all_ranks_have_in_common_is_told_with_its_phase():
    assert in_words([[0.0, 0.5, 0.5], [0.0, 0.48, 0.52]], ["a", "b"]) == "50% of a step waits in exchange"
    assert in_words([[0.5, 0.5, 0.0]], ["a"]) == "50% of a step waits in data"
    assert common_wait([[0.1, 0.7, 0.2], [0.1, 0.7, 0.2]]) is None
    assert in_words([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]], ["a", "b"]) == "", "no step since the last line"


def test_the_whole_table_has_a_line_a_rank():
    assert as_lines(20, [[0.001, 0.5, 0.25], [0.3, 0.2, 0.251]], ["node-a", "node-b"]) == [
        "step 20  seconds a step      data   compute  exchange",
        "  rank 0 on node-a         0.0010    0.5000    0.2500",
        "  rank 1 on node-b         0.3000    0.2000    0.2510",
    ]


def test_one_process_is_timed_only_if_it_is_asked_for(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="tinylm")
    trainer = trainer_for(tiny_model(), UnevenRows(), run_arguments(tmp_path / "plain"))
    trainer.train()
    assert trainer.phase_times is None and "seconds a step" not in caplog.text
    assert "phases" not in (tmp_path / "plain" / TIMING_NAME).read_text()
    trainer = trainer_for(tiny_model(), UnevenRows(), run_arguments(tmp_path / "timed", log_timing=True))
    trainer.train()
    assert caplog.text.count("seconds a step") == 4 and caplog.text.count("  rank 0 on ") == 4
    first = json.loads((tmp_path / "timed" / TIMING_NAME).read_text().splitlines()[0])
    assert all(len(first["phases"][phase]) == 1 for phase in ("data", "compute", "exchange"))


class FakeEvent:
    """An event of a GPU whose time is given by the test, in milliseconds."""

    now = 0.0
    synchronized: ClassVar[list[float]] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = FakeEvent.now

    def synchronize(self) -> None:
        FakeEvent.synchronized.append(self.at)

    def elapsed_time(self, other: "FakeEvent") -> float:
        return other.at - self.at


def test_phases_on_a_gpu_are_measured_on_its_own_stream(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    times = PhaseTimes(torch.device("cuda"))
    for at, phase in [(0, "data"), (40, "compute"), (240, "exchange"), (300, "compute"), (310, "data"), (330, "save")]:
        FakeEvent.now = float(at)
        times.enter(phase)
    assert times.take() == pytest.approx([0.060 / 2, 0.210 / 2, 0.060 / 2])
    assert FakeEvent.synchronized == [300.0, 330.0], "a step waits for events that have happened"
    assert times.take() == [0.0, 0.0, 0.0]


def test_the_examples_of_the_module_hold():
    assert doctest.testmod(phase_times).failed == 0


def test_times_by_phase_stay_when_a_run_goes_on(tmp_path: Path):
    settings = {"max_steps": 6, "logging_steps": 2, "save_strategy": "steps", "save_steps": 4, "log_timing": True}
    trainer_for(tiny_model(), UnevenRows(), run_arguments(tmp_path, **settings)).train()
    before = (tmp_path / TIMING_NAME).read_text().splitlines()
    trainer_for(tiny_model(), UnevenRows(), run_arguments(tmp_path, **settings)).train(str(tmp_path / "checkpoint-4"))
    after = (tmp_path / TIMING_NAME).read_text().splitlines()
    kept = [line for line in before if json.loads(line)["step"] <= 4]
    assert after[: len(kept)] == kept and "phases" in kept[0]
    assert [json.loads(line)["step"] for line in after if "phases" in line] == [2, 4, 6]
