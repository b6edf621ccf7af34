"""Examples to batches. Labels equal the inputs: the model shifts them.

Shapes: B examples, T tokens of the longest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from tinylm.data.encoding import document_start_id


def collate_blocks(examples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Blocks of one length: `input_ids`, `labels` and, where the examples have them, `position_ids` ([B, T] int64).

    No `attention_mask`: nothing is padded, and with one the restarting positions would not keep documents apart.
    """
    batch = {name: torch.stack([example[name] for example in examples]) for name in examples[0]}
    return {**batch, "labels": batch["input_ids"].clone()}


@dataclass(frozen=True)
class PadRecords:
    """Records of different lengths, padded on the right to the longest with `pad_token_id`.

    Gives `input_ids`, `attention_mask` (1 on tokens, 0 on padding) and `labels` (-100 on padding), all [B, T] int64.
    """

    pad_token_id: int

    @classmethod
    def for_tokenizer(cls, tokenizer: PreTrainedTokenizerBase) -> "PadRecords":
        """Pads with the tokenizer's pad token, or with eos where it has none: padding is masked either way."""
        return cls(document_start_id(tokenizer) if tokenizer.pad_token_id is None else tokenizer.pad_token_id)

    def __call__(self, examples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        rows = [example["input_ids"] for example in examples]
        attention_mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        return {
            "input_ids": pad_sequence(rows, batch_first=True, padding_value=self.pad_token_id),
            "attention_mask": attention_mask,
            "labels": pad_sequence(rows, batch_first=True, padding_value=-100),
        }
