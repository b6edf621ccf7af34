"""All checks of this folder that need ranks, in one launch for each number of them."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from tests.distributed import run_on_ranks

WORLD_SIZES = pytest.mark.parametrize(
    "world_size", [1, 2, 3, *(pytest.param(many, marks=pytest.mark.slow) for many in (4, 5))]
)


def results_on(world_size: int) -> dict[str, list]:
    """For each check what it returned on each rank.

    Raises:
        AssertionError: a check failed on a rank; again for each test that asks, without another launch.
    """
    results = _launched(world_size)
    if isinstance(results, AssertionError):
        raise results
    return {name: [of_rank[name] for of_rank in results] for name in results[0]}


@functools.cache
def _launched(world_size: int) -> list[dict[str, object]] | AssertionError:
    if world_size == 1:
        with group_of_one():
            return [all_checks(0, 1, {})]
    try:
        return run_on_ranks("tests.ddp.ranks", "all_checks", world_size)
    except AssertionError as error:
        return error


@contextmanager
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def all_checks(rank: int, world_size: int, payload: dict) -> dict[str, object]:
    from tests.ddp import test_collectives, test_proof, test_synchronizer

    assert dist.get_world_size() == world_size
    checks: list[Callable[[int, int], object]] = [*test_collectives.ON_RANKS, *test_proof.ON_RANKS]
    if world_size == 3:  # an odd number: two ranks can agree against one
        checks += test_synchronizer.ON_RANKS
    return {check.__name__: check(rank, world_size) for check in checks}
