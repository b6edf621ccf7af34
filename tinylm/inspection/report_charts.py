"""The charts of a report: a colour a run, training as a line, validation as dots. PNG files."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter

from tinylm.inspection.run_log import Points, RunLog, duration

_COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive")
_SHOWN_LOSSES = 0.98
"""Of all losses, the lower part that a chart shows: the first few steps would flatten the rest."""

_TOKENS = "tokens read"
_LOSS = "loss (nats a target)"


def draw_charts(logs: Sequence[RunLog], folder: Path) -> list[tuple[str, str]]:
    """Writes the charts that the runs have points for into `folder`; title and file name of each.

    | file | against |
    |---|---|
    | `report-loss-tokens.png`, `report-loss-time.png` | tokens read, time of training |
    | `report-learning-rate.png`, `report-gradient-norm.png`, `report-throughput.png` | tokens read |
    """
    drawn = []
    for name, title, draw in (
        ("loss-tokens", "Loss against tokens", lambda axes: _losses(axes, logs, RunLog.against_tokens)),
        ("loss-time", "Loss against time", lambda axes: _losses(axes, logs, RunLog.against_seconds)),
        ("learning-rate", "Learning rate", lambda axes: _lines(axes, logs, _logged("learning_rate"))),
        ("gradient-norm", "Gradient norm, before clipping", lambda axes: _lines(axes, logs, _logged("grad_norm"))),
        ("throughput", "Tokens a second", lambda axes: _lines(axes, logs, RunLog.throughput)),
    ):
        figure = Figure(figsize=(7.5, 4.5), layout="constrained")
        axes = figure.subplots()
        if not draw(axes):
            continue
        _dress(axes, name, has_legend=len(logs) > 1 or name.startswith("loss"))
        axes.set_title(title, fontsize=10)
        figure.savefig(folder / f"report-{name}.png", dpi=120)
        drawn.append((title, f"report-{name}.png"))
    return drawn


def _logged(key: str) -> Callable[[RunLog], Points]:
    return lambda log: log.against_tokens(key)


def _lines(axes: Axes, logs: Sequence[RunLog], points_of: Callable[[RunLog], Points]) -> bool:
    """Whether there was anything to draw."""
    for place, log in enumerate(logs):
        x, y = points_of(log)
        if len(x):
            axes.plot(x, y, _style(x), color=_COLORS[place % len(_COLORS)], linewidth=1.2, markersize=4, label=log.name)
    return axes.has_data()


def _losses(axes: Axes, logs: Sequence[RunLog], points_of: Callable[[RunLog, str], Points]) -> bool:
    shown, lowest = [], []
    for place, log in enumerate(logs):
        color = _COLORS[place % len(_COLORS)]
        prefix = f"{log.name}, " if len(logs) > 1 else ""
        x, y = points_of(log, "loss")
        if len(x):
            axes.plot(x, y, _style(x), color=color, linewidth=1.1, markersize=4, label=f"{prefix}training")
        at, scored = points_of(log, "eval_loss")
        if len(at):
            style = {"color": color, "markersize": 6, "markeredgecolor": "white", "linewidth": 1}
            axes.plot(at, scored, "o--", label=f"{prefix}validation", **style)
        values = np.concatenate([y, scored])
        values = values[np.isfinite(values)]
        if len(values):
            shown.append(np.quantile(values, _SHOWN_LOSSES))
            lowest.append(values.min())
    if shown:
        margin = 0.05 * max(max(shown) - min(lowest), 0.1)
        axes.set_ylim(min(lowest) - margin, max(shown) + margin)
    return axes.has_data()


def _style(x: np.ndarray) -> str:
    return "o-" if len(x) < 3 else "-"  # a line of one point cannot be seen


def _dress(axes: Axes, name: str, *, has_legend: bool) -> None:
    axes.grid(alpha=0.3)
    axes.margins(x=0.02)
    axes.set_xlim(left=0)
    if name == "loss-time":
        axes.set_xlabel("time of training, validation and saving included")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: duration(seconds)))
    else:
        axes.set_xlabel(_TOKENS)
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    if name.startswith("loss"):
        axes.set_ylabel(_LOSS)
    elif name == "throughput":
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(EngFormatter(sep=" "))
    elif name == "learning-rate":
        axes.set_ylim(bottom=0)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    if has_legend:
        axes.legend(fontsize=8)
