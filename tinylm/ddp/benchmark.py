"""The step times of many ways to exchange gradients, measured in turns so that drift of the machine hits all alike.

Each configuration is proven right before it is timed. Then, in every round, each takes a turn (the order turns round
with every round): a fresh copy of the model and a fresh optimizer, so that no hook, bucket or wrapper of another is
left over; some steps that are not counted; some that are. A step is forward, backward, exchange, AdamW, clearing the
gradients. The ranks meet at a barrier before it, and the slowest rank's time is the step's.
"""

import copy
import gc
import logging
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tinylm.ddp.agreement import check_same_on_all_ranks
from tinylm.ddp.clock import finished_at, percentile, processor_time, slowest_rank
from tinylm.ddp.configurations import NO_EXCHANGE, Configuration
from tinylm.ddp.failure import named_failure
from tinylm.ddp.proof import BF16, FP32, Proof, prove
from tinylm.ddp.synchronizer import model_description
from tinylm.ddp.table import WRONG, Circumstances, StepRow

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """What every configuration computes in a step, and for how many steps.

    Args:
        model: a causal language model of Hugging Face's kind on `device`; it is copied, never trained.
        name: of the model, for the rows.
        batch_size: rows a rank.
        autocast: whether the timed steps compute in bfloat16; the proof is always fp32.
        steps: measured steps of a configuration, over all rounds.
        warmup_steps: steps before them in each round.
    """

    model: nn.Module
    name: str
    batch_size: int
    sequence_length: int
    device: torch.device
    autocast: bool
    steps: int
    warmup_steps: int
    rounds: int

    def build_model(self) -> nn.Module:
        return copy.deepcopy(self.model)

    def batch(self, rank: int, step: int) -> dict[str, Tensor]:
        """Random rows, `[B, T]`, that only this rank has in this step."""
        generator = torch.Generator().manual_seed(1_000_003 * rank + step)
        shape = (self.batch_size, self.sequence_length)
        input_ids = torch.randint(self.model.config.vocab_size, shape, generator=generator).to(self.device)
        return {"input_ids": input_ids, "labels": input_ids}

    def steps_in_round(self, number: int) -> int:
        """The measured steps of round `number`, from 0; they add up to `steps`."""
        return self.steps // self.rounds + (number < self.steps % self.rounds)

    def describe(self, configurations: Sequence[Configuration]) -> str:
        """Lines that must be the same on all ranks."""
        lines = [f"{name} {getattr(self, name)}" for name in ("name", "batch_size", "sequence_length", "autocast")]
        lines += [f"{name} {getattr(self, name)}" for name in ("steps", "warmup_steps", "rounds")]
        return "\n".join([*lines, *map(repr, configurations)])


@dataclass(frozen=True)
class Turn:
    """The measured steps of a round: wall and processor seconds of each, of the rank that needed most."""

    seconds: list[float]
    processor_seconds: list[float]


class Replica:
    """A fresh model on this rank, its optimizer and its exchange."""

    def __init__(self, task: Task, configuration: Configuration) -> None:
        model = task.build_model()
        self.task, self.batch = task, task.batch(dist.get_rank(), 0)
        self.exchange = None if configuration == NO_EXCHANGE else configuration.wrap(model)
        self.model = self.exchange.model if self.exchange else model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(self) -> None:
        with torch.autocast(self.task.device.type, dtype=torch.bfloat16, enabled=self.task.autocast):
            loss = self.model(**self.batch).loss
        loss.backward()
        if self.exchange:
            self.exchange.synchronize()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        if self.exchange:
            self.exchange.close()


