"""PyTorch's own DistributedDataParallel, under the same four names as `Synchronizer`."""

from contextlib import AbstractContextManager

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel


class NativeDDP:
    """`model` is the wrapped model, to be called in its place; its backward leaves mean gradients behind.

    Args:
        bf16_hook: gradients travel in bfloat16, half the bytes.
    """

    def __init__(
        self,
        model: nn.Module,
        bucket_cap_mb: float = 25,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
        bf16_hook: bool = False,
    ) -> None:
        self.model = DistributedDataParallel(
            model,
            bucket_cap_mb=bucket_cap_mb,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            find_unused_parameters=find_unused_parameters,
        )
        if bf16_hook:
            self.model.register_comm_hook(None, _send_as_bf16)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.model.no_sync()

    def synchronize(self) -> None:
        """Nothing is left to do: DDP has waited at the end of backward."""

    def close(self) -> None:
        """Nothing to take off: the hooks end with the wrapper."""


def _send_as_bf16(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """torch's own hook: DDP refuses it by its name on all backends but NCCL, and Gloo sums bfloat16 well."""
    return bf16_compress_hook(group, bucket)
