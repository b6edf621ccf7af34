"""One reader's way through its share of a stream: rows are encoded in a worker and become examples in the trainer.

    worker    rows of its shards -> token ids -> chunks, each with the position behind it
    trainer   chunks -> pieces -> shuffle window -> examples

Choices:
- What waits to be trained on (pieces of the last chunk, the shuffle window and its random state) is held in the
  trainer's process, and each chunk says how far its worker had read. So after every example the whole state is at hand,
  exact however far the workers have read ahead, and taking it costs a few microseconds.
- Whoever goes on from it reads on behind the last chunk that was used: no row before it is encoded again.
- The shuffle window holds what examples are made of, not rows: the blocks of one long document would fill whole batches
  else.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from tinylm.data.order import assign_shards, shuffled

if TYPE_CHECKING:
    from tinylm.data.stream import ResumableStream

_CHUNKS_AHEAD = 4  # a worker reads on while the shuffle windows of the readers before it fill up

Given = TypeVar("Given")
Row = TypeVar("Row")


@dataclass(frozen=True)
class Chunk:
    """Some encoded rows, and the position behind the last of them: row `num_rows` of part `part`."""

    part: int
    num_rows: int


@dataclass(frozen=True)
class ReaderState:
    """All that a reader needs to go on: numbers (as JSON), and lists of token ids (int32 arrays that never change)."""

    numbers: dict[str, object]
    tokens: dict[str, list[np.ndarray]]


class Chunks(ABC, IterableDataset, Generic[Row]):
    """The rows of `parts` as chunks, from row `num_rows` of part `part` on.

    What is wrong with them comes as the last item: raised in a worker, its words would reach the user in a traceback.
    """

    def __init__(self, parts: list[tuple[int, int, int]], part: int, num_rows: int) -> None:
        self.parts, self.part, self.num_rows = parts, part, num_rows

    @abstractmethod
    def open(self, shard: int, start: int, step: int) -> Iterator[Row]:
        """Rows `start, start + step, ...` of a shard; one that is not to be read comes as "" or None."""

    @abstractmethod
    def encoded(self, rows: Iterator[Row]) -> Iterator[Chunk]:
        """The rows in chunks; `part` and `num_rows` are the position behind the one that was asked for last."""

    def __iter__(self) -> Iterator[Chunk | ValueError | OSError]:
        try:
            yield from self.encoded(self._rows())
        except (ValueError, OSError) as error:
            yield error

    def _rows(self) -> Iterator[Row]:
        while self.part < len(self.parts):
            shard, start, step = self.parts[self.part]
            for row in self.open(shard, start + step * self.num_rows, step):
                self.num_rows += 1
                if row:
                    yield row
            self.part, self.num_rows = self.part + 1, 0


class Reader(ABC, Generic[Given]):
    """One reader's examples, in an order fixed by seed, epoch, the reader's number and how many readers there are.

    `state()` holds whenever an example has just been given out.
    """

    NUMBERS: ClassVar[tuple[str, ...]] = ("part", "num_rows", "num_examples", "ended")

    def __init__(self, stream: "ResumableStream[Given]", number: int) -> None:
        self.stream, self.number = stream, number
        turn = (number + stream.epoch) % stream.num_readers  # shards differ in length: no reader keeps the same ones
        self.parts = assign_shards(stream.num_shards, turn, stream.num_readers)
        self.part, self.num_rows, self.num_examples, self.ended = 0, 0, 0, False
        self.window: list[np.ndarray] = []
        self.rng = np.random.default_rng([stream.seed, stream.epoch, number])

    # What a subclass adds.

    @abstractmethod
    def chunks(self) -> Chunks:
        """Those behind the present position."""

    @abstractmethod
    def take(self, chunk: Chunk) -> None:
        """Counts what is in a chunk, and keeps it for `cut`."""

    @abstractmethod
    def cut(self) -> Iterator[np.ndarray]:
        """The pieces (int32) that can be made of what was taken; each is out of the state when it is given out."""

    def wants_more(self) -> bool:
        """Whether another chunk is to be read."""
        return True

    def composed(self, pieces: Iterator[np.ndarray]) -> Iterator[Given]:
        """Examples, from pieces that come out of the shuffle window; the state holds whenever one is given out."""
        return pieces

    @abstractmethod
    def report(self) -> None:
        """Says what has come of the reader's rows in this epoch."""

    # Its way.

    def state(self) -> ReaderState:
        numbers = {name: getattr(self, name) for name in self.NUMBERS}
        return ReaderState({**numbers, "rng": self.rng.bit_generator.state}, {"window": list(self.window)})

    def restore(self, state: ReaderState) -> None:
        for name in self.NUMBERS:
            setattr(self, name, state.numbers[name])
        self.rng.bit_generator.state = state.numbers["rng"]
        self.window = list(state.tokens["window"])

    def examples(self) -> Iterator[Given]:
        """The examples from here on.

        Raises:
            ValueError: the source is broken. OSError: it cannot be read.
        """
        if self.ended:
            return
        pieces = shuffled(self._in_order(), self.stream.shuffle_window, self.rng, self.window)
        for example in self.composed(pieces):
            self.num_examples += 1
            yield example
        self.ended = True
        self.report()

    def _in_order(self) -> Iterator[np.ndarray]:
        yield from self.cut()
        chunks = iter(self._chunks())
        while self.wants_more() and (chunk := next(chunks, None)) is not None:
            if not isinstance(chunk, Chunk):
                raise chunk
            self.part, self.num_rows = chunk.part, chunk.num_rows
            self.take(chunk)
            yield from self.cut()

    def _chunks(self) -> Iterable[Chunk | ValueError | OSError]:
        """From a worker if the stream has any. Nothing is drawn from torch's own generator, which is the model's."""
        chunks = self.chunks()
        if not self.stream.num_workers or self.part == len(self.parts):
            return chunks
        settings = {"num_workers": 1, "prefetch_factor": _CHUNKS_AHEAD, "generator": torch.Generator()}
        return DataLoader(chunks, batch_size=None, collate_fn=_unchanged, **settings)


def _unchanged(item: Chunk | ValueError | OSError) -> Chunk | ValueError | OSError:
    """DataLoader's own way with single items makes tensors of arrays."""
    return item
