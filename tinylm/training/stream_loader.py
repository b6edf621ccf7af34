"""Batches of a stream, in whole optimizer steps that all ranks have.

Ranks read different shards, so one runs dry before the others. A rank that went on alone would wait in the next
all-reduce for ever, so before each optimizer step all of them ask: has everyone a whole window of micro-batches?
In the same breath they learn that one of them cannot read on, and stop together behind the step before.

A `ResumableStream` tells after each window where it is, and a resumed run goes on from there. Of any other stream the
windows that were done are read again and passed over.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tinylm.data.stream import ResumableStream, StreamState
from tinylm.data.stream_files import load_stream_state, save_stream_state

from .launch import RunStopped, sum_over_ranks

logger = logging.getLogger(__name__)

Batch = dict[str, Tensor]


class StreamBroken(RunStopped):
    """One rank cannot read its stream any further. All ranks raise it, behind the same step."""


class StreamLoader:
    """Iterates a DataLoader over a stream window by window (a window: the micro-batches of one optimizer step).

    Args:
        loader: this rank's DataLoader over a dataset with `set_epoch`; without workers if that is a `ResumableStream`.
        window_size: micro-batches a window.
        windows_done: optimizer steps that the run has taken when iteration begins. Unless `go_on_from` has told where
            they ended, they are read again and passed over, whole epochs included.
        before_agreeing: called when this rank has read a window, and is to wait for the others.
    """

    def __init__(
        self,
        loader: DataLoader,
        window_size: int,
        *,
        windows_done: Callable[[], int],
        before_agreeing: Callable[[], None] = lambda: None,
    ) -> None:
        self.loader = loader
        self.window_size = window_size
        self.windows_done, self.before_agreeing = windows_done, before_agreeing
        self._epoch = 0
        self._epochs_passed_over = 0
        self._windows_before = 0  # of the epoch in which the run goes on, that earlier runs were given
        self.place = (0, 0)
        """The epoch of the last window that was given out, and how many of that epoch were, in earlier runs too."""
        self._restored: StreamState | None = None
        self._state: StreamState | None = None  # behind the last window that was given out
        self._started = False

    @property
    def dataset(self) -> IterableDataset:
        return self.loader.dataset

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def go_on_from(self, checkpoint: Path, rank: int, world_size: int) -> None:
        """Begins behind the step at which `save` wrote into `checkpoint`, if the stream can.

        Raises:
            FileNotFoundError: the checkpoint holds no position. ValueError: it does not suit this stream or the ranks.
        """
        if isinstance(self.dataset, ResumableStream):
            self._restored = self._state = load_stream_state(checkpoint, rank, world_size)
            self.dataset.restore(self._restored)
            self._windows_before = self._restored.num_windows

    def save(self, checkpoint: Path, rank: int) -> None:
        """Writes where this rank's stream was when the last window had been read, if the stream can tell."""
        if self._state is not None:
            save_stream_state(self._state, checkpoint, rank)

    def __iter__(self) -> Iterator[Batch]:
        behind, passed_over = self._begin()
        while True:
            self.dataset.set_epoch(self._epoch + self._epochs_passed_over)
            given = False
            self.place = self._epoch + self._epochs_passed_over, self._windows_before
            self._windows_before = 0
            for window in self._windows():
                self.place = self.place[0], self.place[1] + 1
                self._note_state()
                if behind:
                    behind, passed_over = behind - 1, True
                else:
                    given = True
                    yield from window
            if given:
                return
            if not passed_over:
                raise RunStopped(
                    "The stream ends before every rank has the micro-batches of one optimizer step: too little text, or"
                    " fewer documents than ranks. Give more, or lower the ranks, `--per_device_train_batch_size`,"
                    " `--gradient_accumulation_steps` or `--block_size`; one long text can be divided with"
                    " `--document_separator` or prepared (`--prepared_corpus`)."
                )
            self._epochs_passed_over += 1
            passed_over = False

    def _begin(self) -> tuple[int, bool]:
        """How many windows are to be passed over, and whether a part of the epoch has been given in an earlier run."""
        if self._started:
            return 0, False
        self._started = True
        if self._restored is None:
            return self.windows_done(), False
        self._epochs_passed_over = self._restored.epoch - self._epoch
        return 0, bool(self._restored.readers)

    def _windows(self) -> Iterator[list[Batch]]:
        """Whole windows while every rank has one; then says how many rows that were read stay unused.

        Raises:
            StreamBroken: a rank could not read on.
        """
        batches, window, failure = iter(self.loader), [], None
        while True:
            try:
                window = list(islice(batches, self.window_size))
            except (ValueError, OSError, RuntimeError) as error:
                failure = error
            rows = sum(len(batch["input_ids"]) for batch in window)
            self.before_agreeing()
            run_dry, broken, rows_left = sum_over_ranks([len(window) < self.window_size, failure is not None, rows])
            if broken:
                what = "another rank cannot read on; see its message." if failure is None else str(failure)
                raise StreamBroken(
                    f"{what} All ranks have stopped behind the last step that each of them had the data for, and what"
                    " was trained until then is saved: go on with `--resume_from_checkpoint auto`."
                ) from failure
            if run_dry:
                logger.info(
                    "An epoch of the stream ends on all ranks together: %d rows read and left over.",
                    rows_left,
                )
                if isinstance(self.dataset, ResumableStream):
                    self.dataset.set_epoch(self.dataset.epoch + 1)
                    self._state = self.dataset.state()
                return
            yield window

    def _note_state(self) -> None:
        if isinstance(self.dataset, ResumableStream):
            self._state = replace(self.dataset.state(), num_windows=self.place[1])
