"""Scores of models on corpora as one table for people and one JSON text for programs."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .side_by_side import Scores

_COLUMNS = {
    "nats_per_token": ("nats/token", ",.4f"),
    "perplexity": ("perplexity", ",.2f"),
    "bits_per_byte": ("bits/byte", ",.4f"),
    "num_tokens": ("tokens", ","),
    "num_bytes": ("bytes", ","),
    "num_documents": ("documents", ","),
}
_WIDTH_OF_A_FILE = 160


def scores_as_json(results: Sequence[Scores]) -> str:
    """Of one model on one corpus an object of its scores; of more, a list of objects with `model` and `corpus` too."""
    if len(results) > 1:
        return json.dumps(list(results), indent=2) + "\n"
    return json.dumps({name: results[0][name] for name in _COLUMNS}, indent=2) + "\n"


def print_scores(results: Sequence[Scores], console: Console | None = None) -> None:
    """One table, a row for each model and corpus; what all rows share stands above it."""
    console = console or Console()
    if not console.is_terminal:
        console.width = _WIDTH_OF_A_FILE
    told_apart = [kind for kind in ("model", "corpus") if len({row[kind] for row in results}) > 1]
    shared = [f"{kind} {results[0][kind]}" for kind in ("model", "corpus") if kind not in told_apart]
    if shared:
        console.print(Text(", ".join(shared)))
    table = Table(box=box.SIMPLE_HEAD)
    for kind in told_apart:
        table.add_column(kind, overflow="fold")
    for heading, _ in _COLUMNS.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for row in results:
        numbers = (format(row[name], form) for name, (_, form) in _COLUMNS.items())
        table.add_row(*(Text(str(row[kind])) for kind in told_apart), *numbers)
    console.print(table)


def check_output_file(path: Path) -> None:
    """Looks, before any work is done, whether a file can be written there.

    Raises:
        FileNotFoundError: a folder, or a place in one that does not exist.
        PermissionError: the folder that it would be in may not be written.
    """
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir():
        raise FileNotFoundError(
            f"Scores are written to a file in a folder that exists; `{path}` is not that. Set `--output_file`."
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"Scores go to `{path}`, and `{folder}` may not be written. Set `--output_file`.")
