"""The lab's charts, as PNG files. What a chart compares was measured in one run, and its title says on what."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tinylm.ddp.cost_model import PROJECTED_RANKS, Fit, project, relative_errors
from tinylm.ddp.table import SizeRow, StepRow

_MARKERS = "osD^vP"
_COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")


def draw_step_times(rows: Sequence[StepRow], path: Path) -> None:
    """A bar a configuration: the median step, its 10th to 90th percentile, a line at the step without exchange."""
    timed = _timed(rows)
    figure, axes = _bars(
        timed,
        [row.median_ms for row in timed],
        [(row.median_ms - row.p10_ms, row.p90_ms - row.median_ms) for row in timed],
    )
    for row in timed:
        if row.algorithm == "none":
            axes.axvline(row.median_ms, color="0.3", linestyle="--", linewidth=1)
    axes.set(xlabel="ms a step")
    _save(figure, "One optimizer step: median, and 10th to 90th percentile", timed[0], path)


def draw_exposed(rows: Sequence[StepRow], path: Path) -> None:
    """A bar a configuration: how much longer its step takes than the same step without exchange."""
    timed = [row for row in _timed(rows) if row.algorithm != "none"]
    figure, axes = _bars(timed, [row.exposed_ms for row in timed], None)
    axes.set(xlabel="ms a step")
    _save(figure, "Exposed communication: what the exchange adds to a step", timed[0], path)


def draw_message_sizes(rows: Sequence[SizeRow], fits: dict[str, Fit], path: Path) -> None:
    """Seconds to sum a tensor against its size, measured (points, with their spread) and fitted (lines)."""
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    for place, (name, fit) in enumerate(fits.items()):
        own = sorted((row for row in rows if row.algorithm == name), key=lambda row: row.bytes)
        sizes, medians = [row.bytes for row in own], [row.median_ms for row in own]
        spread = [[row.median_ms - row.p10_ms for row in own], [row.p90_ms - row.median_ms for row in own]]
        style = {"color": _COLORS[place], "marker": _MARKERS[place], "markersize": 4, "linestyle": "none"}
        axes.errorbar(sizes, medians, yerr=spread, elinewidth=0.8, label=name, **style)
        axes.plot(sizes, [1000 * fit.seconds(size) for size in sizes], color=_COLORS[place], linewidth=1)
    _log_log(axes, xlabel="bytes of the tensor", ylabel="ms (points: measured; lines: the cost model)")
    _save(figure, "Time to sum a tensor", rows[0], path)


def draw_predictions(rows: Sequence[SizeRow], fits: dict[str, Fit], path: Path) -> None:
    """Predicted against measured for sizes that nothing was fitted to; the band is 20 % to either side."""
    figure = Figure(figsize=(6.5, 6), layout="constrained")
    axes = figure.subplots()
    errors = relative_errors(fits, rows)
    for place, (name, fit) in enumerate(fits.items()):
        own = [row for row in rows if row.algorithm == name]
        axes.plot(
            [row.median_ms for row in own],
            [1000 * fit.seconds(row.bytes) for row in own],
            _MARKERS[place],
            color=_COLORS[place],
            markersize=5,
            label=f"{name}: {statistics.median(errors[name]):.0%}",
        )
    ends = [min(row.median_ms for row in rows) / 1.5, max(row.median_ms for row in rows) * 1.5]
    axes.plot(ends, ends, color="0.3", linewidth=1)
    axes.fill_between(ends, [0.8 * end for end in ends], [1.2 * end for end in ends], color="0.9", zorder=0)
    _log_log(axes, xlabel="measured, ms", ylabel="predicted, ms")
    axes.legend(title="median error")
    median = statistics.median(error for of_one in errors.values() for error in of_one)
    _save(figure, f"Sizes that were not fitted to: median error {median:.0%}", rows[0], path)


def draw_projection(
    algorithms: Sequence[str], sizes: Sequence[int], path: Path, *, latency_us: float, gbit: float, commit: str
) -> None:
    """Milliseconds to sum a tensor of each of `sizes` (bytes) against the number of ranks, over the links given."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    panels = figure.subplots(1, len(sizes), squeeze=False)[0]
    for axes, num_bytes in zip(panels, sizes, strict=True):
        lines: dict[tuple[float, ...], list[str]] = {}
        for name in algorithms:
            times = [project(name, ranks, num_bytes, latency_us=latency_us, gbit=gbit) for ranks in PROJECTED_RANKS]
            lines.setdefault(tuple(1000 * seconds for seconds in times), []).append(name)
        for times, names in lines.items():
            place = algorithms.index(names[0])
            style = {"color": _COLORS[place], "marker": _MARKERS[place], "markersize": 4}
            axes.plot(PROJECTED_RANKS, times, label=",\n".join(names), **style)
        _log_log(axes, xlabel=f"ranks that sum {num_bytes:,} bytes", ylabel="ms (projected)")
        axes.set_xticks(PROJECTED_RANKS, [f"{ranks:,}" for ranks in PROJECTED_RANKS], fontsize=8)
        axes.minorticks_off()
    figure.suptitle(
        f"Projected: links of {latency_us:g} us and {gbit:g} Gbit/s, by the model's counts; commit {commit}", fontsize=9
    )
    figure.savefig(path, dpi=120)


def _timed(rows: Sequence[StepRow]) -> list[StepRow]:
    """The rows with times; all of one run."""
    assert len({row.run for row in rows}) == 1, "rows of different runs do not share a chart"
    return [row for row in rows if row.median_ms is not None]


def _bars(
    rows: Sequence[StepRow], values: Sequence[float], spread: Sequence[tuple[float, float]] | None
) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, 1.6 + 0.32 * len(rows)), layout="constrained")
    axes = figure.subplots()
    names = [row.algorithm if row.mode == "none" else f"{row.algorithm}, {row.mode}" for row in rows]
    names = [name.replace(" gradient", "\ngradient") for name in names]  # the longest takes two lines
    colors = [_mode_color(row) for row in rows]
    sides = None if spread is None else list(zip(*spread, strict=True))
    bars = axes.barh(range(len(rows)), values, xerr=sides, color=colors, ecolor="0.3", height=0.7)
    axes.bar_label(bars, fmt="{:.1f}", padding=3, fontsize=8)
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def _mode_color(row: StepRow) -> str:
    if row.algorithm in ("none", "native"):
        return {"none": "0.6", "native": "tab:purple"}[row.algorithm]
    return {"no_hooks": "tab:red", "hooks": "tab:blue"}.get(row.mode, "tab:green")


def _log_log(axes: Axes, *, xlabel: str, ylabel: str) -> None:
    axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    axes.legend()


def _save(figure: Figure, title: str, row: StepRow | SizeRow, path: Path) -> None:
    ranks = f"{row.world_size} rank{'s' if row.world_size > 1 else ''} ({row.backend})"
    where = f"{row.hardware}; {ranks}, {row.threads} thread{'s' if row.threads > 1 else ''} each"
    what = f"commit {row.commit}, {row.run}"
    if isinstance(row, StepRow):
        what = f"{row.model}, batch {row.batch_size} x {row.sequence_length} a rank, {row.precision}; {what}"
    figure.suptitle(f"{title}\n{where}\n{what}", fontsize=9)
    figure.savefig(path, dpi=120)
