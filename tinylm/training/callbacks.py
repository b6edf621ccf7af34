"""What a run says while it trains: a line of progress, and its `STATUS`."""

import logging
import math
import time
from collections.abc import Callable

from transformers import TrainerCallback, TrainerControl, TrainerState

from .arguments import RunArguments
from .record_audit import RecordAudit
from .run_record import HOW_TO_GO_ON, write_status

logger = logging.getLogger(__name__)


class ProgressLine(TrainerCallback):
    """Step, loss, tokens/s over all ranks, learning rate, time left; a line for each validation.

    Args:
        totals: the run's token counts, looked at when training begins.
        remark: what else there is to say of the steps since the last line.
    """

    def __init__(self, totals: Callable[[], dict[str, int]], remark: Callable[[], str] = lambda: "") -> None:
        self._totals, self._remark = totals, remark

    def on_train_begin(self, args: RunArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self.began = self.logged_at = time.perf_counter()
        self.first_step = state.global_step
        self.tokens = self._totals()["num_tokens_read"]  # of a run that is gone on with

    def on_log(self, args: RunArguments, state: TrainerState, control: TrainerControl, logs: dict, **kwargs) -> None:
        if not state.is_world_process_zero:
            return
        if "loss" in logs:
            logger.info(self._line(state, logs))
        elif "eval_loss" in logs:
            logger.info(validation_line(state.global_step, logs))

    def _line(self, state: TrainerState, logs: dict[str, float]) -> str:
        now, done = time.perf_counter(), state.global_step - self.first_step
        tokens = logs["num_tokens_read"]
        speed = (tokens - self.tokens) / (now - self.logged_at)
        left = (now - self.began) / max(done, 1) * (state.max_steps - state.global_step)
        self.logged_at, self.tokens = now, tokens
        width, remark = len(str(state.max_steps)), self._remark()
        return (
            f"step {state.global_step:{width}}/{state.max_steps}  loss {logs['loss']:.4f}  {speed:,.0f} tokens/s"
            f"  lr {logs['learning_rate']:.2e}  {_duration(left)} left"
            f"{f'  ({remark})' if remark else ''}"
        )


def validation_line(step: int, metrics: dict[str, float]) -> str:
    """One validation in words."""
    line = f"step {step}  validation: {metrics['eval_loss']:.4f} nats/token over {metrics['eval_num_tokens']:,} tokens"
    bits = metrics.get("eval_bits_per_byte")
    return line if bits is None else f"{line}, {bits:.4f} bits/byte"


def _duration(seconds: float) -> str:
    """
    >>> _duration(59.2), _duration(125), _duration(90_000)
    ('1m00s', '2m05s', '1d01h')
    """
    minutes, seconds = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"


class StatusFile(TrainerCallback):
    """Keeps the run's `STATUS` true while it trains; `finish_run` writes the last word."""

    def on_train_begin(self, args: RunArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self._write(args, state, "running")

    def on_save(self, args: RunArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self._write(args, state, "running")

    def _write(self, args: RunArguments, state: TrainerState, status: str) -> None:
        if state.is_world_process_zero:
            write_status(args.output_dir, status, state.global_step, HOW_TO_GO_ON)


class AuditFiles(TrainerCallback):
    """Begins and ends a record audit with the training; the Trainer closes a part before each checkpoint."""

    def __init__(self, audit: RecordAudit) -> None:
        self.audit = audit

    def on_train_begin(self, args: RunArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self.audit.begin(state.global_step)

    def on_train_end(self, args: RunArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self.audit.close_part()
