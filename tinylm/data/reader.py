"""One reader's way through its share of a stream: text becomes token ids in a worker, examples in the trainer.

    worker    rows of its shards -> token ids -> chunks, each with the position behind it
    trainer   chunks -> blocks or records -> shuffle window -> examples

Choices:
- What waits to be trained on (tokens that no example has got yet, the shuffle window and its random state) is held in
  the trainer's process, and each chunk says how far its worker had read. So after every example the whole state is at
  hand, exact however far the workers have read ahead, and taking it costs a few microseconds.
- Whoever goes on from it reads on behind the last chunk that was used: no text before it is tokenised again.
- A block is cut from the running concatenation `doc eos doc eos ...` and ignores where documents end. Nothing is padded
  and less than one block is lost a reader and epoch.
- The shuffle window holds examples, not documents: the blocks of one long document would fill whole batches else.

Shapes: T block size.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedTokenizerBase

from tinylm.data.documents import Source
from tinylm.data.encoding import encode
from tinylm.data.order import assign_shards, shuffled

if TYPE_CHECKING:
    from tinylm.data.packing import PackedStream

logger = logging.getLogger(__name__)

_CHUNKS_AHEAD = 4  # a worker reads on while the shuffle windows of the readers before it fill up

_NUMBERS = ("part", "num_rows", "num_tokens", "num_documents", "num_examples", "num_truncated", "ended")


@dataclass(frozen=True)
class Chunk:
    """Documents `ids eos` in a row (`tokens`, int32), how many tokens each has, and the position behind the last."""

    tokens: np.ndarray
    lengths: np.ndarray
    part: int
    num_rows: int


@dataclass(frozen=True)
class ReaderState:
    """All that a reader needs to go on: numbers (as JSON), and lists of token ids (int32 arrays that never change)."""

    numbers: dict[str, object]
    tokens: dict[str, list[np.ndarray]]


class Chunks(IterableDataset):
    """The rows of `parts` as chunks, from row `num_rows` of part `part` on.

    What is wrong with them comes as the last item: raised in a worker, its words would reach the user in a traceback.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: PreTrainedTokenizerBase,
        parts: list[tuple[int, int, int]],
        part: int,
        num_rows: int,
    ) -> None:
        self.source, self.tokenizer = source, tokenizer
        self.parts, self.part, self.num_rows = parts, part, num_rows

    def __iter__(self) -> Iterator[Chunk | ValueError | OSError]:
        eos = self.tokenizer.eos_token_id
        try:
            for _, token_lists in encode(self.tokenizer, self._texts()):
                documents = [np.array([*token_ids, eos], dtype=np.int32) for token_ids in token_lists]
                lengths = np.array([len(document) for document in documents])
                yield Chunk(np.concatenate(documents), lengths, self.part, self.num_rows)
        except (ValueError, OSError) as error:
            yield error

    def _texts(self) -> Iterator[str]:
        """The documents in order; `part` and `num_rows` are the position behind the one just given."""
        while self.part < len(self.parts):
            shard, start, step = self.parts[self.part]
            for text in self.source.shards[shard].rows(start + step * self.num_rows, step):
                self.num_rows += 1
                if text:
                    yield text
            self.part, self.num_rows = self.part + 1, 0


