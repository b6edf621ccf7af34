"""Fine-tuning beside TRL's SFTTrainer, and beside the kit's own plain ways: supervised tokens/s and peak memory.

Choices:
- Every way is a process of its own, or their peaks of memory could not be told apart. They take turns of one step, so
  that whatever else the machine does slows all of them; the order turns round after every round.
- Each way takes the same step on the same examples. The first one warms up and is left out.
- TRL's defaults are those of its SFTConfig: padding to the longest of 8 examples, gradient checkpointing on. With
  packing, its rows are the kit's: the same examples, equal tokens a row.
- Lengths are drawn, because a data set of instructions cannot be relied on to be there: prompts of 118 tokens and
  answers of 91 on average (those of databricks-dolly-15k, https://arxiv.org/abs/2306.04751, table 1), both
  log-normal with a sigma of 0.9, which leaves 55 % padding in a batch of 8. The text is the conversations of
  `recipes/data/keeper`, end to end.
"""

import importlib.util
import json
import logging
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from tinylm.evaluation.targets import IGNORED
from tinylm.models.loading import load_base_model, load_base_tokenizer

from ..launch import RunStopped
from .finetuning_ways import OURS, TRL, TRL_PACKED, WAYS, Example, Lesson, Step, order_of_steps, take_steps
from .report import Measurement
from .setting import BATCH_SIZE, fastest_precision

logger = logging.getLogger(__name__)

PROMPT_TOKENS, ANSWER_TOKENS, SIGMA = 118, 91, 0.9
MAX_LENGTH = 1024
_TEXT = Path("recipes/data/keeper/train.jsonl")


def check_trl() -> None:
    """Raises ValueError where TRL is not installed."""
    if importlib.util.find_spec("trl") is None:
        raise ValueError(
            "The part `finetuning` compares with TRL, which is not installed. Install the extra `dev`, or leave"
            " `finetuning` out of `--parts`."
        )


def measure_finetuning(model: str, scratch: str, *, num_rounds: int) -> list[Measurement]:
    """Every way's speed and memory, and how the kit's compares.

    Raises:
        FileNotFoundError, ValueError: there is no such base model (`load_base_model`).
        RunStopped: a way has failed.
    """
    tokenizer = load_base_tokenizer(model)
    base = Path(scratch, "base")
    load_base_model(model, dtype=torch.bfloat16).save_pretrained(base)
    tokenizer.save_pretrained(base)
    lesson = Lesson(
        base=base,
        steps=draw_steps(tokenizer, num_rounds + 1),
        scratch=Path(scratch, "runs"),
        precision=fastest_precision(),
        num_threads=torch.get_num_threads(),
    )
    steps: dict[str, list[Step]] = {name: [] for name in WAYS}
    with processes(lesson) as connections:
        for number in range(num_rounds + 1):
            for name in list(WAYS)[:: 1 if number % 2 else -1]:
                connections[name].send(number)
                steps[name].append(received(connections, name))
                _tell(number, num_rounds, name, steps[name][-1])
        losses = {name: received(connections, name) for name in WAYS}
    targets = [count_targets(lesson.steps[index]) for index in order_of_steps(num_rounds + 1)]
    return compare_ways({name: found[1:] for name, found in steps.items()}, targets[1:], losses)


def draw_steps(tokenizer: PreTrainedTokenizerBase, num_steps: int) -> list[list[Example]]:
    """Steps of 8 examples of drawn lengths, at most 1,024 tokens; targets are the answers."""
    draw = np.random.default_rng(0)
    conversations = [json.loads(line)["messages"] for line in _TEXT.read_text(encoding="utf-8").splitlines()]
    texts = [message["content"] for messages in conversations for message in messages]
    stream = [token for ids in tokenizer(texts)["input_ids"] for token in ids]

    def example() -> Example:
        means = np.log([PROMPT_TOKENS, ANSWER_TOKENS]) - SIGMA**2 / 2
        prompt, answer = (max(1, int(length)) for length in draw.lognormal(means, SIGMA))
        length = min(prompt + answer, MAX_LENGTH)
        begin = int(draw.integers(len(stream) - length))
        ids, masked = stream[begin : begin + length], min(prompt, length - 1)
        return {"input_ids": ids, "labels": [IGNORED] * masked + ids[masked:]}

    return [[example() for _ in range(BATCH_SIZE)] for _ in range(num_steps)]


