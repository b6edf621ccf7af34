"""What the engines of accelerate need from this kit so that a run is the same under each of them.

| engine | launch file | each rank holds |
|---|---|---|
| none, ddp | cpu, mps, cpu_gloo, ddp_nccl, ..._multinode | everything |
| deepspeed (ZeRO-2) | deepspeed_zero2 | all weights; its part of gradients and optimizer |
| deepspeed (ZeRO-3) | deepspeed_zero3 | its part of weights, gradients and optimizer |
| fsdp2 | fsdp2 | its part of weights, gradients and optimizer |

Here are the wrapper-independent parts: names of weights, and files that are checked against them. What differs between
the engines is in `engine_fsdp2.py` and `engine_deepspeed.py`; the Trainer over all of them is in `engine_trainer.py`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from .launch import engine_asked_for, sum_over_ranks


class Shards(Protocol):
    """A model and its optimizer that are spread over the ranks. Every rank has to call each of these."""

    holds_all_weights: bool

    def part(self, name: str) -> Tensor:
        """This rank's part of a weight, as a tensor of numbers that no other rank holds too; it may be empty."""

    def whole(self, name: str) -> Tensor:
        """A weight, in fp32 where it is trained."""

    def put_weights(self, whole: Mapping[str, Tensor]) -> None:
        """Takes the values of these weights, each rank its part."""

    def optimizer_state(self) -> dict[str, object]:
        """What the optimizer of one process would save (`torch.optim.Optimizer.state_dict`)."""

    def put_optimizer_state(self, state: Mapping[str, object]) -> None:
        """Takes what `optimizer_state` gives, each rank its part."""


@contextmanager
def sharding_on_cpus() -> Iterator[None]:
    """Within it an `Accelerator` takes FSDP for a group of CPUs too.

    accelerate 1.15 asks for FSDP only if the group is one of accelerators, and trains plain DDP on CPUs. The sharding
    itself, torch's `fully_shard`, runs on CPUs over Gloo. So the group is announced as one of GPUs while the
    `Accelerator` is made; its device stays the CPU.
    """
    group = PartialState._shared_state
    is_on_cpus = group.get("distributed_type") == DistributedType.MULTI_CPU
    if is_on_cpus and engine_asked_for(dist.get_world_size()) == "fsdp2":
        group["distributed_type"] = DistributedType.MULTI_GPU
    yield


def names_of_weights(model: nn.Module) -> list[str]:
    """What a save of `model` holds, by the names that weights have in it: tied ones once; of an adapter, what is
    trained."""
    once = dict(model.named_parameters())
    if isinstance(model, PeftModel):
        return [name for name, weight in once.items() if weight.requires_grad]
    twice = dict(model.named_parameters(remove_duplicate=False)).keys() - once.keys()
    return [name for name in model.state_dict() if name not in twice]


def as_saved(model: nn.Module, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`whole` by the names that it has in a saved file."""
    if isinstance(model, PeftModel):
        return get_peft_model_state_dict(model, state_dict=dict(whole), save_embedding_layers=False)
    ignored = model._keys_to_ignore_on_save or ()
    return revert_weight_conversion(model, {name: value for name, value in whole.items() if name not in ignored})


def read_weights(model: nn.Module, folder: Path, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """The weights that were saved into `folder`, by the names that they have in `model`.

    Args:
        shapes: of the whole weights.

    Raises:
        ValueError: a weight is missing, or has another shape.
    """
    mine = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    name_of = {id(tensor): name for name, tensor in mine.items()}
    found, read = dict(_tensors_of(model, folder)), {}
    for saved_name, tensor in as_saved(model, mine).items():
        value = found.get(saved_name)
        if value is None or value.shape != tensor.shape:
            there = "is missing" if value is None else f"has the shape {list(value.shape)}"
            raise ValueError(f"`{saved_name}` {there} in `{folder}`, and the model's is {list(tensor.shape)}.")
        read[name_of[id(tensor)]] = value
    return read


def gather(shards: Shards, shapes: Mapping[str, torch.Size], *, keep: bool) -> dict[str, Tensor]:
    """All weights, on the CPU; `{}` where not `keep`. Every rank has to call it.

    Args:
        shapes: of the whole weights.

    Raises:
        RuntimeError: a weight has another shape, or its sum is not that of the ranks' parts.
    """
    kept, sums, parts = {}, [], []
    for name, shape in shapes.items():
        part = shards.part(name)
        parts += [part.double().sum().item(), part.double().abs().sum().item()]
        whole = shards.whole(name)
        if whole.shape != shape:
            raise RuntimeError(f"`{name}` was gathered with the shape {list(whole.shape)}, and it has {list(shape)}")
        sums.append(whole.double().sum().item())
        if keep:
            kept[name] = whole.detach().to("cpu", copy=True)
    parts = sum_over_ranks(parts)
    for name, found, expected, size in zip(shapes, sums, parts[::2], parts[1::2], strict=True):
        # Sums in fp64 of fp32 numbers: what rounding leaves is far below the weight of a single number.
        if abs(found - expected) > 1e-9 * size:
            raise RuntimeError(f"`{name}` was gathered with the sum {found}, and its parts have {expected}")
    return kept


def check_written(model: nn.Module, folder: Path, whole: Mapping[str, Tensor]) -> None:
    """Compares what lies in `folder` with what was gathered.

    Raises:
        RuntimeError: a weight is missing or too many, or has another shape or sum.
    """
    expected = as_saved(model, whole)
    written = dict(_tensors_of(model, folder))
    for name in sorted(expected.keys() | written.keys()):
        sides = [_in_words(tensors.get(name)) for tensors in (written, expected)]
        if sides[0] != sides[1]:
            raise RuntimeError(f"`{name}` was written as {sides[0]}, and was gathered as {sides[1]}")


def _in_words(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{list(tensor.shape)} with the sum {tensor.double().sum().item()}"


def _tensors_of(model: nn.Module, folder: Path) -> Iterator[tuple[str, Tensor]]:
    pattern = "adapter_model*.safetensors" if isinstance(model, PeftModel) else "model*.safetensors"
    for path in sorted(folder.glob(pattern)):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 -- it is no dict
                yield name, file.get_tensor(name)
