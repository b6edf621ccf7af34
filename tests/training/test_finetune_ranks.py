"""LoRA on packed rows: two ranks of a real group, one rank, and what recomputing the layers changes (nothing)."""

from collections.abc import Callable, Sequence

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.distributed import run_on_ranks
from tests.training.tiny import run_arguments, trainer_for
from tinylm.data.rows import join_rows
from tinylm.training import chunked_head
from tinylm.training.trainer import LanguageModelTrainer

VOCAB, STEPS = 89, 20
CHECKPOINTING = (False, True)


class PackedAnswers(Dataset):
    """Rows of two or three examples with answers of very different lengths: 1 to 23 targets a row."""

    def __init__(self, num_rows: int = 12) -> None:
        generator = torch.Generator().manual_seed(13)
        self.rows = [self._row(number, generator) for number in range(num_rows)]

    def _row(self, number: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        examples = [(5, 1)] if number % 2 else [(3, 9), (6, 2), (4, 12)]  # tokens of the question, of the answer
        ids = torch.randint(3, VOCAB, (sum(map(sum, examples)),), generator=generator)
        trained = [number >= question for question, answer in examples for number in range(question + answer)]
        positions = [number for question, answer in examples for number in range(question + answer)]
        labels = ids.masked_fill(~torch.tensor(trained), -100)
        return {"input_ids": ids, "labels": labels, "position_ids": torch.tensor(positions)}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


def without_positions(rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The same rows with their examples run together."""
    batch = join_rows(rows)
    del batch["position_ids"]
    return batch


def train(
    folder: object, *, accumulation: int, checkpointing: bool, collate: Callable = join_rows, **changes: object
) -> LanguageModelTrainer:
    """20 steps of two packed rows on all ranks together, one a micro-batch."""
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=20,
        intermediate_size=31,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
    )
    lora = LoraConfig(r=3, lora_alpha=6, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(Qwen2ForCausalLM(config), lora)
    settings = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_checkpointing": checkpointing,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
    }
    args = run_arguments(folder, **{**settings, **changes})
    trainer = trainer_for(model, PackedAnswers(), args, data_collator=collate)
    trainer.train()
    return trainer


def adapter(trainer: LanguageModelTrainer) -> dict[str, torch.Tensor]:
    """The trained weights."""
    return {name: weight.detach().clone() for name, weight in trainer.model.named_parameters() if weight.requires_grad}


def losses(trainer: LanguageModelTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def two_rank_checks(rank: int, world_size: int, payload: dict[str, str]) -> dict[object, tuple[object, ...]]:
    """Adapters and losses with checkpointing off and on, and after a first step alone."""
    assert world_size == 2
    found = {}
    for checkpointing in CHECKPOINTING:
        trainer = train(payload["folder"], accumulation=1, checkpointing=checkpointing)
        assert (trainer.args.world_size, trainer.engine) == (2, "ddp")
        found[checkpointing] = adapter(trainer), losses(trainer)
        found["one step", checkpointing] = adapter(
            train(payload["folder"], accumulation=1, checkpointing=checkpointing, max_steps=1)
        )
    chunked_head.MOST_LOGITS = 5 * VOCAB
    found["in chunks"] = adapter(train(payload["folder"], accumulation=1, checkpointing=True))
    return found


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = str(tmp_path_factory.mktemp("ranks"))
    return run_on_ranks("tests.training.test_finetune_ranks", "two_rank_checks", 2, {"folder": folder})


def distance(these: dict[str, torch.Tensor], those: dict[str, torch.Tensor]) -> float:
    """Relative, over all weights together."""
    assert these.keys() == those.keys()
    this, that = (torch.cat([weight.flatten() for weight in weights.values()]) for weights in (these, those))
    return ((this - that).norm() / that.norm()).item()


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_two_ranks_reach_the_adapter_of_one(two_ranks: list[dict], tmp_path: object, checkpointing: bool) -> None:
    one = train(tmp_path, accumulation=2, checkpointing=checkpointing)
    start = adapter(train(tmp_path, accumulation=2, checkpointing=False, learning_rate=0.0, max_steps=1))
    assert distance(adapter(one), start) > 0.1, "nothing was learned: this test would prove nothing"
    for found, found_losses in (rank[checkpointing] for rank in two_ranks):
        assert distance(found, adapter(one)) < 1e-6
        assert found_losses == pytest.approx(losses(one), rel=1e-5)


def test_half_the_rows_or_examples_run_together_are_another_adapter(two_ranks: list[dict], tmp_path: object) -> None:
    """The control."""
    adapters = [adapter(train(tmp_path, accumulation=2, checkpointing=False, collate=without_positions))]
    adapters.append(adapter(train(tmp_path, accumulation=1, checkpointing=False)))
    for other in adapters:
        assert distance(two_ranks[0][False][0], other) > 1e-3


def test_recomputed_layers_and_a_head_in_chunks_change_nothing(two_ranks: list[dict]) -> None:
    plain = two_ranks[0][False][0]
    assert distance(two_ranks[0][True][0], plain) < 1e-6
    assert distance(two_ranks[0]["in chunks"], plain) < 1e-6


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_every_adapter_matrix_moves_in_one_step(two_ranks: list[dict], checkpointing: bool) -> None:
    """Case D6."""
    moved = [name for name, weight in two_ranks[0]["one step", checkpointing].items() if weight.count_nonzero() > 0]
    assert sum("lora_B" in name for name in moved) == 2 * 2
    for weights in zip(*(rank["one step", checkpointing].values() for rank in two_ranks), strict=True):
        assert torch.equal(*weights)
