"""Writes a prepared corpus (`token_store.py` says how it looks): in parallel, restartable, never half a result.

Choices:
- A part is one shard of the source, or every n-th row of it, and is written by one process. What it holds depends on
  the source, the tokenizer and the settings only, so the number of processes does not change the store.
- A part is written into a folder beside and renamed when it is whole; the manifest comes last. What is there under its
  final name is right, and a run that was killed goes on.
- `unfinished.json` holds what the store is made from while it grows, `manifest.json` afterwards. Neither is ever reused
  for anything else.
"""

import logging
import multiprocessing
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tinylm.data.documents import Source
from tinylm.data.encoding import document_start_id, tokenizer_hash, vocabulary_size
from tinylm.data.splits import FEWEST_DOCUMENTS, training_part, validation_part
from tinylm.data.store_parts import Part, empty_folder, write_json, write_part, writing_to
from tinylm.data.token_store import FORMAT, SPLITS, Counts, TokenStore, read_json

logger = logging.getLogger(__name__)

# For a source of fewer shards. More parts would keep more cores busy, but each of them reads its shard from the start.
_FEWEST_PARTS = 4


def write_store(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    output_dir: str | Path,
    *,
    num_proc: int = 1,
    max_tokens: int | None = None,
    num_shards: int | None = None,
) -> TokenStore:
    """The store of `source` in `output_dir`: written, finished, or reused if it is there.

    Args:
        num_proc: processes that write parts.
        max_tokens: tokens of the training split at most; each part takes an equal share from its beginning.
        num_shards: parts to divide the source into at least; unset: one a shard of the source, or 4.

    Raises:
        ValueError: the folder holds a store of something else, the disk takes no more, or the source is broken.
    """
    folder = Path(output_dir)
    parts = _parts(source, num_shards or max(len(source.shards), _FEWEST_PARTS))
    share = _share(max_tokens, sum(part.split != "validation" for part in parts))
    settings = {
        "format": FORMAT,
        "source": {"description": source.description, "fingerprint": source.fingerprint},
        "tokenizer": {
            "hash": tokenizer_hash(tokenizer),
            "vocab_size": vocabulary_size(tokenizer),
            "eos_token_id": document_start_id(tokenizer),
        },
        "max_tokens": max_tokens,
        "num_parts": len(parts),
    }
    with writing_to(folder):
        if _is_finished(folder, settings):
            logger.info("`%s` is prepared already, from the same source, tokenizer and settings.", folder)
            return TokenStore.open(folder)
        _begin(folder, settings, tokenizer)
    _write_parts(partial(write_part, folder, tokenizer, share), parts, folder, num_proc)
    with writing_to(folder):
        _finish(folder, settings, parts)
    return TokenStore.open(folder)


