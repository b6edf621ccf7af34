"""A Trainer whose checkpoints are whole, or not there.

What differs from the stock Trainer, and why:
- a checkpoint is written beside, listed and renamed (stock: written in place, so that a kill leaves half of one);
- older ones go when the new one is there; a write that fails on one rank ends all of them, with the reason;
- callbacks that say so have their counters in it.
"""

import json
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn
from transformers import TrainerControl
from transformers.trainer_callback import ExportableState

from .checkpoints import STATE_NAME, complete, place_for, remove_older
from .launch import RunStopped
from .manifest import write_manifest
from .run_record import write_atomically
from .together import WritingFailed, failing_together
from .watched import WatchedTrainer

logger = logging.getLogger(__name__)

PROGRESS_NAME = "progress.json"
"""In each checkpoint: what `CheckpointingTrainer.progress` gives."""


class CheckpointingTrainer(WatchedTrainer):
    """`Trainer` that never leaves half a checkpoint under a checkpoint's name."""

    # What a subclass adds.

    def progress(self) -> dict[str, object]:
        """What a run needs to go on beyond the Trainer's own state, as JSON. Every rank calls it; rank 0 writes it."""
        return {}

    def save_rank_state(self, folder: Path) -> None:
        """What this rank needs beyond the Trainer's own state; all call it before a checkpoint counts."""

    # Saving.

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        """All or nothing, on all ranks."""
        began = time.perf_counter()
        self.phases.enter("save", self.state.global_step)
        self.store_flos()
        progress = self.progress()
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
                self._remove_older(checkpoint)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(checkpoint))
        seconds = time.perf_counter() - began
        logger.info("Saved %s in %.1f s", checkpoint, seconds)
        self.note_save_time(seconds)

    def _remove_older(self, newest: Path) -> None:
        """What cannot be deleted stays, with a warning: the new checkpoint is there, and the run need not end."""
        best, limit = self.state.best_model_checkpoint, self.args.save_total_limit
        try:
            remove_older(newest.parent, newest, best, limit)
        except OSError as error:
            logger.warning("`%s` is saved, and an older checkpoint could not be deleted: %s", newest, error)

    def _best_checkpoint(self) -> str | None:
        path = Path(self.args.output_dir, f"checkpoint-{self.state.best_global_step}")
        return str(path) if path.is_dir() else None

    def _note_callbacks(self) -> None:
        self.state.stateful_callbacks = {type(each).__name__: each.state() for each in self._stateful_callbacks()}

    def _stateful_callbacks(self) -> list[ExportableState]:
        callbacks = self.callback_handler.callbacks
        return [
            each for each in callbacks if isinstance(each, ExportableState) and not isinstance(each, TrainerControl)
        ]


@contextmanager
def _on_all_ranks(checkpoint: Path, beside: Path) -> Iterator[None]:
    """A part of saving that fails on all ranks if it fails on one; then `beside` is gone.

    Raises:
        RunStopped: the disk is full, the folder may not be written, ...
    """
    try:
        with failing_together():
            yield
    except WritingFailed as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise RunStopped(
            f"`{checkpoint}` could not be written: {' '.join(str(error).split())}. Checkpoints from before are as they"
            " were. Make room, or give leave to write, and go on with the same command and `--resume_from_checkpoint"
            " auto`."
        ) from error
