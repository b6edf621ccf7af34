"""Records followed through the Trainer: on 1, 2 and 3 ranks, through a resumed run, and at no cost when off."""

import json
import os
import shutil
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, DistributedSampler

from tests.distributed import run_on_ranks
from tests.training.tiny import UnevenRows, run_arguments, tiny_model, trainer_for
from tinylm.data.collators import PadRecords
from tinylm.data.order import GlobalBatches
from tinylm.data.records import IndexedTextDataset, RecordExamples
from tinylm.inspection.audit import audit_run
from tinylm.models import TinyTransformerConfig, TinyTransformerForCausalLM
from tinylm.tokenizers.byte import byte_tokenizer
from tinylm.training.trainer import LanguageModelTrainer

NUM_RECORDS = 25  # divided neither by 2 nor by 3 ranks, nor by their batches


def records(split_long: bool = False) -> RecordExamples:
    """25 texts of 4 to 28 bytes; some do not fit into 17 tokens."""
    texts = [f"{number:02} " + "abcdefgh "[: number % 9 + 1] * 3 for number in range(NUM_RECORDS)]
    return RecordExamples(IndexedTextDataset(texts), byte_tokenizer(), 17, split_long=split_long)


def train(folder: object, dataset: Dataset, *, resume: str | None = None, **settings: object) -> LanguageModelTrainer:
    """A byte transformer trained for two epochs with an audit."""
    torch.manual_seed(3)
    model = TinyTransformerForCausalLM(TinyTransformerConfig(max_position_embeddings=17))
    defaults = {"max_steps": -1, "num_train_epochs": 2, "learning_rate": 3e-4, "record_audit": True}
    args = run_arguments(folder, **{**defaults, **settings})
    trainer = trainer_for(model, dataset, args, data_collator=PadRecords(256))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def seen(folder: object) -> dict[int, list[int]]:
    """The records of each step, over all ranks."""
    steps: dict[int, list[int]] = {}
    for path in Path(folder, "audit").glob("rank-*/*.parquet"):
        rows = pyarrow.parquet.read_table(path).to_pydict()
        for step, record_id in zip(rows["step"], rows["record_id"], strict=True):
            steps.setdefault(step, []).append(record_id)
    return {step: sorted(steps[step]) for step in sorted(steps)}


def weights(trainer: LanguageModelTrainer) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])


def train_ranks(rank: int, world_size: int, payload: dict) -> torch.Tensor:
    """Two epochs of records; on two ranks also 20 steps of split records, whose weights are the result."""
    assert world_size == dist.get_world_size() == payload["world_size"]
    train(payload["folder"], records(), per_device_train_batch_size=2, save_strategy="steps", save_steps=4)
    if world_size != 2:
        return torch.empty(0)
    settings = {"per_device_train_batch_size": 2, "max_steps": 20}
    trainer = train(payload["folder"] + "/twenty", records(split_long=True), **settings)
    assert trainer.args.world_size == 2
    return weights(trainer)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[torch.Tensor]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, run_on_ranks(
        "tests.training.test_record_audit", "train_ranks", 2, {"folder": str(folder), "world_size": 2}
    )


def assert_clean(folder: Path, world_size: int) -> None:
    epochs = audit_run(folder)
    assert [epoch.epoch for epoch in epochs] == [0, 1]
    for epoch in epochs:
        assert (epoch.expected, epoch.never, epoch.is_clean) == (NUM_RECORDS, 0, True)
        assert len(epoch.filled_up) == -NUM_RECORDS % (2 * world_size)
        assert list(epoch.examples_per_rank) == list(range(world_size))
        assert len(set(epoch.examples_per_rank.values())) == 1


def test_the_audit_is_clean_over_two_epochs_on_two_ranks(two_ranks: tuple[Path, list[torch.Tensor]]) -> None:
    folder, _ = two_ranks
    assert_clean(folder, 2)
    for rank in range(2):
        parts = sorted(path.name for path in (folder / "audit" / f"rank-{rank}").iterdir())
        assert parts == ["step-1.parquet", "step-13.parquet", "step-5.parquet", "step-9.parquet"]
    steps = list(seen(folder).values())
    assert steps[:7] != steps[7:], "each epoch has an order of its own"


def test_the_audit_is_clean_over_two_epochs_on_three_ranks(tmp_path: Path) -> None:
    run_on_ranks("tests.training.test_record_audit", "train_ranks", 3, {"folder": str(tmp_path), "world_size": 3})
    assert_clean(tmp_path, 3)


def test_one_rank_is_clean_and_has_no_group_no_wrapper_and_no_distributed_sampler(tmp_path: Path) -> None:
    loaders = []

    class Watched(LanguageModelTrainer):
        def get_train_dataloader(self):
            loaders.append(super().get_train_dataloader())
            return loaders[-1]

    args = run_arguments(tmp_path, max_steps=-1, num_train_epochs=2, record_audit=True, per_device_train_batch_size=2)
    model = TinyTransformerForCausalLM(TinyTransformerConfig(max_position_embeddings=17))
    trainer = Watched(model=model, args=args, train_dataset=records(), data_collator=PadRecords(256))
    trainer.train()
    assert_clean(tmp_path, 1)
    assert not dist.is_initialized()
    assert trainer.model_wrapped is trainer.model is model
    [loader] = loaders
    assert type(loader.batch_sampler) is GlobalBatches
    assert not isinstance(loader.sampler, DistributedSampler)
    assert not isinstance(loader.batch_sampler, DistributedSampler)
    assert "RANK" not in os.environ and trainer.args.world_size == 1


