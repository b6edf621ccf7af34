"""Documents to training examples, on the fly: tokenise, pack, shuffle; at any example the stream knows where it is.

A stream has a fixed number of *readers* (`reader.py`): ranks x workers where it began. Each rank has its share of them
and takes an example from each in turn.

Shapes: T block size.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from tinylm.data.documents import Source
from tinylm.data.encoding import document_start_id, tokenizer_hash
from tinylm.data.reader import Reader, ReaderState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StreamState:
    """Where one rank is in a stream: the states of its readers by number (none: the epoch has not begun for it).

    `turn` counts in the order of the rank's readers which of them gives the next example. `settings` is what decides
    about the examples, and `text` stands for the corpus as it was.
    """

    epoch: int
    num_readers: int
    turn: int
    settings: dict[str, str | int | None]
    text: str
    readers: dict[int, ReaderState]


class PackedStream(IterableDataset):
    """Blocks `{"input_ids": [T] int64}` of one rank, tokenised while training. It starts its own workers.

    With `document_mask` also `position_ids` ([T] int64), which restart at each document. With `packing=False` one
    document an example instead, cut at the block size. Iterating twice gives the same order, until `set_epoch`.

    Args:
        num_workers: processes of this rank that read and tokenise; 0 does it between two steps.
        max_tokens: tokens (eos included) of the corpus to use, over all ranks; each reader takes an equal share.
        shuffle_window: examples that a reader holds back to shuffle; 0 keeps the order of the source.

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
        self.source, self.tokenizer, self.block_size = source, tokenizer, block_size
        self.seed, self.rank, self.world_size, self.num_workers = seed, rank, world_size, num_workers
        self.shuffle_window, self.max_tokens = shuffle_window, max_tokens
        self.packing, self.document_mask = packing, document_mask
        self.eos_token_id = document_start_id(tokenizer)
        self.epoch, self.num_readers = 0, world_size * max(1, num_workers)
        self._readers: list[Reader] = []
        self._turn = 0
        self._restored: StreamState | None = None
        self.share_of_tokens()

    def set_epoch(self, epoch: int) -> None:
        """The next iteration gives this epoch, from its beginning or from where `restore` was told."""
        self.epoch, self._readers, self._turn = epoch, [], 0

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

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        assert get_worker_info() is None, "each worker would read everything: a PackedStream starts its own"
        readers = [Reader(self, number) for number in self._numbers()]
        restored, self._restored = self._restored, None
        if restored is not None:
            assert restored.epoch == self.epoch
            for reader in readers if restored.readers else ():
                reader.restore(restored.readers[reader.number])
            self._turn = restored.turn
        self._readers = readers
        mask_eos = self.eos_token_id if self.packing and self.document_mask else None
        return (example(tokens, mask_eos) for tokens in self._in_turns(readers))

    def _numbers(self) -> range:
        return range(self.rank, self.num_readers, self.world_size)

    def _in_turns(self, readers: list[Reader]) -> Iterator[np.ndarray]:
        examples = [reader.examples() for reader in readers]
        while not all(reader.ended for reader in readers):
            given = next(examples[self._turn], None)
            self._turn = (self._turn + 1) % len(readers)
            if given is not None:
                yield given

    @cached_property
    def settings(self) -> dict[str, str | int | None]:
        """What decides about the examples, besides the text and the number of readers."""
        numbers = {
            name: getattr(self, name) for name in ("block_size", "shuffle_window", "max_tokens", "packing", "seed")
        }
        return {**numbers, "shards": len(self.source.shards), "tokenizer": tokenizer_hash(self.tokenizer)}

    def state(self) -> StreamState:
        """Where the present iteration is. Holds whenever an example has just been given out."""
        readers = {reader.number: reader.state() for reader in self._readers}
        return StreamState(self.epoch, self.num_readers, self._turn, self.settings, self.source.fingerprint, readers)

    def restore(self, state: StreamState) -> None:
        """Makes the next iteration of that epoch go on from there, with as many readers as the stream began with.

        Raises:
            ValueError: the examples would be others, or the ranks cannot share the readers equally.
        """
        for name, before in state.settings.items():
            if self.settings[name] != before:
                raise ValueError(
                    "A stream is gone on with as it was begun, or rows would be repeated and skipped: its"
                    f" `{name}` was {before} and is {self.settings[name]} now. Set it back."
                )
        if state.num_readers % self.world_size:
            raise ValueError(
                f"A stream is gone on with by the readers it was begun with (ranks x `--dataloader_num_workers`), or"
                f" rows would be repeated and skipped. There were {state.num_readers}, which {self.world_size} ranks"
                " cannot share equally. Take a number of ranks that divides them, or a prepared corpus"
                " (`--prepared_corpus`), which any number of ranks goes on with."
            )
        if state.text != self.source.fingerprint:
            logger.warning("The text has changed, or has been moved, since the checkpoint: going on at the same row.")
        self.num_readers, self._restored = state.num_readers, state


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
