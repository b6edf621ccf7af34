"""Six ways to sum a tensor over all ranks, in place: the backend's own, and five made of simpler operations.

Legend: n ranks, S bytes in the tensor. "Bytes" are what one rank sends. Each function takes a tensor of any size, any
float dtype and any strides, does nothing where there is one rank, and leaves the same bits on every rank, because
every element is summed on one rank only (or by one fixed formula) and copied from there.

`batch_isend_irecv` starts a send and a receive together: two ranks that both sent first and received afterwards would
wait for each other under NCCL.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

SEGMENT_BYTES = 2 << 20  # what a ring step sends at most: long enough to hide the call, short enough for the cache
RINGS_IN_FLIGHT = 4  # rings at work at the same time: one adds up while the others travel

# torch 2.13 renamed the two; the old names warn there.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _on_flat(sum_flat: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """The all-reduce of any tensor, from one of contiguous vectors that are not empty, on two ranks or more."""

    @functools.wraps(sum_flat)
    @torch.no_grad()
    def all_reduce(tensor: Tensor) -> None:
        if dist.get_world_size() == 1 or tensor.numel() == 0:
            return
        flat = tensor.detach().contiguous().view(-1)
        sum_flat(flat)
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))

    return all_reduce


@_on_flat
def builtin(flat: Tensor) -> None:
    """The backend's all-reduce: Gloo's segmented ring; NCCL chooses between rings and trees.

    One call; on Gloo 2(n-1) steps and 2(n-1)/n S bytes, as `ring`, in C++.

        every rank:  [a]  ->  ( Gloo or NCCL )  ->  [a+b+c+d]
    """
    dist.all_reduce(flat)


@_on_flat
def reduce_broadcast(flat: Tensor) -> None:
    """Sum at rank 0, then send the sum to all: two collectives, and a rank that the others wait for.

    Gloo reduces as half a ring, whose parts rank 0 collects, and broadcasts along a tree of log2 n levels: rank 0 sends
    (n-1)/n S + S log2 n bytes (rounded up), the others S, and S more for each rank that they pass the sum on to.

        0 [a] <-+- 1 [b]          0 [abcd] -+-> 1
                +- 2 [c]    then            +-> 2
                +- 3 [d]                    +-> 3
    """
    dist.reduce(flat, dst=0)
    dist.broadcast(flat, src=0)


@_on_flat
def point_to_point(flat: Tensor) -> None:
    """The same by hand, the plainest possible: rank 0 receives from one rank after the other, adds, and answers each.

    2(n-1) messages one after the other, of S bytes each. Rank 0 sends (n-1) S bytes, the others S.

        0 <- 1, 0 <- 2, 0 <- 3, then 0 -> 1, 0 -> 2, 0 -> 3
    """
    if dist.get_rank() != 0:
        dist.send(flat, dst=0)
        dist.recv(flat, src=0)
        return
    received = torch.empty_like(flat)
    for rank in range(1, dist.get_world_size()):
        dist.recv(received, src=rank)
        flat += received
    for rank in range(1, dist.get_world_size()):
        dist.send(flat, dst=rank)


@_on_flat
def reduce_scatter_all_gather(flat: Tensor) -> None:
    """Each rank gets the sum of one n-th (reduce-scatter), then all collect all parts (all-gather).

    Two collectives, each (n-1)/n S bytes where the backend has both. Gloo makes its reduce-scatter from a whole
    all-reduce, and so sends 3(n-1)/n S. A tensor that n does not divide is padded with zeros in a copy.

        0 [a1 a2]  reduce-  0 [a1+b1]  all-     0 [a1+b1 a2+b2]
        1 [b1 b2]  scatter  1 [a2+b2]  gather   1 [a1+b1 a2+b2]
    """
    world_size = dist.get_world_size()
    padding = -flat.numel() % world_size
    padded = torch.nn.functional.pad(flat, (0, padding)) if padding else flat
    part = padded.new_empty(padded.numel() // world_size)
    _reduce_scatter(part, padded)
    _all_gather(padded, part)
    if padding:
        flat.copy_(padded[: flat.numel()])


@_on_flat
def ring(flat: Tensor) -> None:
    """A ring: every rank sends to its right and receives from its left at the same time; no rank is the middle.

    The tensor has n chunks. In n-1 steps each chunk goes once around and collects the sum, in n-1 more the sums go
    around: 2(n-1) steps, a message of S/n each, 2(n-1)/n S bytes, whatever n is: the least that is possible.

        0 [A][ ][ ]    step by step:      0 -A-> 1 -A+-> 2    each arrow at the same time as the others,
        1 [ ][B][ ]                       1 -B-> 2 -B+-> 0    with another chunk
        2 [ ][ ][C]                       2 -C-> 0 -C+-> 1

    A long tensor is many short rings one after the other, a few at work at the same time, so that the additions of
    one overlap with the transfer of the next. Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms
    for clusters of workstations", 2009.
    """
    world_size = dist.get_world_size()
    segment = SEGMENT_BYTES // flat.element_size()
    blocks = flat.split(segment * world_size)
    lanes = range(min(RINGS_IN_FLIGHT, len(blocks)))
    buffers = flat.new_empty(len(lanes), min(segment, -(-flat.numel() // world_size)))
    in_flight = deque()
    for lane in lanes:
        rings = _rings(blocks[lane :: len(lanes)], buffers[lane])
        in_flight.append((rings, next(rings)))
    while in_flight:
        rings, works = in_flight.popleft()
        for work in works:
            work.wait()
        works = next(rings, None)
        if works is not None:
            in_flight.append((rings, works))


def _rings(blocks: Sequence[Tensor], buffer: Tensor) -> Iterator[list[dist.Work]]:
    """One ring after the other; yields what a step has started, and goes on when the caller has waited for it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for block in blocks:
        chunks = block.tensor_split(world_size)
        for step in range(world_size - 1):  # reduce-scatter
            mine, theirs = chunks[(rank - step) % world_size], chunks[(rank - step - 1) % world_size]
            received = buffer[: theirs.numel()]
            yield _exchange(mine, right, received, left)
            theirs += received
        for step in range(world_size - 1):  # all-gather
            done, theirs = chunks[(rank + 1 - step) % world_size], chunks[(rank - step) % world_size]
            yield _exchange(done, right, theirs, left)


