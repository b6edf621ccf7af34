"""What test_benchmark runs on two ranks."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from tests.training.tiny import tiny_model
from tinylm.ddp import collectives
from tinylm.ddp.benchmark import Replica, Task, measure_steps
from tinylm.ddp.configurations import NO_EXCHANGE, Configuration
from tinylm.ddp.failure import announce_rank
from tinylm.ddp.message_sizes import measure_sizes
from tinylm.ddp.table import Circumstances

RING, WRONG_ONE, BF16 = (
    Configuration("ring", "hooks"),
    Configuration("forgetful", "no_hooks"),
    Configuration("native", bf16_hook=True),
)


def forgetful(tensor: Tensor) -> None:
    """Sums, and loses what the first element would be."""
    dist.all_reduce(tensor)
    tensor.view(-1)[0] = 0


def two_rank_checks(rank: int, world_size: int, payload: dict) -> dict:
    assert world_size == 2
    announce_rank()
    made = Circumstances("r", "c", "h", world_size, "gloo", 1)
    task = Task(tiny_model(), "tiny", 1, 16, torch.device("cpu"), False, steps=3, warmup_steps=2, rounds=2)
    collectives.ALGORITHMS["forgetful"] = forgetful
    timed: list[str] = []
    step = Replica.step

    def noted_step(replica: Replica) -> None:
        timed.append("none" if replica.exchange is None else type(replica.exchange).__name__)
        step(replica)

    Replica.step = noted_step
    found = {"rows": measure_steps(task, [NO_EXCHANGE, RING, WRONG_ONE, BF16], made), "timed": timed}
    found["sizes"] = measure_sizes(["builtin", "tree"], made, torch.device("cpu"), rounds=2, sizes=(4, 4096))
    try:
        measure_steps(replace(task, batch_size=1 + rank), [NO_EXCHANGE, RING], made)
    except ValueError as error:
        found["shapes"] = str(error)
    try:
        other = replace(task, model=tiny_model(intermediate_size=22 + rank))
        measure_steps(other, [NO_EXCHANGE, Configuration("native")], made)
    except ValueError as error:
        found["models"] = str(error)
    return found
