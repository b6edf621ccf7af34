import math
from dataclasses import replace

import pytest

from tinylm.ddp.collectives import ALGORITHMS
from tinylm.ddp.cost_model import (
    PROJECTED_RANKS,
    Fit,
    crossings,
    fit_costs,
    fitted_crossings,
    messages_and_bytes,
    project,
    projected_crossings,
    relative_errors,
    split_sizes,
)
from tinylm.ddp.table import SizeRow

SIZES = [2**power for power in range(10, 27)]
LINKS = {"latency_us": 10.0, "gbit": 100.0}
ROW = SizeRow("r", "c", "h", 3, "gloo", 1, "ring", 4, repeats=5, median_ms=1.0, p10_ms=1.0, p90_ms=1.0)


def rows_of(*fits: Fit) -> list[SizeRow]:
    """What a machine that keeps to `fits` would measure."""
    rows = []
    for fit in fits:
        row = replace(ROW, algorithm=fit.algorithm, world_size=fit.world_size)
        times = {size: 1000 * fit.seconds(size) for size in SIZES}
        rows += [replace(row, bytes=size, median_ms=ms, p10_ms=ms, p90_ms=ms) for size, ms in times.items()]
    return rows


def test_every_algorithm_has_counts_and_one_rank_sends_nothing():
    for name in ALGORITHMS:
        assert messages_and_bytes(name, 2, 100) > (0, 0)
        assert messages_and_bytes(name, 1, 100) == (0, 0)
    with pytest.raises(ValueError, match="`rumour`"):
        messages_and_bytes("rumour", 2, 100)


def test_counts_are_those_of_the_docstrings():
    assert messages_and_bytes("ring", 5, 100) == (8, pytest.approx(160))
    assert messages_and_bytes("point_to_point", 5, 100) == (8, 800)
    assert messages_and_bytes("reduce_broadcast", 5, 100) == (6, 600)
    assert messages_and_bytes("tree", 8, 100) == (6, pytest.approx(175))
    assert messages_and_bytes("tree", 5, 100) == (6, pytest.approx(350))  # four halve and double, the fifth hands over


def test_a_fit_finds_the_coefficients_that_made_the_times():
    made = [Fit("ring", 3, 2e-4, 1e-9, 5e-10, 2**20), Fit("point_to_point", 3, 1e-4, 3e-9, 0.0, 2**20)]
    fits = fit_costs(rows_of(*made))
    for fit in made:
        found = fits[fit.algorithm]
        assert found.cache_bytes == 2**20
        assert found.seconds_a_message == pytest.approx(fit.seconds_a_message, rel=1e-6)
        assert found.seconds_a_byte == pytest.approx(fit.seconds_a_byte, rel=1e-6)
        assert found.seconds_a_byte_beyond == pytest.approx(fit.seconds_a_byte_beyond, rel=1e-6, abs=1e-18)


def test_sizes_that_were_not_fitted_to_are_predicted_and_two_terms_alone_miss_the_cache():
    rows = rows_of(Fit("ring", 3, 1e-4, 1e-9, 9e-9, 2**20))
    fitted, tested = split_sizes(rows)
    assert {row.bytes for row in fitted}.isdisjoint(row.bytes for row in tested)
    assert len(fitted) + len(tested) == len(rows)
    assert max(relative_errors(fit_costs(fitted), tested)["ring"]) < 1e-6
    assert max(relative_errors(fit_costs(fitted, with_cache=False), tested)["ring"]) > 0.2


def test_no_coefficient_is_negative_even_where_that_would_fit_better():
    rows = [replace(row, median_ms=row.bytes**1.3 / 1e6) for row in rows_of(Fit("ring", 3, 1e-4, 1e-9, 0, 2**20))]
    fit = fit_costs(rows)["ring"]
    assert min(fit.seconds_a_message, fit.seconds_a_byte, fit.seconds_a_byte_beyond) >= 0


def test_an_error_is_a_part_of_what_was_measured():
    fit = Fit("ring", 3, 1e-3, 0.0, 0.0, 1)  # 4 messages: 4 ms
    assert relative_errors({"ring": fit}, [replace(ROW, median_ms=5.0)])["ring"] == [pytest.approx(0.2)]


def test_lines_cross_where_both_cost_the_same():
    (crossing,) = crossings({"slow start": (1.0, 0.1), "steep": (0.0, 0.3), "never": (2.0, 0.3)})[:1]
    assert (crossing.small, crossing.large, crossing.num_bytes) == ("steep", "slow start", pytest.approx(5.0))
    assert crossings({"a": (1.0, 1.0), "b": (2.0, 2.0)}) == []


def test_the_projection_is_what_the_links_need_and_a_ring_overtakes_two_trees():
    assert project("ring", 4, 1e9, **LINKS) == pytest.approx(6 * 10e-6 + 1.5e9 * 8 / 100e9)
    assert PROJECTED_RANKS[0] == 8 and PROJECTED_RANKS[-1] == 4096
    for ranks in PROJECTED_RANKS:
        (crossing,) = projected_crossings(list(ALGORITHMS), ranks, **LINKS)
        assert crossing.small == "reduce_broadcast" and "ring" in crossing.large
        both = [project(name, ranks, crossing.num_bytes, **LINKS) for name in ("reduce_broadcast", "ring")]
        assert math.isclose(*both)


def test_on_this_machine_algorithms_cross_within_the_cache_only():
    early, late = Fit("ring", 2, 3e-4, 1e-9, 0, 2**20), Fit("point_to_point", 2, 2e-4, 1e-9, 0, 2**20)
    (crossing,) = fitted_crossings({fit.algorithm: fit for fit in (early, late)})
    assert (crossing.small, crossing.large) == ("point_to_point", "ring")
    assert early.seconds(crossing.num_bytes) == pytest.approx(late.seconds(crossing.num_bytes))
    small_cache = {fit.algorithm: replace(fit, cache_bytes=2**10) for fit in (early, late)}
    assert fitted_crossings(small_cache) == []
