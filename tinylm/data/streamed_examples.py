"""Conversations to rows of examples, on the fly: encode, shuffle, join up to a token budget.

What waits to be trained on is kept as token ids (`reader.py`), so a run that is gone on with encodes nothing again.

Shapes: T tokens of an example or of a row.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import count

import numpy as np
import torch
from datasets import IterableDataset as Rows
from torch import Tensor

from tinylm.data.chat import ExampleCounts, encode_row
from tinylm.data.chat_encoder import ChatEncoder
from tinylm.data.conversations import ROW_NUMBER, ChatRows, one_by_one
from tinylm.data.hub import patient
from tinylm.data.reader import Chunk, Chunks, Reader, ReaderState
from tinylm.data.rows import joined_examples
from tinylm.data.stream import ResumableStream

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 16  # of a chunk: few, because what a chunk holds is in every checkpoint

IsRead = Callable[[Mapping[str, object]], bool]


class StreamedExamples(ResumableStream[list[np.ndarray]]):
    """Examples of one rank, encoded while training. Every row has one reader.

    With `row_tokens` joined to rows as in `PackedRows` (without `record_ids`), each begun when an example does not fit
    into the one before; without, one by one.

    Args:
        shuffle_window: examples that a reader holds back to shuffle; 0 keeps the order of the source.
        is_read: which rows belong to this dataset, where others are held out; all if None.

    Raises:
        ValueError: `row_tokens` is less than the encoder's `max_length`.
    """

    def __init__(
        self,
        chat_rows: ChatRows,
        encoder: ChatEncoder,
        *,
        row_tokens: int | None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        shuffle_window: int = 0,
        skip_bad_rows: bool = False,
        is_read: IsRead | None = None,
    ) -> None:
        if row_tokens is not None and row_tokens < encoder.max_length:
            raise ValueError(
                f"A row holds whole examples of up to `max_length` {encoder.max_length} tokens; `row_tokens` is"
                f" {row_tokens}. Raise `--row_tokens`, or lower `--max_length`."
            )
        super().__init__(
            seed=seed, rank=rank, world_size=world_size, num_workers=num_workers, shuffle_window=shuffle_window
        )
        self.chat_rows, self.encoder, self.row_tokens = chat_rows, encoder, row_tokens
        self.skip_bad_rows, self.is_read = skip_bad_rows, is_read

    @property
    def num_shards(self) -> int:
        return self.chat_rows.rows.num_shards

    @cached_property
    def settings(self) -> dict[str, str | int | None]:
        numbers = {name: getattr(self, name) for name in ("row_tokens", "shuffle_window", "skip_bad_rows", "seed")}
        of_rows = {"shape": self.chat_rows.shape, "holds_out": self.is_read is not None, "shards": self.num_shards}
        of_encoder = {"max_length": self.encoder.max_length, "train_on": self.encoder.train_on}
        return {**numbers, **of_rows, **of_encoder, "tokenizer_and_template": self.encoder.fingerprint}

    def identity(self) -> tuple[str, str, Iterable[object]]:
        rows = one_by_one(_shard(self.chat_rows.rows, 0))
        return self.chat_rows.description, self.chat_rows.identity, (sorted(row.items()) for row in rows)

    def reader(self, number: int) -> "ExampleReader":
        return ExampleReader(self, number)

    def example(self, given: list[np.ndarray]) -> dict[str, Tensor]:
        examples = [
            dict(zip(("input_ids", "labels"), torch.from_numpy(ids.astype(np.int64)).chunk(2), strict=True))
            for ids in given
        ]
        return joined_examples(examples) if self.row_tokens is not None else examples[0]


@dataclass(frozen=True)
class ExampleChunk(Chunk):
    """Encoded rows: what is counted of them, and under `ids` the example, `[2 T]` int32: `input_ids`, then `labels`."""

    rows: list[dict[str, object]]


class ExampleChunks(Chunks[dict[str, object]]):
    """The rows of a stream of conversations in chunks."""

    def __init__(self, stream: StreamedExamples, parts: list[tuple[int, int, int]], part: int, num_rows: int) -> None:
        super().__init__(parts, part, num_rows)
        self.chat_rows, self.is_read = stream.chat_rows, stream.is_read
        self.encode = partial(
            encode_row, of=stream.chat_rows, encoder=stream.encoder, skip_bad_rows=stream.skip_bad_rows
        )

    def open(self, shard: int, start: int, step: int) -> Iterator[dict[str, object] | None]:
        read = partial(_rows_of_shard, self.chat_rows.rows, shard)
        if self.chat_rows.is_remote:
            read = partial(patient, read, where=f"Shard {shard} of {self.chat_rows.description}")
        for number, row in zip(count(start + 1, step), read(start, step), strict=False):
            is_read = self.is_read is None or self.is_read(row)
            yield {**row, ROW_NUMBER: f"{number} of shard {shard}"} if is_read else None

    def encoded(self, rows: Iterator[dict[str, object]]) -> Iterator[ExampleChunk]:
        """A row that is at fault raises behind those before it."""
        done: list[dict[str, object]] = []
        position = self.part, self.num_rows
        try:
            for row in rows:
                encoded = self.encode(row)
                ids = np.array([*encoded.pop("input_ids"), *encoded.pop("labels")], dtype=np.int32)
                done.append({**encoded, "ids": ids})
                position = self.part, self.num_rows
                if len(done) == _ROWS_AT_ONCE:
                    yield ExampleChunk(*position, done)
                    done = []
        except (ValueError, OSError):
            if done:
                yield ExampleChunk(*position, done)
            raise
        yield ExampleChunk(self.part, self.num_rows, done)


def _shard(rows: Rows, shard: int) -> Rows:
    return rows.shard(num_shards=rows.num_shards, index=shard)


def _rows_of_shard(rows: Rows, shard: int, start: int, step: int) -> Iterator[dict[str, object]]:
    return one_by_one(_shard(rows, shard), start, step)


class ExampleReader(Reader[list[np.ndarray]]):
    """Gives rows, as lists of their examples (each `[2 T]` int32: `input_ids`, then `labels`)."""

    stream: StreamedExamples

    def __init__(self, stream: StreamedExamples, number: int) -> None:
        super().__init__(stream, number)
        self.counts = ExampleCounts(stream.encoder.max_length)
        self.taken: list[np.ndarray] = []  # of the last chunk, not yet in the shuffle window
        self.row: list[np.ndarray] = []  # to which more may come

    def state(self) -> ReaderState:
        state = super().state()
        state.numbers["counts"] = asdict(self.counts)
        state.tokens.update(taken=list(self.taken), row=list(self.row))
        return state

    def restore(self, state: ReaderState) -> None:
        super().restore(state)
        self.counts = ExampleCounts(**state.numbers["counts"])
        self.taken, self.row = list(state.tokens["taken"]), list(state.tokens["row"])

    def chunks(self) -> ExampleChunks:
        return ExampleChunks(self.stream, self.parts, self.part, self.num_rows)

    def take(self, chunk: ExampleChunk) -> None:
        self.taken += [row["ids"] for row in chunk.rows if self.counts.add(row)]

    def cut(self) -> Iterator[np.ndarray]:
        while self.taken:
            yield self.taken.pop(0)

    def composed(self, pieces: Iterator[np.ndarray]) -> Iterator[list[np.ndarray]]:
        for example in pieces:
            row = [*self.row, example]
            if self.stream.row_tokens is None:
                yield row
            elif sum(map(len, row)) <= 2 * self.stream.row_tokens:
                self.row = row
            else:
                row, self.row = self.row, [example]
                yield row
        if self.row:
            row, self.row = self.row, []
            yield row

    def report(self) -> None:
        told = (self.number + 1, self.stream.num_readers, self.stream.epoch, self.counts.in_words())
        logger.info("Data reader %d of %d, epoch %d ended: %s.", *told)
