"""`tinylm COMMAND`: what is done with a run besides training it. A command imports what it needs when it is called."""

import sys

import typer

from . import models, runs  # noqa: F401  (they add their commands)
from .application import app

__all__ = ["app", "main"]


def main() -> None:
    """The console script: wrong input becomes one paragraph and exit code 2."""
    try:
        app()
    except (ValueError, OSError, ImportError) as error:
        typer.echo(" ".join(str(error).split()), err=True)
        sys.exit(2)