def test_one_process_and_two_ranks_see_the_same_records_and_reach_the_same_weights(
    tmp_path: Path, two_ranks: tuple[Path, list[torch.Tensor]]
) -> None:
    """Batch 4 on one process, batch 2 on each of two ranks, 20 steps of AdamW in fp32."""
    folder, ranked = two_ranks
    one = train(tmp_path, records(split_long=True), per_device_train_batch_size=4, max_steps=20)
    steps = seen(tmp_path)
    assert list(steps) == list(range(1, 21)) and {len(ids) for ids in steps.values()} == {4}
    assert seen(folder / "twenty") == steps
    assert torch.equal(*ranked)
    assert (ranked[0] - weights(one)).norm() / weights(one).norm() < 1e-6
    other = train(tmp_path / "other", records(split_long=True), per_device_train_batch_size=4, max_steps=20, seed=1)
    assert (weights(other) - weights(one)).norm() / weights(one).norm() > 1e-4, "this test would prove nothing"


def test_a_resumed_run_deletes_what_lies_beyond_its_checkpoint_and_is_clean(tmp_path: Path) -> None:
    settings = {"per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 5}
    train(tmp_path / "whole", records(split_long=True), **settings)
    parts = tmp_path / "whole" / "audit" / "rank-0"
    assert {path.name for path in parts.iterdir()} >= {"step-1.parquet", "step-6.parquet", "step-11.parquet"}
    expected = seen(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    beyond = tmp_path / "resumed" / "audit" / "rank-1"  # of a run that had a second rank then
    beyond.mkdir()
    for name in ("step-6.parquet", "step-99.parquet", ".step-11.parquet"):
        shutil.copy(parts / "step-6.parquet", beyond / name)
    kept = (tmp_path / "resumed" / "audit" / "rank-0" / "step-1.parquet").stat().st_mtime_ns
    checkpoint = str(tmp_path / "resumed" / "checkpoint-5")
    train(tmp_path / "resumed", records(split_long=True), resume=checkpoint, **settings)
    assert not list(beyond.iterdir())
    assert (tmp_path / "resumed" / "audit" / "rank-0" / "step-1.parquet").stat().st_mtime_ns == kept
    assert seen(tmp_path / "resumed") == expected
    assert all(epoch.is_clean for epoch in audit_run(tmp_path / "resumed"))
    with pytest.raises(ValueError, match=r"global batch size was 4 and is 2 now"):
        train(
            tmp_path / "resumed",
            records(split_long=True),
            resume=checkpoint,
            **{**settings, "per_device_train_batch_size": 2},
        )


def test_an_audit_that_begins_with_a_resumed_run_says_from_where(tmp_path: Path) -> None:
    settings = {"per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 5}
    train(tmp_path, records(), record_audit=False, **settings)
    assert not (tmp_path / "audit").exists()
    train(tmp_path, records(), resume=str(tmp_path / "checkpoint-5"), **settings)
    assert json.loads((tmp_path / "audit" / "about.json").read_text())["first_step"] == 6
    first, second = audit_run(tmp_path)
    assert (first.num_steps, first.steps_per_epoch, first.is_clean) == (2, 7, True)
    assert (second.num_steps, second.expected, second.is_clean) == (7, NUM_RECORDS, True)


@pytest.mark.parametrize("record_audit", [False, True])
def test_the_model_never_sees_record_ids(tmp_path: Path, record_audit: bool) -> None:
    names: set[str] = set()
    model = TinyTransformerForCausalLM(TinyTransformerConfig(max_position_embeddings=17))
    model.register_forward_pre_hook(lambda _, args, kwargs: names.update(kwargs), with_kwargs=True)
    args = run_arguments(tmp_path, max_steps=2, record_audit=record_audit)
    trainer = trainer_for(model, records(), args, data_collator=PadRecords(256))
    trainer.train()
    trainer.evaluate(ScoredRecords())
    assert {"input_ids", "attention_mask", "labels"} <= names
    assert "record_ids" not in names
    assert (tmp_path / "audit").exists() == record_audit


class ScoredRecords(Dataset):
    """Records as rows to score, which have labels of their own."""

    def __len__(self) -> int:
        return NUM_RECORDS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        example = records()[index]
        return {**example, "labels": example["input_ids"]}


def test_for_packed_blocks_the_record_is_the_block(tmp_path: Path) -> None:
    rows = UnevenRows(7)
    assert "record_ids" not in rows[0], "examples without an audit carry nothing more"
    args = run_arguments(tmp_path, max_steps=-1, num_train_epochs=2, record_audit=True, per_device_train_batch_size=2)
    trainer_for(tiny_model(), rows, args).train()
    epochs = audit_run(tmp_path)
    assert [(epoch.expected, epoch.is_clean, len(epoch.filled_up)) for epoch in epochs] == [(7, True, 1)] * 2
