"""Sources of a few lines and a tokenizer of bytes, so that what should come out can be worked out by hand."""

from collections.abc import Iterable, Sequence
from functools import partial

from transformers import PreTrainedTokenizerFast

from tests.evaluation.tiny import byte_tokenizer
from tinylm.data.documents import Shard, Source, fingerprint, from_texts

EOS = 256


def tokenizer_with_eos(**settings: object) -> PreTrainedTokenizerFast:
    """256 bytes, and eos as id 256."""
    tokenizer = byte_tokenizer(eos_token="</s>", **settings)
    assert tokenizer.eos_token_id == EOS
    return tokenizer


def source_of(*shards: Sequence[str]) -> Source:
    """A source held in memory."""
    parts = tuple(Shard(f"shard {n}", partial(from_texts, tuple(texts))) for n, texts in enumerate(shards))
    return Source(f"{len(shards)} shards of a test", fingerprint(shards), parts)


def numbered_documents(count: int, length: int = 9, first: int = 0) -> list[str]:
    """Documents of `length` ASCII characters that all differ."""
    return [f"{number:0{length}d}" for number in range(first, first + count)]


def running_text(texts: Iterable[str], tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """`doc eos doc eos ...`, one document at a time."""
    ids = []
    for text in texts:
        ids += [*tokenizer(text, add_special_tokens=False)["input_ids"], EOS]
    return ids