@_on_flat
def tree(flat: Tensor) -> None:
    """Recursive halving, then doubling: few steps, for short messages; each exchange is with one partner both ways.

    With a partner at distance n/2, n/4, ... 1 a rank swaps one half of what it still sums for the other: after
    log2 n steps it holds the sum of one n-th, and the way back collects the rest. 2 log2 n messages a rank and
    2(n-1)/n S bytes. Where n is no power of two, the ranks beyond the last one hand their tensor to a partner first
    and get the sum at the end: 2 more steps, S bytes more.

        0 [a1 a2]    1 gets b1' = a2    0 [a1+b1    ]    swap   0 [a1+b1 a2+b2]
        1 [b1 b2]    0 gets a1' = b1    1 [    a2+b2]    back   1 [a1+b1 a2+b2]

    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    power = 1 << (world_size.bit_length() - 1)
    if rank >= power:
        dist.send(flat, dst=rank - power)
        dist.recv(flat, src=rank - power)
        return
    received = torch.empty_like(flat)
    if rank + power < world_size:
        dist.recv(received, src=rank + power)
        flat += received
    part, swaps = flat, []
    distance = power // 2
    while distance:
        low, high = part.tensor_split(2)
        part, given = (high, low) if rank & distance else (low, high)
        _wait(_exchange(given, rank ^ distance, received[: part.numel()], rank ^ distance))
        part += received[: part.numel()]
        swaps.append((part, given, rank ^ distance))
        distance //= 2
    for part, given, partner in reversed(swaps):
        _wait(_exchange(part, partner, given, partner))
    if rank + power < world_size:
        dist.send(flat, dst=rank + power)


def _exchange(outgoing: Tensor, destination: int, incoming: Tensor, source: int) -> list[dist.Work]:
    """Starts a send and a receive; an empty tensor is no message, on either side."""
    operations = []
    if outgoing.numel():
        operations.append(dist.P2POp(dist.isend, outgoing, destination))
    if incoming.numel():
        operations.append(dist.P2POp(dist.irecv, incoming, source))
    return dist.batch_isend_irecv(operations) if operations else []


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


ALGORITHMS: dict[str, Callable[[Tensor], None]] = {
    "builtin": builtin,
    "reduce_broadcast": reduce_broadcast,
    "point_to_point": point_to_point,
    "reduce_scatter_all_gather": reduce_scatter_all_gather,
    "ring": ring,
    "tree": tree,
}


def named_algorithm(name: str) -> Callable[[Tensor], None]:
    """The in-place sum called `name`.

    Raises:
        ValueError: no algorithm has this name.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"There is no all-reduce `{name}`. Set `--algorithm` to one of {', '.join(ALGORITHMS)}.")
    return ALGORITHMS[name]


@torch.no_grad()
def all_reduce_mean(tensor: Tensor, algorithm: str) -> None:
    """The mean of `tensor` over all ranks, in place: summed, then divided (Gloo has no average of its own).

    Raises:
        ValueError: no algorithm has this name.
    """
    named_algorithm(algorithm)(tensor)
    if dist.get_world_size() > 1:
        tensor.div_(dist.get_world_size())
