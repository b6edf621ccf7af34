"""How well a causal language model predicts documents, counted so that the number is the model's and nothing else's.

The choices:
- Targets are text tokens, each of them exactly once, never a special. Every document follows one start token.
- A document longer than the context is read in windows. A window has at least one token before its first target, so
  windows that overlap as little as possible overlap by one token; `stride` makes them overlap more.
- Bytes are those of the raw text: the bytes of its pieces would add up to 30 % more.
- Sums, never means of means: nats in float64 over all batches and ranks, divided once by the number of targets.
- The cross-entropy is taken from the logits, not from the model's own loss, in fp32 whatever the logits are.

Shapes: B rows of a batch, T tokens, V vocabulary, N targets.
"""

import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from tinylm.data.encoding import encode, scoring_start_id
from tinylm.evaluation.targets import IGNORED, takes_target_places, target_places

logger = logging.getLogger(__name__)

_BATCHES_SORTED_AT_ONCE = 64
_SLICE_ELEMENTS = 2**24  # logits that the cross-entropy holds in fp32 at a time: 64 MiB

Row = Mapping[str, Tensor | Sequence[int]]


class LabelledRows(Protocol):
    """Any map-style dataset whose rows hold `input_ids` and what `collate` needs to make `labels`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...


def encode_documents(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> Iterator[tuple[list[int], int]]:
    """`(token_ids, num_bytes)` of each text, for `scoring_rows`; the texts are read as they are needed.

    Reserved strings such as `</s>` in a text are ordinary text, and no special is added. `num_bytes` is the length of
    the raw text in UTF-8; without a start token it leaves out the characters of the first token, which is no target.
    """
    start_id = scoring_start_id(tokenizer)
    for batch, token_lists in encode(tokenizer, texts):
        for text, token_ids in zip(batch, token_lists, strict=True):
            skipped = _end_of_first_token(tokenizer, text) if start_id is None and token_ids else 0
            yield token_ids, len(text[skipped:].encode())


def _end_of_first_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """How many characters of the text its first token reaches over."""
    encoded = tokenizer(
        text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True, verbose=False
    )
    return encoded["offset_mapping"][0][1]


class ScoringRows(Dataset):
    """Windows over documents: `{"input_ids", "labels"}`, int64, at most `context` long, not shifted.

    The documents lie in one array of 4 bytes a token; a window is cut when it is asked for. `num_tokens` counts the
    targets, `num_bytes` and `num_documents` what they came from.
    """

    def __init__(self, token_ids: np.ndarray, windows: np.ndarray, *, num_documents: int, num_bytes: int) -> None:
        """`token_ids` [tokens of all documents]; `windows` [rows, 3]: begin, first target, end in `token_ids`."""
        self._token_ids = token_ids
        self._windows = windows
        self.num_documents = num_documents
        self.num_bytes = num_bytes
        self.num_tokens = int((windows[:, 2] - windows[:, 1]).sum())

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        begin, first_target, end = self._windows[index].tolist()
        input_ids = torch.from_numpy(self._token_ids[begin:end].astype(np.int64))
        labels = input_ids.clone()
        labels[: first_target - begin] = IGNORED
        return {"input_ids": input_ids, "labels": labels}


def scoring_rows(
    documents: Iterable[tuple[Sequence[int], int]], *, context: int, start_id: int | None, stride: int | None = None
) -> ScoringRows:
    """Rows in which every token of every document is a target exactly once.

    `documents` are `(token_ids, num_bytes)`. Each is scored after `start_id`; without one (`None`) its first token is
    context only, and that is said. A document that does not fit into `context` tokens is read in windows of that size,
    each `stride` tokens after the one before; tokens that a window shares with the one before are context there. By
    default, and with a stride of the whole context, a window takes just the last token of the one before as context.

    Raises:
        ValueError: the context holds less than 2 tokens, the stride is not within it, or no document has a target.
    """
    check_windows(context, stride)
    if start_id is None:
        logger.warning("No bos and no eos: the first token of each document and its bytes are left out of the scores.")
    step = min(stride or context, context - 1)
    token_ids, windows = array("i"), array("q")
    num_documents = num_bytes = 0
    for document, document_bytes in documents:
        num_documents += 1
        num_bytes += document_bytes
        begin = len(token_ids)
        if start_id is not None:
            token_ids.append(start_id)
        token_ids.extend(document)
        end, first_target = len(token_ids), begin + 1
        while first_target < end:
            windows.extend((begin, first_target, min(begin + context, end)))
            first_target, begin = begin + context, begin + step
    if not windows:
        raise ValueError(f"Nothing to score: {num_documents} documents have no token to predict. Give files with text.")
    return ScoringRows(
        np.frombuffer(token_ids, dtype=np.int32),
        np.frombuffer(windows, dtype=np.int64).reshape(-1, 3),
        num_documents=num_documents,
        num_bytes=num_bytes,
    )


def check_windows(context: int, stride: int | None) -> None:
    """Raises ValueError for windows that hold no target, or that would leave tokens out."""
    if context < 2:
        raise ValueError(f"Scoring needs a token to predict from and one to predict; the context is {context}.")
    if stride is not None and not 1 <= stride <= context:
        raise ValueError(
            f"Windows must not leave tokens out: the stride is at least 1 and at most the context of {context} tokens, "
            f"not {stride}. Set `--stride {context // 2}` for windows that overlap by half."
        )


def pad_rows(rows: Sequence[Row]) -> dict[str, Tensor]:
    """A batch `[B, T]` of rows made equally long by repeating their last column; the labels there are no targets.

    No `attention_mask`: a causal model never looks ahead, so real positions cannot see what stands to their right. It
    keeps attention on its fast causal path, and packed rows with `position_ids` isolated.
    """
    length = max(len(row["input_ids"]) for row in rows)
    batch = {}
    for name in rows[0].keys() - {"record_ids"}:
        columns = [torch.as_tensor(row[name]) for row in rows]
        fills = [IGNORED if name == "labels" else column[-1].item() for column in columns]
        padded = [functional.pad(c, (0, length - len(c)), value=fill) for c, fill in zip(columns, fills, strict=True)]
        batch[name] = torch.stack(padded)
    return batch


def score(
    model: nn.Module,
    rows: LabelledRows,
    *,
    batch_size: int,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
    collate: Callable[[Sequence[Row]], dict[str, Tensor]] = pad_rows,
    autocast: torch.dtype | None = None,
) -> dict[str, float | int]:
    """`nats_per_token`, `perplexity`, `num_tokens` (targets) and `num_documents` of the model on the rows; with
    `ScoringRows` also `bits_per_byte` and `num_bytes`. Of other rows each is a document: an example of a conversation,
    say, with labels at its answers only. What training calls the loss is the same number.

    The same on every rank and, rounding of the logits aside, for every batch size and number of ranks: row i belongs to
    rank i % world_size, and the sums are added over the ranks (`world_size > 1` needs an initialised group). Every rank
    runs equally many forwards, so that a sharded model is safe; memory is that of one batch's logits, `[N, V]` if the
    model gives only those asked for, else `[B, T, V]`. A nat that is not finite makes the result so, and is counted in
    a warning. The modes of all modules are put back.

    Args:
        batch_size: rows of one forward.
        device: where the model is.
        collate: makes a list of rows a batch that the model takes, with `labels` `[B, T]`.
        autocast: number format of the forward; None computes in that of the weights.

    Raises:
        ValueError: no row has a target.
    """
    sums = torch.zeros(3, dtype=torch.float64)  # nats, targets, targets whose nats are not finite
    autocasting = torch.autocast(device.type, dtype=autocast, enabled=autocast is not None)
    at_targets = takes_target_places(model)
    with evaluation_mode(model), torch.no_grad(), autocasting:
        for taken, counts in _batches(rows, batch_size, rank, world_size):
            batch = {name: column.to(device) for name, column in collate(taken).items()}
            labels = batch.pop("labels")
            batch.pop("record_ids", None)  # of records that are scored as they are trained on
            labels = labels if counts else torch.full_like(labels, IGNORED)
            places, targets = target_places(labels)
            # The logits get no name: one would keep them until the next batch's are there too.
            if at_targets:
                nats = target_nats(model(**batch, use_cache=False, logits_to_keep=places).logits, targets)
            else:
                nats = target_nats(model(**batch, use_cache=False).logits, targets, places)
            nats = nats.cpu().double()
            sums += torch.tensor([nats.sum(), nats.numel(), (~nats.isfinite()).sum()], dtype=torch.float64)
    if world_size > 1:
        shared = sums.to(device)
        dist.all_reduce(shared)
        sums = shared.cpu()
    nats, num_tokens, num_bad = sums[0].item(), int(sums[1]), int(sums[2])
    if num_bad and rank == 0:
        logger.warning("The model's loss is not finite on %d of %d targets.", num_bad, num_tokens)
    return _scores(nats, num_tokens, rows)


def _scores(nats: float, num_tokens: int, rows: LabelledRows) -> dict[str, float | int]:
    from tinylm.evaluation.metrics import BitsPerByte, NatsPerToken, Perplexity  # loads scipy: most of a second

    if num_tokens == 0:
        raise ValueError(f"None of the {len(rows)} rows has a target to score. Give rows with labels other than -100.")
    counted = {"nats": [nats], "num_tokens": [num_tokens]}
    result = {**NatsPerToken().compute(**counted), **Perplexity().compute(**counted), "num_tokens": num_tokens}
    if not isinstance(rows, ScoringRows):
        return {**result, "num_documents": len(rows)}
    assert num_tokens == rows.num_tokens
    result |= BitsPerByte().compute(nats=[nats], num_bytes=[rows.num_bytes])
    return {**result, "num_bytes": rows.num_bytes, "num_documents": rows.num_documents}


def target_nats(logits: Tensor, targets: Tensor, places: Tensor | None = None) -> Tensor:
    """Negative log-likelihoods `[N]`, fp32, of `targets` `[N]`.

    `logits` `[..., N, V]` are those of the targets, or, with `places` as of `target_places`, `[B, T, V]` those of all
    positions. They are taken to fp32 in slices, so that a large vocabulary costs little.
    """
    flat = logits.flatten(0, -2)
    rows = torch.arange(len(flat), device=flat.device)
    if places is not None:
        rows = places.flatten().nonzero()[:, 0] if places.dtype == torch.bool else places
    slices = max(1, _SLICE_ELEMENTS // flat.shape[-1])
    parts = zip(rows.split(slices), targets.split(slices), strict=True)
    return torch.cat([functional.cross_entropy(flat[row].float(), target, reduction="none") for row, target in parts])


def _batches(rows: LabelledRows, batch_size: int, rank: int, world_size: int) -> Iterator[tuple[list[Row], bool]]:
    """This rank's batches, and whether they count: where another rank has one more, the first row makes up for it.

    Rows of like length come together to save padding, within 64 batches, so that a row is read once and then let go.
    """
    mine = range(rank, len(rows), world_size)
    given = 0
    for start in range(0, len(mine), batch_size * _BATCHES_SORTED_AT_ONCE):
        window = [rows[i] for i in mine[start : start + batch_size * _BATCHES_SORTED_AT_ONCE]]
        window.sort(key=lambda row: len(row["input_ids"]), reverse=True)  # the longest first: memory fails early
        for first in range(0, len(window), batch_size):
            yield window[first : first + batch_size], True
            given += 1
    most = len(range(0, len(range(0, len(rows), world_size)), batch_size))
    for _ in range(most - given):
        yield [rows[0]], False


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards each module is as it was, also where only some were training."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
