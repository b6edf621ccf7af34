"""What one collective carries: the gradient of one parameter, or a bucket of many in one flat piece of memory.

The mean is the sum, divided. Where the number of ranks is a power of two, the division only changes exponents, so each
rank can divide before the sum, to the same bits (unless a number leaves the dtype's range): while the gradient is still
in the cache, or in the copy that a bucket needs anyway, instead of in one more pass over all gradients.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


class SingleGradient:
    """One parameter's own `.grad`, sent as it is."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        world_size = dist.get_world_size()
        self.divided_before, self.divided_after = (world_size, 1) if world_size.bit_count() == 1 else (1, world_size)
        self.start_step()

    @property
    def tensor(self) -> Tensor:
        """What is sent."""
        return self.parameters[0].grad

    def start_step(self) -> None:
        self.num_missing = len(self.parameters)
        self.work: dist.Work | None = None

    def take(self, parameter: nn.Parameter) -> None:
        """Makes the gradient one that can be sent; zeros where there is none."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        parameter.grad = parameter.grad.contiguous()
        if self.divided_before > 1:
            parameter.grad /= self.divided_before
        self.num_missing -= 1

    def finish(self) -> None:
        """Waits for the sum, and makes it the mean."""
        if self.work is not None:
            self.work.wait()
        if self.divided_after > 1:
            self.tensor.div_(self.divided_after)


class Bucket(SingleGradient):
    """Gradients that live side by side in one flat tensor, and travel together: one collective instead of many."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters)
        self.flat = parameters[0].new_empty(sum(parameter.numel() for parameter in parameters))
        parts = self.flat.split([parameter.numel() for parameter in parameters])
        self.views = {one: part.view(one.shape) for one, part in zip(parameters, parts, strict=True)}

    @property
    def tensor(self) -> Tensor:
        return self.flat

    def take(self, parameter: nn.Parameter) -> None:
        """Moves the gradient (zeros where there is none) to its place, and makes `.grad` a view of it.

        After `zero_grad()` autograd puts a new tensor into `.grad`: one copy a step. A `.grad` that was kept is the
        view already, and autograd has added to it in place.
        """
        view = self.views[parameter]
        if parameter.grad is None:
            view.zero_()
        else:
            torch.mul(parameter.grad, 1 / self.divided_before, out=view)  # of a power of two: the same bits, sooner
        parameter.grad = view
        self.num_missing -= 1


def fill_buckets(parameters: Iterable[nn.Parameter], bucket_cap_mb: float) -> list[Bucket]:
    """Buckets that are closed as soon as they hold `bucket_cap_mb` MiB, each of one dtype and device.

    The last gradient may overflow its bucket, as in native DDP: fewer collectives than if it went into the next one.
    In the order in which they will be complete, if the gradients arrive in the order of `parameters`.
    """
    buckets: list[list[nn.Parameter]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device)
        bucket = open_buckets.setdefault(kind, [])
        bucket.append(parameter)
        if sum(one.nbytes for one in bucket) >= bucket_cap_mb * 2**20:
            buckets.append(open_buckets.pop(kind))
    return [Bucket(bucket) for bucket in (*buckets, *open_buckets.values())]
