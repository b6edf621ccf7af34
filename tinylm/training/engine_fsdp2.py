"""FSDP2: weights, gradients and optimizer are torch's `DTensor`s, each rank holding some rows of every weight."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


class Fsdp2Shards:
    """As `engines.Shards`.

    Args:
        model: after `fully_shard`.
        optimizer: torch's own, over the weights of `model`.
    """

    holds_all_weights = False

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def part(self, name: str) -> Tensor:
        tensor = self._tensor(name)
        if isinstance(tensor, DTensor):
            return tensor.to_local()
        return tensor if dist.get_rank() == 0 else tensor.new_empty(0)

    def whole(self, name: str) -> Tensor:
        return _whole(self._tensor(name))

    @torch.no_grad()
    def put_weights(self, whole: Mapping[str, Tensor]) -> None:
        for name, value in whole.items():
            tensor = self._tensor(name)
            tensor.copy_(_part_of(value, tensor))

    def optimizer_state(self) -> dict[str, object]:
        state = self._optimizer.state_dict()
        each = {index: {key: _whole(value) for key, value in one.items()} for index, one in state["state"].items()}
        return {**state, "state": each}

    def put_optimizer_state(self, state: Mapping[str, object]) -> None:
        each = {
            index: {key: _part_if_like(value, weight) for key, value in state["state"].get(index, {}).items()}
            for index, weight in enumerate(self._weights())
        }
        self._optimizer.load_state_dict({**state, "state": {index: one for index, one in each.items() if one}})

    def _weights(self) -> Iterator[Tensor]:
        for group in self._optimizer.param_groups:
            yield from group["params"]

    def _tensor(self, name: str) -> Tensor:
        module, _, attribute = name.rpartition(".")
        return getattr(self._model.get_submodule(module), attribute).detach()


@contextmanager
def of_its_own_class(model: nn.Module) -> Iterator[None]:
    """`fully_shard` gives a model a class that torch makes; a model that saves its code would save torch's instead."""
    sharded = type(model)
    if isinstance(model, FSDPModule):
        model.__class__ = next(each for each in sharded.__mro__ if not issubclass(each, FSDPModule))
    try:
        yield
    finally:
        model.__class__ = sharded


def _whole(value: object) -> object:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _part_if_like(value: object, weight: Tensor) -> object:
    """This rank's part of a state that is as large as its weight; other states, such as a count of steps, whole."""
    is_like = torch.is_tensor(value) and value.shape == weight.shape
    return _part_of(value, weight).clone() if is_like else value


def _part_of(value: Tensor, like: Tensor) -> Tensor:
    """This rank's part of `value`, which every rank has."""
    value = value.to(like.device, like.dtype)
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
