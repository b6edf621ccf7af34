"""What every source of text looks like to the rest of the kit: shards that yield documents in a fixed order.

Rows are numbered as they lie in a shard, those that hold no document too, so a row's number never depends on what its
neighbours hold: readers can share a shard by strides, and a number of rows is a position to go on from.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice

import numpy as np


@dataclass(frozen=True)
class Shard:
    """One file, or one part of a dataset.

    `rows(start, step)` yields one text for each of the rows `start, start + step, ...`, always the same: its document,
    or "" if it holds none. Skipped rows are not cleaned or decoded where that can be avoided.
    """

    name: str
    rows: Callable[[int, int], Iterator[str]]

    def read(self, start: int, step: int) -> Iterator[str]:
        """The documents of rows `start, start + step, ...`, in order."""
        return filter(None, self.rows(start, step))


@dataclass(frozen=True)
class Source:
    """A corpus of documents that can be pickled into workers.

    `description` is one line for the user. `fingerprint` (hex) changes when the documents may have changed, or lie
    elsewhere; `identity` (hex) stands for names and sizes only, and is the fingerprint where it is not told.
    """

    description: str
    fingerprint: str
    shards: tuple[Shard, ...]
    identity: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "identity", self.identity or self.fingerprint)

    def documents(self) -> Iterator[str]:
        """Every document of every shard, in order."""
        return chain.from_iterable(shard.read(0, 1) for shard in self.shards)

    def take(self, max_documents: int) -> "Source":
        """The first `max_documents` documents, in order, as one shard.

        Raises:
            ValueError: `max_documents` is not positive.
        """
        if max_documents < 1:
            raise ValueError(f"`max_documents` must be at least 1, but is {max_documents}. Set `--max_documents`.")
        shard = Shard(f"first {max_documents} documents", partial(_read_first, self.shards, max_documents))
        return Source(
            description=f"the first {max_documents:,} documents of {self.description}",
            fingerprint=fingerprint(self.fingerprint, max_documents),
            shards=(shard,),
            identity=fingerprint(self.identity, max_documents),
        )


def fingerprint(*parts: object) -> str:
    """32 hexadecimal digits that stand for the parts and their order."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def fingerprint_of_arrays(arrays: Iterable[np.ndarray]) -> str:
    """32 hexadecimal digits that stand for the numbers in the arrays, one behind the other."""
    state = hashlib.blake2b(digest_size=16)
    for array in arrays:
        state.update(np.ascontiguousarray(array))
    return state.hexdigest()


_empty_rows: ContextVar[list[int] | None] = ContextVar("empty_rows", default=None)


def blanked(rows: Iterable[str]) -> Iterator[str]:
    """A shard's rows, with "" for those in which there is nothing but whitespace: they are no documents."""
    for row in rows:
        if row.strip():
            yield row
            continue
        if (count := _empty_rows.get()) is not None:
            count[0] += 1
        yield ""


@contextmanager
def counting_empty_rows() -> Iterator[list[int]]:
    """Counts, as its one item, the empty rows that every source drops while the block reads it."""
    count = [0]
    before = _empty_rows.set(count)
    try:
        yield count
    finally:
        _empty_rows.reset(before)


def from_texts(texts: tuple[str, ...], start: int, step: int) -> Iterator[str]:
    """`Shard.rows` of documents held in memory: `Shard(name, partial(from_texts, texts))`."""
    return blanked(texts[start::step])


def _read_first(shards: tuple[Shard, ...], count: int, start: int, step: int) -> Iterator[str]:
    documents = chain.from_iterable(shard.read(0, 1) for shard in shards)
    return islice(documents, start, count, step)
