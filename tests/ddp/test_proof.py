"""The proof: right exchanges pass on 1 to 5 ranks, planted bugs do not, and what is counted was really sent."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.ddp.proving import PlantedBug, TinyNet, mean_square, rows
from tests.ddp.ranks import WORLD_SIZES, group_of_one, results_on
from tests.distributed import ROOT, rank_environment
from tinylm.ddp.collectives import ALGORITHMS
from tinylm.ddp.native import NativeDDP
from tinylm.ddp.proof import BF16, Batch, Exchange, Proof, Rounding, prove
from tinylm.ddp.synchronizer import MODES, Synchronizer

BUGS = ("", "reduces the parameter", "skips the broadcast", "skips the division")
NUM_BYTES = sum(4 * parameter.numel() for parameter in TinyNet().parameters())


def proof_of(exchange: Callable[[nn.Module], Exchange], **settings: int | Rounding) -> Proof:
    return prove(TinyNet, rows, exchange, compute_loss=mean_square, **settings)


def proofs_of_algorithms(rank: int, world_size: int) -> dict[str, Proof]:
    return {
        f"{algorithm} {mode}": proof_of(
            lambda model, algorithm=algorithm, mode=mode: Synchronizer(model, algorithm, mode), accumulation_steps=2
        )
        for algorithm in ALGORITHMS
        for mode in (MODES if world_size <= 2 else ("bucketed",))
    }


def proofs_of_planted_bugs(rank: int, world_size: int) -> dict[str, Proof]:
    return {bug: proof_of(lambda model, bug=bug: PlantedBug(model, bug)) for bug in BUGS}


def proofs_with_small_gradients(rank: int, world_size: int) -> dict[str, Proof]:
    """Held to the rounding of bfloat16, on gradients that are all smaller than it."""

    def small(model: nn.Module, batch: Batch) -> torch.Tensor:
        return 1e-4 * mean_square(model, batch)

    return {
        bug: prove(TinyNet, rows, lambda model, bug=bug: PlantedBug(model, bug), compute_loss=small, rounding=BF16)
        for bug in ("", "skips the division")
    }


def proofs_of_native(rank: int, world_size: int) -> dict[str, Proof]:
    if world_size != 2:  # its imports take seconds
        return {}
    return {
        "plain": proof_of(NativeDDP),
        "fast": proof_of(lambda model: NativeDDP(model, static_graph=True, gradient_as_bucket_view=True)),
        "bf16": proof_of(lambda model: NativeDDP(model, bf16_hook=True), rounding=BF16),
        "bf16, strict": proof_of(lambda model: NativeDDP(model, bf16_hook=True)),
    }


ON_RANKS: list[Callable[[int, int], object]] = [
    proofs_of_algorithms,
    proofs_of_planted_bugs,
    proofs_with_small_gradients,
    proofs_of_native,
]


@WORLD_SIZES
def test_every_algorithm_and_mode_is_proven(world_size: int) -> None:
    for proofs in results_on(world_size)["proofs_of_algorithms"]:
        assert all(proof.holds and proof.world_size == world_size for proof in proofs.values()), proofs


@pytest.mark.parametrize("world_size", [2, 3])
def test_planted_bugs_are_reported_as_wrong(world_size: int) -> None:
    for proofs in results_on(world_size)["proofs_of_planted_bugs"]:
        assert {bug: proof.holds for bug, proof in proofs.items()} == {bug: bug == "" for bug in BUGS}
        assert str(proofs[""]).startswith("proven: gradients equal one process on the whole batch")
        assert str(proofs["skips the division"]).startswith("WRONG: gradients DIFFER from one process")
        assert not proofs["skips the broadcast"].replicas_identical
        assert proofs["skips the division"].replicas_identical


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_sum_in_place_of_a_mean_is_no_rounding_however_small_the_gradients(world_size: int) -> None:
    for proofs in results_on(world_size)["proofs_with_small_gradients"]:
        assert {bug: proof.holds for bug, proof in proofs.items()} == {"": True, "skips the division": False}
        assert proofs["skips the division"].gradient_difference >= 0.9 * (world_size - 1)


def test_native_ddp_is_proven_and_its_reducer_counted() -> None:
    for proofs in results_on(2)["proofs_of_native"]:
        assert {name: proof.holds for name, proof in proofs.items()} == {
            "plain": True,
            "fast": True,
            "bf16": True,
            "bf16, strict": False,
        }
        sent = {name: (proof.traffic.collectives, proof.traffic.bytes) for name, proof in proofs.items()}
        assert sent["plain"][0] == sent["fast"][0] == 2  # the buffer, and one bucket
        assert NUM_BYTES < sent["plain"][1] < NUM_BYTES + 2000  # headers, and the barrier's
        assert sent["bf16"][1] < sent["plain"][1] - NUM_BYTES / 4


def test_one_rank_is_proven_and_sends_nothing() -> None:
    [proofs] = results_on(1)["proofs_of_algorithms"]
    assert {(one.traffic.collectives, one.traffic.messages, one.traffic.bytes) for one in proofs.values()} == {
        (0, 0, 0)
    }


def test_nan_in_a_gradient_is_wrong() -> None:
    def not_a_number(model: nn.Module, batch: Batch) -> torch.Tensor:
        return mean_square(model, batch) * float("nan")

    with group_of_one():
        proof = prove(TinyNet, rows, Synchronizer, compute_loss=not_a_number)
    assert not proof.holds


def test_the_same_rows_for_all_ranks_are_refused() -> None:
    from tinylm.ddp.proof import _check_different

    with pytest.raises(ValueError, match="All ranks have the same batch"):
        _check_different([[rows(0, 0)], [rows(0, 0)]])
    _check_different([[rows(0, 0)], [rows(0, 0)], [rows(1, 0)]])


@pytest.mark.parametrize(
    ("way", "cause"),
    [
        ("killed", "Rank 1 died in step 3."),
        pytest.param("raises", "Rank 1 failed in step 3 with ValueError: row 7 is empty.", marks=pytest.mark.slow),
    ],
)
def test_when_a_rank_is_lost_the_others_end_and_name_it_and_the_step(way: str, cause: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3"]
    command += ["--module", "tests.ddp.dying", way, str(tmp_path)]
    done = subprocess.run(command, env=rank_environment(), cwd=ROOT, capture_output=True, timeout=120, check=False)
    assert done.returncode != 0
    for rank in (0, 2):
        ended = (tmp_path / f"{rank}").read_text()
        assert ended.startswith(f"ConnectionError: {cause} So rank {rank}, which was in step 3, ends too.")
