"""What a run's mean loss is made of."""

import json
import math

import torch

from tinylm.training.loss_meter import LossMeter


def window(nats: float, tokens: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A micro-batch of one row with as many targets as `tokens`."""
    rows = torch.zeros(1, tokens + 1, dtype=torch.long)
    return torch.tensor(nats), {"input_ids": rows, "labels": rows}


def test_a_window_that_is_not_finite_is_shown_and_leaves_the_mean_of_the_others():
    meter = LossMeter(torch.device("cpu"))
    losses = []
    for nats, tokens in ((6.0, 3), (math.nan, 7), (math.inf, 5), (10.0, 5)):
        meter.add(*window(nats, tokens))
        losses.append(meter.reduce()["loss"])
    assert losses[0] == losses[3] == 2.0
    assert math.isnan(losses[1]) and math.isinf(losses[2])
    assert meter.mean == 16.0 / 8
    assert meter.total["num_tokens_trained"] == 3 + 7 + 5 + 5, "they were read all the same"
    json.dumps(meter.state(), allow_nan=False)
