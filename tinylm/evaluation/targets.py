"""Where a model's targets are, so that its head runs there and nowhere else.

Half of a conversation is context. A head of 151,936 tokens over 1,024 positions is 620 MB of fp32 logits, and those
that nobody asks for cost as much as the others. `logits_to_keep` and `shift_labels` are arguments of the library's
causal models: the first names the positions whose logits are wanted, the second holds their labels.

Shapes: B rows of a batch, T tokens, N targets of all rows.
"""

import inspect

from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch.nn import functional
from transformers.trainer_utils import unwrap_peft_model

IGNORED = -100  # the label of a position that is no target, as everywhere in PyTorch and transformers


def target_places(labels: Tensor) -> tuple[Tensor, Tensor]:
    """`(logits_to_keep, shift_labels)` of `labels` `[B, T]`, which are not shifted.

    `logits_to_keep` is true `[B, T]` where the next token is a target; logits are then `[N, V]`. Of one row it is the
    index `[N]` of these places, and logits are `[1, N, V]`. `shift_labels` `[N]` are the targets, row by row.
    """
    shifted = functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    kept = shifted != IGNORED
    return kept[0].nonzero()[:, 0] if len(labels) == 1 else kept, shifted[kept]


def takes_target_places(model: nn.Module) -> bool:
    """Whether the model's forward takes what `target_places` gives. The library's causal models do, and ours.

    Others get the plain way: code that came with a model, models without the argument, and a model whose forward Liger
    has replaced, because that one never holds all logits and cuts them in its own way.
    """
    forward = inspect.unwrap(bare_model(model).forward)
    is_known = forward.__module__.startswith(("transformers.", "tinylm."))
    return is_known and "logits_to_keep" in inspect.signature(forward).parameters


def bare_model(model: nn.Module) -> nn.Module:
    """The model itself, without what PEFT, DDP or `torch.compile` have put around it."""
    return unwrap_peft_model(extract_model_from_parallel(model, keep_torch_compile=False))
