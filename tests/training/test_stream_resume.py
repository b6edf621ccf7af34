"""A run on a stream that is interrupted and gone on with ends in the bytes of the undisturbed one (cases S1 to S4)."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.data.tiny import numbered_documents, source_of, tokenizer_with_eos
from tests.distributed import run_on_ranks
from tests.training.tiny import run_arguments, tiny_model
from tinylm.data import encoding
from tinylm.data.collators import collate_blocks
from tinylm.data.documents import Shard, Source, from_texts
from tinylm.data.packing import PackedStream
from tinylm.data.stream_files import load_stream_state
from tinylm.training.stream_loader import StreamBroken
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
    """Weights, optimizer and schedule as bytes, and all logged losses with their steps and epochs."""
    checkpoint = folder / f"checkpoint-{step}"
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    losses = [
        (entry["step"], entry["epoch"], entry["loss"], entry["grad_norm"]) for entry in history if "loss" in entry
    ]
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


def test_the_number_of_workers_may_change(tmp_path):
    """The readers stay as many as the run began with; only where they work is another place."""
    whole = train(tmp_path / "whole", shards(), 8, workers=2)
    resumed = train(tmp_path / "resumed", shards(), 8, tmp_path / "whole" / "checkpoint-4", workers=0, seed=1)
    assert resumed.seen == [(at, row) for at, row in whole.seen if at > 4]
    assert outcome(tmp_path / "resumed", 8) == outcome(tmp_path / "whole", 8)


def breaking_behind(count: int, texts: tuple[str, ...], start: int, step: int) -> Iterator[str]:
    for number, text in enumerate(from_texts(texts, start, step)):
        if start + step * number == count:
            raise ConnectionError("The Hub is gone.")
        yield text


def breaking(source: Source, shard: int, count: int) -> Source:
    """The source, one of whose shards cannot be read from a row on."""
    parts = list(source.shards)
    texts = tuple(parts[shard].read(0, 1))
    parts[shard] = Shard(parts[shard].name, partial(breaking_behind, count, texts))
    return replace(source, shards=tuple(parts))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_cannot_be_read_on_saves_the_run_behind_its_last_whole_step(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(encoding, "_CHARACTERS_AT_ONCE", 60)
    train(tmp_path / "whole", shards(), 12, workers=workers)
    folder = tmp_path / "broken"
    with pytest.raises(StreamBroken, match=r"The Hub is gone. All ranks have stopped"):
        train(folder, breaking(shards(), shard=3, count=6), 12, workers=workers)
    [last] = [path for path in folder.glob("checkpoint-*") if path.name != "checkpoint-4"]
    step = int(last.name.removeprefix("checkpoint-"))
    assert 4 < step < 12, "between two planned checkpoints"
    train(folder, shards(), 12, last, workers=workers, seed=1)
    assert outcome(folder, 12) == outcome(tmp_path / "whole", 12)


def two_rank_checks(rank, world_size, payload):
    """What the ranks of one launch find out for the tests below."""
    assert world_size == 2
    folder = Path(payload["folder"])
    settings = {"rank": rank, "world_size": 2, "gradient_accumulation_steps": 1}
    encoding._CHARACTERS_AT_ONCE = 60
    found = {"whole": train(folder / "whole", shards(5), 16, **settings).seen}
    found["resumed"] = train(
        folder / "resumed", shards(5), 16, folder / "whole" / "checkpoint-8", workers=0, seed=1, **settings
    ).seen
    try:
        train(folder / "broken", breaking(shards(5), shard=3, count=13), 16, **settings)
    except StreamBroken as error:
        found["error"] = str(error)
    dist.barrier()
    last = max(folder.glob("broken/checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    found["mended"] = (last.name, train(folder / "broken", shards(5), 16, last, seed=1, **settings).seen)
    return found


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return folder, run_on_ranks("tests.training.test_stream_resume", "two_rank_checks", 2, {"folder": str(folder)})


def test_two_ranks_go_on_as_if_nothing_had_happened(two_ranks):
    """Case S3: weights, losses and rows, on readers of their own."""
    folder, found = two_ranks
    for ranks_own in found:
        assert ranks_own["resumed"] == [(at, row) for at, row in ranks_own["whole"] if at > 8]
    assert found[0]["whole"] != found[1]["whole"]
    assert outcome(folder / "resumed", 16) == outcome(folder / "whole", 16)


def test_all_ranks_stop_and_save_when_one_cannot_read_on(two_ranks):
    folder, found = two_ranks
    messages = sorted(ranks_own["error"] for ranks_own in found)
    assert messages[0].startswith("The Hub is gone. All ranks have stopped")
    assert messages[1].startswith("another rank cannot read on")
    assert found[0]["mended"][0] == found[1]["mended"][0] not in ("checkpoint-4", "checkpoint-8")
    assert outcome(folder / "broken", 16) == outcome(folder / "whole", 16)


def test_one_rank_takes_over_the_readers_of_two_and_not_the_other_way_round(two_ranks, tmp_path):
    """Case S4: each step sees the rows that it would have seen."""
    folder, found = two_ranks
    checkpoint = folder / "whole" / "checkpoint-4"
    alone = train(tmp_path / "alone", shards(5), 8, checkpoint)
    expected = [entry for ranks_own in found for entry in ranks_own["whole"] if 4 < entry[0] <= 8]
    assert sorted(alone.seen) == sorted(expected)
    stream = PackedStream(shards(5), TOKENIZER, block_size=16, shuffle_window=5, world_size=2)
    train(tmp_path / "one", shards(5), 4)
    with pytest.raises(ValueError, match=r"There were 1, which 2 ranks cannot share equally"):
        stream.restore(load_stream_state(tmp_path / "one" / "checkpoint-4", 0, 2))
