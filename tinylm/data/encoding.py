"""Documents to token ids, and which tokenizer did it."""

import hashlib
import json
from collections.abc import Iterable, Iterator

from transformers import PreTrainedTokenizerBase

# Documents are encoded in batches of at least so many characters: enough to spread the costs of a call, and little
# enough that the first block does not wait.
_CHARACTERS_AT_ONCE = 100_000


def document_start_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that ends every document in a packed corpus, and so stands before the next one: eos.

    Raises:
        ValueError: the tokenizer has no eos token.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"Documents are separated by the eos token, and the tokenizer {tokenizer.name_or_path!r} has none "
            f"(`eos_token` is None). Choose another one with `--tokenizer_name_or_path`, or set `eos_token` in its "
            f"`tokenizer_config.json`."
        )
    return tokenizer.eos_token_id


def scoring_start_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token after which a document is scored: what the tokenizer puts before a text by itself, else eos, else bos.

    `None` for a tokenizer that has none of them.
    """
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    dressed = tokenizer("a")["input_ids"]
    if dressed[: len(bare)] != bare:
        return dressed[0]
    return tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.bos_token_id


def encode(tokenizer: PreTrainedTokenizerBase, documents: Iterable[str]) -> Iterator[tuple[list[str], list[list[int]]]]:
    """Batches of documents with their token ids, in order; no special tokens are added.

    Strings such as `</s>` inside a document are ordinary text: they do not become the special token.
    """
    documents = iter(documents)
    while batch := _batch(documents):
        encoded = tokenizer(
            batch,
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            verbose=False,  # a document is longer than the context as a rule, and is cut later
        )
        yield batch, encoded["input_ids"]


def _batch(documents: Iterator[str]) -> list[str]:
    batch, num_characters = [], 0
    while num_characters < _CHARACTERS_AT_ONCE and (document := next(documents, None)) is not None:
        batch.append(document)
        num_characters += len(document)
    return batch


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hex SHA-256 of what decides the ids of a text, and of the eos id; a saved and reloaded tokenizer has the same."""
    if tokenizer.is_fast:
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        rules = {name: value for name, value in rules.items() if name not in ("padding", "truncation")}  # of last call
    else:
        rules = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    text = json.dumps([rules, tokenizer.eos_token_id], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest id: `len(tokenizer)`, unless its ids have gaps."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))


def check_tokenizer_matches(model_vocab_size: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that could hand the model an id beyond its embedding.

    A model may have more rows than the tokenizer has tokens: many are padded to a multiple of 64.

    Raises:
        ValueError: the tokenizer has more tokens than the model has rows.
    """
    vocab_size = vocabulary_size(tokenizer)
    if vocab_size > model_vocab_size:
        raise ValueError(
            f"The model's vocabulary must hold every token of the tokenizer: the model has `vocab_size` "
            f"{model_vocab_size}, the tokenizer {tokenizer.name_or_path!r} has {vocab_size} tokens. Give the model "
            f"that `vocab_size` in its `config.json`, or choose its own tokenizer with `--tokenizer_name_or_path`."
        )