def count_targets(step: Sequence[Example]) -> int:
    """Supervised tokens of a step."""
    return sum(label != IGNORED for example in step for label in example["labels"])


@contextmanager
def processes(lesson: Lesson) -> Iterator[dict[str, Connection]]:
    """A process of each way, ready for its first step; within it they live."""
    context = multiprocessing.get_context("spawn")
    connections: dict[str, Connection] = {}
    started = []
    try:
        for name in WAYS:
            connections[name], theirs = context.Pipe()
            process = context.Process(target=take_steps, args=(theirs, name, lesson), daemon=True)
            process.start()
            started.append(process)
            theirs.close()
        for name in WAYS:
            received(connections, name)
            logger.info("%s is ready", name)
        yield connections
    finally:
        for process in started:
            process.kill()  # the kit's Trainer takes SIGTERM for a wish to end after this step
            process.join()


def received(connections: dict[str, Connection], name: str) -> object:
    """What a way sends next.

    Raises:
        RunStopped: its process has ended instead.
    """
    try:
        return connections[name].recv()
    except EOFError as error:
        raise RunStopped(f"Fine-tuning by `{name}` failed; the reason is above.") from error


def compare_ways(
    steps: dict[str, list[Step]], targets: Sequence[int], losses: dict[str, list[float]]
) -> list[Measurement]:
    """The table's rows, from measured steps and all losses of each way, and the supervised tokens of each step."""
    speeds = {name: [n / step.seconds for n, step in zip(targets, taken, strict=True)] for name, taken in steps.items()}
    memory = {name: taken[-1].peak_memory for name, taken in steps.items()}
    rows = [
        Measurement(
            f"Fine-tuning by {name}",
            f"{median(speeds[name]):,.0f} supervised tokens/s, peak {memory[name] / 1e6:,.0f} MB",
            {
                "supervised_tokens_per_second": speeds[name],
                "step_seconds": [step.seconds for step in steps[name]],
                "peak_bytes": memory[name],
                "losses": losses[name],
            },
        )
        for name in WAYS
    ]
    for other, least, most in ((TRL, 1.5, 0.6), (TRL_PACKED, 1.0, 1.0)):
        faster, smaller = _ratios(speeds, memory, other)
        rows += [
            _compared(f"Supervised tokens/s over {other}", faster, f"at least {least}", met=faster >= least),
            _compared(f"Peak memory over {other}", smaller, f"at most {most}", met=smaller <= most),
        ]
    for other in (name for name in WAYS if name not in (OURS, TRL, TRL_PACKED)):
        faster, smaller = _ratios(speeds, memory, other)
        value = f"{faster:.2f} times the supervised tokens/s, {smaller:.2f} of the peak memory"
        rows.append(Measurement(f"{OURS} over {other}", value, {"speed_ratio": faster, "memory_ratio": smaller}))
    apart = max(abs(found[-1] / losses[OURS][-1] - 1) for found in losses.values())
    values = f"{apart:.2%} apart at most ({OURS} {losses[OURS][-1]:.4f})"
    rows.append(Measurement("Losses of the last step", values, {"apart": apart}, "at most 0.50%", apart <= 0.005))
    return rows


def _ratios(speeds: dict[str, list[float]], memory: dict[str, int], other: str) -> tuple[float, float]:
    """The kit's median speed and peak memory over another way's."""
    return median(speeds[OURS]) / median(speeds[other]), memory[OURS] / memory[other]


def _compared(what: str, ratio: float, target: str, *, met: bool) -> Measurement:
    return Measurement(what, f"{ratio:.2f}", {"ratio": ratio}, target, met)


def _tell(number: int, num_rounds: int, name: str, step: Step) -> None:
    turn = f"round {number} of {num_rounds}" if number else "warming up"
    logger.info("%s, %s: %.1f s, peak %.0f MB", turn, name, step.seconds, step.peak_memory / 1e6)
