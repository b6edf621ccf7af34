"""A checkpoint can be told that it is of another step, and a run goes on there: what the benchmark measures."""

import json
from pathlib import Path

import pytest

from tests.data.tiny import numbered_documents, source_of, tokenizer_with_eos
from tests.training.tiny import UnevenRows, run_arguments, stack, tiny_model, trainer_for
from tinylm.data import encoding
from tinylm.data.collators import collate_blocks
from tinylm.data.packing import PackedStream
from tinylm.training.benchmark.resuming import POSITIONS, compare_positions, move_in_corpus, move_in_stream
from tinylm.training.checkpoints import find_fault

SETTINGS = {"save_strategy": "steps", "per_device_train_batch_size": 2}


def logged_steps(trainer) -> list[int]:
    return [entry["step"] for entry in trainer.state.log_history if "loss" in entry]


def one_step(folder: Path, dataset, collate, vocab_size: int, position: int = 0):
    """A run that takes one step, from a checkpoint of `position` steps if there is one."""
    args = run_arguments(folder, max_steps=position + 1, **SETTINGS)
    trainer = trainer_for(tiny_model(vocab_size=vocab_size), dataset, args, data_collator=collate)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{position}") if position else None)
    return trainer


def test_a_run_on_a_corpus_goes_on_at_the_step_that_its_checkpoint_was_moved_to(tmp_path):
    rows = UnevenRows(11)
    one_step(tmp_path / "seed", rows, stack, 31)
    before = {path.name: path.read_bytes() for path in (tmp_path / "seed" / "checkpoint-1").iterdir()}
    moved = tmp_path / "run" / "checkpoint-1000000"
    move_in_corpus(tmp_path / "seed" / "checkpoint-1", moved, 1_000_000)
    assert find_fault(moved) is None
    assert logged_steps(one_step(tmp_path / "run", rows, stack, 31, position=1_000_000)) == [1, 1_000_001]
    assert {path.name: path.read_bytes() for path in (tmp_path / "seed" / "checkpoint-1").iterdir()} == before


def test_a_run_on_a_stream_goes_on_at_the_row_that_its_checkpoint_was_moved_to(tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "_CHARACTERS_AT_ONCE", 60)

    def stream():
        source = source_of(numbered_documents(2000))
        return PackedStream(source, tokenizer_with_eos(), block_size=10, shuffle_window=0)

    one_step(tmp_path / "seed", stream(), collate_blocks, 257)
    moved = tmp_path / "run" / "checkpoint-1500"
    move_in_stream(tmp_path / "seed" / "checkpoint-1", moved, 1500)
    assert find_fault(moved) is None
    trainer = one_step(tmp_path / "run", stream(), collate_blocks, 257, position=1500)
    assert logged_steps(trainer) == [1, 1501]
    [reader] = trainer.stream_loader.dataset.state().readers.values()
    assert reader.numbers["num_rows"] > 1500
    assert json.loads((moved / "progress.json").read_text())["step"] == 1500


def test_positions_are_compared_by_medians():
    near, far = POSITIONS
    corpus = {near: [10.0, 9.0, 30.0], far: [11.0, 12.0, 90.0]}
    stream = {near: [10.0, 10.0, 10.0], far: [11.0, 10.5, 20.0]}
    ratio, more = compare_positions(corpus, stream)
    assert (ratio.numbers["ratio"], ratio.met) == (1.2, False)
    assert more.numbers["seconds_a_million_rows"] == pytest.approx(1 / 0.999)
    assert more.met is False
    assert compare_positions(corpus, {near: [10.0], far: [10.9]})[1].met
