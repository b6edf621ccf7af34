"""How much memory a training step will take, from the configuration alone: no weight is read, nothing is computed.

The step is taken with fake tensors (https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html): they have
shapes, dtypes and lives, and no contents. What lives is counted at every operation. So the figure holds for any
architecture, adapter, optimizer and precision, and no formula has to be kept true. It is of one rank, without what the
process takes before there is a model.

On a CPU, freed memory is not given back at once, and its holes fit few tensors: a process takes between what lives at
the peak and the sum of what each part takes at most. Runs were seen at either end; the estimate is the middle.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from tinylm.evaluation.targets import bare_model, takes_target_places
from tinylm.training import segment_attention
from tinylm.training.arguments import RunArguments
from tinylm.training.chunked_head import chunked_head
from tinylm.training.trainer import LanguageModelTrainer

_KERNELS = 22_000_000
"""Bytes that the CPU's kernels and the loop take for themselves: measured with a model of 13,488 parameters."""

PARTS = ("weights", "gradients", "optimizer", "activations", "logits")


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank: the most that each of `PARTS` takes, and the most that the process takes for all (`peak`).

    The peak is less than the sum: when the gradients are all there, the activations are gone.
    """

    parts: dict[str, int]
    peak: int
    num_parameters: int
    num_trainable: int

    def in_words(self) -> str:
        parts = ", ".join(f"{name} {_megabytes(size)}" for name, size in self.parts.items())
        return f"Memory of a rank, estimated: {_megabytes(self.peak)} at the peak ({parts}; not all at once)"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def estimate_memory(
    build: Callable[[], PreTrainedModel], run: RunArguments, *, num_tokens: int, num_targets: int | None = None
) -> MemoryEstimate:
    """The memory of a step of batches `[per_device_train_batch_size, num_tokens]`.

    Args:
        build: makes the model to be trained, with the dtypes of its weights; it is called on the meta device.
        num_targets: of a row, where the other positions are no targets; None: all are.
    """
    with torch.device("meta"):
        model = build().train()
    with FakeTensorMode(), _Living() as living:
        with living.called("weights"):
            _move(model, run.device)
        living.vocabulary = bare_model(model).get_output_embeddings().weight.shape[0]
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        for weight in trained:
            weight.register_post_accumulate_grad_hook(lambda weight: living.rename(weight.grad, "gradients"))
        if run.activation_checkpointing:
            model.activation_checkpointing_enable(run.activation_checkpointing_kwargs)
        optimizer_class, settings = LanguageModelTrainer.get_optimizer_cls_and_kwargs(run, model)
        optimizer = optimizer_class(trained, **settings)
        batch = _batch(model, run, num_tokens, num_targets)
        with living.called("gradients"):  # of a first step, before which the optimizer has no state
            for weight in trained:
                weight.grad = torch.empty_like(weight)
        with living.called("optimizer"):
            optimizer.step()
        if run.gradient_accumulation_steps == 1:  # otherwise the second micro-step finds those of the first
            optimizer.zero_grad(set_to_none=True)
        with nullcontext() if run.torch_compile else _attention_of_training(model):
            _forward_and_backward(model, run, batch)
        with living.called("optimizer"):
            optimizer.step()
        counts = [sum(weight.numel() for weight in weights) for weights in (model.parameters(), trained)]
    parts = {part: living.most[part] for part in PARTS}
    peak = _KERNELS + (living.peak + sum(parts.values())) // 2 if run.device.type == "cpu" else living.peak
    return MemoryEstimate(parts, peak, *counts)


def _move(model: nn.Module, device: torch.device) -> None:
    """Weights and buffers become fake tensors on `device`; those that are shared stay so. (`Module.to` cannot.)"""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in moved:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                    is_weight = isinstance(tensor, nn.Parameter)
                    moved[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_weight else fake
                if tensor is not None:
                    tensors[name] = moved[id(tensor)]


def _batch(model: nn.Module, run: RunArguments, num_tokens: int, num_targets: int | None) -> dict[str, Tensor]:
    """Rows of which a part are targets are joined to one, as packed rows are."""
    size = run.per_device_train_batch_size
    shape = (size, num_tokens) if num_targets is None else (1, size * num_tokens)
    batch = {name: torch.zeros(shape, dtype=torch.int64, device=run.device) for name in ("input_ids", "labels")}
    if num_targets is not None and takes_target_places(model):
        targets = torch.zeros(size * num_targets, dtype=torch.int64, device=run.device)
        batch |= {"logits_to_keep": targets, "shift_labels": targets}
    return batch


@contextmanager
def _attention_of_training(model: nn.Module) -> Iterator[None]:
    """As the Trainer has it. Fake positions cannot be read: a row counts as one example, which takes as much memory."""
    read = segment_attention.example_lengths
    segment_attention.example_lengths = lambda position_ids: [position_ids.shape[1]] * len(position_ids)
    try:
        with segment_attention.attention_by_example(bare_model(model)):
            yield
    finally:
        segment_attention.example_lengths = read


def _forward_and_backward(model: nn.Module, run: RunArguments, batch: dict[str, Tensor]) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(run.precision)
    with (
        chunked_head(bare_model(model)) if "shift_labels" in batch else nullcontext() as head,
        nullcontext() if head is None else head.deferring(len(batch["shift_labels"])),
    ):
        with torch.autocast(run.device.type, dtype) if dtype else nullcontext():
            loss = model(**batch, num_items_in_batch=batch["labels"].numel(), use_cache=False).loss
        loss.backward()


class _Living(TorchDispatchMode):
    """Counts the bytes of all tensors that live, by part; a tensor whose last axis is the vocabulary is logits."""

    def __init__(self) -> None:
        super().__init__()
        self.vocabulary = 0
        self.most: defaultdict[str, int] = defaultdict(int)
        self.peak = 0
        self._now: defaultdict[str, int] = defaultdict(int)
        self._part_of: dict[int, str] = {}
        self._part: str | None = None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return result

    @contextmanager
    def called(self, part: str) -> Iterator[None]:
        """What is made within it belongs to `part`."""
        self._part = part
        yield
        self._part = None

    def rename(self, tensor: Tensor, part: str) -> None:
        storage = tensor.untyped_storage()
        self._count(tensor)
        self._add(self._part_of[id(storage)], -storage.nbytes())
        self._part_of[id(storage)] = part
        self._add(part, storage.nbytes())

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._part_of or tensor.device.type == "meta":
            return
        is_logits = tensor.dim() > 1 and tensor.shape[-1] == self.vocabulary
        self._part_of[key] = self._part or ("logits" if is_logits else "activations")
        size = storage.nbytes()
        self._add(self._part_of[key], size)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._add(self._part_of.pop(key), -size)

    def _add(self, part: str, size: int) -> None:
        self._now[part] += size
        self.most[part] = max(self.most[part], self._now[part])
        self.peak = max(self.peak, sum(self._now.values()))
