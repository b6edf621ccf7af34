"""Exchanging gradients on three ranks: what is equal, what is left alone, when it is sent, and what is refused."""

import logging
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ddp.proving import Branches, TinyNet, mean_square, rows
from tests.ddp.ranks import group_of_one, results_on
from tinylm.ddp.agreement import check_same_on_all_ranks
from tinylm.ddp.buckets import fill_buckets
from tinylm.ddp.synchronizer import MODES, Synchronizer
from tinylm.ddp.traffic import observed_traffic


def state_after_wrapping(rank: int, world_size: int) -> list[float]:
    """All numbers of a model that was another on each rank."""
    torch.manual_seed(rank)
    model = TinyNet()
    model.first.weight.requires_grad_(False)  # frozen weights are sent, too
    Synchronizer(model).close()
    return [number for tensor in model.state_dict().values() for number in tensor.flatten().tolist()]


def under_no_sync(rank: int, world_size: int) -> dict[str, list[float]]:
    """In each mode a gradient after a backward inside `no_sync` that fails at its end, and after one more outside."""
    seen = {}
    for mode in MODES:
        model = TinyNet()
        synchronizer = Synchronizer(model, mode=mode)
        with observed_traffic() as traffic, pytest.raises(ZeroDivisionError), synchronizer.no_sync():
            mean_square(model, rows(rank, 0)).backward()
            synchronizer.synchronize()
            raise ZeroDivisionError
        seen[mode] = [traffic.collectives, model.last.bias.grad[0].item()]
        mean_square(model, rows(rank, 1)).backward()
        synchronizer.synchronize()
        seen[mode].append(model.last.bias.grad[0].item())
        synchronizer.close()
    return seen


def collectives_of_a_step(rank: int, world_size: int) -> dict[str, tuple[int, int]]:
    """In each mode the collectives of an optimizer step of one, and of four micro-steps."""
    seen = {}
    for mode in MODES:
        counts = []
        for micro_steps in (1, 4):
            model = TinyNet()
            synchronizer = Synchronizer(model, mode=mode)
            with observed_traffic() as traffic:
                with synchronizer.no_sync():
                    for micro_step in range(micro_steps - 1):
                        mean_square(model, rows(rank, micro_step)).backward()
                mean_square(model, rows(rank, micro_steps)).backward()
                synchronizer.synchronize()
            counts.append(traffic.collectives)
            synchronizer.close()
        seen[mode] = tuple(counts)
    return seen


def branches_used(rank: int, world_size: int) -> dict[str, list[dict[str, float | None]]]:
    """In each mode, for three steps, the gradients where rank 0 uses a, the others b in the other order, and none c."""
    seen = {}
    for mode in MODES:
        model = Branches()
        synchronizer = Synchronizer(model, mode=mode, bucket_cap_mb=1e-6)
        seen[mode] = []
        for step in range(3):
            (model("ax") if rank == 0 else model("xb")).backward()
            synchronizer.synchronize()
            gradients = {name: one.grad for name, one in model.named_parameters()}
            seen[mode].append({name: None if one is None else one.item() for name, one in gradients.items()})
            model.zero_grad(set_to_none=step == 0)
            model.c.grad = None  # zeroed, it would be one that is there
        synchronizer.close()
    return seen


def sent_before_backward_ends(rank: int, world_size: int) -> dict[str, int]:
    """In each mode the exchanges that were started when the last gradient was not yet made."""
    seen = {}
    for mode in MODES:
        model = TinyNet()
        synchronizer = Synchronizer(model, mode=mode, bucket_cap_mb=1e-4)
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
            counts = []
            model.first.weight.register_hook(lambda _, mock=all_reduce, to=counts: to.append(mock.call_count))
            mean_square(model, rows(rank, 0)).backward()
        [seen[mode]] = counts
        synchronizer.synchronize()
        synchronizer.close()
    return seen


def places_of_gradients(rank: int, world_size: int) -> list[tuple[int, list[str]]]:
    """For some steps, how many pieces of memory hold all gradients of the `bucketed` mode, and their names in order."""
    model = TinyNet()
    synchronizer = Synchronizer(model, mode="bucketed")
    seen = []
    for set_to_none in (True, False, True):
        mean_square(model, rows(rank, 0)).backward()
        synchronizer.synchronize()
        places = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        in_order = sorted(places, key=lambda name: places[name].data_ptr())
        seen.append((len({one.untyped_storage().data_ptr() for one in places.values()}), in_order))
        model.zero_grad(set_to_none=set_to_none)
    synchronizer.close()
    return seen


def strided_and_half_gradients(rank: int, world_size: int) -> dict[str, bool]:
    """In each mode, whether weights with gaps, and of two dtypes, get the mean."""
    seen = {}
    for mode in MODES:
        model = nn.Module()
        model.with_gaps = nn.Parameter(torch.zeros(5, 3).T)
        model.in_bf16 = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        model.in_fp64 = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        synchronizer = Synchronizer(model, mode=mode)
        wanted = torch.arange(15.0).view(3, 5)
        ((model.with_gaps * wanted).sum() + model.in_bf16.sum() + model.in_fp64.sum()).mul(rank).backward()
        synchronizer.synchronize()
        mean = (world_size - 1) / 2
        gradients = (model.with_gaps.grad, model.in_bf16.grad, model.in_fp64.grad)
        seen[mode] = all(
            torch.equal(one, to * mean)
            for one, to in zip(gradients, (wanted, *map(torch.ones_like, gradients[1:])), strict=True)
        )
        synchronizer.close()
    return seen


