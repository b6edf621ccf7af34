"""A training step whose cost is that of its targets: the head runs on them only, in chunks where their logits are many,
and packed rows are attended to example by example. Loss and gradients are those of the plain way.

| batch | logits |
|---|---|
| every position is a target (pretraining) | all, the plain way: there is nothing to leave out |
| some are masked | those of the targets, `[N, V]` |
| more than 2^24 of them (64 MiB in fp32) | never all at once: chunks, with the gradient made beside the loss |

The plain way stays for models that do not take `logits_to_keep`, for label smoothing, for `torch.compile` (the number
of targets changes at every step) and for Liger's fused loss (`--use_liger_kernel true`, on a GPU), which holds no
logits anyway. Where weights are sharded (FSDP, ZeRO) there are no chunks: a shard of the head cannot be multiplied.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss

from tinylm.evaluation.targets import bare_model, takes_target_places, target_places

from .chunked_head import ChunkedHead, chunked_head
from .segment_attention import attention_by_example


class TargetsOnly:
    """What the Trainer does to the batches of a model, and to the model while it trains.

    Args:
        model: as it came, with PEFT or without.
        has_whole_weights: every rank holds all weights (one process, DDP).
    """

    def __init__(self, model: nn.Module, args: TrainingArguments, *, has_whole_weights: bool) -> None:
        self.model = bare_model(model)
        self.keeps_targets = (
            takes_target_places(model)
            and self.model.loss_function is ForCausalLMLoss
            and not (args.label_smoothing_factor or args.torch_compile or args.use_liger_kernel)
        )
        self.by_example = not args.torch_compile
        self.has_whole_weights = has_whole_weights
        self._head: ChunkedHead | None = None

    @contextmanager
    def while_training(self) -> Iterator[None]:
        """The model with its attention and head for training; afterwards it is as it was."""
        with ExitStack() as changes:
            if self.by_example:
                changes.enter_context(attention_by_example(self.model))
            if self.keeps_targets and self.has_whole_weights:
                self._head = changes.enter_context(chunked_head(self.model))
            yield
        self._head = None

    @contextmanager
    def batch(self, inputs: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """The inputs of one forward, with `logits_to_keep` and `shift_labels` where some positions are no targets."""
        labels = inputs["labels"]
        if not self.keeps_targets or "shift_labels" in inputs or labels[:, 1:].ne(-100).all():
            yield inputs
            return
        places, targets = target_places(labels)
        with nullcontext() if self._head is None else self._head.deferring(len(targets)):
            yield {**inputs, "logits_to_keep": places, "shift_labels": targets}
