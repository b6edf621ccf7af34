"""The checks before anything is loaded. Real launches are in tests/recipes/test_pretrain_tlm.py."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_on_ranks
from tinylm.training.launch import RunStopped, check_engine, rank_zero_first, run_recipe, start, sum_over_ranks


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def test_one_process_takes_all_cores_whatever_a_launcher_left(monkeypatch, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    launch = start(torch.device("cpu"))
    assert launch.threads == torch.get_num_threads() == len(os.sched_getaffinity(0))
    assert (launch.world_size, launch.backend, launch.engine) == (1, None, "none")
    assert start(torch.device("cpu"), num_threads=1).threads == torch.get_num_threads() == 1


def test_a_process_alone_that_was_meant_as_one_of_two_is_refused_with_both_sizes(monkeypatch, threads):
    """Case D1."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RunStopped, match=r"asked for 2 processes, and this one is in a group of 1"):
        start(torch.device("cpu"))


@pytest.mark.parametrize(("version", "asked"), [("2", "fsdp2"), ("1", "fsdp")])
def test_an_engine_that_would_not_come_up_is_refused_with_both_engines(monkeypatch, threads, version, asked):
    """Case D1: one process has nothing to share."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", version)
    with pytest.raises(RunStopped, match=f"asks for the engine `{asked}` and this run would use `none`"):
        start(torch.device("cpu"))
    check_engine("ddp", "ddp")


@pytest.mark.parametrize(("error", "code"), [(ValueError, 2), (FileNotFoundError, 2), (RunStopped, 1)])
def test_wrong_input_ends_a_recipe_with_one_paragraph(monkeypatch, capsys, error, code):
    def main():
        raise error("the rule,\n  the value, the remedy")

    monkeypatch.setattr(sys, "argv", ["recipe.py"])
    with pytest.raises(SystemExit) as ended:
        run_recipe(main)
    assert ended.value.code == code
    assert capsys.readouterr().err.splitlines()[0] == "the rule, the value, the remedy"
    monkeypatch.setattr(sys, "argv", ["recipe.py", "--traceback"])
    with pytest.raises(error):
        run_recipe(main)
    assert sys.argv == ["recipe.py"]


def test_an_error_of_ours_keeps_its_traceback(monkeypatch):
    def main():
        raise KeyError("bug")

    monkeypatch.setattr(sys, "argv", ["recipe.py"])
    with pytest.raises(KeyError):
        run_recipe(main)


def ranks_take_turns(rank, world_size, payload):
    """Rank 0 writes inside the block; the others must find it, and all sums must agree."""
    assert world_size == 2
    path = payload["path"]
    with rank_zero_first("a file") as first:
        if first:
            Path(path).write_text("there", encoding="utf-8")
        else:
            assert Path(path).read_text(encoding="utf-8") == "there"
    return {"first": first, "sum": sum_over_ranks([1, rank]), "late": rank_zero_is_late(rank)}


def rank_zero_is_late(rank):
    """What a barrier says to rank 1 after half a second without rank 0; and the sum after a wait twice as long as the
    group's time-out for rank 0 inside the block."""
    store, barrier = dist.distributed_c10d._get_default_store(), "passed"
    impatient = dist.new_group(timeout=timedelta(seconds=0.5))
    if rank == 0:
        store.wait(["barrier"])
    else:
        try:
            dist.barrier(impatient)
        except RuntimeError as error:
            barrier = str(error)
        store.set("barrier", "left")
    meet_anew("impatient", seconds=2)
    with rank_zero_first("late") as first:
        if first:
            time.sleep(4)  # the fault itself: a rank that takes longer than the group allows
    meet_anew("patient", seconds=60)
    return barrier, sum_over_ranks([1, rank])


def meet_anew(name, seconds):
    """Replaces the group by one with this time-out."""
    place = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    place["store"] = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    place["store"].set_timeout(timedelta(seconds=seconds))
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds), **place)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "file"
    return run_on_ranks("tests.training.test_launch", "ranks_take_turns", 2, {"path": str(path)})


def test_rank_zero_goes_first(two_ranks):
    assert [(one["first"], one["sum"]) for one in two_ranks] == [(True, [2.0, 1.0]), (False, [2.0, 1.0])]
    with rank_zero_first("alone") as first:
        assert first
    assert sum_over_ranks([3, 4]) == [3, 4]


def test_rank_zero_may_take_longer_than_the_time_out_of_the_group(two_ranks):
    """Case D9. A barrier gives up."""
    assert "imed out" in two_ranks[1]["late"][0]
    assert [one["late"][1] for one in two_ranks] == [[2.0, 1.0]] * 2