def refused(rank: int, world_size: int) -> list[str]:
    """What ranks hear that differ in a model's shapes, in a batch's, and that make gradients twice."""
    messages = []
    for wrong in (
        lambda: Synchronizer(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4 + (rank == 1)))),
        lambda: check_same_on_all_ranks(f"input_ids [{rank // 2}, 64]", "batch"),
    ):
        with pytest.raises(ValueError) as caught:
            wrong()
        messages.append(str(caught.value))
    model = TinyNet()
    synchronizer = Synchronizer(model, mode="hooks")
    mean_square(model, rows(rank, 0)).backward()
    with pytest.raises(RuntimeError) as twice:
        mean_square(model, rows(rank, 1)).backward()
    synchronizer.synchronize()
    synchronizer.close()
    mean_square(model, rows(rank, 1)).backward()  # nobody listens any more
    return [*messages, str(twice.value)]


ON_RANKS: list[Callable[[int, int], object]] = [
    state_after_wrapping,
    under_no_sync,
    collectives_of_a_step,
    branches_used,
    sent_before_backward_ends,
    places_of_gradients,
    strided_and_half_gradients,
    refused,
]


def test_all_ranks_start_with_the_weights_and_buffers_of_rank_0() -> None:
    torch.manual_seed(0)
    wanted = [number for tensor in TinyNet().state_dict().values() for number in tensor.flatten().tolist()]
    assert results_on(3)["state_after_wrapping"] == [wanted] * 3


@pytest.mark.parametrize("mode", MODES)
def test_no_sync_sends_nothing_and_ends_with_an_exception_too(mode: str) -> None:
    seen = [result[mode] for result in results_on(3)["under_no_sync"]]
    assert [collectives for collectives, _, _ in seen] == [0, 0, 0]
    assert len({inside for _, inside, _ in seen}) == 3, "this test would prove nothing"
    assert len({after for _, _, after in seen}) == 1


def test_a_step_costs_one_exchange_however_many_micro_steps_it_has_and_tied_weights_are_sent_once() -> None:
    num_parameters = len(list(TinyNet().parameters()))
    assert num_parameters == len(TinyNet().state_dict()) - 2  # a tied weight and a buffer
    for counts in results_on(3)["collectives_of_a_step"]:
        assert counts == {"no_hooks": (num_parameters,) * 2, "hooks": (num_parameters,) * 2, "bucketed": (1, 1)}


@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_that_some_ranks_lack_is_the_mean_and_one_that_all_lack_is_none(mode: str) -> None:
    seen = [result[mode] for result in results_on(3)["branches_used"]]
    expected = {"a": 1 / 3, "b": 2 / 3, "c": None, "x": 1.0}
    for steps in seen:
        assert [{name: one and pytest.approx(one) for name, one in step.items()} for step in steps] == [expected] * 3


def test_hooks_and_buckets_start_while_backward_goes_on() -> None:
    for sent in results_on(3)["sent_before_backward_ends"]:
        assert sent["no_hooks"] == 0
        assert sent["hooks"] > 3
        assert sent["bucketed"] > 1


def test_bucketed_gradients_share_one_piece_of_memory_in_the_order_of_arrival() -> None:
    for first, second, third in results_on(3)["places_of_gradients"]:
        assert first[0] == second[0] == third[0] == 1
        assert second[1] == third[1]
        assert second[1].index("last.weight") < second[1].index("tied.weight") < second[1].index("first.weight")


def test_a_bucket_is_closed_when_it_is_full_and_holds_one_dtype() -> None:
    sizes = (100, 100, 100, 400, 50)
    single = [nn.Parameter(torch.zeros(size)) for size in sizes]
    half = [nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for size in sizes]
    both = [parameter for pair in zip(single, half, strict=True) for parameter in pair]
    with group_of_one():
        filled = [[one.numel() for one in bucket.parameters] for bucket in fill_buckets(both, 800 / 2**20)]
    assert filled == [[100, 100], [100, 400], [100, 100, 100, 400], [50], [50]]


def test_gradients_with_gaps_and_of_several_dtypes_are_exchanged() -> None:
    assert results_on(3)["strided_and_half_gradients"] == [{mode: True for mode in MODES}] * 3


def test_ranks_that_differ_are_told_who_and_where() -> None:
    for model, batch, twice in results_on(3)["refused"]:
        assert "the same model. Different from rank 0: rank 1." in model
        assert "Rank 0 has `1.weight [4, 3] torch.float32 trained=True`, rank 1 has `1.weight [5, 3]" in model
        assert "the same batch. Different from rank 0: rank 2." in batch
        assert "`no_sync()`" in twice


def test_one_rank_says_that_nothing_is_exchanged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tinylm")
    with group_of_one():
        model = TinyNet()
        synchronizer = Synchronizer(model)
        mean_square(model, rows(0, 0)).backward()
        synchronizer.synchronize()
    assert "one rank: nothing is exchanged" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"algorithm": "star"}, "no all-reduce `star`"),
        ({"mode": "hook"}, "no mode `hook` of exchange. Choose one of no_hooks, hooks, bucketed"),
        ({"bucket_cap_mb": 0}, "not 0 MiB. Set `--bucket_cap_mb`"),
    ],
)
def test_wrong_arguments_are_refused_with_the_right_ones(arguments: dict[str, str | int], message: str) -> None:
    with pytest.raises(ValueError, match=message), group_of_one():
        Synchronizer(TinyNet(), **arguments)
