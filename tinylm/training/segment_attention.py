"""Attention of packed rows, example by example: the CPU's `sdpa` for training.

The library's `sdpa` attends over a packed row under a mask `[T, T]`, and the CPU's kernel computes all of it: T^2 for
examples that need the sum of their own squares. Here each example is attended to by itself, causally, without a mask.
Measured on SmolLM2's heads (9 of 64, 3 of keys), one row, one layer, forward and backward, one core:

| row | examples | sdpa with mask, bf16 | by example, bf16 | by example, fp32 inside |
|---|---|---|---|---|
| 1,024 | 5 | 139 ms | 76 ms | 42 ms |
| 2,048 | 7 | 586 ms | 187 ms | 132 ms |

The last column is what training uses: the kernel's backward is slower in bf16 than in fp32.

Shapes: B rows, H heads, T tokens, D head size.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

SEGMENTS = "segments"
"""The name of this attention, as `attn_implementation` takes it. It computes what `sdpa` does."""


@contextmanager
def attention_by_example(model: PreTrainedModel) -> Iterator[None]:
    """Within it, a model on the CPU that attends with `sdpa` does so example by example. Others stay as they are."""
    if model.device.type != "cpu" or model.config._attn_implementation != "sdpa":
        yield
        return
    model.set_attn_implementation(SEGMENTS)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_ids: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """`[B, T, H, D]` of `query` `[B, H, T, D]`; an example begins wherever `position_ids` `[B or 1, T]` do not go on.

    The examples are read from the positions at every call, so a recomputed forward sees those of the first.
    Everything that needs a mask (padding, a cache, a window) is left to `sdpa`.
    """
    if attention_mask is not None or position_ids is None or query.shape[2] != key.shape[2]:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, position_ids=position_ids, **kwargs
        )
    batch_size, num_tokens = query.shape[0], query.shape[2]
    lengths = example_lengths(position_ids.expand(batch_size, -1))
    is_packed = len(lengths) > batch_size
    inside = torch.float32 if module.training and value.dtype.itemsize < 4 else value.dtype
    qkv = [states.to(inside) for states in (query, key, value)]
    if is_packed:
        qkv = [states.transpose(0, 1).flatten(1, 2)[None] for states in qkv]  # rows end to end: 1 H B*T D
    with torch.autocast(query.device.type, enabled=False):  # it would take them back to bf16
        attended = [
            scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scaling, is_causal=True, enable_gqa=True)
            for q, k, v in zip(*(states.split(lengths if is_packed else num_tokens, 2) for states in qkv), strict=True)
        ]
    heads = torch.cat(attended, 2).transpose(1, 2)  # 1 B*T H D, or B T H D
    return heads.reshape(batch_size, num_tokens, *heads.shape[2:]).to(value.dtype), None


def example_lengths(position_ids: Tensor) -> list[int]:
    """Tokens of each example of `position_ids` `[B, T]`, row by row; a row's first token always begins one.

    >>> example_lengths(torch.tensor([[0, 1, 2, 0, 1], [3, 4, 0, 0, 1]]))
    [3, 2, 2, 1, 2]
    """
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids.diff(dim=-1) != 1
    places = begins.flatten().nonzero()[:, 0]
    return places.diff(append=places.new_tensor([position_ids.numel()])).tolist()


def segment_mask(
    *,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **kwargs: object,
) -> Tensor | None:
    """No mask for a packed row, which is all that can forbid the causal shortcut here; else `sdpa`'s mask."""
    plain = attention_mask is None and local_size is None and not use_vmap
    if plain and not allow_is_causal_skip and kwargs["q_length"] == kwargs["kv_length"] > 1:
        return None
    return sdpa_mask(
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        use_vmap=use_vmap,
        **kwargs,
    )


AttentionInterface.register(SEGMENTS, segment_attention)
AttentionMaskInterface.register(SEGMENTS, segment_mask)
