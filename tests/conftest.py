"""No test talks to the Hub or to a tracker, and none uses a GPU: set before anything is imported."""

import logging
import os
from collections.abc import Iterator

import pytest

os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", WANDB_MODE="offline", TOKENIZERS_PARALLELISM="false")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A recipe that runs in a test shows the package's log on the standard output of that test only."""
    package = logging.getLogger("tinylm")
    handlers, level, propagate = package.handlers[:], package.level, package.propagate
    yield
    package.handlers[:], package.propagate = handlers, propagate
    package.setLevel(level)
