"""What a run has trained on, and at which loss: sums that stay exact over ranks, micro-batches and interruptions."""

import math

import torch
from torch import Tensor

from .launch import gather_over_ranks, sum_over_ranks


class LossMeter:
    """Sums of nats and counts of tokens of this rank since the last `reduce`, and over all ranks since the start."""

    COUNTS = ("num_tokens_read", "num_tokens_not_padding", "num_tokens_trained")

    def __init__(self, device: torch.device) -> None:
        # MPS has no float64; the sum of one logging window fits float32 there.
        self.nats = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        self.window = dict.fromkeys(self.COUNTS, 0)
        self.total = dict.fromkeys(self.COUNTS, 0)
        self.total_nats, self.total_targets = 0.0, 0.0

    def add(self, nats: Tensor, inputs: dict[str, Tensor]) -> None:
        """One micro-batch: its sum of nats (scalar tensor) and its `input_ids`, `labels` [B, T], `attention_mask`."""
        self.nats += nats.to(self.nats.dtype)
        self.window["num_tokens_read"] += inputs["input_ids"].numel()
        mask = inputs.get("attention_mask")
        self.window["num_tokens_not_padding"] += inputs["input_ids"].numel() if mask is None else int(mask.sum())
        self.window["num_tokens_trained"] += count_targets(inputs)

    def reduce(self) -> dict[str, float]:
        """The window's loss over all ranks and the totals so far; starts a new window. Every rank has to call it.

        A window whose sum is not finite, of which a step was skipped, is left out of `mean`, or that would be NaN for
        the rest of the run.
        """
        nats, *counts = sum_over_ranks([self.nats.item(), *self.window.values()])
        if math.isfinite(nats):
            self.total_nats += nats
            self.total_targets += counts[-1]
        for name, count in zip(self.COUNTS, counts, strict=True):
            self.total[name] += int(count)
        self.nats.zero_()
        self.window = dict.fromkeys(self.COUNTS, 0)
        return {"loss": nats / counts[-1] if counts[-1] else float("nan"), **self.total}

    @property
    def mean(self) -> float:
        """Nats a target over all windows since the run began whose sum is finite."""
        return self.total_nats / self.total_targets if self.total_targets else float("nan")

    def state(self) -> dict[str, object]:
        """All of it as JSON, each rank's window by itself: sums in another order differ in the last bit.

        Every rank has to call it.
        """
        windows = gather_over_ranks([self.nats.item(), *self.window.values()])
        return {"total": self.total, "nats": self.total_nats, "targets": self.total_targets, "windows": windows}

    def restore(self, state: dict[str, object], rank: int, world_size: int) -> None:
        """Goes on from `state`; on another number of ranks, rank 0 takes the windows of all."""
        self.total, self.total_nats, self.total_targets = dict(state["total"]), state["nats"], state["targets"]
        windows = state["windows"]
        if len(windows) != world_size:
            windows = [[sum(column) for column in zip(*windows, strict=True)]] + [[0] * len(windows[0])] * world_size
        nats, *counts = windows[rank]
        self.nats.fill_(nats)
        self.window = {name: int(count) for name, count in zip(self.COUNTS, counts, strict=True)}


def count_targets(inputs: dict[str, Tensor]) -> int:
    """Real targets of a batch: labels that are not -100, the first position of each row (which is never one) aside."""
    if "shift_labels" in inputs:
        return int(inputs["shift_labels"].ne(-100).sum())
    return int(inputs["labels"][:, 1:].ne(-100).sum())
