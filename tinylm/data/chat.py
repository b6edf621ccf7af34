"""Rows of conversations to a map-style dataset of examples, through a `datasets` map that remembers its result.

Shapes: T tokens of one example.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import numpy as np
import torch
from datasets import Dataset as Table
from datasets import Features, List, Value
from jinja2 import TemplateError
from torch import Tensor
from torch.utils.data import Dataset

from tinylm.data.chat_encoder import IGNORED, ChatEncoder
from tinylm.data.chat_format import UnstableTemplateError
from tinylm.data.chat_records import BrokenRuleError, conversation_of
from tinylm.data.conversations import ROW_NUMBER, ChatRows
from tinylm.data.documents import fingerprint, fingerprint_of_arrays

logger = logging.getLogger(__name__)

_FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "labels": List(Value("int32")),
        "num_tokens": Value("int32"),
        "num_targets": Value("int32"),
        "num_turns_dropped": Value("int32"),
        "num_tokens_cut": Value("int32"),
        "fault": Value("string"),  # of a bad row; the empty lines of a file have neither a fault nor tokens
    }
)
_COUNTED = ("num_tokens", "num_targets", "num_turns_dropped", "num_tokens_cut", "fault")
_FAULTS_TOLD = 3


class BadRowError(ValueError):
    """A row that is no conversation, with its number and what to do."""


@dataclass
class ExampleCounts:
    """What became of rows: bad ones and those without a target give no example; others may have lost something.

    `max_length` is the encoder's, in tokens.
    """

    max_length: int
    num_rows: int = 0
    num_bad: int = 0
    num_without_target: int = 0
    num_tokens: int = 0
    num_targets: int = 0
    num_shortened: int = 0
    num_turns_dropped: int = 0
    num_cut: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def num_examples(self) -> int:
        return self.num_rows - self.num_bad - self.num_without_target

    def add(self, row: Mapping[str, object]) -> bool:
        """Counts what `encode_row` gave, and says whether it is an example to train on."""
        num_tokens, num_targets, num_turns_dropped, num_tokens_cut, fault = (row[name] for name in _COUNTED)
        if not (num_tokens or fault):
            return False
        self.num_rows += 1
        self.num_bad += bool(fault)
        self.faults += [fault] if fault and len(self.faults) < _FAULTS_TOLD else []
        self.num_without_target += not (fault or num_targets)
        if num_targets:
            self.num_tokens += num_tokens
            self.num_targets += num_targets
            self.num_shortened += num_turns_dropped > 0
            self.num_turns_dropped += num_turns_dropped
            self.num_cut += num_tokens_cut > 0
        return num_targets > 0

    def in_words(self) -> str:
        """One line: examples, tokens, and what was dropped, shortened or cut."""
        of = f" of {self.num_rows:,} rows" if self.num_rows > self.num_examples else ""
        parts = [
            f"{self.num_examples:,} examples{of}, {self.num_tokens:,} tokens, {self.num_targets:,} of them trained"
        ]
        if self.num_without_target:
            parts.append(f"{self.num_without_target:,} rows without a target dropped: {self._no_room}")
        if self.num_bad:
            parts.append(f"{self.num_bad:,} bad rows skipped: {self._told()}")
        if self.num_shortened:
            parts.append(
                f"{self.num_shortened:,} lost {self.num_turns_dropped:,} messages from their front to fit into"
                f" {self.max_length} tokens"
            )
        if self.num_cut:
            parts.append(f"{self.num_cut:,} cut at {self.max_length} tokens")
        return "; ".join(parts)

    def check(self, title: str) -> None:
        """Raises ValueError if no row is left to train on, with why."""
        if self.num_examples:
            return
        reasons = []
        if self.num_without_target:
            reasons.append(f"in {self.num_without_target:,} {self._no_room} (raise `--max_length`)")
        if self.num_bad:
            reasons.append(f"{self.num_bad:,} are bad: {self._told()}")
        raise ValueError(
            f"None of the {self.num_rows:,} rows of {title} has a target to train on"
            f"{': ' if reasons else ''}{'; '.join(reasons)}."
        )

    @property
    def _no_room(self) -> str:
        return f"the prompt leaves no room for an answer in {self.max_length} tokens"

    def _told(self) -> str:
        more = self.num_bad - len(self.faults)
        return "; ".join([*self.faults, f"and {more:,} more"] if more else self.faults)


class Examples(Dataset):
    """Encoded conversations: `{"input_ids": [T], "labels": [T]}`, int64; labels are -100 outside of what is learned.

    `lengths` and `num_targets` (int64, [examples]) say how many tokens an example has and how many are learned;
    `counts` what became of the rows.
    """

    def __init__(self, table: Table, counts: ExampleCounts) -> None:
        self.counts = counts
        self.lengths = np.asarray(table["num_tokens"], dtype=np.int64)
        self.num_targets = np.asarray(table["num_targets"], dtype=np.int64)
        self._table = table.select_columns(["input_ids", "labels"]).with_format("numpy")

    def __len__(self) -> int:
        return len(self._table)

    def fingerprint(self) -> str:
        columns = self._table.with_format("arrow").iter(batch_size=1000)
        ids = (batch[name].combine_chunks().flatten().to_numpy() for batch in columns for name in batch.column_names)
        return fingerprint_of_arrays(chain([self.lengths], ids))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"Examples are 0 to {len(self) - 1}; {index} is outside of the dataset.")
        return {name: torch.from_numpy(ids.astype(np.int64)) for name, ids in self._table[index].items()}


def encode_examples(chat_rows: ChatRows, encoder: ChatEncoder, *, skip_bad_rows: bool = False) -> Examples:
    """All rows, encoded; what became of them is said in one line. The rows of a stream are held in memory.

    The result lies in the cache of `datasets`, and is found there by whoever encodes the same rows in the same way.

    Raises:
        BadRowError: a row breaks a rule, and `skip_bad_rows` is false.
        ValueError: chat data without a chat template, a template that cannot be trained on, no row with a target.
    """
    encode = partial(encode_row, of=chat_rows, encoder=encoder, skip_bad_rows=skip_bad_rows)
    rows = chat_rows.rows
    if isinstance(rows, Table):
        key = fingerprint(rows._fingerprint, chat_rows.shape, encoder.fingerprint, skip_bad_rows)
        table = rows.map(encode, remove_columns=rows.column_names, features=_FEATURES, new_fingerprint=key)
    else:
        encoded = [encode({**row, ROW_NUMBER: number}) for number, row in enumerate(rows, start=1)]
        table = Table.from_list(encoded, features=_FEATURES)
    counts = ExampleCounts(encoder.max_length)
    kept = [index for index, row in enumerate(table.select_columns(list(_COUNTED))) if counts.add(row)]
    counts.check(chat_rows.description)
    logger.info("Examples: %s", counts.in_words())
    return Examples(table.select(kept), counts)


def encode_row(
    row: Mapping[str, object], *, of: ChatRows, encoder: ChatEncoder, skip_bad_rows: bool
) -> dict[str, object]:
    """A row of `of`, with its number, as a row of `_FEATURES`.

    Raises:
        BadRowError: the row breaks a rule, and `skip_bad_rows` is false.
        ValueError: chat data without a chat template, a template that cannot be trained on.
    """
    encoded: Mapping[str, object] = {"input_ids": [], "labels": [], "num_turns_dropped": 0, "num_tokens_cut": 0}
    fault = ""
    try:
        conversation = conversation_of(row, of.shape, is_plain=encoder.is_plain)
        if conversation is not None:
            encoded = encoder.encode_conversation(conversation)
    except UnstableTemplateError as error:
        raise ValueError(f"Row {row[ROW_NUMBER]} of {of.description}: {error}") from error
    except (BrokenRuleError, TemplateError) as error:
        fault = f"row {row[ROW_NUMBER]}: {error}"
        if not skip_bad_rows:
            raise BadRowError(
                f"Row {row[ROW_NUMBER]} of {of.description}: {error}. Mend the row, or drop and count such rows with"
                " `--skip_bad_rows true`."
            ) from error
    labels = np.asarray(encoded["labels"], dtype=np.int64)
    num_targets = int((labels != IGNORED).sum())
    return {**encoded, "num_tokens": len(labels), "num_targets": num_targets, "fault": fault}
