"""A run on a stream that is interrupted and gone on with ends in the bytes of the undisturbed one (cases S1 to S4)."""

import json
from pathlib import Path

import pytest

from tests.data.tiny import numbered_documents, source_of, tokenizer_with_eos
from tests.training.tiny import run_arguments, tiny_model
from tinylm.data.collators import collate_blocks
from tinylm.data.documents import Source
from tinylm.data.packing import PackedStream
from tinylm.training.trainer import LanguageModelTrainer

TOKENIZER = tokenizer_with_eos()
SETTINGS = {"logging_steps": 3, "save_strategy": "steps", "save_steps": 4, "per_device_train_batch_size": 2}
SETTINGS |= {"learning_rate": 1e-2, "warmup_steps": 2, "gradient_accumulation_steps": 2}


def shards(count: int = 4) -> Source:
    return source_of(*[numbered_documents(9 + 2 * number, length=11, first=100 * number) for number in range(count)])


class Watched(LanguageModelTrainer):
    """Notes the rows that each step is given."""

    def training_step(self, model, inputs, *args):
        rows = [(self.state.global_step + 1, row) for row in inputs["input_ids"].tolist()]
        self.seen = [*getattr(self, "seen", []), *rows]
        return super().training_step(model, inputs, *args)


def train(folder, source, max_steps, resume=None, window=5, workers=0, rank=0, world_size=1, seed=0, **settings):
    stream = PackedStream(
        source, TOKENIZER, block_size=16, shuffle_window=window, rank=rank, world_size=world_size, num_workers=workers
    )
    args = run_arguments(folder, **{**SETTINGS, "max_steps": max_steps, **settings})
    assert args.world_size == world_size
    trainer = Watched(
        model=tiny_model(seed, vocab_size=257, attention_dropout=0.2),
        args=args,
        train_dataset=stream,
        data_collator=collate_blocks,
    )
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer


def outcome(folder: Path, step: int):
    """Weights, optimizer and schedule as bytes, and all logged losses."""
    checkpoint = folder / f"checkpoint-{step}"
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    losses = [(entry["step"], entry["loss"], entry["grad_norm"]) for entry in history if "loss" in entry]
    files = {name: (checkpoint / name).read_bytes() for name in ("model.safetensors", "optimizer.pt", "scheduler.pt")}
    return {**files, "losses": losses}


@pytest.mark.parametrize(("window", "workers"), [(0, 0), (5, 0), (5, 2)])
def test_an_interrupted_stream_gives_the_weights_and_losses_of_the_undisturbed_run(tmp_path, window, workers):
    """Case S3, over the end of an epoch: 56 documents make 42 blocks, four a step, with dropout."""
    whole = train(tmp_path / "whole", shards(), 16, window=window, workers=workers)
    expected = outcome(tmp_path / "whole", 16)
    assert whole.stream_loader.dataset.epoch == 1
    for step in (4, 8, 12):
        folder = tmp_path / f"from-{step}"
        resumed = train(folder, shards(), 16, tmp_path / "whole" / f"checkpoint-{step}", window, workers, seed=1)
        assert resumed.seen == [(at, row) for at, row in whole.seen if at > step]
        assert outcome(folder, 16) == expected, f"gone on with from step {step}"
    assert outcome(tmp_path / "whole", 12) != expected
