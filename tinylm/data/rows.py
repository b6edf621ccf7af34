"""Examples to rows: whole examples joined up to a token budget, one batch of them, or padded.

Choices:
- A row has no padding and no attention mask. Its `position_ids` restart at each example, which keeps them apart where
  no mask is given, and the first label of each is -100, so that no example predicts its neighbour.
- Rows are composed by best-fit decreasing (Johnson, "Near-optimal bin packing algorithms", 1973): the longest example
  first, each into the fullest row that has room. They are the same in every epoch; who sees which row when is
  `GlobalBatches`' business.

Shapes: B rows of a batch, T tokens of a row, n examples in it.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from tinylm.data.chat import Examples
from tinylm.data.chat_encoder import IGNORED
from tinylm.data.collators import PadRecords
from tinylm.data.documents import fingerprint

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
