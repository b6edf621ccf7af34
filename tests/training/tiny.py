"""A model, a tokenizer and rows small enough for a test to train."""

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from tinylm.models import TLMConfig, TLMForCausalLM
from tinylm.training.arguments import RunArguments
from tinylm.training.trainer import LanguageModelTrainer

VOCAB = 31


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object) -> TLMForCausalLM:
    """A one-layer tLM of some thousand parameters, the same for the same seed."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 14, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 6}
    sizes |= {"intermediate_size": 22, "max_position_embeddings": 37, "vocab_size": VOCAB}
    return TLMForCausalLM(TLMConfig(**{**sizes, **changes})).to(dtype)


class UnevenRows(Dataset):
    """Rows of 32 tokens that have 31 and 2 targets by turns: a mean of means is far from the mean."""

    def __init__(self, length: int = 16, vocab_size: int = VOCAB) -> None:
        generator = torch.Generator().manual_seed(7)
        self.input_ids = torch.randint(4, vocab_size, (length, 32), generator=generator)
        self.labels = self.input_ids.clone()
        self.labels[1::2, :30] = -100

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.input_ids[index], "labels": self.labels[index]}


def stack(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows of one length as a batch."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def run_arguments(output_dir: object, **settings: object) -> RunArguments:
    """Arguments of a short fp32 run on the CPU that writes nothing by itself."""
    defaults = {"precision": "fp32", "use_cpu": True, "max_steps": 4, "save_strategy": "no", "logging_steps": 1}
    return RunArguments(output_dir=str(output_dir), **{**defaults, **settings})


def trainer_for(model: PreTrainedModel, train_dataset: object, args: RunArguments, **more: object):
    """The kit's Trainer over rows of one length."""
    return LanguageModelTrainer(model=model, args=args, train_dataset=train_dataset, **{"data_collator": stack, **more})
