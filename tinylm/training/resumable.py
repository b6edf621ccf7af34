"""A Trainer that goes on as if nothing had happened: whole checkpoints, and in them all that the rest depends on.

What differs from the stock Trainer, and why:
- a checkpoint is written beside, listed and renamed (stock: written in place, so that a kill leaves half of one);
- older ones go when the new one is there; a write that fails on one rank ends all of them, with the reason;
- the logging window, the token counts, the bad steps in a row and the callbacks' counters are part of it, so the logged
  losses are those of the undisturbed run too (stock: the window's sum and early stopping's patience are lost);
- the position in map-style data is the number of steps done (stock: the sampler is run through);
- a run that is told to stop saves at once; what was due in that step is done first when it goes on, so that saving need
  not wait for a validation;
- what falls on an epoch's last step is done once, at the end of the epoch, so that a checkpoint is never between the
  two; a run that has taken its last step goes on to its end (stock: takes one step more).
"""

import json
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import repeat
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import TrainerControl
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import TrainOutput

from tinylm.data.order import GlobalBatches

from .checkpoints import STATE_NAME, complete, place_for, remove_leftovers, remove_older, set_aside_newer
from .launch import RunInterrupted, RunStopped, sum_over_ranks
from .loss_meter import LossMeter
from .manifest import write_manifest
from .run_record import HOW_TO_GO_ON, write_atomically
from .trackers import one_wandb_run
from .watched import WatchedTrainer

logger = logging.getLogger(__name__)

PROGRESS_NAME = "progress.json"
"""In each checkpoint: the order of the data, the tokens so far, the present logging window."""


class ResumableTrainer(WatchedTrainer):
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

    def save_rank_state(self, folder: Path) -> None:
        """What this rank needs beyond the Trainer's own state; all call it before a checkpoint counts."""

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
        if self.is_world_process_zero():
            set_aside_newer(Path(self.args.output_dir), Path(checkpoint), self.steps_done)

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

    def _stateful_callbacks(self) -> list[ExportableState]:
        callbacks = self.callback_handler.callbacks
        return [
            each for each in callbacks if isinstance(each, ExportableState) and not isinstance(each, TrainerControl)
        ]

    def _run_epoch(self, **kwargs) -> None:
        if self._due is not None:
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
        super()._maybe_log_save_evaluate(
            self._tr_loss, due["grad_norm"], model, trial, epoch, ignore_keys_for_eval, start_time, due["learning_rate"]
        )

    def _evaluate(self, trial, ignore_keys_for_eval, skip_scheduler: bool = False) -> dict[str, float]:
        if skip_scheduler and self.steps_done:
            return {}  # `eval_on_start`, and this is not the start
        return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)

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
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, learning_rate=learning_rate, **kwargs)
        if save:
            self.wishes_are_fulfilled()

    def _interrupt(self, grad_norm: Tensor | float | None, learning_rate: float | None) -> None:
        self._due = {
            "log": self.control.should_log,
            "evaluate": self.control.should_evaluate,
            "grad_norm": None if grad_norm is None else float(grad_norm),
            "learning_rate": learning_rate,
        }
        self._save_checkpoint(self.model, trial=None)
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        self.wishes_are_fulfilled()
        raise RunInterrupted(
            f"Stopped after step {self.state.global_step} of {self.state.max_steps} and saved"
            f" ({self.why_to_stop()}). Go on with {HOW_TO_GO_ON}."
        )

    # Saving.

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        """All or nothing, on all ranks."""
        began = time.perf_counter()
        self.phases.enter("save", self.state.global_step)
        self.store_flos()
        progress = self._progress()
        checkpoint = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        beside = checkpoint.with_name(f".saving-{checkpoint.name}")
        writes = self.args.should_save
        with _on_all_ranks(checkpoint, beside):
            if writes:
                place_for(checkpoint)
        with _on_all_ranks(checkpoint, beside):
            self.save_model(str(beside), _internal_call=True)
            if not self.args.save_only_model:
                self._save_optimizer_and_scheduler(str(beside))
                self._save_scaler(str(beside))
                self._save_rng_state(str(beside))
            self.save_rank_state(beside)
        with _on_all_ranks(checkpoint, beside):
            if writes:
                if self.state.best_global_step == self.state.global_step or self._best_checkpoint():
                    self.state.best_model_checkpoint = str(
                        checkpoint.with_name(f"checkpoint-{self.state.best_global_step}")
                    )
                self._note_callbacks()
                self.state.save_to_json(str(beside / STATE_NAME))
                write_atomically(beside / PROGRESS_NAME, json.dumps(progress) + "\n")
                write_manifest(beside, self.state.global_step)
                complete(beside, checkpoint)
                remove_older(
                    checkpoint.parent, checkpoint, self.state.best_model_checkpoint, self.args.save_total_limit
                )
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(checkpoint))
        seconds = time.perf_counter() - began
        logger.info("Saved %s in %.1f s", checkpoint, seconds)
        self.note_save_time(seconds)

    def _progress(self) -> dict[str, object]:
        """Every rank has to call it."""
        return {
            "step": self.state.global_step,
            "order": self.order_of_data(),
            "meter": self.meter.state(),
            "bad_steps": [self.num_bad_steps, self.bad_steps_in_a_row],
            "due": self._due,
            "stopped_early_of": self.state.max_steps if self.control.should_training_stop else 0,
        }

    def _best_checkpoint(self) -> str | None:
        path = Path(self.args.output_dir, f"checkpoint-{self.state.best_global_step}")
        return str(path) if path.is_dir() else None

    def _note_callbacks(self) -> None:
        self.state.stateful_callbacks = {type(each).__name__: each.state() for each in self._stateful_callbacks()}


@contextmanager
def _on_all_ranks(checkpoint: Path, beside: Path) -> Iterator[None]:
    """Runs a part of saving on every rank. If it fails on one, every rank raises, and `beside` is gone.

    Raises:
        RunStopped: the disk is full, the folder may not be written, ...
    """
    failure = None
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        failure = error
    if sum_over_ranks([failure is not None])[0]:
        shutil.rmtree(beside, ignore_errors=True)
        reason = "see the message of the rank that failed" if failure is None else " ".join(str(failure).split())
        raise RunStopped(
            f"`{checkpoint}` could not be written: {reason}. Checkpoints from before are as they were. Make room, or"
            " give leave to write, and go on with the same command and `--resume_from_checkpoint auto`."
        ) from failure


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
