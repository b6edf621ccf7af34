"""A Trainer that goes on as if nothing had happened: its checkpoints hold all that the rest of a run depends on.

What differs from the stock Trainer, and why:
- the logging window, the token counts, the bad steps in a row and the callbacks' counters are part of it, so the logged
  losses are those of the undisturbed run too (stock: the window's sum and early stopping's patience are lost);
- the position in map-style data is the number of steps done (stock: the sampler is run through);
- a run that is told to stop saves at once; what was due in that step is done first when it goes on, so that saving need
  not wait for a validation, and one that has begun is left and done again;
- what falls on an epoch's last step is done once, at the end of the epoch, so that a checkpoint is never between the
  two; a run that has taken its last step goes on to its end (stock: takes one step more).
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import repeat
from pathlib import Path
from typing import NoReturn

from torch import Tensor
from transformers.trainer_utils import TrainOutput

from tinylm.data.order import GlobalBatches

from .checkpointing import PROGRESS_NAME, CheckpointingTrainer
from .checkpoints import remove_leftovers, set_aside_newer
from .loss_meter import LossMeter
from .run_record import HOW_TO_GO_ON
from .trackers import one_wandb_run
from .watched import ValidationStopped

logger = logging.getLogger(__name__)


class ResumableTrainer(CheckpointingTrainer):
    """`Trainer` whose interrupted and resumed runs end in the bytes of the undisturbed one."""

    meter: LossMeter

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.num_bad_steps, self.bad_steps_in_a_row = 0, 0
        self.steps_done = 0  # before this process
        self._stopped_early_of = 0  # the number of steps that a run was to have whose early stopping ended it
        self._handled_step = -1  # the last step whose logs, validation and checkpoint are done
        self._due: dict[str, float | bool | None] | None = None  # what a run that was stopped has to do first

    # What a subclass adds.

    def order_of_data(self) -> dict[str, int | str | None]:
        """What decides which examples a step sees; a run goes on with the same."""
        return {}

    # Going on.

    def train(self, resume_from_checkpoint: str | None = None, **kwargs) -> TrainOutput:
        """As in the Trainer.

        Raises:
            RunInterrupted: the run was stopped on purpose, and saved.
            RunStopped: a checkpoint could not be written, or another rank failed: which one, and where.
        """
        if self.is_world_process_zero():
            remove_leftovers(Path(self.args.output_dir))
        self.steps_done = 0
        if resume_from_checkpoint:
            self.go_on_from(resume_from_checkpoint)
            if self.is_world_process_zero():  # only here: a run that is refused before leaves all names as they are
                set_aside_newer(Path(self.args.output_dir), Path(resume_from_checkpoint), self.steps_done)
            logger.info("Going on from %s", resume_from_checkpoint)
        logs_to_wandb = "wandb" in self.args.report_to and self.is_world_process_zero()
        tracker = one_wandb_run(self.args.output_dir, goes_on=bool(self.steps_done)) if logs_to_wandb else nullcontext()
        with tracker:
            return super().train(resume_from_checkpoint, **kwargs)

    def go_on_from(self, checkpoint: str) -> None:
        """Takes counts and position over; refuses an order of the data that would repeat or skip rows in silence.

        Raises:
            ValueError: the order was another; both values are named.
        """
        progress = json.loads(Path(checkpoint, PROGRESS_NAME).read_text(encoding="utf-8"))
        order = self.order_of_data()
        for name, before in progress["order"].items():
            if order[name] != before:
                raise ValueError(
                    f"A run goes on with the order of data that it began with, or rows are repeated and skipped: its"
                    f" {name.replace('_', ' ')} was {before} and is {order[name]} now. With another number of ranks,"
                    " choose `--per_device_train_batch_size` and `--gradient_accumulation_steps` so that their product"
                    " with it stays; a stream needs the same ranks and workers. With other data, begin a new run in"
                    " another `--output_dir`."
                )
        self.steps_done = progress["step"]
        self.meter.restore(progress["meter"], self.args.process_index, self.args.world_size)
        self.num_bad_steps, self.bad_steps_in_a_row = progress["bad_steps"]
        self._stopped_early_of = progress["stopped_early_of"]
        self._due = progress["due"]

    def _init_training_state(self, max_steps: int, *args, **kwargs) -> tuple[int, int]:
        started = super()._init_training_state(max_steps, *args, **kwargs)
        if self.state.best_global_step:  # the run's folder may have been moved
            self.state.best_model_checkpoint = self._best_checkpoint()
        return started

    def _load_callback_state(self) -> None:
        """Gives callbacks their counters back. The control flags are those of the step that saved, and stay there."""
        for callback in self._stateful_callbacks():
            attributes = self.state.stateful_callbacks.get(type(callback).__name__, {}).get("attributes", {})
            vars(callback).update(attributes)

    def _run_epoch(self, **kwargs) -> None:
        if self._due is not None:
            self._load_rng_state(kwargs["resume_from_checkpoint"])  # it may be saved again before the first step
            self._do_what_was_due(**kwargs)
        if self.control.should_training_stop or self.state.max_steps in (
            self._stopped_early_of,
            self.state.global_step,
        ):
            self.control.should_training_stop = True
            return
        super()._run_epoch(**kwargs)

    def _do_what_was_due(self, model, trial, epoch, ignore_keys_for_eval, start_time, **_: object) -> None:
        due, self._due = self._due, None
        self.control.should_log, self.control.should_evaluate = due["log"], due["evaluate"]
        self._globalstep_last_logged = self.state.global_step - 1
        norm, rate = due["grad_norm"], due["learning_rate"]
        with self._interrupting(norm, rate):
            super()._maybe_log_save_evaluate(
                self._tr_loss, norm, model, trial, epoch, ignore_keys_for_eval, start_time, rate
            )

    def _evaluate(self, trial, ignore_keys_for_eval, skip_scheduler: bool = False) -> dict[str, float]:
        if skip_scheduler and self.steps_done:
            return {}  # `eval_on_start`, and this is not the start
        try:
            return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        except ValidationStopped:
            if not skip_scheduler:
                raise
            self.leave(
                f"Stopped before the first step ({self.why_to_stop()}): there is nothing to save. Begin again with"
                f" {HOW_TO_GO_ON}."
            )

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, grad_norm, *args, learning_rate=None, **kwargs) -> None:
        """Called after each step, and again when the epoch has ended; what the last step asks for waits for that."""
        self.note_step_time()
        is_last = self.control.should_training_stop or float(self.state.epoch).is_integer()
        if is_last and self._handled_step != self.state.global_step:
            self._handled_step = self.state.global_step
            return
        self._handled_step = self.state.global_step
        save, stop = self.take_wishes()
        if stop and not self.control.should_training_stop:
            self._interrupt(grad_norm, learning_rate)
        self.control.should_save |= save
        with self._interrupting(grad_norm, learning_rate):
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, learning_rate=learning_rate, **kwargs)
        if save:
            self.wishes_are_fulfilled(stopped=False)

    @contextmanager
    def _interrupting(self, grad_norm: Tensor | float | None, learning_rate: float | None) -> Iterator[None]:
        """What is logged before a validation that is stopped is logged; what comes with it and behind it is due."""
        try:
            yield
        except ValidationStopped:
            self._interrupt(grad_norm, learning_rate)

    def _interrupt(self, grad_norm: Tensor | float | None, learning_rate: float | None) -> None:
        self._due = {
            "log": self.control.should_log,
            "evaluate": self.control.should_evaluate,
            "grad_norm": None if grad_norm is None else float(grad_norm),
            "learning_rate": learning_rate,
        }
        self._save_checkpoint(self.model, trial=None)
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        self._leave()

    def interrupt_after_training(self) -> None:
        """For a validation after the last step that was stopped: the run can be gone on with to its end.

        Raises:
            RunInterrupted: always.
        """
        has_best_weights = self.args.load_best_model_at_end  # and not those of the last step
        if not has_best_weights and not Path(self.args.output_dir, f"checkpoint-{self.state.global_step}").is_dir():
            self._save_checkpoint(self.model, trial=None)
        self._leave()

    def _leave(self) -> NoReturn:
        self.leave(
            f"Stopped after step {self.state.global_step} of {self.state.max_steps} and saved ({self.why_to_stop()})."
            f" Go on with {HOW_TO_GO_ON}."
        )

    def progress(self) -> dict[str, object]:
        """The order of the data, the tokens so far, the present logging window, what is due."""
        return {
            "step": self.state.global_step,
            "order": self.order_of_data(),
            "meter": self.meter.state(),
            "bad_steps": [self.num_bad_steps, self.bad_steps_in_a_row],
            "due": self._due,
            "stopped_early_of": self.state.max_steps if self.control.should_training_stop else 0,
        }


class PassedOver:
    """The micro-batches of `GlobalBatches` with `start_step`, after empty ones in the place of those before it.

    The stock Trainer runs through as many of them as were done, which takes 50 ns each this way.
    """

    def __init__(self, batches: GlobalBatches) -> None:
        self.batches = batches

    def set_epoch(self, epoch: int) -> None:
        self.batches.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        batches = self.batches
        steps = batches.start_step - batches.epoch * batches.steps_per_epoch
        yield from repeat([], max(0, steps) * batches.accumulation_steps)
        yield from batches
