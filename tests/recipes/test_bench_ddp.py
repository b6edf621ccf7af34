import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed import ROOT, rank_environment
from tests.recipes.running import CPU_GLOO, launch, output_of, run_here
from tests.training.tiny import tiny_model
from tinylm.ddp.table import SizeRow, StepRow, read_rows

RECIPE = str(ROOT / "recipes" / "bench_ddp.py")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> list[str]:
    """Flags that make the benchmark small."""
    folder = tmp_path_factory.mktemp("architecture") / "tiny"
    tiny_model().config.save_pretrained(folder)
    shape = ["--config_name", str(folder / "config.json"), "--sequence_length", "16", "--num_threads", "1"]
    return [*shape, "--steps", "2", "--rounds", "2", "--warmup_steps", "2", "--use_cpu"]


@pytest.fixture(autouse=True)
def left_group():
    """A recipe that is refused in this process leaves its group of one behind."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def pngs(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.png")}


def torchrun(flags: list[str], folder: Path) -> str:
    """What two ranks printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", RECIPE, *flags]
    done = subprocess.run(
        command, env=rank_environment(), cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_accelerate_measures_one_configuration_and_leaves_rows_and_charts(tiny, tmp_path):
    flags = ["--bucketed", "--bucket-cap-mb", "0.01", "--output-file", tmp_path / "cpu.csv"]  # dashes do as well
    printed = output_of(launch("--config_file", CPU_GLOO, RECIPE, *tiny, *flags), timeout=600)
    none, bucketed = read_rows(tmp_path / "cpu.csv", StepRow)
    assert (none.algorithm, bucketed.algorithm, bucketed.mode) == ("none", "builtin", "bucketed 0.01 MB")
    assert (bucketed.world_size, bucketed.backend, bucketed.proven, bucketed.steps) == (2, "gloo", "yes", 2)
    assert bucketed.exposed_ms is not None and bucketed.processor_ms > 0 and bucketed.collectives > 1
    chart = "cpu-2-ranks-tiny-1x16-fp32-builtin-bucketed-0-01-mb"
    assert pngs(tmp_path) == {f"{chart}-step-time.png", f"{chart}-exposed.png"}
    assert printed.index(": proven") < printed.index("round 1 of 2") < printed.index("ms a step ")


@pytest.mark.slow
def test_torchrun_measures_the_matrix_then_models_the_cost(tiny, tmp_path):
    printed = torchrun([*tiny, "--matrix", "--output_file", "cpu.csv"], tmp_path)
    rows = read_rows(tmp_path / "cpu.csv", StepRow)
    assert len(rows) == 17 and {row.proven for row in rows[1:]} == {"yes"}
    assert len({(row.run, row.commit, row.hardware, row.world_size) for row in rows}) == 1
    assert "ring, hooks: proven" in printed
    steps = {f"cpu-2-ranks-tiny-1x16-fp32-all-{what}.png" for what in ("step-time", "exposed")}

    flags = ["--cost_model", "--rounds", "1", "--latency_us", "5", "--gbit", "400", "--output_file", "cpu.csv"]
    printed = torchrun([*tiny, *flags], tmp_path)
    sizes = read_rows(tmp_path / "cpu-sizes.csv", SizeRow)
    assert {row.world_size for row in sizes} == {2} and len({row.algorithm for row in sizes}) == 6
    assert "over links of 5 us and 400 Gbit/s" in printed
    assert "Median error on the sizes that were not fitted to" in printed
    assert "4,096 ranks: builtin = reduce_scatter_all_gather = ring overtakes reduce_broadcast" in printed
    drawn = {f"cpu-sizes-2-ranks-{what}.png" for what in ("time", "predicted", "projected")}
    assert pngs(tmp_path) == steps | drawn
    assert len(read_rows(tmp_path / "cpu.csv", StepRow)) == 17


def test_one_process_says_that_nothing_is_exchanged(tiny, tmp_path, monkeypatch, capsys):
    flags = ["--algorithm", "ring", "--no-hooks", "--output_file", tmp_path / "one.csv"]
    assert run_here(monkeypatch, "bench_ddp", *tiny, *flags) == 0
    assert "nothing is exchanged" in capsys.readouterr().out
    none, ring = read_rows(tmp_path / "one.csv", StepRow)
    assert (none.algorithm, ring.algorithm, ring.mode, ring.world_size) == ("none", "ring", "no_hooks", 1)
    assert (ring.bytes, ring.collectives, ring.messages) == (0, 0, 0)
    for more in (["--cost_model"], ["--matrix", "native"]):
        flags = ["--output_file", tmp_path / "more.csv"]
        assert run_here(monkeypatch, "bench_ddp", *tiny, *more, *flags) == 0
        assert "nothing is exchanged" in capsys.readouterr().out
    assert [row.algorithm for row in read_rows(tmp_path / "more.csv", StepRow)] == ["none"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--algorithm", "gossip"], "reduce_scatter_all_gather, ring, tree"),
        (["--output_file", "{file}/rows.csv"], "cannot be written"),
        (["--sequence_length", "38"], "context is 37 tokens"),
        (["--config_name", "nowhere.json"], "`--config_name`"),
    ],
)
def test_wrong_input_ends_the_recipe_before_the_run(tiny, flags, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    flags = [flag.format(file=tmp_path / "file") for flag in flags]
    assert run_here(monkeypatch, "bench_ddp", *tiny, "--output_file", tmp_path / "rows.csv", *flags) == 2
    out, err = capsys.readouterr()
    assert message in err and "proven" not in out
    assert not (tmp_path / "rows.csv").exists()


@pytest.mark.slow
def test_a_rank_that_dies_is_named_with_the_step_and_nothing_is_written(tiny, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**rank_environment(), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    flags = ["--steps", "1000000", "--rounds", "1000000", "--output_file", str(tmp_path / "rows.csv")]
    ranks = [
        subprocess.Popen(
            [sys.executable, RECIPE, *tiny, *flags],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        next(line for line in ranks[0].stdout if line.startswith("round 2 of"))
        os.kill(ranks[1].pid, signal.SIGKILL)
        printed, _ = ranks[0].communicate(timeout=30)
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[0].returncode == 2
    assert re.search(r"Rank 1 died in step \d of round \d+ of `(none|builtin, hooks)`", printed)
    assert not (tmp_path / "rows.csv").exists()