def measure_steps(task: Task, configurations: Sequence[Configuration], circumstances: Circumstances) -> list[StepRow]:
    """Proves each configuration, times those that hold in turns, and gives a row for each. Every rank has to call it.

    Args:
        configurations: `NO_EXCHANGE` among them, which the others are compared with.

    Raises:
        ValueError: ranks with different models, shapes or settings.
        ConnectionError: a rank is lost.
    """
    check_same_on_all_ranks(task.describe(configurations), "settings")
    check_same_on_all_ranks(model_description(task.model), "model")
    proofs = {configuration: _proof(task, configuration) for configuration in configurations}
    right = [configuration for configuration, proof in proofs.items() if proof is None or proof.holds]
    turns: dict[Configuration, list[Turn]] = {configuration: [] for configuration in right}
    for number in range(min(task.rounds, task.steps)):
        for configuration in right[:: -1 if number % 2 else 1]:
            turns[configuration].append(_turn(task, configuration, number))
        without = 1000 * statistics.median(turns[NO_EXCHANGE][-1].seconds)
        logger.info("round %d of %d: %.1f ms a step without exchange", number + 1, task.rounds, without)
    return [
        _row(task, configuration, proof, turns.get(configuration), turns[NO_EXCHANGE], circumstances)
        for configuration, proof in proofs.items()
    ]


def _proof(task: Task, configuration: Configuration) -> Proof | None:
    """None where there is nothing to prove."""
    if configuration == NO_EXCHANGE:
        return None
    rounding = BF16 if configuration.bf16_hook else FP32
    with named_failure(f"the proof of `{configuration}`"):
        proof = prove(task.build_model, task.batch, configuration.wrap, rounding=rounding)
    gc.collect()
    logger.log(logging.INFO if proof.holds else logging.WARNING, "%s: %s", configuration, proof)
    return proof


def _turn(task: Task, configuration: Configuration, number: int) -> Turn:
    """The steps of round `number`."""
    replica = Replica(task, configuration)
    seconds, processor_seconds = [], []
    for step in range(task.warmup_steps + task.steps_in_round(number)):
        with named_failure(f"step {step + 1} of round {number + 1} of `{configuration}`"):
            dist.barrier()
            began, worked = finished_at(task.device), processor_time()
            replica.step()
            seconds.append(finished_at(task.device) - began)
            processor_seconds.append(processor_time() - worked)
    counted = slice(task.warmup_steps, None)
    turn = Turn(slowest_rank(seconds[counted], task.device), slowest_rank(processor_seconds[counted], task.device))
    replica.close()
    del replica
    gc.collect()  # wrappers lie in reference cycles, with their buckets
    return turn


def _row(
    task: Task,
    configuration: Configuration,
    proof: Proof | None,
    turns: list[Turn] | None,
    turns_without: list[Turn],
    circumstances: Circumstances,
) -> StepRow:
    times = dict.fromkeys(("median_ms", "p10_ms", "p90_ms", "exposed_ms", "processor_ms", "tokens_per_second"))
    if turns is not None:
        seconds = [second for turn in turns for second in turn.seconds]
        exposed = [
            statistics.median(turn.seconds) - statistics.median(without.seconds)
            for turn, without in zip(turns, turns_without, strict=True)
        ]
        tokens = circumstances.world_size * task.batch_size * task.sequence_length
        times = {
            "median_ms": 1000 * statistics.median(seconds),
            "p10_ms": 1000 * percentile(seconds, 10),
            "p90_ms": 1000 * percentile(seconds, 90),
            "exposed_ms": 1000 * statistics.median(exposed),
            "processor_ms": 1000 * statistics.median(second for turn in turns for second in turn.processor_seconds),
            "tokens_per_second": tokens / statistics.median(seconds),
        }
    return StepRow(
        **asdict(circumstances),
        model=task.name,
        batch_size=task.batch_size,
        sequence_length=task.sequence_length,
        precision="bf16" if task.autocast else "fp32",
        algorithm=configuration.algorithm,
        mode=configuration.described_mode,
        warmup_steps=task.warmup_steps,
        steps=task.steps,
        rounds=task.rounds,
        **times,
        bytes=proof.traffic.bytes if proof else 0,
        collectives=proof.traffic.collectives if proof else 0,
        messages=proof.traffic.messages if proof else 0,
        proven="no exchange" if proof is None else "yes" if proof.holds else WRONG,
        gradient_difference=proof.gradient_difference if proof else None,
    )
