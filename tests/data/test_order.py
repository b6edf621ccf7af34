import copy
import logging
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinylm.data.order import GlobalBatches, assign_shards, permuted, shuffled, usable_workers

SEEDS = st.integers(0, 2**32 - 1)


@settings(max_examples=60, deadline=None)
@given(length=st.integers(1, 5000), seed=SEEDS, epoch=st.integers(0, 1000))
def test_every_index_has_one_position(length: int, seed: int, epoch: int) -> None:
    assert sorted(permuted(np.arange(length), length, seed, epoch)) == list(range(length))


@settings(max_examples=40, deadline=None)
@given(length=st.integers(1, 10**12), seed=SEEDS, data=st.data())
def test_the_permutation_is_the_same_at_any_position(length: int, seed: int, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, length - 1))
    alone = permuted(np.array([position]), length, seed, 3)
    among_others = permuted(np.array([0, position, length - 1]), length, seed, 3)
    assert 0 <= alone[0] < length
    assert alone[0] == among_others[1]


@pytest.mark.parametrize("length", [53, 64, 1009])
def test_seeds_and_epochs_order_differently(length: int) -> None:
    orders = [permuted(np.arange(length), length, seed, epoch) for seed in (0, 1, 42) for epoch in (0, 1, 2)]
    for number, order in enumerate(orders):
        for other in orders[:number]:
            assert np.mean(order == other) < 0.15  # two random orders share 1 place on average


def test_the_permutation_moves_indices_like_a_random_one() -> None:
    length = 4001
    order = permuted(np.arange(length), length, 7, 0)
    correlation = np.corrcoef(order, np.arange(length))[0, 1]
    assert abs(correlation) < 4 / np.sqrt(length)
    assert np.mean(np.diff(order) == 1) < 0.01


def batches_of_ranks(length: int, world_size: int, accumulation_steps: int, per_rank: int, **settings: int) -> list:
    """For each rank its micro-batches."""
    return [
        list(
            GlobalBatches(
                length,
                per_rank_batch_size=per_rank,
                accumulation_steps=accumulation_steps,
                rank=rank,
                world_size=world_size,
                **settings,
            )
        )
        for rank in range(world_size)
    ]


def steps(ranks: list, accumulation_steps: int) -> list[list[int]]:
    """The indices of each optimizer step, in the order of the ranks."""
    num_steps = len(ranks[0]) // accumulation_steps
    windows = [slice(step * accumulation_steps, (step + 1) * accumulation_steps) for step in range(num_steps)]
    return [[index for rank in ranks for batch in rank[window] for index in batch] for window in windows]


