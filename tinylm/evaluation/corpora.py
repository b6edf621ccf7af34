"""Corpora to score models on, each by itself, from the names that a user gives them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tinylm.data.encoding import encode
from tinylm.data.file_formats import is_known
from tinylm.data.sources import Source, open_source
from tinylm.data.splits import validation_part

SPLITS = ("all", "validation")


@dataclass(frozen=True)
class Corpus:
    """Documents under a name."""

    name: str
    texts: Iterable[str]


class Documents:
    """The documents of a source, read again at each iteration."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __iter__(self) -> Iterator[str]:
        return self.source.documents()


def open_places(
    places: Sequence[str],
    *,
    text_column: str = "text",
    dataset_split: str = "train",
    document_separator: str | None = None,
    max_documents: int | None = None,
) -> dict[str, Source]:
    """The source that each word names: `sample`; a file, folder or glob; a dataset of the Hub, as `name`,
    `name:configuration` or `name:configuration:split`. The other arguments are those of `open_source`, for all.

    Raises:
        FileNotFoundError, ValueError: as `open_source`; or a word that is there twice.
    """
    if len(set(places)) < len(places):
        raise ValueError(f"Each corpus is scored once; `{max(places, key=places.count)}` is named twice.")
    shared = {"text_column": text_column, "max_documents": max_documents}
    return {place: _open_place(place, dataset_split, document_separator, shared) for place in places}


def _open_place(
    place: str, dataset_split: str, separator: str | None, shared: Mapping[str, str | int | None]
) -> Source:
    if place != "sample" and _is_local(place):
        return open_source(data_files=[place], document_separator=separator, **shared)
    name, _, rest = place.partition(":")
    configuration, _, split = rest.partition(":")
    return open_source(
        dataset_name=name, dataset_config_name=configuration or None, dataset_split=split or dataset_split, **shared
    )


def _is_local(place: str) -> bool:
    """Whether a word means files: names of the Hub have one slash at most, and no ending that is read."""
    path = Path(place).expanduser()
    looks_local = has_magic(place) or path.is_absolute() or place.startswith(".") or place.count("/") > 1
    return path.exists() or looks_local or is_known(path)


def corpora_of(
    sources: Mapping[str, Source], *, split: str, tokenizer: PreTrainedTokenizerBase, max_eval_tokens: int = 500_000
) -> list[Corpus]:
    """Of each source, by its name, all documents, or those that a run would be validated on.

    Args:
        split: `all` or `validation`.
        tokenizer: counts the tokens that `max_eval_tokens` bounds the validation part by. Models with other tokenizers
            are scored on the same documents.

    Raises:
        ValueError: another split, or a source that is too short to be divided.
    """
    check_split(split)
    if split == "all":
        return [Corpus(name, Documents(source)) for name, source in sources.items()]
    held_out = {name: validation_part(source).documents() for name, source in sources.items()}
    return [Corpus(name, list(first_texts(tokenizer, texts, max_eval_tokens))) for name, texts in held_out.items()]


def check_split(split: str) -> None:
    """Raises ValueError for a split that does not exist."""
    if split not in SPLITS:
        raise ValueError(f"`eval_split` is `all` or `validation`, not `{split}`. Set `--eval_split`.")


def first_texts(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], max_tokens: int) -> Iterator[str]:
    """Whole documents until they have `max_tokens` tokens together; the first one whatever its length."""
    num_tokens = 0
    for batch, token_lists in encode(tokenizer, texts):
        for text, token_ids in zip(batch, token_lists, strict=True):
            num_tokens += len(token_ids)
            if num_tokens > max(max_tokens, len(token_ids)):
                return
            yield text
