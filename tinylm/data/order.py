"""Who reads what, and in which order: a permutation, global batches, shards for readers, a shuffle window.

Choices:
- Map-style data is ordered by a keyed permutation that can be computed at any position in constant memory. A position
  in the whole run is one number (an optimizer step), and the world size never changes what a step sees.
- Streams are divided by us. A *reader* is one DataLoader worker of one rank; every row of a source has one reader.
"""

import logging
from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

_ROUNDS = 8  # four rounds of a good function already look random; small domains profit from more


def _mixed(values: np.ndarray) -> np.ndarray:
    """`values` (uint64) with every bit depending on every bit: the finaliser of SplitMix64 (Steele et al., 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def permuted(positions: np.ndarray, length: int, seed: int, epoch: int) -> np.ndarray:
    """The indices (int64) at `positions` of the permutation of `0 .. length - 1` that belongs to `(seed, epoch)`.

    A Feistel network permutes the next power of four; an index that falls outside of `length` walks on along its cycle
    until it is inside (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): under four rounds on average.
    """
    half = np.uint64(max(1, ((length - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64)
    indices = np.asarray(positions, dtype=np.uint64).copy()
    outside = np.arange(len(indices))
    while len(outside):
        left, right = indices[outside] >> half, indices[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right + key) & mask)
        indices[outside] = (left << half) | right
        outside = outside[indices[outside] >= length]
    return indices.astype(np.int64)


class GlobalBatches:
    """One rank's micro-batches of indices: a batch sampler for map-style data.

    Optimizer step s of an epoch takes positions `[s * G, (s + 1) * G)` of the epoch's permutation, where
    `G = per_rank_batch_size * accumulation_steps * world_size`; rank r takes its contiguous slice, cut into
    `accumulation_steps` micro-batches. An epoch's last step fills up with the epoch's first positions (`repeated`).
    `len()` is the number of micro-batches that a rank gets in a whole epoch.

    `start_step` counts optimizer steps from the beginning of the run: all epochs before it are empty, the one it falls
    into begins there, and the later ones are whole.
    """

    def __init__(
        self,
        length: int,
        *,
        per_rank_batch_size: int,
        accumulation_steps: int = 1,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        start_step: int = 0,
    ) -> None:
        self.length, self.seed, self.epoch, self.start_step = length, seed, 0, start_step
        self.per_rank_batch_size, self.accumulation_steps = per_rank_batch_size, accumulation_steps
        self.rank, self.world_size = rank, world_size
        self.global_batch_size = per_rank_batch_size * accumulation_steps * world_size
        self.steps_per_epoch = -(-length // self.global_batch_size)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.steps_per_epoch * self.accumulation_steps

    def __iter__(self) -> Iterator[list[int]]:
        first = max(0, self.start_step - self.epoch * self.steps_per_epoch)
        share = self.per_rank_batch_size * self.accumulation_steps
        for step in range(first, self.steps_per_epoch):
            begin = step * self.global_batch_size + self.rank * share
            indices = self._indices(np.arange(begin, begin + share))
            yield from indices.reshape(self.accumulation_steps, self.per_rank_batch_size).tolist()

    def repeated(self) -> np.ndarray:
        """The indices (int64, in order, over all ranks) with which the epoch's last step is filled up."""
        return self._indices(np.arange(self.length, self.steps_per_epoch * self.global_batch_size))

    def _indices(self, positions: np.ndarray) -> np.ndarray:
        return permuted(positions % self.length, self.length, self.seed, self.epoch)


def assign_shards(num_shards: int, reader: int, num_readers: int) -> list[tuple[int, int, int]]:
    """What a reader reads: `(shard, start, step)` stands for the rows `start, start + step, ...` of a shard.

    Every reader gets equally many whole shards; the `num_shards % num_readers` that are left are split by rows.
    """
    num_whole = num_shards // num_readers * num_readers
    whole = [(shard, 0, 1) for shard in range(reader, num_whole, num_readers)]
    return whole + [(shard, reader, num_readers) for shard in range(num_whole, num_shards)]


def usable_workers(num_shards: int, world_size: int, requested: int) -> int:
    """How many of the `requested` DataLoader workers of a rank to start: no more than there are shards for.

    Further workers would read the same shard from its beginning to skip most of it.
    """
    usable = min(requested, max(1, num_shards // world_size))
    if usable < requested:
        logger.info(
            "%d of %d data workers a rank: the source has %d shard(s) for %d rank(s).",
            usable,
            requested,
            num_shards,
            world_size,
        )
    return usable


def shuffled(
    items: Iterable[Item], window: int, rng: np.random.Generator, waiting: list[Item] | None = None
) -> Iterator[Item]:
    """The items in an order shuffled within a window: each newcomer takes the place of one that leaves at random.

    `waiting` holds the items inside the window and may be the caller's list: whenever an item is given out, it and
    `rng` are the whole state. A window of 0 or 1 keeps the order.
    """
    waiting = [] if waiting is None else waiting
    for item in items:
        if len(waiting) < window:
            waiting.append(item)
        elif not waiting:
            yield item
        else:
            place = int(rng.integers(len(waiting)))
            item, waiting[place] = waiting[place], item
            yield item
    while waiting:
        place = int(rng.integers(len(waiting)))
        waiting[place], waiting[-1] = waiting[-1], waiting[place]
        yield waiting.pop()
