"""Parts of a save that succeed on all ranks or fail on all: a rank that failed alone would leave the others waiting."""

from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from .launch import sum_over_ranks


class WritingFailed(OSError):  # noqa: N818
    """A part of a save failed, on this rank or on another. What a lost rank does to the others is none."""


@contextmanager
def failing_together() -> Iterator[None]:
    """Runs a part of saving on every rank; if it fails on one, every rank raises.

    Raises:
        WritingFailed: no space, no leave, or torch's and safetensors' words for both.
    """
    failure = None
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        failure = error
    if sum_over_ranks([failure is not None])[0]:
        raise WritingFailed(str(failure or "another rank could not write; see its message")) from failure
