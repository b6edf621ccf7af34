"""A Trainer that can be stopped on purpose, and whose ranks can say which of them has failed.

Choices:
- One exchange of three numbers a step, before the weights change: does any rank want to save, to stop, and is every
  rank's loss a number? So all ranks decide the same in the same step.
- Each rank notes which phase of which step it is in (`phases.py`).
- `STATUS` is kept true when the run ends in an error.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from transformers.trainer_utils import TrainOutput

from .arguments import RunArguments
from .engine_trainer import EngineTrainer
from .launch import RunInterrupted, gather_over_ranks, sum_over_ranks
from .phase_times import PhaseTimes, Table, as_lines, in_words
from .phases import Phases
from .run_record import HOW_TO_GO_ON, write_status
from .stopping import ANOTHER_RANK, LAUNCHERS_GRACE, STOP_NAME, StopRequests, parse_duration

logger = logging.getLogger(__name__)


class ValidationStopped(Exception):  # noqa: N818
    """All ranks have left a validation, because one of them was asked to stop."""


class WatchedTrainer(EngineTrainer):
    """`EngineTrainer` with the wishes of all ranks, their phases and their `STATUS`."""

    args: RunArguments

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        folder = Path(self.args.output_dir)
        is_timed = self.args.world_size > 1 or self.args.log_timing
        self.phase_times = PhaseTimes(self.args.device) if is_timed else None
        self.phases = Phases(folder, self.args.process_index, self.args.world_size, self.phase_times)
        self.time_table: Table | None = None  # of the last logging window
        self.loss_is_finite = True  # in this step, on every rank
        self._step_loss: Tensor | float = 0.0  # of this rank
        self._wishes = (False, False)  # of any rank: to save, to stop
        self._times = {"step": 0.0, "save": 0.0}  # seconds, the longest so far
        self._step_began = 0.0
        self._requests = StopRequests(
            folder,
            is_rank_zero=self.is_world_process_zero(),
            max_seconds=parse_duration(self.args.max_time) if self.args.max_time else None,
            leave_at_once=self.phases.somebody_failed,
            before_dying=lambda: self.write_status("interrupted", self._requests.reason),
        )

    def train(self, resume_from_checkpoint: str | None = None, **kwargs) -> TrainOutput:
        if dist.is_initialized():  # `TrainingArguments` hands it on to groups of GPUs only
            dist.distributed_c10d._set_pg_timeout(self.args.ddp_timeout_delta)
        with self.watched():
            return super().train(resume_from_checkpoint, **kwargs)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within it the run can be stopped, ranks note their phases, and `STATUS` tells of an error."""
        with self.status_is_kept(), self._requests, self.phases:
            yield

    @contextmanager
    def status_is_kept(self) -> Iterator[None]:
        """`STATUS` says so when the block ends in an error."""
        try:
            yield
        except RunInterrupted as interrupted:
            self.write_status("interrupted", interrupted.because)
            raise
        except KeyboardInterrupt:
            self.write_status("interrupted", "SIGINT")
            raise
        except BaseException:
            self.write_status("failed")
            raise

    def write_status(self, status: str, because: str = "") -> None:
        """`STATUS`, by rank 0; a disk that takes no more changes nothing."""
        if self.is_world_process_zero():
            with suppress(OSError):
                write_status(self.args.output_dir, status, self.state.global_step, HOW_TO_GO_ON, because)

    # What the ranks want.

    def take_wishes(self) -> tuple[bool, bool]:
        """Whether any rank was asked to save, and to stop, in this step; asked once."""
        wishes, self._wishes = self._wishes, (False, False)
        return wishes

    def wishes_are_fulfilled(self, *, stopped: bool) -> None:
        """The run has saved, or stopped as well."""
        self._requests.fulfilled(stopped=stopped)

    def why_to_stop(self) -> str:
        """In words."""
        return self._requests.describe()

    def leave(self, message: str) -> NoReturn:
        """Ends the run as the wish to stop has it; `STATUS` says because of what.

        Raises:
            RunInterrupted: always.
        """
        self._requests.wishes()  # a file `STOP` may have come while the run saved
        because = self._requests.reason or ANOTHER_RANK
        self.wishes_are_fulfilled(stopped=True)
        raise RunInterrupted(message, because) from None

    def stop_validation_if_asked(self) -> None:
        """Called before each batch of a validation, equally often on every rank.

        Raises:
            ValidationStopped: some rank was asked to stop. Its wish is not fulfilled yet.
        """
        if self._requests.is_listening:
            self.phases.enter("validation", self.state.global_step)
            _, stop = self._requests.wishes()
            if sum_over_ranks([stop])[0]:
                raise ValidationStopped

    def note_step_time(self) -> None:
        """Called when a step's weights have changed."""
        self._times["step"] = max(self._times["step"], time.perf_counter() - self._step_began)

    def note_save_time(self, seconds: float) -> None:
        """Says once that a launcher would kill the run before it has saved."""
        is_news = self._times["save"] + self._times["step"] <= LAUNCHERS_GRACE
        self._times["save"] = max(self._times["save"], seconds)
        if is_news and self._times["save"] + self._times["step"] > LAUNCHERS_GRACE:
            logger.warning(
                "A step takes up to %.0f s and a save %.0f s, and a launcher that is told to stop kills the ranks after"
                " %.0f s: stop this run with a file `%s` in its folder, or with `--max_time`.",
                *(self._times["step"], self._times["save"], LAUNCHERS_GRACE, STOP_NAME),
            )

    # The phases of a step, in their order.

    def get_batch_samples(self, *args, **kwargs) -> tuple[list, Tensor | int | None]:
        self._step_began, self._step_loss = time.perf_counter(), 0.0
        self.phases.enter("data", self.state.global_step + 1)
        return super().get_batch_samples(*args, **kwargs)

    def _get_num_items_in_batch(self, *args, **kwargs) -> Tensor | int | None:
        self.phases.enter("exchange", self.state.global_step + 1)
        return super()._get_num_items_in_batch(*args, **kwargs)

    def training_step(self, *args, **kwargs) -> Tensor:
        self.phases.enter("compute", self.state.global_step + 1)
        loss = super().training_step(*args, **kwargs)
        self._step_loss = self._step_loss + loss
        return loss

    def compute_loss(self, *args, **kwargs):
        computed = super().compute_loss(*args, **kwargs)
        loss = computed[0] if isinstance(computed, tuple) else computed
        if self.phase_times is not None and loss.requires_grad:
            loss.register_hook(self._note_end_of_own_backward)
        return computed

    def _note_end_of_own_backward(self, _: Tensor) -> None:
        """Called when backward begins. What is put into its queue first is done first when this rank's gradients are
        there, and DDP waits for those of the others in that queue too."""
        step = self.state.global_step + 1
        Variable._execution_engine.queue_callback(lambda: self.phases.enter("exchange", step))

    def _get_grad_norm(self, *args, **kwargs) -> Tensor | float:
        """Once a step: what does any rank want, and is its loss a number? The stock method follows."""
        self.phases.enter("exchange", self.state.global_step + 1)
        is_bad = not torch.isfinite(torch.as_tensor(self._step_loss))
        save, stop, num_bad = sum_over_ranks([*self._requests.wishes(), is_bad])
        self._wishes, self.loss_is_finite = (bool(save), bool(stop)), not num_bad
        self.phases.enter("compute", self.state.global_step + 1)
        return super()._get_grad_norm(*args, **kwargs)

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        """Every rank calls it. The times do not go into `logs`, which are the same in each run."""
        self.time_table = None
        if "loss" in logs and self.phase_times is not None:
            self.time_table = gather_over_ranks(self.phase_times.take())
            if self.args.log_timing and self.is_world_process_zero():
                for line in as_lines(self.state.global_step, self.time_table, self._hosts):
                    logger.info("%s", line)
        super().log(logs, *args, **kwargs)

    def time_in_words(self) -> str:
        """The slowest rank of the last logging window, or what all of them waited for; empty if neither is much."""
        return in_words(self.time_table, self._hosts) if self.time_table is not None else ""

    @cached_property
    def _hosts(self) -> list[str]:
        return self.phases.hosts()

    def _evaluate(self, *args, **kwargs) -> dict[str, float]:
        self.phases.enter("validation", self.state.global_step)
        return super()._evaluate(*args, **kwargs)
