"""The command `tinylm`, to which `runs.py` and `models.py` add theirs, and what they say to a terminal."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import TextIO

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


class Answers:
    """Where the answer goes: standard output, also after `quieten`."""

    stream: TextIO | None = None


@app.callback()
def tinylm() -> None:
    """Look at small language models and at the runs that made them."""
    Answers.stream = None  # of a call before this one in the same process


def quieten() -> None:
    """Standard output is for the answer alone: our log goes to standard error, as does what libraries print there when
    they are imported (`[INFO] Running in WANDB offline mode`), and they only say errors."""
    Answers.stream, sys.stdout = sys.stdout, sys.stderr
    os.environ["TQDM_DISABLE"] = "1"
    from transformers.utils import logging as library

    logging.basicConfig(format="%(message)s")
    logging.getLogger("tinylm").setLevel(logging.INFO)
    library.set_verbosity_error()
    library.disable_progress_bar()
    warnings.simplefilter("ignore")


def answers() -> TextIO:
    """The stream for the answer."""
    return Answers.stream or sys.stdout


def write(text: str) -> None:
    """A piece of the answer, at once."""
    typer.echo(text, nl=False, file=answers())
    answers().flush()


def say(text: str = "") -> None:
    """A line of the answer."""
    write(f"{text}\n")


def print_table(rows: list[tuple[str, str, str]]) -> None:
    """Rows of level, subject and detail, in colour."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    colors = {"ok": "green", "warning": "yellow", "problem": "bold red"}
    shown = Table(box=box.SIMPLE, show_header=False)
    for level, subject, detail in rows:
        shown.add_row(f"[{colors[level]}]{level}", subject, detail.replace("[", r"\["))
    Console(file=answers()).print(shown)


def typed_lines() -> Iterator[str]:
    """What the user types, to the end of standard input."""
    while True:
        try:
            write("> " if sys.stdin.isatty() else "")
            yield input()
        except EOFError:
            return
