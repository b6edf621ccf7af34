"""Whether training waits for data: what one core reads, tokenises and packs, beside what it trains on."""

import logging
from collections.abc import Iterable, Iterator
from statistics import median
from time import perf_counter, process_time

import torch
from torch import Tensor

from ..trainer import LanguageModelTrainer
from .overhead import StepTimer, quiet_progress, trainer_for
from .report import Measurement
from .setting import Setting, open_setting

logger = logging.getLogger(__name__)

_STEPS = 8
_WARM_UP = 2
_MOST_TOKENS = 2_000_000  # of one epoch
_TARGET = 20


class WaitingTrainer(LanguageModelTrainer):
    """Keeps in `waits` how long (seconds) each optimizer step waited for its batches."""

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.waits: list[float] = []

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Tensor]], Tensor | int | None]:
        began = perf_counter()
        batches = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.waits.append(perf_counter() - began)
        return batches


def measure_pipeline(run_config: str, scratch: str) -> list[Measurement]:
    """Both ways of data, prepared and streamed: tokens/s on one core over training's, and the wait of a step."""
    prepared = open_setting(run_config, scratch, max_steps=_STEPS)
    tokenizer = prepared.corpus.tokenizer.name_or_path
    streamed = open_setting(run_config, scratch, max_steps=_STEPS, stream_with=tokenizer)
    return [
        row
        for name, setting in (("prepared corpus", prepared), ("streamed source", streamed))
        for row in _measure_way(name, setting)
    ]


def _measure_way(name: str, setting: Setting) -> list[Measurement]:
    timer = StepTimer()
    trainer = trainer_for(setting, timer, WaitingTrainer)
    pipeline = tokens_per_core_second(trainer.get_train_dataloader())
    with quiet_progress():
        trainer.train()
    step, wait = median(timer.seconds[_WARM_UP:]), median(trainer.waits[_WARM_UP:])
    share = sum(trainer.waits[_WARM_UP:]) / sum(timer.seconds[_WARM_UP:])
    cores = torch.get_num_threads() if setting.run.device.type == "cpu" else 1
    training = setting.tokens_a_step / step / cores
    logger.info("%s: %s tokens/s on one core; a step waits %.2f ms", name, f"{pipeline:,.0f}", wait * 1e3)
    speeds = {"pipeline_tokens_per_second": pipeline, "training_tokens_per_second_per_core": training}
    waits = {"median_wait_seconds": wait, "share_of_all_steps": share, "first_wait_seconds": trainer.waits[0]}
    return [
        Measurement(
            f"Data pipeline's tokens/s over training's on one core, {name}",
            f"{pipeline / training:,.0f} ({pipeline:,.0f} and {training:,.0f})",
            {"ratio": pipeline / training, **speeds},
            target=f"at least {_TARGET}",
            met=pipeline / training >= _TARGET,
        ),
        Measurement(
            f"Wait for data a step, {name}",
            f"{wait * 1e3:.2f} ms (median), {share:.2%} of the time of all steps",
            waits,
        ),
    ]


def tokens_per_core_second(batches: Iterable[dict[str, Tensor]]) -> float:
    """Tokens that one core makes in a second: the CPU time of all threads, or the time on the wall if that is more."""
    wall, cpu, tokens = perf_counter(), process_time(), 0
    for batch in batches:
        tokens += batch["input_ids"].numel()
        if tokens >= _MOST_TOKENS:
            break
    return tokens / max(perf_counter() - wall, process_time() - cpu)
