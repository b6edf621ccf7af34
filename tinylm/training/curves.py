"""The chart of a run: training and validation loss against the step."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure


def draw_loss_curves(log_history: Sequence[dict[str, float]], path: str | Path) -> None:
    """Draws `loss` and `eval_loss` (nats a token) of a `trainer_state.json`'s `log_history` into the PNG `path`."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for key, label, style in (("loss", "training", "-"), ("eval_loss", "validation", "o-")):
        points = [(entry["step"], entry[key]) for entry in log_history if key in entry]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1.2, markersize=4)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
