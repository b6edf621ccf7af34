"""`tinylm report`: runs side by side, drawn from their folders: charts and `report.md`. No tracker is needed."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tinylm.inspection.report_charts import draw_charts
from tinylm.inspection.run_log import RunLog, duration, read_run_log, read_run_logs
from tinylm.training.run_record import write_atomically

REPORT_NAME = "report.md"
_MARK = "<!-- written by tinylm report -->"
_COURSE = "## How it went"

Rows = Sequence[tuple[str, Callable[[RunLog], str]]]
"""Rows of a table: title, and the value for a run, empty where it has none."""


def write_report(runs: Sequence[Path], output_dir: Path | None = None) -> Path:
    """Draws the runs into one chart each and writes `report.md` with a table and the charts; gives its path.

    An earlier report in the same place is replaced.

    Args:
        output_dir: unset: `report` in the folder of the first run.

    Raises:
        FileNotFoundError: a folder that is no run.
        FileExistsError: a `report.md` that this command did not write.
        ValueError: a run that has logged nothing, or a file of it that is damaged.
    """
    logs = read_run_logs(runs)
    for log in logs:
        if not any("loss" in entry or "eval_loss" in entry for entry in log.entries):
            raise ValueError(
                f"The run `{log.name}` has logged no loss until step {log.step}. Train with a smaller"
                " `--logging_steps`."
            )
    folder = output_dir or runs[0] / "report"
    path = folder / REPORT_NAME
    if path.is_file() and not path.read_text(encoding="utf-8").startswith(_MARK):
        raise FileExistsError(f"`{path}` was not written by this command, and is kept. Set `--output_dir`.")
    folder.mkdir(parents=True, exist_ok=True)
    charts = draw_charts(logs, folder)
    write_atomically(path, report_markdown(logs, charts))
    return path


def add_course_to_card(run: Path) -> None:
    """Adds to the card of a finished run, or renews there, how it went: the rows of the report's table that the card
    does not have.

    Raises:
        FileNotFoundError: the folder holds no run, or no card.
    """
    card = run / "README.md"
    text = card.read_text(encoding="utf-8").partition(_COURSE)[0].rstrip()
    rows = _table_rows([read_run_log(run)], _IN_CARD)
    if rows:
        write_atomically(card, "\n".join([text, "", _COURSE, "", "| | |", "|---|---|", *rows]) + "\n")


def report_markdown(logs: Sequence[RunLog], charts: Sequence[tuple[str, str]]) -> str:
    """A heading, a table with a column a run, and the charts `(title, file name)`. It names no path of this machine."""
    lines = [_MARK, "", f"# {', '.join(log.name for log in logs)}", ""]
    lines += [f"| | {' | '.join(log.name for log in logs)} |", f"|---|{'---|' * len(logs)}"]
    lines += _table_rows(logs, _ROWS)
    if len(logs) > 1:
        lines += [
            "",
            "Losses compare where tokenizer and validation documents are the same; bits a byte compare always.",
        ]
    if not all(log.times for log in logs):
        without = ", ".join(log.name for log in logs if not log.times)
        lines += ["", f"Not against time, since no times were noted: {without}."]
    for title, name in charts:
        lines += ["", f"![{title}]({name})"]
    return "\n".join(lines) + "\n"


def _table_rows(logs: Sequence[RunLog], rows: Rows) -> list[str]:
    """Those of which at least one run has a value."""
    lines = []
    for title, value_of in rows:
        values = [value_of(log) for log in logs]
        if any(values):
            lines.append(f"| {title} | {' | '.join(value or '-' for value in values)} |")
    return lines


def _steps(log: RunLog) -> str:
    return f"{log.step:,} of {log.max_steps:,}"


def _time(log: RunLog) -> str:
    if log.times:
        return duration(max(log.times.values()))
    spent = log.results.get("train_runtime")
    return "" if spent is None else duration(spent)


def _median_throughput(log: RunLog) -> str:
    speeds = log.throughput()[1]
    return f"{np.median(speeds):,.0f}" if len(speeds) else ""


def _best_validation(log: RunLog) -> str:
    best = log.best("eval_loss")
    return "" if best is None else f"{best[0]:.4f} (step {best[1]:,})"


def _parameters(log: RunLog) -> str:
    counts = log.record.get("parameters")
    return f"{counts['trainable']:,} of {counts['total']:,}" if counts else ""


def _machine(log: RunLog) -> str:
    if not log.record:
        return ""
    ranks = log.record["world_size"]
    return f"{log.record['hardware']}, {ranks} rank{'s' if ranks > 1 else ''}, {log.record['precision']}"


def _logged(key: str, form: str) -> Callable[[RunLog], str]:
    def value_of(log: RunLog) -> str:
        value = log.last(key)
        return "" if value is None else format(value, form)

    return value_of


def _data(log: RunLog) -> str:
    """Files by their names, without the folders of this machine."""
    source = str(log.record.get("data_source", ""))
    return re.sub(r"`[^`]*/([^`/]+)`", r"`\1`", source).replace("|", r"\|")


def _highest_rate(log: RunLog) -> str:
    rates = log.against_tokens("learning_rate")[1]
    return f"{rates.max():.2e}" if len(rates) else ""


_ONLY_HERE = {
    "time of training",
    "tokens a second, median",
    "training loss, last",
    "validation loss, best",
    "steps skipped, not finite",
}
_ROWS: Rows = (
    ("state", lambda log: log.status),
    ("steps", _steps),
    ("tokens read", _logged("num_tokens_read", ",")),
    ("tokens trained on", _logged("num_tokens_trained", ",")),
    ("time of training", _time),
    ("tokens a second, median", _median_throughput),
    ("training loss, last", _logged("loss", ".4f")),
    ("validation loss, last", _logged("eval_loss", ".4f")),
    ("validation loss, best", _best_validation),
    ("validation perplexity, last", _logged("eval_perplexity", ".2f")),
    ("validation bits a byte, last", _logged("eval_bits_per_byte", ".4f")),
    ("learning rate, highest", _highest_rate),
    ("steps skipped, not finite", _logged("num_bad_steps", ",")),
    ("parameters trained", _parameters),
    ("data", _data),
    ("machine", _machine),
    ("commit", lambda log: str(log.record.get("commit") or "")),
)
_IN_CARD = [(title, value_of) for title, value_of in _ROWS if title in _ONLY_HERE]
