"""The three numbers of a language model's evaluation as `evaluate.Metric` classes that never touch the Hub or the disk.

    NatsPerToken().compute(nats=[690.1, 14.2], num_tokens=[230, 7])

Each input row is a sum over anything - a token, a document, a batch, a rank: sums are added before they are divided, so
that the number does not depend on how the rows were cut. A mean of means does.
"""

import math
from collections.abc import Sequence

import datasets
import evaluate

_DESCRIPTION = "Scores of a causal language model from sums of negative log-likelihoods (natural logarithm)."
_INPUTS = """
nats: sum of the negative log-likelihoods of the targets, in nats
num_tokens: how many targets that sum is over
num_bytes: length of the raw text of those targets in UTF-8 bytes
"""


class _SumMetric(evaluate.Metric):
    """A metric over sums that keeps its few numbers in memory: processes that run at once share no cache file."""

    inputs: dict[str, str]

    def __init__(self) -> None:
        super().__init__(keep_in_memory=True)

    def _build_data_dir(self) -> str:
        # The library would create a folder in the user's cache, which fails in a read-only home, and leave it empty.
        return ""

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({name: datasets.Value(kind) for name, kind in self.inputs.items()})
        return evaluate.MetricInfo(
            description=_DESCRIPTION, citation="", inputs_description=_INPUTS, features=features, format=None
        )


class NatsPerToken(_SumMetric):
    """`{"nats_per_token": x}`: the mean negative log-likelihood of a target, in nats: the loss of training.

    Raises:
        ValueError: the rows hold no target.
    """

    inputs = {"nats": "float64", "num_tokens": "int64"}  # noqa: RUF012

    def _compute(self, nats: Sequence[float], num_tokens: Sequence[int]) -> dict[str, float]:
        return {"nats_per_token": _ratio(nats, num_tokens, "num_tokens")}


class Perplexity(_SumMetric):
    """`{"perplexity": x}`: `exp(nats_per_token)`; infinite where that is beyond a float64.

    Raises:
        ValueError: the rows hold no target.
    """

    inputs = {"nats": "float64", "num_tokens": "int64"}  # noqa: RUF012

    def _compute(self, nats: Sequence[float], num_tokens: Sequence[int]) -> dict[str, float]:
        try:
            return {"perplexity": math.exp(_ratio(nats, num_tokens, "num_tokens"))}
        except OverflowError:
            return {"perplexity": math.inf}


class BitsPerByte(_SumMetric):
    """`{"bits_per_byte": x}`: `sum(nats) / ln 2 / sum(num_bytes)`, comparable between tokenizers.

    Source: Gao et al. 2020, "The Pile", arXiv:2101.00027.

    Raises:
        ValueError: the rows hold no byte.
    """

    inputs = {"nats": "float64", "num_bytes": "int64"}  # noqa: RUF012

    def _compute(self, nats: Sequence[float], num_bytes: Sequence[int]) -> dict[str, float]:
        return {"bits_per_byte": _ratio(nats, num_bytes, "num_bytes") / math.log(2)}


def _ratio(nats: Sequence[float], counts: Sequence[int], name: str) -> float:
    count = sum(counts)
    if count == 0:
        raise ValueError(f"A score needs at least one target; `{name}` adds up to 0. Give rows that hold text.")
    return math.fsum(nats) / count
