"""Models side by side: each is scored on each corpus, on the same documents, and all scores stand in one table.

Everything that can be wrong with any of the models is looked for before the first of them is loaded. Then one model at
a time is in memory. Between tokenizers only `bits_per_byte` compares.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from tinylm.data.encoding import check_tokenizer_matches

from .corpora import Corpus
from .model_and_tokenizer import check_weights, load_checked, tokenizer_of
from .pretrained import is_adapter, pretrained_config
from .scoring import check_windows, encode_documents, score, scoring_rows, scoring_start_id

logger = logging.getLogger(__name__)

Scores = dict[str, str | float | int]
"""`model`, `corpus`, and what `score` gives."""


@dataclass(frozen=True)
class Contestant:
    """A model that is going to be scored; `context` is how many tokens a window of its holds."""

    name: str
    base_model: str | None
    tokenizer: PreTrainedTokenizerBase
    context: int


def contestants(
    names: Sequence[str],
    *,
    base_model: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    block_size: int | None = None,
    stride: int | None = None,
) -> list[Contestant]:
    """Models by their names, looked at and not yet loaded.

    Args:
        names: runs' folders, adapters, merged models, Hub ids, GGUF files.
        base_model: what those of them that are adapters stand on, instead of what they name themselves.
        tokenizer: of all of them; None: each has its own.
        block_size: tokens of a window; None: the context of each.
        stride: tokens from one window to the next, which has to lie within each context.

    Raises:
        FileNotFoundError: no such model.
        ValueError: a model whose files are damaged or pickled, whose context is too small, or whose vocabulary does
            not hold its tokenizer's.
    """
    if len(set(names)) < len(names):
        raise ValueError(f"Each model is scored once; `{max(names, key=names.count)}` is named twice.")
    adapters = {name for name in names if is_adapter(name)}
    if base_model is not None and not adapters:
        raise ValueError(f"Adapters have a base model, and {', '.join(names)} is none. Leave `--base_model` out.")
    settings = {"tokenizer": tokenizer, "block_size": block_size, "stride": stride}
    return [_contestant(name, base_model if name in adapters else None, **settings) for name in names]


def _contestant(
    name: str,
    base_model: str | None,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    block_size: int | None,
    stride: int | None,
) -> Contestant:
    check_weights(name, base_model)
    config = pretrained_config(name, base_model)
    context = scoring_context(config, block_size)
    check_windows(context, stride)
    tokenizer = tokenizer or tokenizer_of(name, base_model)
    check_tokenizer_matches(config.vocab_size, tokenizer)
    return Contestant(name, base_model, tokenizer, context)


def scoring_context(config: PreTrainedConfig, block_size: int | None = None) -> int:
    """`block_size`, or the model's context if it is None.

    Raises:
        ValueError: a window of fewer than 2 tokens or of more than the context, or a model that states none.
    """
    context = getattr(config, "max_position_embeddings", None)
    if block_size is None and context is None:
        raise ValueError(
            f"Documents are read in windows of the context, and a `{config.model_type}` states none in"
            " `max_position_embeddings`. Set `--block_size` to the tokens of a window."
        )
    if block_size is not None and not 2 <= block_size <= (context or block_size):
        raise ValueError(
            f"A window holds at least 2 tokens and at most the model's context of {context}; `block_size` is"
            f" {block_size}. Set `--block_size`, or leave it out."
        )
    return block_size or context


def score_side_by_side(
    models: Sequence[Contestant],
    corpora: Sequence[Corpus],
    *,
    device: torch.device,
    batch_size: int,
    dtype: torch.dtype = torch.float32,
    stride: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    autocast: torch.dtype | None = None,
) -> list[Scores]:
    """The scores of each model on each corpus, model by model; every rank of a group has to call it.

    Args:
        dtype: what the weights are held in; the other arguments are those of `scoring_rows` and `score`.

    Raises:
        FileNotFoundError, ValueError: as `load_checked`; or a corpus has nothing to score.
    """
    results: list[Scores] = []
    for each in models:
        start_id = scoring_start_id(each.tokenizer)
        rows = [
            scoring_rows(
                encode_documents(each.tokenizer, corpus.texts), context=each.context, start_id=start_id, stride=stride
            )
            for corpus in corpora
        ]
        model = load_checked(each.name, each.base_model, dtype=dtype).to(device)
        settings = {"batch_size": batch_size, "device": device, "rank": rank, "world_size": world_size}
        for corpus, of_corpus in zip(corpora, rows, strict=True):
            scores = score(model, of_corpus, autocast=autocast, **settings)
            results.append({"model": each.name, "corpus": corpus.name, **scores})
            if len(models) * len(corpora) > 1:
                logger.info("%s on %s: %.4f bits a byte", each.name, corpus.name, scores["bits_per_byte"])
        del model
    return results
