"""What a run would train on, in words: decoded examples with the trained part marked, and counts. Writes nothing."""

import sys
from itertools import islice

import numpy as np
from transformers import PreTrainedTokenizerBase

from tinylm.data.chat import Examples
from tinylm.data.chat_encoder import IGNORED
from tinylm.data.order import permuted
from tinylm.data.rows import best_fit_decreasing

_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"
_CHARACTERS_SHOWN = 300


def preview_examples(
    tokenizer: PreTrainedTokenizerBase,
    examples: Examples,
    num: int = 1,
    *,
    in_full: bool = False,
    in_colour: bool | None = None,
) -> str:
    """The first `num` examples, and one line on all of them.

    What is trained stands in green, or between ⟦ and ⟧ where there is no colour.

    Args:
        in_full: show long stretches whole, not just their ends.
        in_colour: None: if standard output is a terminal.
    """
    if in_colour is None:
        in_colour = sys.stdout.isatty()
    lines = []
    for number in range(min(num, len(examples))):
        input_ids, labels = (examples[number][name].numpy() for name in ("input_ids", "labels"))
        num_trained = int((labels != IGNORED).sum())
        lines.append(
            f"--- example {number + 1} of {len(examples):,}: {len(labels):,} tokens, {len(labels) - num_trained:,} of"
            f" context and {num_trained:,} trained ({'green' if in_colour else '⟦ ⟧'})"
        )
        lines.append(marked_text(tokenizer, input_ids, labels, in_full=in_full, in_colour=in_colour))
    lines.append(f"--- {examples.counts.in_words()}")
    return "\n".join(lines)


def marked_text(
    tokenizer: PreTrainedTokenizerBase, input_ids: np.ndarray, labels: np.ndarray, *, in_full: bool, in_colour: bool
) -> str:
    """The tokens decoded, special ones too, with the trained stretches marked. `input_ids`, `labels`: [T]."""
    begin, end = (_GREEN, _PLAIN) if in_colour else ("⟦", "⟧")
    trained = labels != IGNORED
    stretches = np.split(np.arange(len(labels)), 1 + np.flatnonzero(np.diff(trained)))
    shown = []
    for places in stretches:
        text = tokenizer.decode(input_ids[places].tolist(), clean_up_tokenization_spaces=False)
        text = text if in_full else _ends(text)
        shown.append(f"{begin}{text}{end}" if trained[places[0]] else text)
    return "".join(shown)


def _ends(text: str) -> str:
    if len(text) <= _CHARACTERS_SHOWN:
        return text
    half = _CHARACTERS_SHOWN // 2
    return f"{text[:half]} [… {len(text) - 2 * half:,} characters …] {text[-half:]}"


def rows_in_words(lengths: np.ndarray, *, row_tokens: int | None, batch_size: int, seed: int) -> str:
    """One line on the rows of an epoch: how full they are when packed, or how much of padded batches is padding.

    Args:
        lengths: tokens of each example.
        row_tokens: of packed rows; None: examples are padded to the longest of their batch.
        batch_size: examples or rows in a batch of one rank.
    """
    num_tokens = int(lengths.sum())
    if row_tokens is not None:
        num_rows = len(best_fit_decreasing(lengths, row_tokens))
        share = num_tokens / (num_rows * row_tokens)
        return (
            f"Packed: {num_rows:,} rows of up to {row_tokens:,} tokens, {share:.0%} full, {batch_size} a batch; nothing"
            " is padded"
        )
    in_order = iter(lengths[permuted(np.arange(len(lengths)), len(lengths), seed, epoch=0)].tolist())
    num_read = 0
    while batch := list(islice(in_order, batch_size)):
        num_read += len(batch) * max(batch)
    return (
        f"Padded: batches of {batch_size} examples, {num_read - num_tokens:,} of {num_read:,} tokens are padding"
        f" ({1 - num_tokens / num_read:.0%})"
    )
