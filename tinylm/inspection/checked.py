"""One look of the doctor: what it found, or what it was refused, and what was warned of on the way."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tinylm.inspection.doctor import Finding

_WRONG_INPUT = (ValueError, OSError, ImportError)


class Checked:
    """What `look` gives as `value`, or None and a `fault` where it refuses; `said` are its warnings."""

    def __init__(self, subject: str, look: Callable[[], object]) -> None:
        self.subject, self.value, self.fault = subject, None, None
        with _warnings_kept() as self.said:
            try:
                self.value = look()
            except _WRONG_INPUT as error:
                self.fault = " ".join(str(error).split())

    def unless_ok(self, detail: str) -> list[Finding]:
        """The problem, or `detail` as what is well."""
        return [Finding("problem" if self.fault else "ok", self.subject, self.fault or detail)]


@contextmanager
def _warnings_kept() -> Iterator[list[str]]:
    """What the package warns of within it, which is not shown."""
    package, said = logging.getLogger("tinylm"), []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    before = package.handlers[:], package.level, package.propagate
    package.handlers[:], package.propagate = [handler], False
    package.setLevel(logging.WARNING)
    try:
        yield said
    finally:
        package.handlers[:], package.propagate = before[0], before[2]
        package.setLevel(before[1])
