"""The proof that a way of exchanging gradients is right; nothing is timed that has not passed it.

On every rank two models train side by side for a few steps: the replica, on its rank's part of the data and with the
exchange; and a reference that knows no other rank, on the whole batch. Ranks other than 0 spoil their replica's
weights before the exchange gets it, so that only rank 0's, brought over by the exchange, can end equal.
"""

import hashlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tinylm.ddp.traffic import Traffic, observed_traffic

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Rounding:
    """What may differ between a gradient and the reference.

    Args:
        tolerance: the largest difference, as a part of the largest gradient in the same tensor.
        least_scale: the largest gradient of a tensor counts as at least this part of the norm of all gradients: some
            are zero but for rounding, as those of a key's bias are.
    """

    tolerance: float
    least_scale: float


FP32 = Rounding(tolerance=1e-6, least_scale=1.0)  # so of the norm: no single gradient is larger
BF16 = Rounding(tolerance=2**-6, least_scale=1e-5)  # 2**-9 at each rounding, of parts that may cancel in the mean


class Exchange(Protocol):
    """A way to exchange gradients, as `Synchronizer` and `NativeDDP` are."""

    model: nn.Module  # to be called

    def no_sync(self) -> AbstractContextManager[None]: ...

    def synchronize(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Proof:
    """What was seen, the same on all ranks.

    Args:
        world_size: ranks.
        gradient_difference: largest difference of a gradient's element to the reference, over all steps and ranks, as
            a part of the scale that `Rounding` tells; infinite where only one of the two has a gradient, NaN
            where one is.
        tolerance: up to this, the difference is rounding.
        replicas_identical: the parameters and buffers have the same bits on all ranks after the last step.
        traffic: of the last optimizer step; of each count the most that a rank has.
    """

    world_size: int
    gradient_difference: float
    tolerance: float
    replicas_identical: bool
    traffic: Traffic

    @property
    def gradients_equal(self) -> bool:
        return self.gradient_difference <= self.tolerance  # false for NaN

    @property
    def holds(self) -> bool:
        return self.gradients_equal and self.replicas_identical

    def __str__(self) -> str:
        gradients = "equal" if self.gradients_equal else "DIFFER from"
        replicas = "bit-identical" if self.replicas_identical else "NOT IDENTICAL"
        sent = "not observed" if self.traffic.bytes is None else f"{self.traffic.bytes:,}"
        return (
            f"{'proven' if self.holds else 'WRONG'}: gradients {gradients} one process on the whole batch "
            f"({self.gradient_difference:.1e}, at most {self.tolerance:.0e}); replicas {replicas} on {self.world_size} "
            f"ranks; in a step collectives {self.traffic.collectives}, messages {self.traffic.messages}, bytes {sent}"
        )


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The loss as a Hugging Face model computes it."""
    return model(**batch).loss


def prove(
    build_model: Callable[[], nn.Module],
    build_batch: Callable[[int, int], Batch],
    exchange: Callable[[nn.Module], Exchange],
    *,
    compute_loss: Callable[[nn.Module, Batch], Tensor] = loss_of,
    num_steps: int = 4,
    accumulation_steps: int = 1,
    rounding: Rounding = FP32,
) -> Proof:
    """Trains `num_steps` optimizer steps both ways, on all ranks, and compares. A failure is returned, not raised.

    Args:
        build_model: a new model on its device, without dropout; the same at each call for the same torch seed, which is
            set here.
        build_batch: the batch of `(rank, micro_step)`, any rank's on any rank; all have the same number of rows and of
            targets, so that the mean loss over all of them is the mean of their losses.
        exchange: takes the replica.
        compute_loss: mean loss of a model on a batch.
        num_steps: from 4 on the last one is a usual one: DDP and our hooks know the order of the gradients by then.
        accumulation_steps: micro-steps in an optimizer step; all but the last inside `no_sync`.
        rounding: `BF16` for an exchange that sends gradients in bfloat16.

    Raises:
        ValueError: all ranks have the same data, so that a missing exchange would not show.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    reference, model = _seeded(build_model), _seeded(build_model)
    _spoil(model, rank)
    exchanged = exchange(model)
    differences = []
    for step in range(num_steps):
        micro_steps = range(step * accumulation_steps, (step + 1) * accumulation_steps)
        batches = [[build_batch(other, micro_step) for micro_step in micro_steps] for other in range(world_size)]
        _check_different(batches)
        whole = {name: torch.cat([micro[name] for one in batches for micro in one]) for name in batches[0][0]}
        compute_loss(reference, whole).backward()
        with observed_traffic() if step == num_steps - 1 else nullcontext() as traffic:
            _backward(exchanged, batches[rank], compute_loss)
        differences.append(_largest_difference(model, reference, rounding.least_scale))
        _descend(model)
        _descend(reference)
    exchanged.close()
    return _gathered(_largest(differences), rounding.tolerance, _hash(model), traffic)


def _seeded(build_model: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build_model()


@torch.no_grad()
def _spoil(model: nn.Module, rank: int) -> None:
    """Nothing on rank 0; on the others every weight becomes a wrong one."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor += rank


def _check_different(batches: list[list[Batch]]) -> None:
    first, *others = batches
    same = [
        all(torch.equal(one[name], micro[name]) for one, micro in zip(first, other, strict=True) for name in one)
        for other in others
    ]
    if others and all(same):
        raise ValueError("All ranks have the same batch, which hides a missing exchange. Give each rank its own rows.")


def _backward(exchanged: Exchange, batches: list[Batch], compute_loss: Callable[[nn.Module, Batch], Tensor]) -> None:
    """The gradients of one optimizer step, as a training loop makes them."""
    for number, batch in enumerate(batches, start=1):
        with exchanged.no_sync() if number < len(batches) else nullcontext():
            (compute_loss(exchanged.model, batch) / len(batches)).backward()
    exchanged.synchronize()


@torch.no_grad()
def _descend(model: nn.Module) -> None:
    """A step of gradient descent, after which no gradient is left."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter -= 0.01 * parameter.grad
    model.zero_grad()


def _largest_difference(model: nn.Module, reference: nn.Module, least_scale: float) -> float:
    """See `Proof.gradient_difference`."""
    differences, largest, norms = [0.0], [0.0], [0.0]
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        if mine.grad is not None and other.grad is not None:
            differences.append((mine.grad - other.grad).abs().max().item())
            largest.append(other.grad.abs().max().item())
            norms.append(other.grad.norm().item())
        elif mine.grad is not other.grad:
            differences.append(math.inf)
            largest.append(0.0)
    difference, least = torch.tensor(differences), least_scale * torch.tensor(norms).norm()
    parts = difference / torch.tensor(largest).clamp(min=least)
    return _largest(parts.where(difference != 0, 0.0).tolist())


def _largest(numbers: list[float]) -> float:
    """The largest, and NaN where one is: Python's `max` would pass over it."""
    return torch.tensor(numbers).max().item()


def _hash(model: nn.Module) -> str:
    """Of all bits of the parameters and buffers."""
    digest = hashlib.sha256()
    for tensor in (*model.parameters(), *model.buffers()):
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _gathered(difference: float, tolerance: float, state: str, traffic: Traffic) -> Proof:
    """The proof, from what each rank has seen."""
    seen: list[tuple[float, str, Traffic]] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, (difference, state, traffic))
    differences, states, traffics = zip(*seen, strict=True)
    num_bytes = [one.bytes for one in traffics]
    busiest = Traffic(
        collectives=max(one.collectives for one in traffics),
        messages=max(one.messages for one in traffics),
        bytes=None if None in num_bytes else max(num_bytes),
    )
    return Proof(len(seen), _largest(differences), tolerance, len(set(states)) == 1, busiest)
