"""What one collective carries: the gradient of one parameter, or a bucket of many in one flat piece of memory."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


class SingleGradient:
    """One parameter's own `.grad`, sent as it is."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameters = [parameter]
        self.num_missing = 1
        self.work: dist.Work | None = None

    @property
    def tensor(self) -> Tensor:
        return self.parameters[0].grad

    def take(self, parameter: nn.Parameter) -> None:
        """Makes the gradient one that can be sent; zeros where there is none."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        parameter.grad = parameter.grad.contiguous()
        self.num_missing -= 1


class Bucket:
    """Gradients that live side by side in one flat tensor, and travel together: one collective instead of many."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.tensor = parameters[0].new_empty(sum(parameter.numel() for parameter in parameters))
        parts = self.tensor.split([parameter.numel() for parameter in parameters])
        self.views = {one: part.view(one.shape) for one, part in zip(parameters, parts, strict=True)}
        self.num_missing = len(parameters)
        self.work: dist.Work | None = None

    def take(self, parameter: nn.Parameter) -> None:
        """Moves the gradient (zeros where there is none) to its place, and makes `.grad` a view of it.

        After `zero_grad()` autograd puts a new tensor into `.grad`: one copy a step. A `.grad` that was kept is the
        view already, and autograd has added to it in place.
        """
        view = self.views[parameter]
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad is not view:
            view.copy_(parameter.grad)
        parameter.grad = view
        self.num_missing -= 1


def fill_buckets(parameters: Iterable[nn.Parameter], bucket_cap_mb: float) -> list[Bucket]:
    """Buckets of at most `bucket_cap_mb` MiB (one larger gradient fills its own), each of one dtype and device.

    In the order in which they will be complete, if the gradients arrive in the order of `parameters`.
    """
    buckets: list[list[nn.Parameter]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device)
        bucket = open_buckets.setdefault(kind, [])
        if bucket and sum(one.nbytes for one in bucket) + parameter.nbytes > bucket_cap_mb * 2**20:
            buckets.append(bucket)
            bucket = open_buckets[kind] = []
        bucket.append(parameter)
    return [Bucket(bucket) for bucket in (*buckets, *open_buckets.values())]
