"""The comparison with TRL: that all ways do the same work, on a model of some thousand weights."""

import json

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.evaluation.tiny import byte_tokenizer
from tests.recipes.running import run_here
from tinylm.training.benchmark.finetuning import compare_ways, count_targets, draw_steps
from tinylm.training.benchmark.finetuning_ways import OURS, TRL, TRL_PACKED, WAYS, Step, order_of_steps, rows_for_trl


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny Llama and a byte tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=258, initializer_range=0.2, **sizes)).save_pretrained(folder)
    byte_tokenizer(pad_token="<|pad|>", eos_token="<|end|>").save_pretrained(folder)
    return str(folder)


def test_drawn_lengths_are_those_that_were_meant() -> None:
    steps = draw_steps(byte_tokenizer(), 100)
    lengths = np.array([[len(example["input_ids"]) for example in step] for step in steps])
    assert lengths.shape == (100, 8) and lengths.max() <= 1024
    assert lengths.mean() == pytest.approx(118 + 91, rel=0.1)
    assert sum(map(count_targets, steps)) / lengths.sum() == pytest.approx(91 / 209, rel=0.1)
    assert 1 - lengths.sum() / (8 * lengths.max(1).sum()) == pytest.approx(0.55, abs=0.03)  # padding
    assert all(set(example["labels"]) != {-100} for step in steps for example in step)


def test_the_order_is_a_permutation_and_packed_rows_hold_their_examples() -> None:
    assert sorted(order_of_steps(6)) == list(range(6)) != order_of_steps(6)
    [step] = draw_steps(byte_tokenizer(), 1)
    [row] = rows_for_trl(step, WAYS[TRL_PACKED])
    assert len(row["input_ids"]) == len(row["labels"]) == sum(row["seq_lengths"])
    assert len(rows_for_trl(step, WAYS[TRL])) == len(row["seq_lengths"]) == 8


def test_speeds_are_compared_by_their_medians_and_memory_by_its_peaks() -> None:
    steps = {name: [Step(2.0, 50), Step(3.0, 100), Step(40.0, 100)] for name in WAYS}
    steps[OURS] = [Step(1.0, 30), Step(1.5, 60), Step(2.0, 60)]
    losses = {name: [3.0, 2.0] for name in WAYS} | {TRL: [3.0, 2.02]}
    rows = {row.what: row for row in compare_ways(steps, [100, 150, 200], losses)}
    assert rows["Fine-tuning by tinylm"].value == "100 supervised tokens/s, peak 0 MB"
    assert rows["Supervised tokens/s over TRL"].numbers["ratio"] == 2.0
    assert rows["Supervised tokens/s over TRL"].met and rows["Peak memory over TRL"].met
    assert rows["Peak memory over TRL"].numbers["ratio"] == 0.6
    assert rows["Losses of the last step"].numbers["apart"] == pytest.approx(0.01)
    assert not rows["Losses of the last step"].met


@pytest.mark.slow
def test_all_ways_do_the_same_work(base: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--parts", "finetuning", "--finetuning_model", base, "--finetuning_rounds", 2, "--num_threads", 1]
    assert run_here(monkeypatch, "bench_training", *flags, "--output_dir", tmp_path) == 0
    results = json.loads((tmp_path / "bench_finetuning.json").read_text())
    assert results["finetuning"]["made"]["versions"].keys() >= {"trl", "peft"}
    rows = {row["what"]: row["numbers"] for row in results["finetuning"]["measurements"]}
    ways = [rows[f"Fine-tuning by {name}"] for name in WAYS]
    for way in ways:
        assert way["losses"] == pytest.approx(ways[0]["losses"], rel=0.005)
        assert len(way["losses"]) == len(way["step_seconds"]) + 1 == 3
        assert way["peak_bytes"] > 50e6
    assert rows["Losses of the last step"]["apart"] < 0.005
    assert not (tmp_path / "bench_training.json").exists()
