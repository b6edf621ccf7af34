"""What rank 0 leaves of a run: rows in the CSV, charts beside it, a table for the terminal."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from tinylm.ddp.charts import draw_exposed, draw_message_sizes, draw_predictions, draw_projection, draw_step_times
from tinylm.ddp.cost_model import (
    PROJECTED_RANKS,
    Crossing,
    fit_costs,
    fitted_crossings,
    project,
    projected_crossings,
    relative_errors,
    split_sizes,
)
from tinylm.ddp.table import SizeRow, StepRow, append_rows, file_name

_SHORT = 65_536  # bytes: a tensor for which latency is what counts


def report_steps(rows: Sequence[StepRow], path: Path, what: str) -> str:
    """Appends `rows`, one run's, to the CSV `path` and draws its charts; the run as a table.

    Args:
        what: a name for the charts, beside the CSV's, the ranks' and the shape's.
    """
    append_rows(path, rows)
    first = rows[0]
    shape = f"{first.model}-{first.batch_size}x{first.sequence_length}-{first.precision}"
    chart = f"{path.stem}-{first.world_size}-ranks-{file_name(shape)}-{file_name(what)}"
    if any(row.median_ms is not None and row.algorithm != "none" for row in rows):
        draw_step_times(rows, path.with_name(f"{chart}-step-time.png"))
        draw_exposed(rows, path.with_name(f"{chart}-exposed.png"))
    return "\n".join([_steps_table(rows), "", f"Rows are in {path}, charts beside it ({chart}-*.png)."])


def report_sizes(rows: Sequence[SizeRow], path: Path, *, latency_us: float, gbit: float, num_bytes: int) -> str:
    """Appends `rows`, one run's, to the CSV `path`, fits, draws its charts; errors and projection as text.

    Args:
        latency_us: microseconds a message of the links that are projected.
        gbit: their Gbit/s.
        num_bytes: the tensor of the projection: all gradients of a model.
    """
    append_rows(path, rows)
    fitted, tested = split_sizes(rows)
    fits = fit_costs(fitted)
    chart = f"{path.stem}-{rows[0].world_size}-ranks"
    draw_message_sizes(rows, fits, path.with_name(f"{chart}-time.png"))
    draw_predictions(tested, fits, path.with_name(f"{chart}-predicted.png"))
    links = {"latency_us": latency_us, "gbit": gbit}
    projected = path.with_name(f"{chart}-projected.png")
    draw_projection(list(fits), (_SHORT, num_bytes), projected, commit=rows[0].commit, **links)

    errors = relative_errors(fits, tested)
    two_terms = relative_errors(fit_costs(fitted, with_cache=False), tested)
    lines = [f"{'fitted here':<28}{'us a message':>14}{'ns a byte':>12}{'beyond cache':>14}{'median error':>14}"]
    for name, fit in fits.items():
        terms = (1e6 * fit.seconds_a_message, 1e9 * fit.seconds_a_byte, 1e9 * fit.seconds_a_byte_beyond)
        error = statistics.median(errors[name])
        lines.append(f"{name:<28}{terms[0]:>14.1f}{terms[1]:>12.3f}{terms[2]:>14.3f}{error:>14.1%}")
    cache = next(iter(fits.values())).cache_bytes
    lines += [
        f"Median error on the sizes that were not fitted to: {_median_of_all(errors):.1%}"
        f" (without the third term, for tensors over {_size(cache)}: {_median_of_all(two_terms):.1%}).",
        *_overtaking("On this machine, ", fitted_crossings(fits)),
        "",
        f"projected, ms for {_size(num_bytes)} over links of {latency_us:g} us and {gbit:g} Gbit/s",
        f"{'ranks':<28}" + "".join(f"{ranks:>10,}" for ranks in PROJECTED_RANKS),
    ]
    for name in fits:
        times = [1000 * project(name, ranks, num_bytes, **links) for ranks in PROJECTED_RANKS]
        lines.append(f"{name:<28}" + "".join(f"{time:>10,.1f}" if time < 1e6 else f"{time:>10.1e}" for time in times))
    for ranks in PROJECTED_RANKS:
        lines += _overtaking(f"{ranks:,} ranks: ", projected_crossings(list(fits), ranks, **links))
    lines += ["", f"Rows are in {path}, charts beside it ({chart}-*.png)."]
    return "\n".join(lines)


def _steps_table(rows: Sequence[StepRow]) -> str:
    name_width = max(len(f"{row.algorithm}, {row.mode}") for row in rows) + 2
    columns = f"{'median':>9}{'p10':>9}{'p90':>9}{'exposed':>9}{'processor':>11}{'tokens/s':>10}"
    columns += f"{'MB sent':>9}{'calls':>7}{'msgs':>6}  "
    lines = [f"{'ms a step':<{name_width}}{columns}proven"]
    for row in rows:
        name = row.algorithm if row.mode == "none" else f"{row.algorithm}, {row.mode}"
        times = f"{'not timed':>57}"
        if row.median_ms is not None:
            times = "".join(f"{ms:>9.1f}" for ms in (row.median_ms, row.p10_ms, row.p90_ms, row.exposed_ms))
            times += f"{row.processor_ms:>11.1f}{row.tokens_per_second:>10,.0f}"
        sent = f"{'unknown' if row.bytes is None else f'{row.bytes / 1e6:.1f}':>9}{row.collectives:>7}{row.messages:>6}"
        lines.append(f"{name:<{name_width}}{times}{sent}  {row.proven}")
    return "\n".join(lines)


def _overtaking(where: str, crossings: Sequence[Crossing]) -> list[str]:
    return [
        f"{where}{crossing.large} overtakes {crossing.small} from {_size(crossing.num_bytes)} on."
        for crossing in crossings
    ]


def _median_of_all(errors: dict[str, list[float]]) -> float:
    return statistics.median(error for of_one in errors.values() for error in of_one)


def _size(num_bytes: float) -> str:
    """
    >>> _size(79_300_000), _size(65_536), _size(500)
    ('79.3 MB', '65.5 kB', '500 bytes')
    """
    for unit, name in ((1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes:.0f} bytes"
