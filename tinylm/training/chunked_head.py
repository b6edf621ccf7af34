"""The head and its cross-entropy in chunks, for vocabularies whose logits do not fit: 151,936 x 2,000 targets in fp32
are 1.2 GB, and their gradient and softmax as much again.

A chunk's logits live only until its gradient with respect to the hidden states is known, which cross-entropy gives in
closed form: softmax minus one at the target. So the forward pass makes it at once (as Liger's kernel does,
https://arxiv.org/abs/2410.10989), nothing is computed twice, and the backward pass only scales it.

The model's forward stays the library's. While a step `defers`, the head hands its input on and `loss_function`, which
the library's models look up on themselves, applies the weight. The weight is the same Parameter under the same name,
tied or not, and outside a step the head is an ordinary one.

Shapes: N targets, C hidden size, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

MOST_LOGITS = 2**24
"""Logits at once: 64 MiB in fp32."""

# Models whose forward does nothing between the head and the loss; others scale or cap their logits.
_PLAIN_MODEL_TYPES = {"llama", "mistral", "qwen2", "qwen3", "tlm"}


class ChunkedHead(nn.Linear):
    """A head without bias that can leave its product to the loss.

    Args:
        linear: the head whose weight this one shares.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self.train(linear.training)
        self._defers = False

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states if self._defers else super().forward(hidden_states)

    @contextmanager
    def deferring(self, num_targets: int) -> Iterator[None]:
        """Within it, one forward of the model with `shift_labels` `[N]`; in chunks if its logits are many."""
        self._defers = num_targets * self.out_features > MOST_LOGITS
        try:
            yield
        finally:
            self._defers = False

    def loss(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        shift_labels: Tensor | None = None,
        **kwargs: object,
    ) -> Tensor:
        """In the place of the model's `loss_function`; `logits` are hidden states `[..., N, C]` while it defers."""
        if not self._defers:
            return ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, shift_labels=shift_labels, **kwargs)
        nats = SumOfNats.apply(logits.reshape(-1, self.in_features), self.weight, shift_labels)
        return nats / (len(shift_labels) if num_items_in_batch is None else num_items_in_batch)


class SumOfNats(torch.autograd.Function):
    """Sum of the cross-entropies (scalar, fp32) of `hidden_states` `[N, C]` times `weight` `[V, C]` at `targets` `[N]`.

    Products are in the number format of autocast where it is on, all else in fp32.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, hidden_states: Tensor, weight: Tensor, targets: Tensor):
        device = hidden_states.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_states.dtype
        head = weight.to(dtype)
        nats = torch.zeros((), dtype=torch.float32, device=hidden_states.device)
        to_hidden = torch.empty_like(hidden_states, dtype=torch.float32)
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        size = max(MOST_LOGITS // len(weight), 1 if to_weight is None else 256)  # adding up to_weight costs a chunk
        with torch.autocast(device, enabled=False):
            for part, target, gradient in zip(
                *(x.split(size) for x in (hidden_states, targets, to_hidden)), strict=True
            ):
                part = part.to(dtype)
                logits, at = (part @ head.T).float(), target[:, None]
                log_sums = logits.logsumexp(-1, keepdim=True)
                nats += (log_sums - logits.gather(-1, at)).sum()
                errors = logits.sub_(log_sums).exp_()
                errors.scatter_add_(-1, at, errors.new_full(at.shape, -1.0))
                errors = errors.to(dtype)
                gradient.copy_(errors @ head)
                if to_weight is not None:
                    to_weight += errors.T @ part
        ctx.save_for_backward(to_hidden, to_weight)
        ctx.dtypes = hidden_states.dtype, weight.dtype
        return nats

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        to_hidden, to_weight = ctx.saved_tensors
        for_hidden, for_weight = ctx.dtypes
        weights = None if to_weight is None else (to_weight * gradient).to(for_weight)
        return (to_hidden * gradient).to(for_hidden), weights, None


@contextmanager
def chunked_head(model: PreTrainedModel) -> Iterator[ChunkedHead | None]:
    """Within it, the model has a `ChunkedHead`, which is given; None where the head has to stay as it is.

    It stays where it is more than one matrix (a bias, an adapter of its own) or not all of what makes the logits.
    """
    linear = model.get_output_embeddings()
    if type(linear) is not nn.Linear or linear.bias is not None or model.config.model_type not in _PLAIN_MODEL_TYPES:
        yield None
        return
    head = ChunkedHead(linear)
    model.set_output_embeddings(head)
    model.loss_function = head.loss
    try:
        yield head
    finally:
        model.set_output_embeddings(linear)
        del model._loss_function
