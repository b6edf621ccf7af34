"""Examples to rows: whole examples joined up to a token budget, one batch of them, or padded; from memory or a stream.

Choices:
- A row has no padding and no attention mask. Its `position_ids` restart at each example, which keeps them apart where
  no mask is given, and the first label of each is -100, so that no example predicts its neighbour.
- Rows are composed by best-fit decreasing (Johnson, "Near-optimal bin packing algorithms", 1973): the longest example
  first, each into the fullest row that has room. They are the same in every epoch; who sees which row when is
  `GlobalBatches`' business.

Shapes: B rows of a batch, T tokens of a row, n examples in it.
"""

import logging
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from tinylm.data.chat import ExampleCounts, Examples, encode_row
from tinylm.data.chat_encoder import IGNORED, ChatEncoder
from tinylm.data.collators import PadRecords
from tinylm.data.conversations import ROW_NUMBER, ChatRows, one_by_one
from tinylm.data.documents import fingerprint
from tinylm.data.order import assign_shards, shuffled

logger = logging.getLogger(__name__)

Example = Mapping[str, Tensor]


class PackedRows(Dataset):
    """Rows of whole examples: `input_ids`, `labels`, `position_ids` ([T] int64) and `record_ids` ([n] int64).

    A record id is the index of an example. T is at most `row_tokens`, and mostly little less.

    Raises:
        ValueError: an example is longer than `row_tokens`.
    """

    def __init__(self, examples: Examples, row_tokens: int) -> None:
        longest = int(examples.lengths.max())
        if longest > row_tokens:
            raise ValueError(
                f"A row holds whole examples; the longest has {longest} tokens, and `row_tokens` is {row_tokens}. Raise"
                " `--row_tokens`, or lower `--max_length`."
            )
        self.examples, self.row_tokens = examples, row_tokens
        rows = best_fit_decreasing(examples.lengths, row_tokens)
        self._members = np.array([index for row in rows for index in row], dtype=np.int64)
        self._ends = np.cumsum([len(row) for row in rows])

    def __len__(self) -> int:
        return len(self._ends)

    def record_ids_of(self, row: int) -> np.ndarray:
        """`[n]` int64: the examples in a row."""
        return self._members[self._ends[row - 1] if row else 0 : self._ends[row]]

    def contents(self) -> tuple[np.ndarray, np.ndarray]:
        """`(rows, record_ids)`, int64: which examples each row holds, in the order of the rows."""
        return np.repeat(np.arange(len(self)), np.diff(self._ends, prepend=0)), self._members

    def fingerprint(self) -> str:
        return fingerprint(self.examples.fingerprint(), self.row_tokens)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        if not 0 <= row < len(self):
            raise IndexError(f"Rows are 0 to {len(self) - 1}; {row} is outside of the dataset.")
        record_ids = self.record_ids_of(row)
        joined = joined_examples([self.examples[index] for index in record_ids.tolist()])
        return {**joined, "record_ids": torch.from_numpy(record_ids.copy())}


def best_fit_decreasing(lengths: np.ndarray, row_tokens: int) -> list[list[int]]:
    """Indices of `lengths` in rows of at most `row_tokens` together, ascending within a row."""
    rows: list[list[int]] = []
    with_room: defaultdict[int, list[list[int]]] = defaultdict(list)  # tokens of room: rows
    rooms: list[int] = []  # the keys, ascending
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        place = bisect_left(rooms, length)
        if place == len(rooms):
            room, row = row_tokens, []
            rows.append(row)
        else:
            room = rooms[place]
            row = with_room[room].pop()
            if not with_room[room]:
                del rooms[place]
        row.append(index)
        if not with_room[room - length]:
            insort(rooms, room - length)
        with_room[room - length].append(row)
    return [sorted(row) for row in rows]


def joined_examples(examples: Sequence[Example]) -> dict[str, Tensor]:
    """Examples one behind the other: `input_ids`, `labels`, `position_ids` ([T] int64)."""
    labels = [example["labels"].clone() for example in examples]
    for of_example in labels:
        of_example[0] = IGNORED
    return {
        "input_ids": torch.cat([example["input_ids"] for example in examples]),
        "labels": torch.cat(labels),
        "position_ids": torch.cat([torch.arange(len(of_example)) for of_example in labels]),
    }