@settings(max_examples=15, deadline=None)
@given(length=st.integers(1, 80), seed=SEEDS)
def test_a_step_sees_the_same_whatever_the_ranks_and_the_accumulation(length: int, seed: int) -> None:
    layouts = [(1, 1, 12), (1, 3, 4), (2, 1, 6), (2, 2, 3), (3, 2, 2), (3, 4, 1), (4, 1, 3), (4, 3, 1)]
    seen = []
    for world_size, accumulation_steps, per_rank in layouts:
        ranks = batches_of_ranks(length, world_size, accumulation_steps, per_rank, seed=seed)
        assert all(len(batch) == per_rank for rank in ranks for batch in rank)
        seen.append(steps(ranks, accumulation_steps))
    assert all(other == seen[0] for other in seen)
    assert len(seen[0]) == -(-length // 12)


@given(length=st.integers(1, 200), world_size=st.integers(1, 4), accumulation_steps=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_an_epoch_repeats_only_what_it_names(length: int, world_size: int, accumulation_steps: int) -> None:
    ranks = batches_of_ranks(length, world_size, accumulation_steps, per_rank=5, seed=1)
    batches = GlobalBatches(
        length, per_rank_batch_size=5, accumulation_steps=accumulation_steps, world_size=world_size, seed=1
    )
    repeated = batches.repeated().tolist()
    seen = Counter(index for rank in ranks for batch in rank for index in batch)
    assert seen == Counter(range(length)) + Counter(repeated)
    assert len(repeated) < batches.global_batch_size
    assert len(batches) == len(ranks[0])


def test_a_run_begins_at_any_step_of_any_epoch() -> None:
    settings = {"per_rank_batch_size": 2, "accumulation_steps": 3, "rank": 1, "world_size": 2, "seed": 5}
    whole, resumed = GlobalBatches(50, **settings), GlobalBatches(50, **settings, start_step=7)
    assert whole.steps_per_epoch == 5
    runs = []
    for batches in (whole, resumed):
        run = []
        for epoch in range(3):
            batches.set_epoch(epoch)
            run += list(batches)
        runs.append(run)
    assert len(runs[0]) == 3 * 5 * 3
    assert runs[1] == runs[0][7 * 3 :]
    assert runs[0][:15] != runs[0][15:30], "epochs have orders of their own"


@given(sizes=st.lists(st.integers(0, 12), min_size=1, max_size=9), num_readers=st.integers(1, 8))
def test_every_row_of_every_shard_has_one_reader(sizes: list[int], num_readers: int) -> None:
    shares = [assign_shards(len(sizes), reader, num_readers) for reader in range(num_readers)]
    rows = Counter(
        (shard, row) for share in shares for shard, start, step in share for row in range(sizes[shard])[start::step]
    )
    assert rows == Counter((shard, row) for shard, size in enumerate(sizes) for row in range(size))
    whole = [sum(step == 1 for _, _, step in share) for share in shares]
    if num_readers > 1:
        assert whole == [len(sizes) // num_readers] * num_readers


def test_readers_leave_shards_alone_that_are_not_theirs() -> None:
    shares = [assign_shards(41, reader, 2) for reader in range(2)]
    assert [len(share) for share in shares] == [21, 21]
    assert {shard for shard, *_ in shares[0]} & {shard for shard, *_ in shares[1]} == {40}


def test_more_workers_than_shards_are_capped_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Case S7."""
    caplog.set_level(logging.INFO, logger="tinylm")
    assert usable_workers(num_shards=4, world_size=2, requested=2) == 2
    assert usable_workers(num_shards=1, world_size=2, requested=0) == 0
    assert not caplog.records
    assert usable_workers(num_shards=1, world_size=1, requested=8) == 1
    [record] = caplog.records
    assert record.getMessage() == "1 of 8 data workers a rank: the source has 1 shard(s) for 1 rank(s)."
    assert usable_workers(num_shards=41, world_size=2, requested=64) == 20


@given(count=st.integers(0, 60), window=st.integers(0, 70), seed=SEEDS)
def test_a_window_loses_and_repeats_nothing(count: int, window: int, seed: int) -> None:
    order = list(shuffled(range(count), window, np.random.default_rng(seed)))
    assert sorted(order) == list(range(count))
    if window <= 1:
        assert order == list(range(count))
    assert all(item <= place + window for place, item in enumerate(order)), "nothing leaves before it has come"


def test_a_window_shuffles() -> None:
    orders = [list(shuffled(range(100), 20, np.random.default_rng(seed))) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != list(range(100))


@pytest.mark.parametrize("stop", [1, 30, 85, 99])
def test_a_window_goes_on_from_its_items_and_its_random_state(stop: int) -> None:
    source, waiting, rng = iter(range(100)), [], np.random.default_rng(3)
    walk = shuffled(source, 20, rng, waiting)
    seen = [next(walk) for _ in range(stop)]
    kept, kept_rng = list(waiting), copy.deepcopy(rng)
    expected = list(walk)
    still_to_come = range(len(seen) + len(kept), 100)
    assert list(shuffled(still_to_come, 20, kept_rng, kept)) == expected
    assert sorted(seen + expected) == list(range(100))
