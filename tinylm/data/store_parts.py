"""One part of a prepared corpus: written into a folder beside, renamed when it is whole."""

import errno
import json
import os
import shutil
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from tinylm.data.documents import Shard
from tinylm.data.encoding import document_start_id, encode, vocabulary_size
from tinylm.data.splits import is_held_out
from tinylm.data.token_store import SPLITS, Counts, token_dtype

_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR}


@dataclass(frozen=True)
class Part:
    """Rows `start, start + step, ...` of a shard; `split` is None where each document decides by its hash."""

    name: str
    shard_number: int
    shard: Shard
    start: int
    step: int
    split: str | None


def write_part(folder: Path, tokenizer: PreTrainedTokenizerBase, share: int | None, part: Part) -> None:
    """Writes `folder / part.name`, with at most `share` training tokens.

    Raises:
        ValueError: the disk takes no more, or the source is broken.
    """
    dtype = token_dtype(vocabulary_size(tokenizer))
    with writing_to(folder):
        # The process id keeps a worker apart that outlived its run, killed in the middle.
        beside = empty_folder(folder / f"{part.name}-{os.getpid()}.partial")
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, beside, ignore_errors=True)  # a full disk needs the room
        writers = {split: stack.enter_context(_SplitWriter(beside, split, dtype)) for split in SPLITS}
        for split, token_ids, num_bytes, place in _documents(part, tokenizer, share):
            with writing_to(folder):
                writers[split].add(token_ids, num_bytes, place)
        with writing_to(folder):
            write_json(beside / "counts.json", {split: writers[split].finish() for split in SPLITS})
            if not (folder / part.name).exists():
                beside.rename(folder / part.name)


def _documents(
    part: Part, tokenizer: PreTrainedTokenizerBase, share: int | None
) -> Iterator[tuple[str, list[int], int, int]]:
    """`(split, token_ids with eos, num_bytes, place)` until the part or its share of training tokens ends."""
    place, left = part.start, share
    for texts, token_lists in encode(tokenizer, part.shard.read(part.start, part.step)):
        for text, token_ids in zip(texts, token_lists, strict=True):
            split = part.split or ("validation" if is_held_out(text) else "train")
            token_ids, num_bytes = [*token_ids, document_start_id(tokenizer)], len(text.encode())
            if split == "train" and left is not None:
                if left < len(token_ids):
                    kept = token_ids[: left - 1]
                    token_ids = [*kept, document_start_id(tokenizer)]  # the next part begins a document
                    num_bytes = len(tokenizer.decode(kept).encode())  # true but for a cut character
                left -= len(token_ids)
            yield split, token_ids, num_bytes, place
            if left == 0:
                return
            place += part.step


class _SplitWriter:
    """The two files of one split of a part."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype) -> None:
        self.path, self.dtype, self.table, self.max_id = folder / split, dtype, array("q"), -1

    def __enter__(self) -> "_SplitWriter":
        self.file = self.path.with_suffix(".tokens").open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # a full disk has said so already
            self.file.close()

    def add(self, token_ids: list[int], num_bytes: int, place: int) -> None:
        self.file.write(np.array(token_ids, dtype=self.dtype).tobytes())
        self.table.extend((len(token_ids), num_bytes, place))
        self.max_id = max(self.max_id, *token_ids)

    def finish(self) -> Counts:
        """Everything is on the disk when this returns: a rename could otherwise outlive its data in a power cut."""
        self.file.flush()
        os.fsync(self.file.fileno())
        table = np.array(self.table, dtype=np.int64).reshape(-1, 3)
        np.save(self.path.with_suffix(".npy"), table)
        tokens, num_bytes, _ = table.sum(axis=0).tolist()
        return {"documents": len(table), "tokens": tokens, "bytes": num_bytes, "max_id": self.max_id}


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Turns what a disk can refuse into one paragraph for the user."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        raise ValueError(
            f"`{folder}` cannot be written: {error.strerror}. Make room or set another `--output_dir`; the parts that "
            "are finished stay, and the same command goes on with them."
        ) from error


def empty_folder(folder: Path) -> Path:
    """The folder, new."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def write_json(path: Path, value: dict) -> None:
    """Written whole or not at all."""
    beside = path.with_name(f"{path.name}.partial")
    beside.write_text(json.dumps(value, indent=1), encoding="utf-8")
    os.replace(beside, path)
