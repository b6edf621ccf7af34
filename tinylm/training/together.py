"""Parts of a save that succeed on all ranks or fail on all: a rank that failed alone would leave the others waiting."""

from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from .launch import sum_over_ranks

WRITING_FAILED = (OSError, RuntimeError, SafetensorError)
"""What a write raises: no space, no leave, and torch's and safetensors' words for both."""


@contextmanager
def failing_together() -> Iterator[None]:
    """Runs a part of saving on every rank; if it fails on one, every rank raises.

    Raises:
        OSError, RuntimeError, SafetensorError: what this rank's part raised; a RuntimeError if only another's did.
    """
    failure = None
    try:
        yield
    except WRITING_FAILED as error:
        failure = error
    if sum_over_ranks([failure is not None])[0]:
        raise failure or RuntimeError("see the message of the rank that failed")
