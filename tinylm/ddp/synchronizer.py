"""Data parallelism around an ordinary training loop: every rank ends backward with the mean of all ranks' gradients.

    synchronizer = Synchronizer(model, algorithm="builtin", mode="hooks")
    for batch in batches:
        model(**batch).loss.backward()
        synchronizer.synchronize()
        optimizer.step()
        optimizer.zero_grad()

Three modes. `no_hooks`: all gradients are exchanged in `synchronize()`, one collective each. `hooks`: a gradient is
exchanged as soon as backward has made it; with `builtin` this goes on in the background while backward works on the
next one. `bucketed`: the same, with many gradients in one collective.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from tinylm.ddp.agreement import check_same_on_all_ranks, from_rank_0, new_key
from tinylm.ddp.buckets import SingleGradient, fill_buckets
from tinylm.ddp.collectives import named_algorithm

logger = logging.getLogger(__name__)

MODES = ("no_hooks", "hooks", "bucketed")


class Synchronizer:
    """Keeps the replicas of a model the same: rank 0's state for all at the start, and the mean gradient in each step.

    A parameter that has a gradient on any rank gets the mean on all of them (a rank without one counts as zeros); one
    that has none anywhere keeps `.grad` None on all. Tied parameters are one parameter. Frozen ones are left out.

    All ranks must exchange in the same order, whatever the order in which their gradients are made: a gradient that is
    early waits for its turn. The turns are the reverse of the model's order in the first step, and from then on the
    order in which rank 0's gradients came in that step.

    Args:
        model: the same on every rank but for its values; on its device, before the optimizer has used it.
        algorithm: a name in `ALGORITHMS`. All but `builtin` block: their hooks exchange, but do not overlap.
        mode: one of `MODES`.
        bucket_cap_mb: the MiB at which a bucket is full; only for `bucketed`.

    Raises:
        ValueError: an unknown algorithm or mode, a cap that is not positive, or ranks whose models differ.
    """

    def __init__(
        self, model: nn.Module, algorithm: str = "builtin", mode: str = "hooks", bucket_cap_mb: float = 25
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"There is no mode `{mode}` of exchange. Choose one of {', '.join(MODES)}.")
        if bucket_cap_mb <= 0:
            raise ValueError(f"A bucket must hold something, not {bucket_cap_mb} MiB. Set `--bucket_cap_mb` above 0.")
        self.model = model
        self._sum = named_algorithm(algorithm)
        self._mode, self._bucket_cap_mb = mode, bucket_cap_mb
        self._overlaps = algorithm == "builtin" and mode != "no_hooks"
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._exchanging = dist.get_world_size() > 1
        self._hooks = []
        if not self._exchanging:
            logger.info("There is one rank: nothing is exchanged.")
            return
        check_same_on_all_ranks(model_description(model), "model")
        broadcast_state(model)
        self._absent = AbsentGradients(self._parameters)
        self._form_buckets(self._parameters[::-1])
        self._knows_order = False
        if mode != "no_hooks":
            self._hooks = [one.register_post_accumulate_grad_hook(self._arrived) for one in self._parameters]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients only add up on their rank: for all backwards of an optimizer step but the last."""
        before, self._exchanging = self._exchanging, False
        try:
            yield
        finally:
            self._exchanging = before

    def synchronize(self) -> None:
        """After backward: exchanges what is still to be exchanged, and waits. Inside `no_sync` it does nothing."""
        if not self._exchanging:
            return
        absent = self._absent.announce()
        for parameter in self._parameters:
            if parameter not in self._seen:
                self._bucket_of[parameter].take(parameter)
        while self._num_launched < len(self._buckets):
            self._launch_next()
        for bucket in self._buckets:
            bucket.finish()
        self._absent.remove_where_all_are(absent)
        self._next_step()

    def close(self) -> None:
        """Takes the hooks off the model; its gradients are its own again."""
        for hook in self._hooks:
            hook.remove()

    def _arrived(self, parameter: nn.Parameter) -> None:
        """What autograd calls when it has added to a parameter's `.grad`."""
        if not self._exchanging:
            return
        if parameter in self._seen:
            raise RuntimeError(
                "A gradient was made again while its exchange was under way. Call `synchronize()` after each backward, "
                "or put all backwards of a step but the last into `no_sync()`."
            )
        self._seen[parameter] = None
        self._bucket_of[parameter].take(parameter)
        while self._num_launched < len(self._buckets) and self._buckets[self._num_launched].num_missing == 0:
            self._launch_next()

    def _launch_next(self) -> None:
        """Exchanges the next bucket, or starts to."""
        bucket = self._buckets[self._num_launched]
        self._num_launched += 1
        if self._overlaps:
            bucket.work = dist.all_reduce(bucket.tensor, async_op=True)
        else:
            self._sum(bucket.tensor)

    def _next_step(self) -> None:
        """After the first step with hooks, the order in which rank 0's gradients came is everyone's."""
        if self._knows_order or not self._hooks:
            self._start_step()
            return
        number = {parameter: index for index, parameter in enumerate(self._parameters)}
        seen = " ".join(str(number[parameter]) for parameter in self._seen)
        order = [self._parameters[int(index)] for index in from_rank_0(seen).split()]
        self._form_buckets(list(dict.fromkeys((*order, *self._parameters[::-1]))))
        self._knows_order = True

    def _form_buckets(self, order: list[nn.Parameter]) -> None:
        """Buckets for gradients that arrive in this order. They fill in the next step; `.grad` stays as it is."""
        self._buckets: list[SingleGradient]
        if self._mode == "bucketed":
            self._buckets = [*fill_buckets(order, self._bucket_cap_mb)]
        else:
            self._buckets = [SingleGradient([parameter]) for parameter in order]
        self._bucket_of = {one: bucket for bucket in self._buckets for one in bucket.parameters}
        self._start_step()

    def _start_step(self) -> None:
        for bucket in self._buckets:
            bucket.start_step()
        self._num_launched = 0
        self._seen: dict[nn.Parameter, None] = {}  # a set that keeps the order


