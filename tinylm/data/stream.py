"""A stream that knows at any example where it is, and goes on from there.

A stream has a fixed number of *readers* (`reader.py`): ranks x workers where it began. Each rank has its share of them
and takes an example from each in turn. What the examples are is a subclass' business.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Generic, TypeVar

from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from tinylm.data.documents import fingerprint
from tinylm.data.reader import Reader, ReaderState

Given = TypeVar("Given")

FIRST_ROWS = 3
"""Rows of a source that are looked at to know it again: reading all of it would cost what a position is to save."""


@dataclass(frozen=True)
class StreamState:
    """Where one rank is in a stream: the states of its readers by number (none: the epoch has not begun for it).

    `turn` counts in the order of the rank's readers which of them gives the next example, `num_windows` the optimizer
    steps of this epoch that were taken, where the stream is read in such. `settings` is what decides about the
    examples; `data` is what it reads, in words and as a fingerprint.
    """

    epoch: int
    num_readers: int
    turn: int
    settings: dict[str, str | int | None]
    data: dict[str, str]
    readers: dict[int, ReaderState]
    num_windows: int = 0


class ResumableStream(ABC, IterableDataset, Generic[Given]):
    """Examples of one rank. It starts its own workers. Iterating twice gives the same order, until `set_epoch`.

    Args:
        num_workers: processes of this rank that read and encode; 0 does it between two steps.
        shuffle_window: examples that a reader holds back to shuffle; 0 keeps the order of the source.
    """

    def __init__(self, *, seed: int, rank: int, world_size: int, num_workers: int, shuffle_window: int) -> None:
        self.seed, self.rank, self.world_size, self.num_workers = seed, rank, world_size, num_workers
        self.shuffle_window = shuffle_window
        self.epoch, self.num_readers = 0, world_size * max(1, num_workers)
        self._readers: list[Reader[Given]] = []
        self._turn = 0
        self._restored: StreamState | None = None

    # What a subclass adds.

    @property
    @abstractmethod
    def num_shards(self) -> int:
        """Files or parts that readers share."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, str | int | None]:
        """What decides about the examples, besides the data and the number of readers."""

    @abstractmethod
    def reader(self, number: int) -> Reader[Given]:
        """A reader at the beginning of the present epoch."""

    @abstractmethod
    def example(self, given: Given) -> dict[str, Tensor]:
        """What a reader has given, as the model takes it."""

    @abstractmethod
    def identity(self) -> tuple[str, str, Iterable[object]]:
        """The data in words, its names and sizes as a fingerprint, and its rows, of which the first are looked at."""

    # Reading.

    def set_epoch(self, epoch: int) -> None:
        """The next iteration gives this epoch, from its beginning or from where `restore` was told."""
        self.epoch, self._readers, self._turn = epoch, [], 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        assert get_worker_info() is None, "each worker would read everything: such a stream starts its own"
        readers = [self.reader(number) for number in range(self.rank, self.num_readers, self.world_size)]
        restored, self._restored = self._restored, None
        if restored is not None:
            assert restored.epoch == self.epoch
            for reader in readers if restored.readers else ():
                reader.restore(restored.readers[reader.number])
            self._turn = restored.turn
        self._readers = readers
        return (self.example(given) for given in self._in_turns(readers))

    def _in_turns(self, readers: list[Reader[Given]]) -> Iterator[Given]:
        examples = [reader.examples() for reader in readers]
        while not all(reader.ended for reader in readers):
            given = next(examples[self._turn], None)
            self._turn = (self._turn + 1) % len(readers)
            if given is not None:
                yield given

    # Where it is.

    @cached_property
    def data(self) -> dict[str, str]:
        """What is read, wherever it lies: in words, and a fingerprint of names, sizes and first rows."""
        description, names_and_sizes, rows = self.identity()
        return {"description": description, "fingerprint": fingerprint(names_and_sizes, *islice(rows, FIRST_ROWS))}

    def state(self) -> StreamState:
        """Where the present iteration is. Holds whenever an example has just been given out."""
        readers = {reader.number: reader.state() for reader in self._readers}
        return StreamState(self.epoch, self.num_readers, self._turn, self.settings, self.data, readers)

    def check(self, state: StreamState) -> None:
        """Raises ValueError if going on there would give other examples, or the ranks cannot share the readers."""
        for name, before in state.settings.items():
            if self.settings.get(name) != before:
                raise ValueError(
                    "A stream is gone on with as it was begun, or rows would be repeated and skipped: its"
                    f" `{name}` was {before} and is {self.settings.get(name)} now. Set it back."
                )
        if state.num_readers % self.world_size:
            raise ValueError(
                f"A stream is gone on with by the readers it was begun with (ranks x `--dataloader_num_workers`), or"
                f" rows would be repeated and skipped. There were {state.num_readers}, which {self.world_size} ranks"
                " cannot share equally. Take a number of ranks that divides them, or data that any number of ranks goes"
                " on with: a prepared corpus (`--prepared_corpus`), conversations in memory (`--streaming false`)."
            )
        if state.data["fingerprint"] != self.data["fingerprint"]:
            before, now = (f"{data['description']} ({data['fingerprint']})" for data in (state.data, self.data))
            raise ValueError(
                "A stream is gone on with over the data that it was begun with, or rows would be repeated and skipped."
                f" It read {before}, and now there is {now}: names, sizes or first rows differ. Give it the same data"
                " (the folder may be another), or begin a new run in another `--output_dir`."
            )

    def restore(self, state: StreamState) -> None:
        """Makes the next iteration of that epoch go on from there, with as many readers as the stream began with.

        Raises:
            ValueError: what `check` raises.
        """
        self.check(state)
        self.num_readers, self._restored = state.num_readers, state
