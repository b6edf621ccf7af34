"""Streams that are gone on with, as a run does it."""

from pathlib import Path
from typing import TypeVar

from tinylm.data.stream import ResumableStream
from tinylm.data.stream_files import load_stream_state, save_stream_state

AnyStream = TypeVar("AnyStream", bound=ResumableStream)


def gone_on_with(stream: ResumableStream, successor: AnyStream, folder: Path) -> AnyStream:
    """The successor, where the stream is; by way of the files in a checkpoint."""
    folder.mkdir(exist_ok=True)
    save_stream_state(stream.state(), folder, stream.rank)
    state = load_stream_state(folder, successor.rank, successor.world_size)
    successor.restore(state)
    successor.set_epoch(state.epoch)
    return successor