class Reader:
    """One reader's examples, in an order fixed by seed, epoch, the reader's number and how many readers there are.

    `state()` holds whenever an example has just been given out.
    """

    def __init__(self, stream: "PackedStream", number: int) -> None:
        self.stream, self.number = stream, number
        turn = (number + stream.epoch) % stream.num_readers  # shards differ in length: no reader keeps the same ones
        self.parts = assign_shards(len(stream.source.shards), turn, stream.num_readers)
        self.max_tokens = stream.share_of_tokens()
        self.part, self.num_rows, self.num_tokens = 0, 0, 0
        self.num_documents, self.num_examples, self.num_truncated = 0, 0, 0
        self.ended = False
        self.rest = np.empty(0, dtype=np.int32)  # tokens that no block has got yet
        self.records: list[np.ndarray] = []
        self.window: list[np.ndarray] = []
        self.rng = np.random.default_rng([stream.seed, stream.epoch, number])

    def state(self) -> ReaderState:
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        tokens = {"rest": [self.rest], "records": list(self.records), "window": list(self.window)}
        return ReaderState({**numbers, "rng": self.rng.bit_generator.state}, tokens)

    def restore(self, state: ReaderState) -> None:
        for name in _NUMBERS:
            setattr(self, name, state.numbers[name])
        self.rng.bit_generator.state = state.numbers["rng"]
        [self.rest] = state.tokens["rest"]
        self.records, self.window = list(state.tokens["records"]), list(state.tokens["window"])

    def examples(self) -> Iterator[np.ndarray]:
        """Blocks ([T]), or without packing one record each, `eos doc eos` cut at T; int32.

        Raises:
            ValueError: the source is broken. OSError: it cannot be read.
        """
        if self.ended:
            return
        for example in shuffled(self._examples_in_order(), self.stream.shuffle_window, self.rng, self.window):
            self.num_examples += 1
            yield example
        self.ended = True
        self._report()

    def _examples_in_order(self) -> Iterator[np.ndarray]:
        yield from self._cut()
        chunks = iter(self._chunks())
        while self.num_tokens != self.max_tokens and (chunk := next(chunks, None)) is not None:
            if not isinstance(chunk, Chunk):
                raise chunk
            self._take(chunk)
            yield from self._cut()

    def _chunks(self) -> Iterable[Chunk | ValueError | OSError]:
        """From a worker if the stream has any. Nothing is drawn from torch's own generator, which is the model's."""
        stream = self.stream
        chunks = Chunks(stream.source, stream.tokenizer, self.parts, self.part, self.num_rows)
        if not stream.num_workers or self.part == len(self.parts):
            return chunks
        settings = {"num_workers": 1, "prefetch_factor": _CHUNKS_AHEAD, "generator": torch.Generator()}
        return DataLoader(chunks, batch_size=None, collate_fn=_unchanged, **settings)

    def _take(self, chunk: Chunk) -> None:
        self.part, self.num_rows = chunk.part, chunk.num_rows
        tokens, ends = chunk.tokens, np.cumsum(chunk.lengths)
        if self.max_tokens is not None:
            tokens = tokens[: self.max_tokens - self.num_tokens]
        ends = ends[: 1 + np.searchsorted(ends, len(tokens))]  # of the documents of which there is a token
        self.num_tokens += len(tokens)
        self.num_documents += len(ends)
        if self.stream.packing:
            self.rest = np.concatenate([self.rest, tokens])
        else:
            self._add_records(np.split(tokens, ends[:-1]))

    def _add_records(self, documents: list[np.ndarray]) -> None:
        for document in documents:
            record = np.concatenate([[self.stream.eos_token_id], document], dtype=np.int32)
            self.num_truncated += len(record) > self.stream.block_size
            self.records.append(record[: self.stream.block_size])

    def _cut(self) -> Iterator[np.ndarray]:
        """The examples that can be made of what was taken."""
        block_size = self.stream.block_size
        while len(self.rest) >= block_size:
            block = self.rest[:block_size].copy()  # a view in the window would keep its chunk alive
            self.rest = self.rest[block_size:]
            yield block
        while self.records:
            yield self.records.pop(0)

    def _report(self) -> None:
        if self.stream.packing:
            lost = f"blocks of {self.stream.block_size} tokens, {len(self.rest)} tokens left over"
        else:
            lost = f"records, {self.num_truncated} of them cut at {self.stream.block_size} tokens"
        logger.info(
            "Data reader %d of %d, epoch %d ended: %d documents, %d tokens, %d %s.",
            *(self.number + 1, self.stream.num_readers, self.stream.epoch),
            *(self.num_documents, self.num_tokens, self.num_examples, lost),
        )


def _unchanged(item: Chunk | ValueError | OSError) -> Chunk | ValueError | OSError:
    """DataLoader's own way with single items makes tensors of arrays."""
    return item
