"""Records: documents with a number that stays theirs through shuffling, ranks and epochs.

A *record* is one document, with an eos before it, as before every document that is scored, and one behind it. An
*example* is what the model sees of it in one row: the record cut at the block size, or, with `split_long`, all of it in
several rows that overlap by one token, so that each token of the document is a target exactly once. Record ids are
dense: 0, 1, ... in the order of the source.

Shapes: T tokens of one example.
"""

import logging
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from tinylm.data.documents import Source, counting_empty_rows, fingerprint, fingerprint_of_arrays
from tinylm.data.encoding import document_start_id, encode
from tinylm.data.sources import open_source

logger = logging.getLogger(__name__)


class IndexedTextDataset(Dataset):
    """`(record_id, text)` of the texts that hold more than whitespace; how many were dropped is said.

    Raises:
        ValueError: no texts, only empty ones, or one that is not a string (its row and type are named).
    """

    def __init__(self, texts: Iterable[str]) -> None:
        if isinstance(texts, str):
            raise ValueError("Texts come as a list of strings, and this is one `str`. Put it into a list.")
        rows = list(texts)
        for number, row in enumerate(rows):
            if not isinstance(row, str):
                raise ValueError(
                    f"Every text is a string; row {number} is of type `{type(row).__name__}` ({row!r:.60}). Mend it or"
                    " leave it out."
                )
        self._take([row for row in rows if row.strip()], len(rows))

    @classmethod
    def from_source(cls, source: Source) -> "IndexedTextDataset":
        """All documents of a source, in memory."""
        dataset = cls.__new__(cls)
        with counting_empty_rows() as num_empty:
            texts = list(source.documents())
        dataset._take(texts, len(texts) + num_empty[0])
        return dataset

    @classmethod
    def from_file(
        cls, path: str, *, text_column: str = "text", document_separator: str | None = None
    ) -> "IndexedTextDataset":
        """All documents of a local file of any kind that `--data_files` takes. Raises what `open_source` raises."""
        return cls.from_source(
            open_source(data_files=[path], text_column=text_column, document_separator=document_separator)
        )

    def _take(self, texts: list[str], num_rows: int) -> None:
        if not texts:
            kind = f"all {num_rows:,} texts are empty" if num_rows else "there are no texts at all"
            raise ValueError(f"A dataset of records needs at least one text that is not empty; {kind}. Give more text.")
        if num_rows > len(texts):
            logger.info("Records: %s texts, %s empty ones dropped", f"{len(texts):,}", f"{num_rows - len(texts):,}")
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, record_id: int) -> tuple[int, str]:
        if not 0 <= record_id < len(self.texts):
            raise IndexError(f"Record ids are 0 to {len(self.texts) - 1}; {record_id} is outside of the dataset.")
        return record_id, self.texts[record_id]