def _parts(source: Source, num_shards: int) -> list[Part]:
    if sum(1 for _ in islice(source.documents(), FEWEST_DOCUMENTS)) < FEWEST_DOCUMENTS:
        halves = (training_part(source), validation_part(source))
        shards = [(split, shard) for split, half in zip(SPLITS, halves, strict=True) for shard in half.shards]
        return [Part(f"part-{n:05d}", n, shard, 0, 1, split) for n, (split, shard) in enumerate(shards)]
    step = -(-num_shards // len(source.shards))
    rows = [(number, shard, start) for number, shard in enumerate(source.shards) for start in range(step)]
    return [Part(f"part-{n:05d}", number, shard, start, step, None) for n, (number, shard, start) in enumerate(rows)]


def _share(max_tokens: int | None, num_parts: int) -> int | None:
    if max_tokens is not None and max_tokens < num_parts:
        raise ValueError(
            f"`max_tokens` is divided among {num_parts} part(s), but is {max_tokens}. Raise `--max_tokens` or lower "
            "`--num_shards`."
        )
    return None if max_tokens is None else max_tokens // num_parts


# The folder


def _is_finished(folder: Path, settings: dict) -> bool:
    """Whether the whole store is there.

    Raises:
        ValueError: what is there was made from something else, or is no store at all.
    """
    for name in ("manifest.json", "unfinished.json"):
        if (folder / name).exists():
            there = read_json(folder / name)
            differences = _differences(there, settings)
            if differences:
                raise ValueError(
                    f"`{folder}` holds a prepared corpus of something else: {'; '.join(differences)}. Set another "
                    "`--output_dir`, or delete that folder."
                )
            return name == "manifest.json"
    if folder.exists() and any(not path.name.endswith(".partial") for path in folder.iterdir()):
        raise ValueError(f"`{folder}` is not empty and holds no prepared corpus. Set another `--output_dir`.")
    return False


def _differences(there: dict, asked: dict) -> list[str]:
    def words(value: object) -> str:
        return " ".join(f"{name} {part}" for name, part in value.items()) if isinstance(value, dict) else str(value)

    same = {
        "source": there["source"]["fingerprint"] == asked["source"]["fingerprint"],
        **{name: there[name] == asked[name] for name in ("format", "tokenizer", "max_tokens", "num_parts")},
    }
    return [f"its {name} is {words(there[name])}, asked is {words(asked[name])}" for name in same if not same[name]]


def _begin(folder: Path, settings: dict, tokenizer: PreTrainedTokenizerBase) -> None:
    """Makes the folder say what it is, puts the tokenizer in, and takes out what a killed run left half-written."""
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob("part-*.partial"):
        shutil.rmtree(left_over)
    write_json(folder / "unfinished.json", settings)
    if (folder / "tokenizer").exists():
        return
    beside = empty_folder(folder / "tokenizer.partial")
    tokenizer.save_pretrained(beside)
    sentencepiece = Path(tokenizer.name_or_path) / "tokenizer.model"  # not saved with a `tokenizer.json`
    if sentencepiece.exists():
        shutil.copy(sentencepiece, beside)
    beside.rename(folder / "tokenizer")


def _finish(folder: Path, settings: dict, parts: list[Part]) -> None:
    records = [
        {
            "name": part.name,
            "shard": part.shard_number,
            "shard_name": part.shard.name,
            "start": part.start,
            "step": part.step,
            **read_json(folder / part.name / "counts.json"),
        }
        for part in parts
    ]
    splits = {split: _total([record[split] for record in records]) for split in SPLITS}
    write_json(folder / "manifest.json", {**settings, "splits": splits, "parts": records})
    (folder / "unfinished.json").unlink()


def _total(counts: list[Counts]) -> Counts:
    total = {name: sum(count[name] for count in counts) for name in ("documents", "tokens", "bytes")}
    return {**total, "max_id": max(count["max_id"] for count in counts)}


# The parts


def _write_parts(write: Callable[[Part], None], parts: list[Part], folder: Path, num_proc: int) -> None:
    """Writes the parts that are missing, and says so after each.

    Raises:
        ValueError: what a part raised. Parts that others are writing are finished first, and kept.
    """
    missing = [part for part in parts if not (folder / part.name).exists()]
    if len(missing) < len(parts):
        logger.info("%d of %d parts are there already.", len(parts) - len(missing), len(parts))
    finished = len(parts) - len(missing)
    for part in _written(write, missing, min(num_proc, len(missing))):
        finished += 1
        tokens = read_json(folder / part.name / "counts.json")["train"]["tokens"]
        logger.info("Part %d of %d (%s): %d training tokens.", finished, len(parts), part.shard.name, tokens)


def _written(write: Callable[[Part], None], parts: list[Part], num_proc: int) -> Iterator[Part]:
    if num_proc <= 1:
        for part in parts:
            write(part)
            yield part
        return
    # Not fork: readers of the Hub and of Arrow hold threads and locks that do not survive it.
    with ProcessPoolExecutor(num_proc, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(write, part): part for part in parts}
        try:
            for future in as_completed(futures):
                future.result()
                yield futures[future]
        except BrokenProcessPool:
            raise ValueError(
                f"One of the {num_proc} processes died, probably for want of memory. Lower `--num_proc`; the "
                "parts that are finished stay, and the same command goes on with them."
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)
