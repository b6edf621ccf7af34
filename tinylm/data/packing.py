"""Documents to training examples, on the fly: tokenise, pack, shuffle.

Shapes: T block size.
"""

from collections.abc import Iterable
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tinylm.data.documents import Source
from tinylm.data.encoding import document_start_id, tokenizer_hash
from tinylm.data.stream import ResumableStream
from tinylm.data.text_reader import TextReader


class PackedStream(ResumableStream[np.ndarray]):
    """Blocks `{"input_ids": [T] int64}` of one rank, tokenised while training.

    With `document_mask` also `position_ids` ([T] int64), which restart at each document. With `packing=False` one
    document an example instead, cut at the block size.

    Args:
        max_tokens: tokens (eos included) of the corpus to use, over all ranks; each reader takes an equal share.

    Raises:
        ValueError: the tokenizer has no eos, or `max_tokens` is less than a block a reader.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: PreTrainedTokenizerBase,
        *,
        block_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        shuffle_window: int = 0,
        max_tokens: int | None = None,
        packing: bool = True,
        document_mask: bool = False,
    ) -> None:
        super().__init__(
            seed=seed, rank=rank, world_size=world_size, num_workers=num_workers, shuffle_window=shuffle_window
        )
        self.source, self.tokenizer, self.block_size = source, tokenizer, block_size
        self.max_tokens, self.packing, self.document_mask = max_tokens, packing, document_mask
        self.eos_token_id = document_start_id(tokenizer)
        self.share_of_tokens()

    def share_of_tokens(self) -> int | None:
        """How many tokens each reader takes; None without a bound."""
        if self.max_tokens is None:
            return None
        if self.max_tokens < self.block_size * self.num_readers:
            raise ValueError(
                f"`max_tokens` must give each of the {self.num_readers} data reader(s) (ranks x workers) at least one "
                f"block of {self.block_size} tokens, but is {self.max_tokens}. Raise `--max_tokens` or lower "
                "`--dataloader_num_workers` or `--block_size`."
            )
        return self.max_tokens // self.num_readers

    @property
    def num_shards(self) -> int:
        return len(self.source.shards)

    @cached_property
    def settings(self) -> dict[str, str | int | None]:
        numbers = {
            name: getattr(self, name) for name in ("block_size", "shuffle_window", "max_tokens", "packing", "seed")
        }
        return {**numbers, "shards": self.num_shards, "tokenizer": tokenizer_hash(self.tokenizer)}

    def identity(self) -> tuple[str, str, Iterable[object]]:
        return self.source.description, self.source.identity, self.source.shards[0].rows(0, 1)

    def reader(self, number: int) -> TextReader:
        return TextReader(self, number)

    def example(self, given: np.ndarray) -> dict[str, Tensor]:
        return example(given, self.eos_token_id if self.packing and self.document_mask else None)


def example(tokens: np.ndarray, mask_eos: int | None) -> dict[str, Tensor]:
    """`{"input_ids"}` (int64, [T]), and the `position_ids` that restart after each `mask_eos` if that is an id."""
    tensors = {"input_ids": torch.from_numpy(tokens.astype(np.int64))}
    if mask_eos is not None:
        tensors["position_ids"] = torch.from_numpy(positions_in_documents(tokens, mask_eos))
    return tensors


def positions_in_documents(input_ids: np.ndarray, eos_token_id: int) -> np.ndarray:
    """`position_ids` (int64, [T]) of a block: they restart at 0 on every token that follows an eos."""
    positions = np.arange(len(input_ids))
    starts = np.zeros_like(positions)
    starts[1:] = np.where(input_ids[:-1] == eos_token_id, positions[1:], 0)
    return positions - np.maximum.accumulate(starts)
