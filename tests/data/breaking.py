"""A source that breaks in the middle. On its own, because processes that are spawned import what they unpickle."""

from collections.abc import Iterator
from pathlib import Path


def until_repaired(texts: tuple[str, ...], flag: Path, start: int, step: int) -> Iterator[str]:
    """`Shard.read` of `texts`, with an error after nine of them while the file `flag` is there."""
    for number, text in enumerate(texts[start::step]):
        if number == 9 and flag.exists():
            raise ValueError("`broken.txt` is not UTF-8 at byte 7. Convert it.")
        yield text
