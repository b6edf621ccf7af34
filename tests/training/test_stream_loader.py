"""Streams are given out in whole optimizer steps, and a resumed run passes over what it has seen."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tinylm.training.launch import RunStopped
from tinylm.training.stream_loader import StreamLoader


class Numbers(IterableDataset):
    """Rows 10 * epoch + 0, 1, 2, ..."""

    def __init__(self, length):
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return ({"input_ids": torch.tensor([10 * self.epoch + row])} for row in range(self.length))


def epochs(loader, count):
    """What `count` epochs of a loader give, one list each."""
    given = []
    for epoch in range(count):
        loader.set_epoch(epoch)
        given.append([batch["input_ids"].item() for batch in loader])
    return given


def stream_loader(length, window_size, windows_done=0):
    return StreamLoader(DataLoader(Numbers(length), batch_size=1), window_size, windows_done=lambda: windows_done)


def test_an_epoch_ends_before_a_window_that_is_not_whole():
    assert epochs(stream_loader(length=5, window_size=2), 2) == [[0, 1, 2, 3], [10, 11, 12, 13]]


def test_a_resumed_run_sees_what_the_undisturbed_one_would_have_seen():
    assert epochs(stream_loader(length=5, window_size=2, windows_done=1), 2) == [[2, 3], [10, 11, 12, 13]]


def test_a_resumed_run_passes_over_whole_epochs():
    assert epochs(stream_loader(length=5, window_size=2, windows_done=3), 2) == [[12, 13], [20, 21, 22, 23]]
    assert epochs(stream_loader(length=5, window_size=2, windows_done=4), 2)[0] == [20, 21, 22, 23]


@pytest.mark.parametrize("length", [0, 1])
def test_a_stream_without_one_window_ends_the_run(length):
    with pytest.raises(RunStopped, match="ends before every rank has the micro-batches of one optimizer step"):
        epochs(stream_loader(length=length, window_size=2), 1)
