"""What saving costs the steps between two checkpoints, and what a save itself takes.

Choices:
- One `train()` whose turns of a few steps begin with a checkpoint and without one by turns, so that both kinds of steps
  meet the same weather. What can differ is what a save leaves behind: pages to write, memory, cold caches.
- A checkpoint every other turn is far more often than the default of one in 500 steps: the real cost is lower.
- A save is off the clock of the steps, with all that is done because of it (`STATUS`, the notes on time).
- What else exact resuming rests on is part of every step, whether anything is saved or not: where a stream is has to be
  noted. It has a row of its own, so the run is on a stream.
- The first turn of each kind warms up and is left out.
"""

import logging
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

from transformers import TrainerControl, TrainerState

from ..arguments import RunArguments
from ..checkpoints import numbered_checkpoints
from .hand_loop import finished_at
from .overhead import STEPS_A_TURN, StepTimer, quiet_progress, trainer_for
from .report import Measurement
from .setting import open_setting

logger = logging.getLogger(__name__)

_TARGET = 0.98
_NOTES = 100


class SavingTurns(StepTimer):
    """Times the steps, and saves before every other turn of them; `saves` are the seconds of the saves."""

    def __init__(self) -> None:
        super().__init__()
        self.saves: list[float] = []

    def on_step_end(self, args: RunArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        super().on_step_end(args, state, control, **kwargs)
        turn, is_over = state.global_step // STEPS_A_TURN, state.global_step % STEPS_A_TURN == 0
        control.should_save = is_over and turn % 2 == 1 and state.global_step < state.max_steps

    def on_save(self, args: RunArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        now = finished_at(args.device)
        self.saves.append(now - self._began)
        logger.info("saved before step %d in %.2f s", state.global_step + 1, self.saves[-1])
        self._began = now


def measure_saving(run_config: str, scratch: str, *, num_rounds: int) -> list[Measurement]:
    """Speed of steps behind a checkpoint over that of others, the time of a save, and of noting a stream's position."""
    tokenizer = open_setting(run_config, scratch).corpus.tokenizer.name_or_path
    steps = 2 * STEPS_A_TURN * (num_rounds + 1)
    settings = {"max_steps": steps, "logging_steps": steps + 1, "save_total_limit": 1}
    setting = open_setting(run_config, scratch, stream_with=tokenizer, **settings)
    trainer = trainer_for(setting, SavingTurns())
    turns = trainer.pop_callback(SavingTurns)
    trainer.add_callback(turns)  # behind those that do something when a checkpoint is there
    with quiet_progress():
        trainer.train()
    [checkpoint] = numbered_checkpoints(Path(setting.run.output_dir))
    num_bytes = sum(path.stat().st_size for path in checkpoint.iterdir())
    stream = trainer.stream_loader.dataset
    began = perf_counter()
    for _ in range(_NOTES):
        stream.state()
    return compare_turns(turns.seconds, turns.saves, num_bytes, (perf_counter() - began) / _NOTES)


def compare_turns(
    seconds: list[float], saves: list[float], bytes_of_save: int, seconds_of_note: float
) -> list[Measurement]:
    """The table's rows, from the seconds of all steps: turns without a save before them and with one, in this order."""
    turns = [seconds[start : start + STEPS_A_TURN] for start in range(0, len(seconds), STEPS_A_TURN)]
    without, behind = turns[2::2], turns[3::2]
    medians = [median(second for turn in kind for second in turn) for kind in (without, behind)]
    rounds = [median(one) / median(other) for one, other in zip(without, behind, strict=True)]
    low, _, high = quantiles(rounds, method="inclusive")
    ratio = medians[0] / medians[1]
    return [
        Measurement(
            "Speed of the steps behind a checkpoint over that of others",
            f"{ratio:.3f} (quartiles of {len(rounds)} rounds {low:.3f} to {high:.3f};"
            f" {medians[1]:.3f} and {medians[0]:.3f} s a step)",
            {
                "ratio": ratio,
                "lower_quartile": low,
                "upper_quartile": high,
                "step_seconds_behind_checkpoints": [second for turn in behind for second in turn],
                "step_seconds_of_others": [second for turn in without for second in turn],
            },
            target=f"at least {_TARGET}",
            met=ratio >= _TARGET,
        ),
        Measurement(
            "A save",
            f"{median(saves):.2f} s (median of {len(saves)}; {min(saves):.2f} to {max(saves):.2f}),"
            f" {bytes_of_save / 1e6:,.0f} MB",
            {"seconds": saves, "bytes": bytes_of_save},
        ),
        Measurement(
            "Noting where a stream is, once a step",
            f"{seconds_of_note * 1e6:,.0f} µs, {seconds_of_note / medians[0]:.3%} of a step",
            {"note_seconds": seconds_of_note, "share_of_a_step": seconds_of_note / medians[0]},
        ),
    ]
