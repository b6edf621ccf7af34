"""Rows as a run leaves them."""

from tinylm.ddp.table import StepRow

STEP_ROW = StepRow(
    run="2026-01-01T00:00:00Z",
    commit="abc",
    hardware="a CPU, 2 cores",
    world_size=2,
    backend="gloo",
    threads=1,
    model="tiny",
    batch_size=1,
    sequence_length=16,
    precision="fp32",
    algorithm="none",
    mode="none",
    warmup_steps=2,
    steps=4,
    rounds=2,
    median_ms=10.0,
    p10_ms=9.0,
    p90_ms=12.0,
    exposed_ms=0.0,
    processor_ms=10.0,
    tokens_per_second=3200.0,
    bytes=0,
    collectives=0,
    messages=0,
    proven="no exchange",
    gradient_difference=None,
)
