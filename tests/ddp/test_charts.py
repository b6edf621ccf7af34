from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest
from matplotlib.figure import Figure

from tests.ddp.rows import STEP_ROW
from tests.ddp.test_cost_model import rows_of
from tinylm.ddp.charts import draw_exposed, draw_message_sizes, draw_predictions, draw_projection, draw_step_times
from tinylm.ddp.cost_model import Fit, fit_costs
from tinylm.ddp.table import WRONG

RING = replace(STEP_ROW, algorithm="ring", mode="hooks", median_ms=14.0, p90_ms=17.0, exposed_ms=3.5, proven="yes")
UNTIMED = replace(
    RING, algorithm="tree", median_ms=None, p10_ms=None, p90_ms=None, exposed_ms=None, processor_ms=None,
    tokens_per_second=None, proven=WRONG,
)  # fmt: skip


@pytest.fixture
def drawn(monkeypatch) -> list[Figure]:
    """The figures that are saved, in order."""
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: (figures.append(self), save(self, *args, **kw))[1])
    return figures


def labels(figure: Figure) -> list[str]:
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def test_step_times_show_what_was_timed_with_its_spread_and_say_where(tmp_path, drawn):
    draw_step_times([STEP_ROW, RING, UNTIMED], tmp_path / "a.png")
    draw_exposed([STEP_ROW, RING, UNTIMED], tmp_path / "b.png")
    times, exposed = drawn
    assert labels(times) == ["none", "ring, hooks"]
    assert [bar.get_width() for bar in times.axes[0].patches] == [10.0, 14.0]
    (segments,) = [line.get_segments() for line in times.axes[0].collections]
    assert [tuple(end[0] for end in segment) for segment in segments] == [(9.0, 12.0), (9.0, 17.0)]
    assert labels(exposed) == ["ring, hooks"] and exposed.axes[0].patches[0].get_width() == 3.5
    for figure in drawn:
        for fact in ("a CPU, 2 cores", "2 ranks (gloo)", "1 thread each", "tiny, batch 1 x 16", "fp32", "abc"):
            assert fact in figure.get_suptitle()
    assert matplotlib.image.imread(tmp_path / "a.png").std() > 0


def test_rows_of_two_runs_do_not_share_a_chart(tmp_path):
    with pytest.raises(AssertionError, match="different runs"):
        draw_step_times([STEP_ROW, replace(RING, run="2026-01-02T00:00:00Z")], tmp_path / "a.png")


def test_message_sizes_show_points_and_lines_and_predictions_print_their_error(tmp_path, drawn):
    rows = rows_of(Fit("ring", 2, 1e-4, 1e-9, 0, 2**20), Fit("tree", 2, 1e-4, 2e-9, 0, 2**20))
    fits = fit_costs(rows)
    slower = [replace(row, median_ms=2 * row.median_ms) for row in rows]  # than the fit: it predicts half
    draw_message_sizes(rows, fits, tmp_path / "a.png")
    draw_predictions(slower, fits, tmp_path / "b.png")
    sizes, predictions = drawn
    assert sizes.axes[0].get_xscale() == sizes.axes[0].get_yscale() == "log"
    assert {text.get_text() for text in sizes.axes[0].get_legend().get_texts()} == {"ring", "tree"}
    assert "median error 50%" in predictions.get_suptitle()
    assert [text.get_text() for text in predictions.axes[0].get_legend().get_texts()] == ["ring: 50%", "tree: 50%"]


def test_a_projection_joins_algorithms_that_cost_the_same(tmp_path: Path, drawn):
    where = {"latency_us": 10.0, "gbit": 100.0, "commit": "abc"}
    draw_projection(["builtin", "ring", "tree"], (1000, 10**8), tmp_path / "a.png", **where)
    (figure,) = drawn
    assert len(figure.axes) == 2
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["builtin,\nring", "tree"]
