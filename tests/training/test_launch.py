"""The checks before anything is loaded. Real launches are in tests/recipes/test_pretrain_tlm.py."""

import os
import sys
from pathlib import Path

import pytest
import torch

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


def test_fsdp_that_a_cpu_would_turn_into_something_else_is_refused_with_both_engines(monkeypatch, threads):
    """Case D1."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(RunStopped, match=r"asks for the engine `fsdp2` and this run would use `none`"):
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
    return first, sum_over_ranks([1, rank])


def test_rank_zero_goes_first(tmp_path):
    results = run_on_ranks("tests.training.test_launch", "ranks_take_turns", 2, {"path": str(tmp_path / "file")})
    assert results == [(True, [2.0, 1.0]), (False, [2.0, 1.0])]
    with rank_zero_first("alone") as first:
        assert first
    assert sum_over_ranks([3, 4]) == [3, 4]