def join_rows(rows: Sequence[Example]) -> dict[str, Tensor]:
    """B rows as one: `input_ids`, `labels`, `position_ids` ([1, sum of T] int64), and `record_ids` ([sum of n]).

    No `attention_mask`: with one, the restarting positions would not keep examples apart.
    """
    batch = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    return {name: tensor if name == "record_ids" else tensor[None] for name, tensor in batch.items()}


class PadExamples(PadRecords):
    """As `PadRecords`, with the labels of the examples: `input_ids`, `attention_mask`, `labels` [B, T]."""

    def __call__(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        labels = [example["labels"] for example in examples]
        return {**super().__call__(examples), "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED)}


class StreamedExamples(IterableDataset):
    """Examples of one rank, encoded while training; DataLoader workers share the shards. Every row has one reader.

    With `row_tokens` joined to rows as in `PackedRows` (without `record_ids`), each begun when an example does not fit
    into the one before; without, one by one. Iterating twice gives the same order, until `set_epoch`.

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
        shuffle_window: int = 0,
        skip_bad_rows: bool = False,
        is_read: Callable[[Mapping[str, object]], bool] | None = None,
    ) -> None:
        if row_tokens is not None and row_tokens < encoder.max_length:
            raise ValueError(
                f"A row holds whole examples of up to `max_length` {encoder.max_length} tokens; `row_tokens` is"
                f" {row_tokens}. Raise `--row_tokens`, or lower `--max_length`."
            )
        self.chat_rows, self.encoder, self.row_tokens = chat_rows, encoder, row_tokens
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.shuffle_window, self.skip_bad_rows, self.is_read = shuffle_window, skip_bad_rows, is_read
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # workers that outlive an epoch see it too

    @property
    def epoch(self) -> int:
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()
        worker_id, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        number, num_readers = worker_id * self.world_size + self.rank, num_workers * self.world_size
        counts, rng = ExampleCounts(self.encoder.max_length), np.random.default_rng([self.seed, self.epoch, number])
        examples = shuffled(self._examples(number, num_readers, counts), self.shuffle_window, rng)
        yield from examples if self.row_tokens is None else self._rows(examples, self.row_tokens)
        told = (number + 1, num_readers, self.epoch, counts.in_words())
        logger.info("Data reader %d of %d, epoch %d ended: %s.", *told)

    def _examples(self, number: int, num_readers: int, counts: ExampleCounts) -> Iterator[dict[str, Tensor]]:
        """One reader's examples in the order of the source."""
        for row in self._rows_of_reader(number, num_readers):
            encoded = encode_row(row, of=self.chat_rows, encoder=self.encoder, skip_bad_rows=self.skip_bad_rows)
            if counts.add(encoded):
                yield {name: torch.tensor(encoded[name]) for name in ("input_ids", "labels")}

    def _rows_of_reader(self, number: int, num_readers: int) -> Iterator[dict[str, object]]:
        stream = self.chat_rows.rows
        turn = (number + self.epoch) % num_readers  # shards differ in length: no reader keeps the same ones
        for shard, start, step in assign_shards(stream.num_shards, turn, num_readers):
            rows = one_by_one(stream.shard(num_shards=stream.num_shards, index=shard))
            for index, row in islice(enumerate(rows, start=1), start, None, step):
                if self.is_read is None or self.is_read(row):
                    yield {**row, ROW_NUMBER: f"{index} of shard {shard}"}

    @staticmethod
    def _rows(examples: Iterator[dict[str, Tensor]], row_tokens: int) -> Iterator[dict[str, Tensor]]:
        waiting: list[dict[str, Tensor]] = []
        num_tokens = 0
        for example in examples:
            if num_tokens + len(example["input_ids"]) > row_tokens:
                yield joined_examples(waiting)
                waiting, num_tokens = [], 0
            waiting.append(example)
            num_tokens += len(example["input_ids"])
        if waiting:
            yield joined_examples(waiting)
