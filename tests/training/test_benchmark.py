"""The benchmark measures what it says: equal work on both sides, nothing hidden, nothing counted twice."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils import parameters_to_vector
from transformers import TrainerState

import tinylm.models  # noqa: F401
from tests.training.tiny_run import CONTEXT, write_tiny_run
from tinylm.training.benchmark import hand_loop, overhead, saving
from tinylm.training.benchmark.baseline import Demo, compare_with_demo, measure_baseline, read_demo
from tinylm.training.benchmark.hand_loop import HandLoop, cosine
from tinylm.training.benchmark.launches import compare_ranks, launch_and_watch, progress
from tinylm.training.benchmark.overhead import StepTimer, largest_difference, measure_overhead, take_turns, trainer_for
from tinylm.training.benchmark.pipeline import measure_pipeline
from tinylm.training.benchmark.report import Measurement, write_results
from tinylm.training.benchmark.saving import compare_turns, measure_saving
from tinylm.training.benchmark.setting import BenchmarkArguments, Setting, open_setting
from tinylm.training.callbacks import ProgressLine
from tinylm.training.launch import Launch, RunStopped
from tinylm.training.trainer import LanguageModelTrainer

DEMO = Demo(commit="abc", hardware="a machine", train_seconds=100.0, bits_per_byte=2.0, num_bytes=1000)


@pytest.fixture(scope="module")
def run_config(tmp_path_factory) -> str:
    return str(write_tiny_run(tmp_path_factory.mktemp("bench")))


def setting_of(run_config: str, tmp_path: Path, **settings: float) -> Setting:
    return open_setting(run_config, str(tmp_path), **{"precision": "fp32", "max_steps": 8, **settings})


def test_both_loops_do_the_same_work_by_turns(run_config, tmp_path):
    setting = setting_of(run_config, tmp_path)
    by_hand, by_trainer, difference = take_turns(setting)
    assert len(by_hand) == len(by_trainer) == 8
    assert difference < 1e-5


def test_both_loops_end_with_the_same_weights(run_config, tmp_path):
    setting = setting_of(run_config, tmp_path)
    run, corpus = setting.run, setting.corpus
    more_decay = copy.copy(run)
    more_decay.weight_decay = 0.5
    loops = [HandLoop(copy.deepcopy(setting.model), corpus.train_dataset, corpus.collate, r) for r in (run, more_decay)]
    trainer = trainer_for(setting, StepTimer())
    trainer.train()
    for loop in loops:
        for _ in range(8):
            loop.step()
    trained, same, other = (parameters_to_vector(m.parameters()) for m in (trainer.model, *(x.model for x in loops)))
    assert (same - trained).abs().max() < 1e-5
    assert (other - trained).abs().max() > 1e-4, "this test would prove nothing"


def test_both_optimizers_have_the_same_settings(run_config, tmp_path):
    setting = setting_of(run_config, tmp_path)
    hand = HandLoop(copy.deepcopy(setting.model), setting.corpus.train_dataset, setting.corpus.collate, setting.run)
    theirs = trainer_for(setting, StepTimer()).create_optimizer()
    assert len(hand.optimizer.param_groups) == len(theirs.param_groups) == 2
    for mine, group in zip(hand.optimizer.param_groups, theirs.param_groups, strict=True):
        mine = {**mine, "lr": mine["initial_lr"]}
        assert [weight.shape for weight in mine["params"]] == [weight.shape for weight in group["params"]]
        assert {name: value for name, value in mine.items() if name in group and name != "params"} == {
            name: value for name, value in group.items() if name != "params"
        }


def test_the_clock_counts_every_step_and_no_interlude(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(overhead, "finished_at", lambda device: clock[0])

    def pass_time(seconds: float) -> None:
        clock[0] += seconds

    timer = StepTimer(2, lambda: pass_time(100))
    args, state = SimpleNamespace(device=torch.device("cpu")), TrainerState()
    timer.on_train_begin(args, state, None)
    for step, seconds in enumerate([1, 2, 4, 8], 1):
        pass_time(seconds)
        state.global_step = step
        timer.on_step_end(args, state, None)
    assert timer.seconds == [1, 2, 4, 8]
    assert clock[0] == 215


def test_the_hand_loop_times_the_data_too(run_config, tmp_path, monkeypatch):
    setting = setting_of(run_config, tmp_path)
    clock = [0.0]

    def slow_collate(rows):
        clock[0] += 7
        return setting.corpus.collate(rows)

    monkeypatch.setattr(hand_loop, "finished_at", lambda device: clock[0])
    loop = HandLoop(setting.model, setting.corpus.train_dataset, slow_collate, setting.run)
    assert [loop.step(), loop.step()] == [7, 7]


def test_the_overhead_is_a_ratio_of_medians_without_the_first_turn(run_config, tmp_path, monkeypatch):
    by_hand = [90.0] * 4 + [1.0, 1.0, 1.0, 50.0] * 2
    by_trainer = [9.0] * 4 + [2.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0, 4.0]
    monkeypatch.setattr(overhead, "take_turns", lambda setting: (by_hand, by_trainer, 0.0))
    monkeypatch.setattr(overhead, "fastest_precision", lambda: "fp32")
    (row,) = measure_overhead(run_config, str(tmp_path), num_rounds=2)
    assert row.numbers["ratio"] == pytest.approx(1 / 3)
    assert (row.numbers["lower_quartile"], row.numbers["upper_quartile"]) == (0.3125, 0.4375)
    assert row.numbers["trainer_tokens_per_second"] == pytest.approx(8 * CONTEXT / 3)
    assert row.met is False


def test_the_cosine_is_the_trainers(run_config, tmp_path):
    setting = setting_of(run_config, tmp_path, max_steps=11, warmup_steps=3)
    trainer = trainer_for(setting, StepTimer())
    trainer.create_optimizer_and_scheduler(11)
    theirs = [trainer.lr_scheduler.lr_lambdas[0](step) for step in range(12)]
    assert [cosine(step, 3, 11, 0.0) for step in range(12)] == pytest.approx(theirs)


def test_both_ways_of_data_are_measured(run_config, tmp_path):
    rows = measure_pipeline(run_config, str(tmp_path))
    assert [row.what.rsplit(", ", 1)[1] for row in rows] == ["prepared corpus"] * 2 + ["streamed source"] * 2
    for row in rows[::2]:
        numbers = row.numbers
        rates = numbers["pipeline_tokens_per_second"], numbers["training_tokens_per_second_per_core"]
        assert numbers["ratio"] == pytest.approx(rates[0] / rates[1])
    assert all(0 < row.numbers["share_of_all_steps"] < 1 for row in rows[1::2])


def test_the_baseline_is_scored_on_the_demos_text_in_both_windows(run_config, tmp_path):
    num_bytes = setting_of(run_config, tmp_path).corpus.eval_rows.num_bytes
    demo = tmp_path / "demo"
    write_demo(demo, num_bytes)
    plain, compared = measure_baseline(run_config, str(tmp_path), str(demo), num_steps=3)
    assert len(plain.numbers["losses"]) == 3
    own, demos = plain.numbers["bits_per_byte_in_own_windows"], plain.numbers["bits_per_byte_in_demo_windows"]
    assert own != demos
    assert plain.numbers["bits_per_byte"] == min(own, demos)
    assert compared.numbers["demo_commit"] == "abc"
    write_demo(demo, num_bytes + 1)
    with pytest.raises(ValueError, match=f"validated on {num_bytes + 1:,} bytes.*holds out {num_bytes:,}"):
        measure_baseline(run_config, str(tmp_path), str(demo), num_steps=3)


def write_demo(folder: Path, num_bytes: int) -> None:
    folder.mkdir(exist_ok=True)
    results = {"train_runtime": 15.0, "eval_bits_per_byte": 2.25, "eval_num_bytes": num_bytes}
    (folder / "all_results.json").write_text(json.dumps(results))
    history = [{"eval_runtime": 2.5}, {"loss": 1.0}, {"train_runtime": 15.0}, {"eval_runtime": 9.0}]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    (folder / "run.json").write_text(json.dumps({"commit": "abc", "hardware": "a machine"}))


def test_the_demo_wins_only_if_it_is_better_in_no_more_time():
    assert compare_with_demo(DEMO, bits_per_byte=2.1, train_seconds=100.0).met
    assert not compare_with_demo(DEMO, bits_per_byte=2.0, train_seconds=100.0).met
    assert not compare_with_demo(replace(DEMO, train_seconds=101.0), bits_per_byte=2.1, train_seconds=100.0).met


def test_a_missing_demo_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none in `.*nowhere`.*--demo_dir"):
        read_demo(str(tmp_path / "nowhere"))


def test_progress_reads_the_lines_that_a_run_prints(monkeypatch, caplog):
    caplog.set_level("INFO", logger="tinylm")
    state = TrainerState(max_steps=120)
    line = ProgressLine(lambda: {"num_tokens_read": 0})
    line.on_train_begin(None, state, None)
    state.global_step = 7
    line.on_log(None, state, None, {"loss": 3.0, "learning_rate": 1e-3, "num_tokens_read": 10**9})
    line.on_log(None, state, None, {"eval_loss": 3.0, "eval_num_tokens": 5})
    printed = [(float(second), record.getMessage()) for second, record in enumerate(caplog.records, 1)]
    ((step, seconds, speed),) = progress(printed)
    assert (step, seconds) == (7, 1.0)
    assert speed > 1000


def test_two_ranks_are_compared_by_medians_and_pair_by_pair():
    one, two = [[100.0, 101.0, 102.0], [200.0, 201.0, 202.0]], [[90.0, 91.0, 92.0], [190.0, 191.0, 5.0]]
    ratio, memory = compare_ranks(one, two, {1: 2_000_000, 2: 1_000_000})
    assert ratio.numbers["ratio"] == pytest.approx(91.5 / 151)
    assert ratio.numbers["ratios_of_pairs"] == pytest.approx([91 / 101, 190 / 201])
    assert ratio.met is False
    assert "2 MB and 1 MB" in memory.value


def test_steps_behind_checkpoints_are_told_from_others_and_no_save_counts_as_a_step(run_config, tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(overhead, "finished_at", lambda device: clock[0])
    monkeypatch.setattr(saving, "finished_at", lambda device: clock[0])
    real_step, real_save = LanguageModelTrainer.training_step, LanguageModelTrainer._save_checkpoint

    def step(self, *args):
        clock[0] += 5 if self.state.global_step // 4 % 2 else 4
        return real_step(self, *args)

    def save(self, *args, **kwargs):
        clock[0] += 100
        return real_save(self, *args, **kwargs)

    monkeypatch.setattr(LanguageModelTrainer, "training_step", step)
    monkeypatch.setattr(LanguageModelTrainer, "_save_checkpoint", save)
    ratio, a_save, note = measure_saving(run_config, str(tmp_path), num_rounds=2)
    assert ratio.numbers["step_seconds_of_others"] == [4] * 8
    assert ratio.numbers["step_seconds_behind_checkpoints"] == [5] * 8
    assert (ratio.numbers["ratio"], ratio.met) == (0.8, False)
    assert a_save.numbers["seconds"] == [100, 100, 100]
    assert a_save.numbers["bytes"] > 10_000
    assert 0 < note.numbers["note_seconds"] < 1


def test_the_first_turn_of_each_kind_is_left_out():
    turns = [[50.0] * 4, [90.0] * 4, [1.0] * 4, [2.0] * 4, [3.0] * 4, [2.0] * 4]
    ratio, *_ = compare_turns([second for turn in turns for second in turn], [1.0], 7, 1e-5)
    assert (ratio.numbers["ratio"], ratio.met) == (1.0, True)
    assert (ratio.numbers["lower_quartile"], ratio.numbers["upper_quartile"]) == (0.75, 1.25)


def test_a_launch_that_fails_shows_what_it_printed(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("import sys\nprint('the reason')\nsys.exit(3)\n")
    with pytest.raises(RunStopped, match="the reason"):
        launch_and_watch([script])


def test_a_part_is_replaced_and_the_others_stay_with_their_own_stamp(tmp_path):
    launch = Launch(rank=0, world_size=1, backend=None, engine="none", device="cpu", threads=2)
    write_results(str(tmp_path), "overhead", [Measurement("speed", "1.0", {"ratio": 1.0}, ">= 0.97", True)], launch)
    write_results(str(tmp_path), "ranks", [Measurement("ranks", "0.9", target=">= 0.95", met=False)], launch)
    table = write_results(str(tmp_path), "ranks", [Measurement("ranks", "0.8", target=">= 0.95", met=False)], launch)
    assert table == (tmp_path / "bench_training.md").read_text()
    assert table.splitlines()[2:4] == ["| speed | 1.0 | >= 0.97 | yes |", "| ranks | 0.8 | >= 0.95 | no |"]
    assert table.splitlines()[-1].startswith("overhead, ranks: ")
    results = json.loads((tmp_path / "bench_training.json").read_text())
    assert results["overhead"]["measurements"][0]["numbers"] == {"ratio": 1.0}
    for result in results.values():
        assert result["made"].keys() == {"hardware", "threads", "commit", "date", "versions"}


def test_an_unknown_part_and_too_few_rounds_are_named():
    with pytest.raises(ValueError, match=r"'speed' is none.*--parts"):
        BenchmarkArguments(parts=["overhead", "speed"])
    with pytest.raises(ValueError, match="`num_rounds` is 1"):
        BenchmarkArguments(num_rounds=1)


def test_the_largest_difference_is_that_of_one_step():
    assert largest_difference([1.0, 2.0, 3.0], [1.0, 2.5, 2.9]) == 0.5