class RecordCuts:
    """Where each example lies in the running text `eos doc eos doc eos ...`, in which neighbours share an eos.

    `num_records` records become `len(cuts)` examples; `num_long` of the records are longer than the block size.

    Args:
        ends: `[num_records]`, where each document ends in `doc eos doc eos ...`: the number of tokens until then, its
            eos included.
    """

    def __init__(self, ends: np.ndarray, block_size: int, *, split_long: bool = False) -> None:
        self.ends, self.block_size = ends, block_size
        lengths = 1 + np.diff(ends, prepend=0)
        self.num_records = len(ends)
        self.num_long = int((lengths > block_size).sum())
        self.num_tokens_cut = 0 if split_long else int(np.maximum(lengths - block_size, 0).sum())
        pieces = np.maximum(1, -(-(lengths - 1) // (block_size - 1))) if split_long else np.ones_like(lengths)
        self._example_ends = np.cumsum(pieces)

    def __len__(self) -> int:
        return int(self._example_ends[-1])

    def locate(self, index: int) -> tuple[int, int, int]:
        """`(record_id, begin, end)` of an example; token 0 is the eos before the first document."""
        record_id = int(np.searchsorted(self._example_ends, index, side="right"))
        piece = index - (int(self._example_ends[record_id - 1]) if record_id else 0)
        begin = (int(self.ends[record_id - 1]) if record_id else 0) + piece * (self.block_size - 1)
        return record_id, begin, min(begin + self.block_size, 1 + int(self.ends[record_id]))

    def contents(self) -> tuple[np.ndarray, np.ndarray]:
        """`(examples, record_ids)`, int64: the record of each example, in the order of the examples."""
        return np.arange(len(self)), np.repeat(np.arange(self.num_records), np.diff(self._example_ends, prepend=0))

    def report(self) -> None:
        """Says in one line how many examples there are and what became of long records."""
        if self.num_tokens_cut:
            long = f"cut there, {self.num_tokens_cut:,} tokens not used (`--split_long true` uses them)"
        else:
            long = "split"
        more = f"; {self.num_long:,} longer than {self.block_size} tokens: {long}" if self.num_long else ""
        logger.info("Records: %s, as %s examples%s", f"{self.num_records:,}", f"{len(self):,}", more)


@runtime_checkable
class HoldsRecords(Protocol):
    """A dataset whose examples are not one record each."""

    def contents(self) -> tuple[np.ndarray, np.ndarray]:
        """`(examples, record_ids)`, int64, in the order of the examples: which records each of them holds."""


@runtime_checkable
class HasFingerprint(Protocol):
    """A dataset that can tell, in another process too, whether its examples are the same."""

    def fingerprint(self) -> str:
        """Hexadecimal digits that stand for the examples and their order."""


class RecordExamples(Dataset):
    """Tokenised records in memory (4 bytes a token), by index: `{"input_ids": [T] int64, "record_ids": [] int64}`.

    Args:
        max_tokens: keeps the first records, so that they have no more tokens than this (eos included).

    Raises:
        ValueError: the tokenizer has no eos, or `max_tokens` is less than the first record.
    """

    def __init__(
        self,
        records: IndexedTextDataset,
        tokenizer: PreTrainedTokenizerBase,
        block_size: int,
        *,
        split_long: bool = False,
        max_tokens: int | None = None,
    ) -> None:
        eos, ends = document_start_id(tokenizer), array("q")
        tokens = array("i", [eos])
        for _, token_lists in encode(tokenizer, records.texts):
            for token_ids in token_lists:
                tokens.extend([*token_ids, eos])
                ends.append(len(tokens) - 1)
        kept = np.frombuffer(ends, dtype=np.int64)
        if max_tokens is not None:
            kept = kept[kept <= max_tokens]
        if not len(kept):
            raise ValueError(
                f"`max_tokens` is {max_tokens}, and the first record has {ends[0]} tokens. Raise `--max_tokens`."
            )
        self.tokens = np.frombuffer(tokens, dtype=np.int32)[: 1 + kept[-1]]
        self.cuts = RecordCuts(kept, block_size, split_long=split_long)

    def __len__(self) -> int:
        return len(self.cuts)

    def contents(self) -> tuple[np.ndarray, np.ndarray]:
        return self.cuts.contents()

    def fingerprint(self) -> str:
        return fingerprint(fingerprint_of_arrays([self.tokens, self.cuts.ends]), self.cuts.block_size, len(self))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self.cuts):
            raise IndexError(f"Examples are 0 to {len(self.cuts) - 1}; {index} is outside of the dataset.")
        record_id, begin, end = self.cuts.locate(index)
        return numbered({"input_ids": torch.from_numpy(self.tokens[begin:end].astype(np.int64))}, record_id)


class NumberedExamples(Dataset):
    """`(index, example)` of any map-style dataset; an example without `record_ids` is a record of its own."""

    def __init__(self, examples: Dataset) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> tuple[int, dict[str, Tensor]]:
        example = self.examples[index]
        return index, example if "record_ids" in example else numbered(example, index)


class CollateNumbered:
    """Collates `NumberedExamples` by `collate`, and adds which record came in which example.

    `record_ids` and `example_ids` ([R] int64): an entry for each record of each example of the batch, in order.
    """

    def __init__(self, collate: Callable) -> None:
        self.collate = collate

    def __call__(self, numbered_examples: Sequence[tuple[int, dict[str, Tensor]]]) -> dict[str, Tensor]:
        record_ids = [example["record_ids"].reshape(-1) for _, example in numbered_examples]
        example_ids = [
            torch.full_like(ids, index) for (index, _), ids in zip(numbered_examples, record_ids, strict=True)
        ]
        batch = self.collate([example for _, example in numbered_examples])
        return {**batch, "record_ids": torch.cat(record_ids), "example_ids": torch.cat(example_ids)}


def numbered(example: dict[str, Tensor], record_id: int) -> dict[str, Tensor]:
    """The example with its `record_ids`, one number that collators stack."""
    return {**example, "record_ids": torch.tensor(record_id)}
