"""What the Trainer costs: the kit's Trainer and a hand-written loop, by turns in one process.

Choices:
- Two loops that take turns of a few steps meet the same weather: whatever else the machine does slows both.
- The turns are taken from a callback of one `train()`. Calling `train()` for each turn would build loader, scheduler
  and state anew every time, which no user pays for. The callback times the loop that users run, from the end of one
  step to the end of the next: reading data, logging and all other callbacks are in. The hand-written loop runs inside
  the callback, off the Trainer's clock.
- Every step is logged, so that a median over steps hides no cost of logging.
- The first turn of each side warms up and is left out.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median, quantiles

from transformers import TrainerCallback, TrainerControl, TrainerState

from ..arguments import RunArguments
from ..trainer import LanguageModelTrainer
from .hand_loop import HandLoop, finished_at
from .report import Measurement
from .setting import Setting, fastest_precision, open_setting

logger = logging.getLogger(__name__)

STEPS_A_TURN = 4
_TARGET = 0.97


class StepTimer(TrainerCallback):
    """`seconds` of each optimizer step, from the end of the one before to its own end.

    Args:
        interlude: called after every `steps_a_turn` steps; its time counts for no step.
    """

    def __init__(self, steps_a_turn: int = 1, interlude: Callable[[], None] = lambda: None) -> None:
        self.steps_a_turn, self.interlude = steps_a_turn, interlude
        self.seconds: list[float] = []

    def on_train_begin(self, args: RunArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self._began = finished_at(args.device)

    def on_step_end(self, args: RunArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self.seconds.append(finished_at(args.device) - self._began)
        if state.global_step % self.steps_a_turn == 0:
            self.interlude()
        self._began = finished_at(args.device)


def measure_overhead(run_config: str, scratch: str, *, num_rounds: int) -> list[Measurement]:
    """The Trainer's tokens/s over the hand-written loop's, in fp32 and, where the hardware has it, in bf16."""
    return [
        _compare(
            open_setting(run_config, scratch, precision=precision, max_steps=STEPS_A_TURN * (num_rounds + 1)),
            num_rounds,
        )
        for precision in dict.fromkeys(("fp32", fastest_precision()))
    ]


def _compare(setting: Setting, num_rounds: int) -> Measurement:
    by_hand, by_trainer, loss_difference = take_turns(setting)
    by_hand, by_trainer = by_hand[STEPS_A_TURN:], by_trainer[STEPS_A_TURN:]
    ratio = median(by_hand) / median(by_trainer)
    turns = [slice(start, start + STEPS_A_TURN) for start in range(0, STEPS_A_TURN * num_rounds, STEPS_A_TURN)]
    low, _, high = quantiles([median(by_hand[turn]) / median(by_trainer[turn]) for turn in turns], method="inclusive")
    speeds = [setting.tokens_a_step / median(seconds) for seconds in (by_trainer, by_hand)]
    return Measurement(
        f"Trainer's tokens/s over a hand-written loop's, {setting.run.precision}",
        f"{ratio:.3f} (quartiles of {num_rounds} rounds {low:.3f} to {high:.3f};"
        f" {speeds[0]:,.0f} and {speeds[1]:,.0f})",
        {
            "ratio": ratio,
            "lower_quartile": low,
            "upper_quartile": high,
            "trainer_tokens_per_second": speeds[0],
            "hand_tokens_per_second": speeds[1],
            "trainer_step_seconds": by_trainer,
            "hand_step_seconds": by_hand,
            "largest_loss_difference": loss_difference,
        },
        target=f"at least {_TARGET}",
        met=ratio >= _TARGET,
    )


def take_turns(setting: Setting) -> tuple[list[float], list[float], float]:
    """Seconds of each step of the hand-written loop and of the Trainer, from equal weights over equal batches.

    The third value is the largest difference between their losses at a step (nats a token): both did the same work.
    """
    corpus, run = setting.corpus, setting.run
    hand = HandLoop(copy.deepcopy(setting.model), corpus.train_dataset, corpus.collate, run)
    by_hand: list[float] = []

    def hand_turn() -> None:
        by_hand.extend(hand.step() for _ in range(STEPS_A_TURN))
        hands, trainers = (setting.tokens_a_step / median(times[-STEPS_A_TURN:]) for times in (by_hand, timer.seconds))
        turn = f"{run.precision}, turn {len(by_hand) // STEPS_A_TURN} of {run.max_steps // STEPS_A_TURN}"
        logger.info("%s: %s tokens/s by hand, %s by the Trainer", turn, f"{hands:,.0f}", f"{trainers:,.0f}")

    timer = StepTimer(STEPS_A_TURN, hand_turn)
    trainer = trainer_for(setting, timer)
    with quiet_progress():
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return by_hand, timer.seconds, largest_difference(hand.losses, losses)


def largest_difference(these: Sequence[float], those: Sequence[float]) -> float:
    """The largest |difference| of two equally long series."""
    return max(abs(this - that) for this, that in zip(these, those, strict=True))


def trainer_for(
    setting: Setting, timer: StepTimer, kind: type[LanguageModelTrainer] = LanguageModelTrainer
) -> LanguageModelTrainer:
    """The Trainer as the recipe builds it, with a clock."""
    return kind(
        model=setting.model.train(),
        args=setting.run,
        train_dataset=setting.corpus.train_dataset,
        eval_dataset=setting.corpus.eval_rows,
        data_collator=setting.corpus.collate,
        processing_class=setting.corpus.tokenizer,
        callbacks=[timer],
    )


@contextmanager
def quiet_progress() -> Iterator[None]:
    """The Trainer writes its progress lines to nobody: their tokens/s would count the other loop's time as its own."""
    progress = logging.getLogger("tinylm.training.callbacks")
    progress.setLevel(logging.WARNING)
    try:
        yield
    finally:
        progress.setLevel(logging.NOTSET)
