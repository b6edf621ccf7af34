"""Examples to batches. Labels equal the inputs: the model shifts them.

Shapes: B examples, T tokens of the longest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from tinylm.data.encoding import document_start_id, encode
from tinylm.tokenizers.byte import byte_tokenizer


def collate_blocks(examples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Blocks of one length: `input_ids`, `labels` and, where the examples have them, `position_ids` ([B, T] int64).

    No `attention_mask`: nothing is padded, and with one the restarting positions would not keep documents apart.
    """
    batch = {name: torch.stack([example[name] for example in examples]) for name in examples[0]}
    return {**batch, "labels": batch["input_ids"].clone()}


@dataclass(frozen=True)
class PadRecords:
    """Records of different lengths, padded on the right to the longest with `pad_token_id`.

    Gives `input_ids`, `attention_mask` (1 on tokens, 0 on padding) and `labels` (-100 on padding), all [B, T] int64,
    and `record_ids` ([B] int64) where the examples have them.
    """

    pad_token_id: int

    @classmethod
    def for_tokenizer(cls, tokenizer: PreTrainedTokenizerBase) -> "PadRecords":
        """Pads with the tokenizer's pad token, or with eos where it has none: padding is masked either way."""
        return cls(document_start_id(tokenizer) if tokenizer.pad_token_id is None else tokenizer.pad_token_id)

    def __call__(self, examples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        rows = [example["input_ids"] for example in examples]
        attention_mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        batch = {
            "input_ids": pad_sequence(rows, batch_first=True, padding_value=self.pad_token_id),
            "attention_mask": attention_mask,
            "labels": pad_sequence(rows, batch_first=True, padding_value=-100),
        }
        if "record_ids" in examples[0]:
            batch["record_ids"] = torch.stack([example["record_ids"] for example in examples])
        return batch


def tiny_collator(items: Sequence[tuple[int, str]], seq_len: int) -> dict[str, Tensor]:
    """`(record_id, text)` items as a batch of bytes: what `PadRecords` gives, with `record_ids`.

    A row is the text's bytes between two ends of text (257), cut at `seq_len`, padded with 256 to the longest row.

    Raises:
        ValueError: `seq_len` is below 2, so that no row would have a target.
    """
    if seq_len < 2:
        raise ValueError(f"A row needs a token to predict from and one to predict; `seq_len` is {seq_len}. Raise it.")
    tokenizer = byte_tokenizer()
    eos = document_start_id(tokenizer)
    token_lists = (ids for _, batch in encode(tokenizer, [text for _, text in items]) for ids in batch)
    examples = [
        {"input_ids": torch.tensor([eos, *ids, eos][:seq_len]), "record_ids": torch.tensor(record_id)}
        for (record_id, _), ids in zip(items, token_lists, strict=True)
    ]
    return PadRecords.for_tokenizer(tokenizer)(examples)
