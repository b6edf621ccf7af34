"""What an all-reduce costs: latency a message, time a byte; fitted to one machine, projected to larger ones.

The latency-bandwidth (alpha-beta) model: `seconds = alpha * messages + beta * bytes`, of the messages and bytes that
follow one another on the busiest rank. Tensors that outgrow the processor's cache cost more for each byte beyond it:
a rank copies a message into a socket, out of it, and adds it, and then each of these goes to memory. So a fit has a
third term, `gamma * (bytes of the tensor beyond the cache)`, and looks for the cache's size itself, one for all
algorithms. Sources: Hockney, "The communication challenge for MPP", 1994; Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH", 2005.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from tinylm.ddp.table import SizeRow

PROJECTED_RANKS = tuple(2**power for power in range(3, 13))  # 8 to 4,096


def messages_and_bytes(algorithm: str, world_size: int, num_bytes: float) -> tuple[float, float]:
    """Messages, and bytes, that follow one another where `world_size` ranks sum a tensor of `num_bytes`.

    What the docstrings in `collectives` say, with the best that a backend can make of a call: `builtin` is a ring (in
    Gloo; NCCL chooses), `reduce_scatter_all_gather` half a ring twice (Gloo takes three halves), `reduce_broadcast` two
    trees (Gloo reduces along half a ring). On one number of ranks a fit takes up such factors.
    """
    steps, part = world_size - 1, (world_size - 1) / world_size
    match algorithm:
        case "builtin" | "ring" | "reduce_scatter_all_gather":
            return 2 * steps, 2 * part * num_bytes
        case "point_to_point":
            return 2 * steps, 2 * steps * num_bytes
        case "reduce_broadcast":
            depth = math.ceil(math.log2(world_size))
            return 2 * depth, 2 * depth * num_bytes
        case "tree":
            power = 1 << (world_size.bit_length() - 1)
            beyond = 2 if power < world_size else 0  # a whole tensor to a partner, and back
            return 2 * math.log2(power) + beyond, (2 * (power - 1) / power + beyond) * num_bytes
    raise ValueError(f"The cost model knows no algorithm `{algorithm}`.")


@dataclass(frozen=True)
class Fit:
    """The cost of one algorithm on `world_size` ranks of the machine that it was measured on."""

    algorithm: str
    world_size: int
    seconds_a_message: float
    seconds_a_byte: float
    seconds_a_byte_beyond: float
    cache_bytes: float

    def seconds(self, num_bytes: float) -> float:
        messages, sent = messages_and_bytes(self.algorithm, self.world_size, num_bytes)
        beyond = max(0.0, num_bytes - self.cache_bytes)
        return self.seconds_a_message * messages + self.seconds_a_byte * sent + self.seconds_a_byte_beyond * beyond


@dataclass(frozen=True)
class Crossing:
    """From `num_bytes` on, `large` is faster than `small`."""

    small: str
    large: str
    num_bytes: float


def split_sizes(rows: Sequence[SizeRow]) -> tuple[list[SizeRow], list[SizeRow]]:
    """Every second size to fit to, the smallest and (of an odd number) the largest among them; the others to test."""
    sizes = sorted({row.bytes for row in rows})
    fitted = set(sizes[::2])
    return [row for row in rows if row.bytes in fitted], [row for row in rows if row.bytes not in fitted]


def fit_costs(rows: Sequence[SizeRow], *, with_cache: bool = True) -> dict[str, Fit]:
    """A `Fit` for each algorithm of `rows`, which are one run's.

    Least squares of the relative error, so that a kilobyte counts as much as a megabyte, no coefficient below zero.
    The size of the cache is that of the fitted sizes which leaves the smallest error over all algorithms; without
    `with_cache` it has no end, and two terms are left.
    """
    by_algorithm: dict[str, list[SizeRow]] = {}
    for row in rows:
        by_algorithm.setdefault(row.algorithm, []).append(row)
    candidates = sorted({row.bytes for row in rows}) if with_cache else [math.inf]
    solutions = {
        cache: {name: _solve(_terms(of_one, cache)) for name, of_one in by_algorithm.items()} for cache in candidates
    }
    cache = min(candidates, key=lambda size: sum(error for _, error in solutions[size].values()))
    world_size = rows[0].world_size
    return {name: Fit(name, world_size, *terms, cache) for name, (terms, _) in solutions[cache].items()}


def relative_errors(fits: dict[str, Fit], rows: Sequence[SizeRow]) -> dict[str, list[float]]:
    """|predicted - measured| / measured of each row, by algorithm."""
    errors: dict[str, list[float]] = {name: [] for name in fits}
    for row in rows:
        measured = row.median_ms / 1000
        errors[row.algorithm].append(abs(fits[row.algorithm].seconds(row.bytes) - measured) / measured)
    return errors


def project(algorithm: str, world_size: int, num_bytes: float, *, latency_us: float, gbit: float) -> float:
    """Seconds on links that need `latency_us` for a message and carry `gbit` Gbit/s each way; adding is free."""
    messages, sent = messages_and_bytes(algorithm, world_size, num_bytes)
    return messages * latency_us * 1e-6 + sent * 8 / (gbit * 1e9)


def crossings(lines: dict[str, tuple[float, float]]) -> list[Crossing]:
    """Where two of `lines`, `(seconds for no bytes, seconds a byte)` by name, change places."""
    found = []
    for first, second in combinations(lines, 2):
        (start_a, slope_a), (start_b, slope_b) = lines[first], lines[second]
        if (start_a - start_b) * (slope_b - slope_a) > 0:
            small, large = (first, second) if start_a < start_b else (second, first)
            found.append(Crossing(small, large, (start_a - start_b) / (slope_b - slope_a)))
    return sorted(found, key=lambda crossing: crossing.num_bytes)


def projected_crossings(
    algorithms: Sequence[str], world_size: int, *, latency_us: float, gbit: float
) -> list[Crossing]:
    """The sizes at which one algorithm overtakes another on such links; algorithms that cost the same share a name."""
    names: dict[tuple[float, float], list[str]] = {}
    for name in algorithms:
        start = project(name, world_size, 0, latency_us=latency_us, gbit=gbit)
        slope = messages_and_bytes(name, world_size, 1)[1] * 8 / (gbit * 1e9)
        names.setdefault((start, slope), []).append(name)
    return crossings({" = ".join(same): line for line, same in names.items()})


def fitted_crossings(fits: dict[str, Fit]) -> list[Crossing]:
    """The same on the machine that `fits` were measured on, for tensors that its cache holds."""
    lines = {
        name: (fit.seconds(0), (fit.seconds(fit.cache_bytes) - fit.seconds(0)) / fit.cache_bytes)
        for name, fit in fits.items()
    }
    cache = min(fit.cache_bytes for fit in fits.values())
    return [crossing for crossing in crossings(lines) if crossing.num_bytes <= cache]


def _terms(rows: Sequence[SizeRow], cache_bytes: float) -> np.ndarray:
    """`[sizes, 3]`: messages, bytes and bytes beyond the cache, each as a share of the measured seconds."""
    terms = [
        (*messages_and_bytes(row.algorithm, row.world_size, row.bytes), max(0.0, row.bytes - cache_bytes))
        for row in rows
    ]
    return np.array(terms) / (np.array([[row.median_ms] for row in rows]) / 1000)


def _solve(terms: np.ndarray) -> tuple[tuple[float, ...], float]:
    """Coefficients that are not negative and bring each row of `terms` nearest to 1, and the sum of squares left.

    Every choice of terms is tried: of those without a negative coefficient the best is the constrained optimum.
    """
    best = (0.0,) * terms.shape[1], float(len(terms))
    for count in range(1, terms.shape[1] + 1):
        for chosen in combinations(range(terms.shape[1]), count):
            columns = terms[:, chosen]
            scale = np.linalg.norm(columns, axis=0)
            if not scale.all():
                continue
            solution = np.linalg.lstsq(columns / scale, np.ones(len(terms)), rcond=None)[0] / scale
            error = float(((columns @ solution - 1) ** 2).sum())
            if (solution >= 0).all() and error < best[1]:
                coefficients = dict(zip(chosen, solution.tolist(), strict=True))
                best = tuple(coefficients.get(place, 0.0) for place in range(terms.shape[1])), error
    return best
