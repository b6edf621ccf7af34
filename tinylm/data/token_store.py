"""A prepared corpus: token files on disk, read through memory maps.

    folder/manifest.json            what it was made from, and all counts (`prepare.py` writes it last)
    folder/tokenizer/               the tokenizer, so that the folder is enough to train
    folder/part-00000/train.tokens  raw little-endian ids of `doc eos doc eos ...`: uint16 up to a vocabulary of 65,536
    folder/part-00000/train.npy     a row a document: tokens (eos included), bytes of raw text, place in its shard
    ...                             the same for `validation`, and for further parts

Choices: flat files that any tool can map; blocks are a view of the running concatenation and not stored, so
`block_size` stays free. An id beyond the vocabulary is refused here, where it has a name, and not as an `IndexError` in
the embedding.

Shapes: T block size.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TypedDict

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from tinylm.data.documents import fingerprint
from tinylm.data.packing import example
from tinylm.data.records import RecordCuts, numbered

FORMAT = 1
SPLITS = ("train", "validation")
_IDS_CHECKED = 2**20  # of each file when a store is opened: the rest is checked as it is read


class Counts(TypedDict):
    """What a split holds. `max_id` is the largest token id, -1 where there is none."""

    documents: int
    tokens: int
    bytes: int
    max_id: int


def token_dtype(vocab_size: int) -> np.dtype:
    """How ids lie on disk."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def is_store(folder: str | Path) -> bool:
    """Whether the folder holds a prepared corpus, finished or not; its tokenizer is there then."""
    names = ("manifest.json", "unfinished.json")
    return Path(folder, "tokenizer").is_dir() and any(Path(folder, name).exists() for name in names)


def read_json(path: Path) -> dict:
    """Raises `ValueError` where the file is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"`{path}` is damaged: {error}. Delete its folder and run `prepare_corpus.py` again."
        ) from None


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)


@dataclass(frozen=True)
class TokenStore:
    """A checked prepared corpus. `counts` by split; `vocab_size` and `eos_token_id` are its tokenizer's."""

    folder: Path
    description: str
    vocab_size: int
    eos_token_id: int
    counts: dict[str, Counts]
    parts: tuple[str, ...]
    shards: tuple[int, ...]  # of the source, a part each

    @classmethod
    def open(cls, folder: str | Path) -> "TokenStore":
        """The store in `folder`.

        Raises:
            FileNotFoundError: no finished store there.
            ValueError: files are damaged, or hold an id beyond the vocabulary.
        """
        folder = Path(folder)
        if not (folder / "manifest.json").exists():
            if is_store(folder):
                remedy = "it is unfinished. Give the command that began it again: it goes on where it stopped."
            else:
                remedy = "`manifest.json` is missing. Write one with `recipes/prepare_corpus.py`."
            raise FileNotFoundError(f"There is no prepared corpus in `{folder}`: {remedy}")
        manifest = read_json(folder / "manifest.json")
        if manifest["format"] != FORMAT:
            raise ValueError(
                f"`{folder}` has format {manifest['format']}, and this version reads format {FORMAT}. Prepare it again."
            )
        store = cls(
            folder=folder,
            description=f"prepared corpus `{folder}`, from {manifest['source']['description']}",
            vocab_size=manifest["tokenizer"]["vocab_size"],
            eos_token_id=manifest["tokenizer"]["eos_token_id"],
            counts=manifest["splits"],
            parts=tuple(part["name"] for part in manifest["parts"]),
            shards=tuple(part["shard"] for part in manifest["parts"]),
        )
        for part in manifest["parts"]:
            store._check_part(part)
        return store

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / "tokenizer"

    def check_vocabulary(self, model_vocab_size: int) -> None:
        """Refuse a model that has no embedding for some token of the store.

        Raises:
            ValueError: names both sizes.
        """
        if self.vocab_size > model_vocab_size:
            raise ValueError(
                f"The prepared corpus `{self.folder}` was made with a vocabulary of {self.vocab_size} tokens, the "
                f"model has `vocab_size` {model_vocab_size}. Give the model that `vocab_size` in its `config.json`, or "
                "prepare the corpus with the model's tokenizer."
            )

    def tokens(self, split: str) -> list[np.ndarray]:
        """The memory-mapped ids of each part."""
        dtype = token_dtype(self.vocab_size)
        return [_mapped(self.folder / part / f"{split}.tokens", dtype) for part in self.parts]

    def documents(self, split: str) -> list[np.ndarray]:
        """A table (int64, [documents, 3]) for each part: tokens with eos, bytes, place in the shard."""
        return [np.load(self.folder / part / f"{split}.npy") for part in self.parts]

    def validation_documents(self) -> Iterator[tuple[list[int], int]]:
        """`(token_ids without eos, num_bytes)` of the held-out documents, in the source's order."""
        tables, tokens = self.documents("validation"), self.tokens("validation")
        part = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        ends = np.concatenate([np.cumsum(table[:, 0]) for table in tables])
        lengths, num_bytes, places = np.concatenate(tables).T
        for index in np.lexsort((places, np.array(self.shards)[part])):  # parts of one shard interleave
            ids = tokens[part[index]][ends[index] - lengths[index] : ends[index] - 1]
            self.check_ids(ids)
            yield ids.tolist(), int(num_bytes[index])

    def check_ids(self, ids: np.ndarray) -> None:
        """Raises `ValueError` where an id is not in the vocabulary."""
        largest = int(ids.max(initial=0))
        if largest >= self.vocab_size:
            raise ValueError(
                f"The prepared corpus `{self.folder}` holds the token id {largest}, its vocabulary has "
                f"{self.vocab_size} tokens. The files are damaged: delete the folder and run `prepare_corpus.py` again."
            )

    def _check_part(self, part: dict) -> None:
        dtype = token_dtype(self.vocab_size)
        for split in SPLITS:
            path, counts = self.folder / part["name"] / f"{split}.tokens", part[split]
            size = path.stat().st_size if path.exists() else 0
            if size != counts["tokens"] * dtype.itemsize:
                raise ValueError(
                    f"`{path}` must hold {counts['tokens'] * dtype.itemsize} bytes ({counts['tokens']} tokens), and "
                    f"holds {size}. The files are damaged: delete the folder and run `prepare_corpus.py` again."
                )
            self.check_ids(np.array([max(counts["max_id"], 0)]))
            self.check_ids(_mapped(path, dtype)[:_IDS_CHECKED])