class AbsentGradients:
    """Finds the parameters that have a gradient on no rank, without a collective: ranks count them in the store.

    A rank counts before it contributes zeros, and reads after the exchange, so after all have counted. Steps in which
    every parameter has a gradient cost nothing.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._key = new_key("absent")
        self._step = 0
        self._counted: list[str] = []

    def announce(self) -> dict[str, nn.Parameter]:
        """The parameters that have no gradient on this rank, by their keys in the store."""
        self._step += 1
        absent = {
            f"{self._key}/{self._step}/{index}": parameter
            for index, parameter in enumerate(self._parameters)
            if parameter.grad is None
        }
        for key in absent:
            _get_default_store().add(key, 1)
        return absent

    def remove_where_all_are(self, absent: dict[str, nn.Parameter]) -> None:
        """Sets `.grad` back to None where no rank had one."""
        store = _get_default_store()
        for key, parameter in absent.items():
            if store.add(key, 0) == dist.get_world_size():
                parameter.grad = None
        for key in self._counted:  # of an earlier step, which all ranks have left: they took part in this one
            store.delete_key(key)
        self._counted = list(absent)


def model_description(model: nn.Module) -> str:
    """A line for each parameter and buffer: name, shape, dtype, and whether it is trained."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return "\n".join(f"{name} {list(one.shape)} {one.dtype} trained={one.requires_grad}" for name, one in named)


@torch.no_grad()
def broadcast_state(model: nn.Module) -> None:
    """Gives every rank rank 0's parameters and buffers."""
    for tensor in (*model.parameters(), *model.buffers()):
        same = tensor.detach().contiguous()
        dist.broadcast(same, src=0)
        tensor.copy_(same)
