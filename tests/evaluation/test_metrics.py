import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import ROOT
from tinylm.evaluation.metrics import BitsPerByte, NatsPerToken, Perplexity


def test_the_three_metrics_are_sums_over_counts() -> None:
    nats, num_tokens, num_bytes = [3.0, 12.0, 0.0], [2, 31, 0], [11, 89, 5]
    assert NatsPerToken().compute(nats=nats, num_tokens=num_tokens) == {"nats_per_token": 15 / 33}
    assert Perplexity().compute(nats=nats, num_tokens=num_tokens) == {"perplexity": math.exp(15 / 33)}
    bits = BitsPerByte().compute(nats=nats, num_bytes=num_bytes)["bits_per_byte"]
    assert bits == pytest.approx(15 / 105 / math.log(2), rel=1e-15)
    assert bits == pytest.approx((15 / 33) * 33 / math.log(2) / 105, rel=1e-15)  # nats a token x tokens / bytes


def test_a_metric_does_not_depend_on_how_its_rows_were_cut() -> None:
    whole = NatsPerToken().compute(nats=[15.0], num_tokens=[33])
    cut = NatsPerToken()
    cut.add_batch(nats=[3.0], num_tokens=[2])
    cut.add_batch(nats=[12.0], num_tokens=[31])
    assert cut.compute() == whole
    mean_of_means = (3.0 / 2 + 12.0 / 31) / 2
    assert mean_of_means != pytest.approx(whole["nats_per_token"], rel=0.1)  # what it must not be


def test_metrics_in_use_at_the_same_time_keep_their_rows_apart() -> None:
    first, second = NatsPerToken(), NatsPerToken()
    first.add_batch(nats=[8.0], num_tokens=[2])
    second.add_batch(nats=[3.0], num_tokens=[3])
    assert (first.compute(), second.compute()) == ({"nats_per_token": 4.0}, {"nats_per_token": 1.0})


def test_what_is_not_finite_stays_so() -> None:
    assert math.isnan(NatsPerToken().compute(nats=[math.nan, 1.0], num_tokens=[1, 1])["nats_per_token"])
    assert Perplexity().compute(nats=[1e6], num_tokens=[1]) == {"perplexity": math.inf}


def test_no_targets_is_an_error_that_names_the_count() -> None:
    with pytest.raises(ValueError, match="`num_tokens` adds up to 0"):
        Perplexity().compute(nats=[0.0], num_tokens=[0])
    with pytest.raises(ValueError, match="`num_bytes` adds up to 0"):
        BitsPerByte().compute(nats=[0.0], num_bytes=[0])


_WITHOUT_NETWORK = """
import socket

def refuse(*args, **kwargs):
    raise AssertionError(f"a network call: {args}")

socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
from tinylm.evaluation.metrics import BitsPerByte, NatsPerToken, Perplexity
from tinylm.evaluation import scoring

counts = {"nats": [2.0], "num_tokens": [4]}
print(NatsPerToken().compute(**counts), Perplexity().compute(**counts))
print(BitsPerByte().compute(nats=[1.0], num_bytes=[1]))
"""


def test_import_and_use_make_no_network_call_and_no_cache_folder(tmp_path: Path) -> None:
    """Case E8, in a fresh process that was not told to be offline and whose cache cannot be written."""
    blocked = tmp_path / "a file, so no folder can be made under it"
    blocked.touch()
    environment = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "HOME")}
    environment |= {"HF_HOME": str(blocked), "XDG_CACHE_HOME": str(blocked), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_NETWORK], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "{'nats_per_token': 0.5} {'perplexity': 1.648" in done.stdout
