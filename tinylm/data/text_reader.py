"""A reader of documents: blocks cut from their running text, or records of one document each.

Choices:
- A block is cut from the running concatenation `doc eos doc eos ...` and ignores where documents end. Nothing is padded
  and less than one block is lost a reader and epoch.

Shapes: T block size.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from transformers import PreTrainedTokenizerBase

from tinylm.data.documents import Source
from tinylm.data.encoding import encode
from tinylm.data.reader import Chunk, Chunks, Reader, ReaderState

if TYPE_CHECKING:
    from tinylm.data.packing import PackedStream

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextChunk(Chunk):
    """Documents `ids eos` in a row (`tokens`, int32), and how many tokens each has."""

    tokens: np.ndarray
    lengths: np.ndarray


class TextChunks(Chunks[str]):
    """The documents of a source in chunks."""

    def __init__(
        self,
        source: Source,
        tokenizer: PreTrainedTokenizerBase,
        parts: list[tuple[int, int, int]],
        part: int,
        num_rows: int,
    ) -> None:
        super().__init__(parts, part, num_rows)
        self.source, self.tokenizer = source, tokenizer

    def open(self, shard: int, start: int, step: int) -> Iterator[str]:
        return self.source.shards[shard].rows(start, step)

    def encoded(self, rows: Iterator[str]) -> Iterator[TextChunk]:
        eos = self.tokenizer.eos_token_id
        for _, token_lists in encode(self.tokenizer, rows):
            documents = [np.array([*token_ids, eos], dtype=np.int32) for token_ids in token_lists]
            lengths = np.array([len(document) for document in documents])
            yield TextChunk(self.part, self.num_rows, np.concatenate(documents), lengths)


class TextReader(Reader[np.ndarray]):
    """Gives blocks ([T]), or without packing one record each, `eos doc eos` cut at T; int32."""

    stream: "PackedStream"
    NUMBERS = (*Reader.NUMBERS, "num_tokens", "num_documents", "num_truncated")

    def __init__(self, stream: "PackedStream", number: int) -> None:
        super().__init__(stream, number)
        self.max_tokens = stream.share_of_tokens()
        self.num_tokens, self.num_documents, self.num_truncated = 0, 0, 0
        self.rest = np.empty(0, dtype=np.int32)  # tokens that no block has got yet
        self.records: list[np.ndarray] = []

    def state(self) -> ReaderState:
        state = super().state()
        state.tokens.update(rest=[self.rest], records=list(self.records))
        return state

    def restore(self, state: ReaderState) -> None:
        super().restore(state)
        [self.rest] = state.tokens["rest"]
        self.records = list(state.tokens["records"])

    def chunks(self) -> TextChunks:
        return TextChunks(self.stream.source, self.stream.tokenizer, self.parts, self.part, self.num_rows)

    def wants_more(self) -> bool:
        return self.num_tokens != self.max_tokens

    def take(self, chunk: TextChunk) -> None:
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

    def cut(self) -> Iterator[np.ndarray]:
        block_size = self.stream.block_size
        while len(self.rest) >= block_size:
            block = self.rest[:block_size].copy()  # a view in the window would keep its chunk alive
            self.rest = self.rest[block_size:]
            yield block
        while self.records:
            yield self.records.pop(0)

    def report(self) -> None:
        if self.stream.packing:
            lost = f"blocks of {self.stream.block_size} tokens, {len(self.rest)} tokens left over"
        else:
            lost = f"records, {self.num_truncated} of them cut at {self.stream.block_size} tokens"
        logger.info(
            "Data reader %d of %d, epoch %d ended: %d documents, %d tokens, %d %s.",
            *(self.number + 1, self.stream.num_readers, self.stream.epoch),
            *(self.num_documents, self.num_tokens, self.num_examples, lost),
        )