class StoreBlocks(Dataset):
    """Examples like those of `PackedStream`, by index: block i is tokens `[i * T, (i + 1) * T)` of all parts in a row.

    With `packing=False`, records like those of `RecordExamples`. `max_tokens` keeps the first tokens only.

    Raises:
        ValueError: fewer tokens than a block.
    """

    def __init__(
        self,
        store: TokenStore,
        block_size: int,
        *,
        split: str = "train",
        max_tokens: int | None = None,
        packing: bool = True,
        split_long: bool = False,
        document_mask: bool = False,
    ) -> None:
        self.store, self.block_size, self.split = store, block_size, split
        self.mask_eos = store.eos_token_id if packing and document_mask else None
        self._tokens: list[np.ndarray] | None = store.tokens(split)
        self.starts = np.array([0, *accumulate(map(len, self._tokens))])
        num_tokens = int(self.starts[-1])
        if max_tokens is not None:
            num_tokens = min(num_tokens, max_tokens)
        self.cuts: RecordCuts | None = None
        self.length = num_tokens // block_size
        if not packing:
            ends = np.cumsum(np.concatenate([table[:, 0] for table in store.documents(split)]))
            ends = ends[ends <= num_tokens]
            self.length = 0
            if len(ends):
                self.cuts = RecordCuts(ends, block_size, split_long=split_long)
                self.length = len(self.cuts)
        if self.length == 0:
            raise ValueError(
                f"The {split} part of `{store.folder}` gives no example: {num_tokens} tokens, and `block_size` is "
                f"{block_size}. Lower `--block_size`, raise `--max_tokens` or prepare more text."
            )

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_tokens": None}  # a pickled memory map is a copy of the file

    def __len__(self) -> int:
        return self.length

    def contents(self) -> tuple[np.ndarray, np.ndarray]:
        """`(examples, record_ids)`, int64: the record of each example; a block is a record of its own."""
        return (np.arange(self.length),) * 2 if self.cuts is None else self.cuts.contents()

    def fingerprint(self) -> str:
        manifest = (self.store.folder / "manifest.json").read_text(encoding="utf-8")
        return fingerprint(manifest, self.split, self.block_size, self.cuts is None, self.length)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        if self.cuts is None:
            begin = index * self.block_size
            return example(self._read(begin, begin + self.block_size), self.mask_eos)
        record_id, begin, end = self.cuts.locate(index)
        ids = self._read(max(0, begin - 1), end - 1)
        if begin == 0:
            ids = np.concatenate([[self.store.eos_token_id], ids])
        return numbered(example(ids, None), record_id)

    def _read(self, begin: int, end: int) -> np.ndarray:
        if self._tokens is None:
            self._tokens = self.store.tokens(self.split)
        pieces = []
        part = int(np.searchsorted(self.starts, begin, side="right")) - 1
        while begin < end:
            offset = begin - self.starts[part]
            pieces.append(self._tokens[part][offset : offset + end - begin])
            begin += len(pieces[-1])
            part += 1
        ids = np.concatenate(pieces)
        self.store.check_ids(ids)
        return ids
