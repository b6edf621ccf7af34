"""Batches of a stream, in whole optimizer steps that all ranks have.

Ranks read different shards, so one runs dry before the others. A rank that went on alone would wait in the next
all-reduce for ever, so before each optimizer step all of them ask: has everyone a whole window of micro-batches?
"""

import logging
from collections.abc import Callable, Iterator
from itertools import islice

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from .launch import RunStopped, sum_over_ranks

logger = logging.getLogger(__name__)

Batch = dict[str, Tensor]


class StreamLoader:
    """Iterates a DataLoader over a stream window by window (a window: the micro-batches of one optimizer step).

    Args:
        loader: this rank's DataLoader over a dataset with `set_epoch`.
        window_size: micro-batches a window.
        windows_done: optimizer steps that the run has taken when iteration begins. They are read again and passed
            over, whole epochs included, so that a resumed run sees what the undisturbed one would have seen.
    """

    def __init__(self, loader: DataLoader, window_size: int, *, windows_done: Callable[[], int]) -> None:
        self.loader = loader
        self.window_size = window_size
        self.windows_done = windows_done
        self._epoch = 0
        self._epochs_passed_over = 0
        self._started = False

    @property
    def dataset(self) -> IterableDataset:
        return self.loader.dataset

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Batch]:
        behind = 0 if self._started else self.windows_done()
        self._started = True
        while True:
            self.dataset.set_epoch(self._epoch + self._epochs_passed_over)
            given = passed_over = False
            for window in self._windows():
                if behind:
                    behind, passed_over = behind - 1, True
                else:
                    given = True
                    yield from window
            if not given and not passed_over:
                raise RunStopped(
                    "The stream ends before every rank has the micro-batches of one optimizer step: too little text, or"
                    " fewer documents than ranks. Give more, or lower the ranks, `--per_device_train_batch_size`,"
                    " `--gradient_accumulation_steps` or `--block_size`; one long text can be divided with"
                    " `--document_separator` or prepared (`--prepared_corpus`)."
                )
            if given:
                return
            self._epochs_passed_over += 1

    def _windows(self) -> Iterator[list[Batch]]:
        """Whole windows while every rank has one; then says how many rows that were read stay unused."""
        batches = iter(self.loader)
        while True:
            window = list(islice(batches, self.window_size))
            rows = sum(len(batch["input_ids"]) for batch in window)
            ranks_run_dry, rows_left = sum_over_ranks([len(window) < self.window_size, rows])
            if ranks_run_dry:
                logger.info(
                    "An epoch of the stream ends on all ranks together: %d rows read and left over.",
                    rows_left,
                )
                return
            yield window
