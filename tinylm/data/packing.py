"""Documents to training examples, on the fly: tokenise, pack, shuffle.

Choices:
- A block is cut from the running concatenation `doc eos doc eos ...` and ignores where documents end. Nothing is padded
  and less than one block is lost a reader and epoch.
- The shuffle window holds examples, not documents: the blocks of one long document would fill whole batches else.
- Everything that a reader would need to go on elsewhere is in a few plain attributes (`Reader`).

Shapes: T block size.
"""

import logging
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from tinylm.data.documents import Source
from tinylm.data.encoding import document_start_id, encode
from tinylm.data.order import assign_shards, shuffled

logger = logging.getLogger(__name__)


class Packer:
    """Cuts blocks from the running concatenation; `rest` (int32) holds the tokens that no block has got yet."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.rest = np.empty(0, dtype=np.int32)

    def add(self, tokens: np.ndarray) -> Iterator[np.ndarray]:
        """The blocks (int32, [T]) that `tokens` complete."""
        waiting = np.concatenate([self.rest, tokens])
        self.rest = waiting
        for end in range(self.block_size, len(waiting) + 1, self.block_size):
            self.rest = waiting[end:]
            yield waiting[end - self.block_size : end].copy()  # a view in the window would keep its document alive


def pack(token_lists: Iterable[list[int]], block_size: int, eos_token_id: int) -> Iterator[np.ndarray]:
    """Blocks (int32, [T]) cut from `doc eos doc eos ...`; the last tokens that fill no block are dropped."""
    packer = Packer(block_size)
    for token_ids in token_lists:
        yield from packer.add(np.array([*token_ids, eos_token_id], dtype=np.int32))


class Reader:
    """One reader's way through its share of a stream, in an order fixed by seed, epoch and the reader's number.

    Its state: `part` (which of its shards), `num_taken` (documents taken from that shard), `num_tokens` (tokens taken
    in all), `encoded` (documents not yet packed), `packer.rest` (carry-over), `window` and `rng` (the shuffle).
    It holds whenever an example has just been given out.
    """

    def __init__(self, stream: "PackedStream", number: int, num_readers: int) -> None:
        self.stream, self.number, self.num_readers = stream, number, num_readers
        turn = (number + stream.epoch) % num_readers  # shards differ in length: no reader keeps the same ones
        self.parts = assign_shards(len(stream.source.shards), turn, num_readers)
        self.max_tokens = stream.share_of_tokens(num_readers)
        self.part, self.num_taken, self.num_tokens = 0, 0, 0
        self.encoded: list[np.ndarray] = []
        self.window: list[np.ndarray] = []
        self.rng = np.random.default_rng([stream.seed, stream.epoch, number])
        self.packer = Packer(stream.block_size)
        self.num_documents, self.num_examples, self.num_truncated = 0, 0, 0

    def examples(self) -> Iterator[np.ndarray]:
        """Blocks, or without packing one record each, `eos doc eos` cut at the block size (int32)."""
        for example in shuffled(self._examples_in_order(), self.stream.shuffle_window, self.rng, self.window):
            self.num_examples += 1
            yield example
        self._report()

    def _examples_in_order(self) -> Iterator[np.ndarray]:
        block_size, packing = self.stream.block_size, self.stream.packing
        for document in self._documents():
            if packing:
                yield from self.packer.add(document)
                continue
            record = np.concatenate([[self.stream.eos_token_id], document], dtype=np.int32)
            self.num_truncated += len(record) > block_size
            yield record[:block_size]

    def _documents(self) -> Iterator[np.ndarray]:
        """Documents `ids eos` (int32) in the source's order, until the shards or the share of `max_tokens` end."""
        batches = encode(self.stream.tokenizer, self._texts())
        while self.encoded or self._encode(batches):
            document = self.encoded.pop(0)
            if self.max_tokens is not None:
                document = document[: self.max_tokens - self.num_tokens]
            self.num_documents += 1
            self.num_tokens += len(document)
            yield document
            if self.num_tokens == self.max_tokens:
                return

    def _encode(self, batches: Iterator[tuple[list[str], list[list[int]]]]) -> bool:
        for _, token_lists in islice(batches, 1):
            eos = self.stream.eos_token_id
            self.encoded = [np.array([*token_ids, eos], dtype=np.int32) for token_ids in token_lists]
        return bool(self.encoded)

    def _texts(self) -> Iterator[str]:
        while self.part < len(self.parts):
            shard, start, step = self.parts[self.part]
            for text in islice(self.stream.source.shards[shard].read(start, step), self.num_taken, None):
                self.num_taken += 1
                yield text
            self.part, self.num_taken = self.part + 1, 0

    def _report(self) -> None:
        if self.stream.packing:
            lost = f"blocks of {self.stream.block_size} tokens, {len(self.packer.rest)} tokens left over"
        else:
            lost = f"records, {self.num_truncated} of them cut at {self.stream.block_size} tokens"
        logger.info(
            "Data reader %d of %d, epoch %d ended: %d documents, %d tokens, %d %s.",
            *(self.number + 1, self.num_readers, self.stream.epoch),
            *(self.num_documents, self.num_tokens, self.num_examples, lost),
        )


class PackedStream(IterableDataset):
    """Blocks `{"input_ids": [T] int64}` of one rank, tokenised while training; DataLoader workers share the shards.

    With `document_mask` also `position_ids` ([T] int64), which restart at each document. With `packing=False` one
    document an example instead, cut at the block size. Iterating twice gives the same order, until `set_epoch`.

    Args:
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
        shuffle_window: int = 0,
        max_tokens: int | None = None,
        packing: bool = True,
        document_mask: bool = False,
    ) -> None:
        self.source, self.tokenizer, self.block_size = source, tokenizer, block_size
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.shuffle_window, self.max_tokens = shuffle_window, max_tokens
        self.packing, self.document_mask = packing, document_mask
        self.eos_token_id = document_start_id(tokenizer)
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # workers that outlive an epoch see it too
        self.share_of_tokens(world_size)

    @property
    def epoch(self) -> int:
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)

    def share_of_tokens(self, num_readers: int) -> int | None:
        """How many tokens each of `num_readers` takes; None without a bound."""
        if self.max_tokens is None:
            return None
        if self.max_tokens < self.block_size * num_readers:
            raise ValueError(
                f"`max_tokens` must give each of the {num_readers} data reader(s) (ranks x workers) at least one block "
                f"of {self.block_size} tokens, but is {self.max_tokens}. Raise `--max_tokens` or lower "
                "`--dataloader_num_workers` or `--block_size`."
            )
        return self.max_tokens // num_readers

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()
        worker_id, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        reader = Reader(self, worker_id * self.world_size + self.rank, num_workers * self.world_size)
        mask_eos = self.eos_token_id if self.packing and self.document_mask else None
        return (example(tokens, mask_eos) for tokens in reader.examples())


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
