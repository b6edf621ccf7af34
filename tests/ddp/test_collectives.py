"""The all-reduces on 1 to 5 ranks of Gloo: exact sums, the same bits, and as much traffic as they claim."""

import hashlib
import math
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ddp.ranks import WORLD_SIZES, results_on
from tinylm.ddp import collectives
from tinylm.ddp.collectives import ALGORITHMS, all_reduce_mean
from tinylm.ddp.traffic import observed_traffic

SIZES = (0, 1, 2, 7, 1_000_003)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def forgets_the_last_rank(tensor: Tensor) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        tensor.zero_()
    dist.all_reduce(tensor)


def starts_with_its_own(tensor: Tensor) -> None:
    """A right sum, rounded differently on each rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parts = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(parts, tensor.clone())
    tensor.copy_(sum(parts[(rank + distance) % world_size] for distance in range(world_size)))


def integers(size: int | str) -> Tensor:
    """Small enough that every sum of five is exact in every dtype; `strided` is a view with gaps between its rows."""
    return (torch.arange(70).view(10, 7).T % 13)[:, ::2] if size == "strided" else torch.arange(size) % 13


def wrong_sums(rank: int, world_size: int) -> dict[str, list[str]]:
    """The cases in which an algorithm did not give the exact sum."""
    wrong = {}
    for name, algorithm in {**ALGORITHMS, "planted": forgets_the_last_rank}.items():
        wrong[name] = []
        for size in (*SIZES, "strided"):
            for dtype in DTYPES if size in (7, "strided") else DTYPES[:1]:
                tensor = integers(size).to(dtype) + rank
                if size == "strided":
                    tensor = (integers(size).to(dtype).repeat_interleave(2, 1) + rank)[:, ::2]
                    assert not tensor.is_contiguous()
                expected = (integers(size) * world_size + sum(range(world_size))).to(dtype)
                algorithm(tensor)
                if not torch.equal(tensor, expected):
                    wrong[name].append(f"{size} {dtype}")
    return wrong


def wrong_sums_of_many_short_rings(rank: int, world_size: int) -> list[int]:
    """As `wrong_sums`, of tensors that the ring cuts into more blocks than it has at work at a time."""
    with mock.patch.object(collectives, "SEGMENT_BYTES", 64):
        wrong = []
        for size in (16 * world_size * 9, 16 * world_size * 9 + 1, 1009):
            tensor = integers(size).float() + rank
            ALGORITHMS["ring"](tensor)
            if not torch.equal(tensor, integers(size) * world_size + float(sum(range(world_size)))):
                wrong.append(size)
        return wrong


def bits(rank: int, world_size: int) -> dict[str, str]:
    """A hash of the sum of numbers whose sum must be rounded."""
    hashes = {}
    for name, algorithm in {**ALGORITHMS, "planted": starts_with_its_own}.items():
        digest = hashlib.sha256()
        for dtype in (torch.float32, torch.bfloat16):
            tensor = torch.rand(10_007, generator=torch.Generator().manual_seed(rank)).to(dtype)
            algorithm(tensor)
            digest.update(tensor.view(torch.uint8).numpy())
        hashes[name] = digest.hexdigest()
    return hashes


def means(rank: int, world_size: int) -> dict[str, tuple[float, bool]]:
    """The mean of the ranks' numbers, and whether the backend was only ever asked for sums."""
    seen = {}
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        for name in ALGORITHMS:
            tensor = torch.full((3,), float(rank))
            all_reduce_mean(tensor, name)
            asked = [dist.ReduceOp.SUM] if not all_reduce.call_args_list else []
            asked += [call.kwargs.get("op", dist.ReduceOp.SUM) for call in all_reduce.call_args_list]
            seen[name] = (tensor[1].item(), set(asked) == {dist.ReduceOp.SUM})
    return seen


def traffic_of_4_mb(rank: int, world_size: int) -> dict[str, tuple[int, int, float]]:
    """Collectives, messages, and bytes as a part of the tensor's, of this rank."""
    seen = {}
    for name, algorithm in ALGORITHMS.items():
        tensor = torch.ones(1_000_000)
        with observed_traffic() as traffic:
            algorithm(tensor)
        seen[name] = (traffic.collectives, traffic.messages, traffic.bytes / tensor.nbytes)
    return seen


ON_RANKS: list[Callable[[int, int], object]] = [
    wrong_sums,
    wrong_sums_of_many_short_rings,
    bits,
    means,
    traffic_of_4_mb,
]


@WORLD_SIZES
def test_every_rank_ends_with_the_exact_sum(world_size: int) -> None:
    for wrong in results_on(world_size)["wrong_sums"]:
        planted = wrong.pop("planted")
        assert wrong == {name: [] for name in ALGORITHMS}
        assert "7 torch.float32" in planted
    assert results_on(world_size)["wrong_sums_of_many_short_rings"] == [[]] * world_size


@WORLD_SIZES
def test_every_rank_ends_with_the_same_bits(world_size: int) -> None:
    hashes = results_on(world_size)["bits"]
    for name in ALGORITHMS:
        assert len({one[name] for one in hashes}) == 1, name
    if world_size > 2:  # a + b is b + a
        assert len({one["planted"] for one in hashes}) > 1


@WORLD_SIZES
def test_the_mean_is_a_sum_divided_and_never_the_backends_average(world_size: int) -> None:
    for mean in results_on(world_size)["means"]:
        assert mean == {name: ((world_size - 1) / 2, True) for name in ALGORITHMS}


@WORLD_SIZES
def test_the_traffic_is_what_the_docstrings_say(world_size: int) -> None:
    if world_size == 1:
        assert results_on(1)["traffic_of_4_mb"] == [{name: (0, 0, 0.0) for name in ALGORITHMS}]
        return
    least, blocks = 2 * (world_size - 1) / world_size, 4_000_000 // (2 * 2**20 * world_size) + 1
    for rank, seen in enumerate(results_on(world_size)["traffic_of_4_mb"]):
        assert {name: counts[:2] for name, counts in seen.items() if counts[0]} == {
            "builtin": (1, 0),
            "reduce_broadcast": (2, 0),
            "reduce_scatter_all_gather": (2, 0),
        }
        assert seen["builtin"][2] == pytest.approx(least, rel=0.01)
        assert seen["reduce_scatter_all_gather"][2] == pytest.approx(1.5 * least, rel=0.02)
        assert seen["ring"] == (0, 2 * (world_size - 1) * blocks, pytest.approx(least, rel=0.01))
        others = world_size - 1 if rank == 0 else 1
        assert seen["point_to_point"] == (0, others, pytest.approx(others, rel=0.01))
        assert seen["tree"] == (0, *traffic_of_tree(rank, world_size))
        if rank == 0:
            levels = math.ceil(math.log2(world_size))
            assert seen["reduce_broadcast"][2] == pytest.approx(least / 2 + levels, rel=0.01)


def traffic_of_tree(rank: int, world_size: int) -> tuple[int, object]:
    """Messages, and bytes as a part of the tensor's."""
    levels = int(math.log2(world_size))
    if rank >= 2**levels:
        return 1, pytest.approx(1, rel=0.01)
    has_partner = rank + 2**levels < world_size
    return 2 * levels + has_partner, pytest.approx(2 * (1 - 0.5**levels) + has_partner, rel=0.01)


def test_an_unknown_algorithm_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no all-reduce `star`.*`--algorithm` to one of builtin, .*, ring, tree"):
        all_reduce_mean(torch.ones(1), "star")
