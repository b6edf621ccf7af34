"""Models and data small enough to prove things on, and an exchange that can be wrong in known ways."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tinylm.ddp.collectives import builtin
from tinylm.ddp.proof import Batch
from tinylm.ddp.synchronizer import broadcast_state


class TinyNet(nn.Module):
    """Tied weights and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.tied = nn.Linear(7, 7)
        self.tied_again = nn.Linear(7, 7)
        self.tied_again.weight = self.tied.weight
        self.register_buffer("scale", torch.rand(7))
        self.last = nn.Linear(7, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.tied_again(self.tied(self.first(inputs).relu()) * self.scale))


class Branches(nn.Module):
    """Four numbers, all one; calling it with "ax" gives a * x, so that the gradients of a and x are one."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abcx":
            self.register_parameter(name, nn.Parameter(torch.ones(1)))

    def forward(self, names: str) -> Tensor:
        first, second = (self.get_parameter(name) for name in names)
        return (first * second).sum()


def rows(rank: int, micro_step: int) -> Batch:
    """Two rows, others for each rank and micro-step."""
    generator = torch.Generator().manual_seed(1000 * micro_step + rank)
    return {"inputs": torch.rand(2, 5, generator=generator)}


def mean_square(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["inputs"]).square().mean()


class PlantedBug:
    """An exchange as short as can be, right if `bug` is empty."""

    def __init__(self, model: nn.Module, bug: str) -> None:
        self.model, self.bug = model, bug
        if bug != "skips the broadcast":
            broadcast_state(model)

    def no_sync(self) -> nullcontext:
        return nullcontext()

    def synchronize(self) -> None:
        for parameter in self.model.parameters():
            target = parameter if self.bug == "reduces the parameter" else parameter.grad
            builtin(target)
            if self.bug != "skips the division":
                target.data /= dist.get_world_size()

    def close(self) -> None:
        pass
