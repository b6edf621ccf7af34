import json
from pathlib import Path

import pytest

from tests.recipes.running import run_here
from tests.training.tiny_run import write_tiny_run
from tinylm.training.benchmark import resuming
from tinylm.training.benchmark.setting import PARTS


@pytest.fixture(scope="module")
def run_config(tmp_path_factory) -> Path:
    return write_tiny_run(tmp_path_factory.mktemp("bench"))


def test_the_recipe_measures_a_part_and_prints_the_table(run_config, tmp_path, monkeypatch, capsys):
    flags = ["--run_config", run_config, "--output_dir", tmp_path / "results", "--num_rounds", 2, "--num_threads", 1]
    assert run_here(monkeypatch, "bench_training", *flags, "--parts", "overhead") == 0
    printed = capsys.readouterr().out
    assert "turn 3 of 3" in printed
    assert (tmp_path / "results" / "bench_training.md").read_text() in printed
    results = json.loads((tmp_path / "results" / "bench_training.json").read_text())
    assert results.keys() == {"overhead"}
    for row in results["overhead"]["measurements"]:
        assert row["numbers"]["largest_loss_difference"] < 0.05
        assert len(row["numbers"]["trainer_step_seconds"]) == len(row["numbers"]["hand_step_seconds"]) == 8


def test_a_missing_demo_ends_the_recipe_before_anything_is_measured(run_config, tmp_path, monkeypatch, capsys):
    flags = ["--run_config", run_config, "--output_dir", tmp_path / "results", "--demo_dir", tmp_path / "nowhere"]
    assert run_here(monkeypatch, "bench_training", *flags) == 2
    assert "--demo_dir" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_an_unknown_part_is_refused(tmp_path, monkeypatch, capsys):
    assert run_here(monkeypatch, "bench_training", "--parts", "speed", "--output_dir", tmp_path / "results") == 2
    assert "'speed' is none" in capsys.readouterr().err


@pytest.mark.slow
def test_the_recipe_measures_all_parts(run_config, tmp_path, monkeypatch):
    flags = ["--run_config", run_config, "--output_dir", tmp_path / "results"]
    demo = tmp_path / "demo"
    assert run_here(monkeypatch, "pretrain_tlm", "--config", run_config, "--output_dir", demo) == 0
    flags += ["--num_rounds", 2, "--num_threads", 1, "--baseline_steps", 3, "--demo_dir", demo]
    parts = [part for part in PARTS if part != "finetuning"]  # it has a test of its own
    monkeypatch.setattr(resuming, "POSITIONS", (10, 2_000))
    assert run_here(monkeypatch, "bench_training", *flags, "--parts", *parts) == 0
    results = json.loads((tmp_path / "results" / "bench_training.json").read_text())
    assert results.keys() == set(parts)
    numbers = [row["numbers"] for part in parts for row in results[part]["measurements"]]
    assert min(second for row in numbers for second in row.get("seconds", [1.0])) > 0
    processes = [row["numbers"] for part in parts if part != "resuming" for row in results[part]["measurements"]]
    assert min(row["bytes"] for row in processes if "bytes" in row) > 50e6
    assert min(row["bytes"] for row in numbers if "bytes" in row) > 0  # of a checkpoint, too
    assert all(row["two_ranks_bytes_each"] > 50e6 for row in numbers if "two_ranks_bytes_each" in row)
