"""A run on streamed conversations that is interrupted and gone on with ends in the bytes of the undisturbed one."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.data.chats import chat_tokenizer, write_chats
from tests.distributed import run_on_ranks
from tests.training.test_resume import contents
from tests.training.tiny import run_arguments, tiny_model
from tinylm.data import streamed_examples
from tinylm.data.chat_encoder import ChatEncoder
from tinylm.data.conversations import open_rows
from tinylm.data.rows import join_rows
from tinylm.data.streamed_examples import StreamedExamples
from tinylm.training.trainer import LanguageModelTrainer

STEPS = 14
SETTINGS = {"max_steps": STEPS, "logging_steps": 3, "save_strategy": "steps", "save_steps": 4, "learning_rate": 1e-2}
SETTINGS |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "warmup_steps": 2}


@pytest.fixture(autouse=True)
def small_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows at a time are encoded, so that streams stop in the middle of a shard."""
    monkeypatch.setattr(streamed_examples, "_ROWS_AT_ONCE", 3)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    return write_chats(tmp_path, 5, 9, 6, 4)


class Watched(LanguageModelTrainer):
    """Notes the rows that each step is given."""

    def training_step(self, model, inputs, *args):
        self.seen = [*getattr(self, "seen", []), (self.state.global_step + 1, inputs["input_ids"].tolist())]
        return super().training_step(model, inputs, *args)


def train(folder, paths, resume=None, *, workers=0, rank=0, world_size=1, seed=0, **settings):
    """LoRA with dropout on packed rows; the base is the same for every seed."""
    args = run_arguments(folder, **{**SETTINGS, **settings})
    assert args.world_size == world_size
    stream = StreamedExamples(
        open_rows(data_files=paths, streaming=True),
        ChatEncoder(chat_tokenizer(), max_length=150),
        row_tokens=300,
        shuffle_window=4,
        rank=rank,
        world_size=world_size,
        num_workers=workers,
    )
    base = tiny_model(vocab_size=len(chat_tokenizer()), max_position_embeddings=300)
    torch.manual_seed(seed)
    model = get_peft_model(base, LoraConfig(r=3, lora_dropout=0.2, target_modules=["q_proj", "v_proj"]))
    trainer = Watched(model=model, args=args, train_dataset=stream, data_collator=join_rows)
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_weights_optimizer_and_logged_losses_are_those_of_the_undisturbed_run(tmp_path, paths, workers):
    """Case S3, over the end of an epoch."""
    whole = train(tmp_path / "whole", paths, workers=workers)
    expected = contents(tmp_path / "whole" / f"checkpoint-{STEPS}")
    assert whole.stream_loader.dataset.epoch >= 1
    assert [entry["step"] for entry in expected["history"]] == [3, 6, 9, 12]
    assert len({entry["epoch"] for entry in expected["history"]}) == 4
    for step in (4, 8, 12):
        folder = tmp_path / f"from-{step}"
        resumed = train(folder, paths, tmp_path / "whole" / f"checkpoint-{step}", workers=workers, seed=1)
        assert resumed.seen == [(at, row) for at, row in whole.seen if at > step]
        assert contents(folder / f"checkpoint-{STEPS}") == expected, f"gone on with from step {step}"
    assert contents(tmp_path / "whole" / "checkpoint-12")["weights"] != expected["weights"]


def test_nothing_is_encoded_again(tmp_path, paths, monkeypatch):
    encoded: list[str] = []
    real = ChatEncoder.encode_conversation

    def noted(self, conversation):
        encoded.append(conversation.messages[-1]["content"])
        return real(self, conversation)

    monkeypatch.setattr(ChatEncoder, "encode_conversation", noted)
    train(tmp_path / "whole", paths)
    whole = encoded.copy()
    for step in (4, 12):
        encoded.clear()
        folder = tmp_path / f"until-{step}"
        train(folder, paths, max_steps=step)
        before = encoded.copy()
        train(folder, paths, folder / f"checkpoint-{step}", seed=1)
        assert 0 < len(before) < len(whole)
        assert encoded == whole, f"gone on with from step {step}"


def test_a_run_on_other_conversations_is_refused_before_it_begins(tmp_path, paths):
    train(tmp_path / "run", paths, max_steps=4)
    Path(paths[0]).write_text(Path(paths[0]).read_text().replace('"q"', '"p"'))
    with pytest.raises(ValueError, match=r"A stream is gone on with over the data that it was begun with"):
        train(tmp_path / "run", paths, tmp_path / "run" / "checkpoint-4")


def two_rank_checks(rank: int, world_size: int, payload: dict) -> dict[str, list]:
    assert world_size == 2
    streamed_examples._ROWS_AT_ONCE = 3
    folder = Path(payload["folder"])
    settings = {"rank": rank, "world_size": 2, "gradient_accumulation_steps": 1}
    whole = train(folder / "whole", payload["paths"], workers=1, **settings)
    checkpoint = folder / "whole" / "checkpoint-8"
    resumed = train(folder / "resumed", payload["paths"], checkpoint, seed=1, **settings)
    return {"whole": whole.seen, "resumed": resumed.seen}


@pytest.mark.slow
def test_two_ranks_go_on_as_if_nothing_had_happened(tmp_path, paths):
    payload = {"folder": str(tmp_path), "paths": paths}
    found = run_on_ranks("tests.training.test_chat_stream_resume", "two_rank_checks", 2, payload)
    for ranks_own in found:
        assert ranks_own["resumed"] == [(at, row) for at, row in ranks_own["whole"] if at > 8]
    assert found[0]["whole"] != found[1]["whole"]
    expected = contents(tmp_path / "whole" / f"checkpoint-{STEPS}")
    assert {"rng_state_0.pth", "rng_state_1.pth"} < expected.keys()
    assert contents(tmp_path / "resumed" / f"checkpoint-{STEPS}") == expected
