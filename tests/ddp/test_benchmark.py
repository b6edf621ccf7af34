from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from tests.ddp.rows import STEP_ROW
from tests.distributed import run_on_ranks
from tests.training.tiny import tiny_model
from tinylm.ddp.arguments import BenchmarkArguments
from tinylm.ddp.benchmark import Task
from tinylm.ddp.collectives import ALGORITHMS
from tinylm.ddp.configurations import NO_EXCHANGE, Configuration, configurations
from tinylm.ddp.report import report_steps
from tinylm.ddp.table import WRONG, SizeRow, StepRow, append_rows, check_can_append, read_rows


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return run_on_ranks("tests.ddp.benchmarking", "two_rank_checks", world_size=2)


def rows_by_name(ranks: list[dict]) -> dict[str, StepRow]:
    return {f"{row.algorithm} {row.mode}": row for row in ranks[0]["rows"]}


def test_what_is_right_is_proven_and_timed(ranks):
    ring = rows_by_name(ranks)["ring hooks"]
    assert ring.proven == "yes" and ring.gradient_difference < 1e-6
    assert ring.world_size == 2 and (ring.steps, ring.rounds, ring.warmup_steps) == (3, 2, 2)
    assert 0 < ring.p10_ms <= ring.median_ms <= ring.p90_ms and ring.processor_ms > 0
    assert ring.tokens_per_second == pytest.approx(2 * 16 / (ring.median_ms / 1000))
    num_weights = sum(weight.numel() for weight in tiny_model().parameters())
    assert ring.messages == 2 * len(list(tiny_model().parameters()))  # on two ranks: one there, one back
    assert ring.bytes > 4 * num_weights


def test_what_is_wrong_is_reported_and_never_timed(ranks):
    wrong = rows_by_name(ranks)["forgetful no_hooks"]
    assert wrong.proven == WRONG and wrong.gradient_difference > 1e-6
    assert wrong.median_ms is wrong.exposed_ms is wrong.tokens_per_second is None
    # Of four configurations three take turns: 2 steps to warm up, then 2 measured; in the next round 1, the other way.
    names = ("none", "Synchronizer", "NativeDDP")
    expected = [name for steps, order in ((4, names), (3, names[::-1])) for name in order for _ in range(steps)]
    assert ranks[0]["timed"] == expected


def test_the_step_without_exchange_is_the_measure_of_the_others(ranks):
    none = rows_by_name(ranks)["none none"]
    assert (none.exposed_ms, none.bytes, none.collectives, none.messages) == (0, 0, 0, 0)


def test_bfloat16_on_the_way_halves_the_bytes_and_is_held_to_its_own_rounding(ranks):
    bf16 = rows_by_name(ranks)["native 25 MB bf16_hook"]
    assert bf16.proven == "yes" and 1e-6 < bf16.gradient_difference < 2**-6
    assert bf16.bytes < 0.75 * rows_by_name(ranks)["ring hooks"].bytes


def test_tensors_are_summed_in_every_size_by_every_algorithm(ranks):
    assert [(row.algorithm, row.bytes) for row in ranks[0]["sizes"]] == [
        ("builtin", 4),
        ("tree", 4),
        ("builtin", 4096),
        ("tree", 4096),
    ]
    assert all(0 < row.p10_ms <= row.median_ms and row.repeats == 40 for row in ranks[0]["sizes"])


def test_ranks_with_other_batch_shapes_are_told_before_anything_is_exchanged(ranks):
    for rank in ranks:
        assert "batch_size 1" in rank["shapes"] and "batch_size 2" in rank["shapes"]


def test_ranks_with_other_models_of_the_same_name_are_told_before_anything_is_exchanged(ranks):
    for rank in ranks:
        assert "the same model" in rank["models"] and "[22, " in rank["models"] and "[23, " in rank["models"]


def test_the_matrix_has_every_algorithm_both_ways_buckets_and_native():
    names = [str(one) for one in configurations(BenchmarkArguments(matrix="all"), world_size=2)]
    assert names[0] == "none" and len(set(names)) == len(names)
    for algorithm in ALGORITHMS:
        assert {f"{algorithm}, hooks", f"{algorithm}, no_hooks"} <= set(names)
    assert {"builtin, bucketed 25 MB", "native, 25 MB static_graph gradient_as_bucket_view"} <= set(names)


def test_the_native_sweep_has_every_option():
    swept = configurations(BenchmarkArguments(matrix="native"), world_size=2)
    assert len(set(swept)) == len(swept)
    for option in ("static_graph", "gradient_as_bucket_view", "find_unused_parameters", "bf16_hook"):
        assert any(getattr(one, option) for one in swept)
    assert {one.bucket_cap_mb for one in swept if one.mode == "bucketed"} == {1, 5, 25, 100}


def test_a_short_matrix_shows_what_hides_the_exchange():
    names = [str(one) for one in configurations(BenchmarkArguments(matrix="overlap", bucket_cap_mb=5), world_size=2)]
    assert names[:4] == ["none", "builtin, no_hooks", "builtin, hooks", "builtin, bucketed 5 MB"]
    assert names[4:] == ["native, 5 MB static_graph gradient_as_bucket_view"]


def test_flags_name_one_configuration():
    ours = configurations(BenchmarkArguments(algorithm="tree", hooks=False), world_size=2)
    assert ours == [NO_EXCHANGE, Configuration("tree", "no_hooks")]
    native = configurations(BenchmarkArguments(native=True, static_graph=True, bucket_cap_mb=3), world_size=2)
    assert native == [NO_EXCHANGE, Configuration("native", "", 3, static_graph=True)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"algorithm": "gossip"}, "builtin, reduce_broadcast, point_to_point, reduce_scatter_all_gather, ring, tree"),
        ({"matrix": "some"}, "all, overlap, native"),
        ({"steps": 0}, "`--steps`"),
        ({"warmup_steps": 1}, "`warmup_steps` is 1"),
        ({"static_graph": True}, "`--native`"),
        ({"native": True, "bucketed": True}, "not both"),
        ({"precision": "fp16"}, "fp32, bf16"),
    ],
)
def test_flags_that_cannot_be_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        BenchmarkArguments(**flags)


def test_steps_that_rounds_do_not_divide_are_all_measured():
    task = Task(tiny_model(), "tiny", 1, 16, torch.device("cpu"), False, steps=50, warmup_steps=2, rounds=4)
    assert [task.steps_in_round(number) for number in range(4)] == [13, 13, 12, 12]


def test_every_rank_has_its_own_rows():
    task = Task(tiny_model(), "tiny", 3, 16, torch.device("cpu"), False, steps=1, warmup_steps=2, rounds=1)
    assert task.batch(0, 0)["input_ids"].shape == (3, 16)
    assert not torch.equal(task.batch(0, 0)["input_ids"], task.batch(1, 0)["input_ids"])
    assert torch.equal(task.batch(1, 0)["input_ids"], task.batch(1, 0)["input_ids"])


def test_rows_are_added_and_old_ones_kept(tmp_path):
    path = tmp_path / "rows.csv"
    wrong = replace(STEP_ROW, algorithm="ring, or so", median_ms=None, bytes=None, proven=WRONG)
    append_rows(path, [STEP_ROW])
    append_rows(path, [wrong])
    assert read_rows(path, StepRow) == [STEP_ROW, wrong]
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.csv"]


def test_rows_of_runs_that_end_together_are_all_kept(tmp_path):
    path = tmp_path / "rows.csv"
    runs = [replace(STEP_ROW, run=f"run {number}") for number in range(40)]
    with ThreadPoolExecutor(4) as writers:
        list(writers.map(lambda run: append_rows(path, [run]), runs))
    assert sorted(row.run for row in read_rows(path, StepRow)) == sorted(row.run for row in runs)
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.csv"]


def test_an_append_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    append_rows(path, [STEP_ROW])
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        append_rows(path, [STEP_ROW])
    assert path.read_bytes() == before


def test_a_file_with_other_columns_is_refused_and_kept(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("name,value\na,1\n")
    for attempt in (lambda: check_can_append(path, SizeRow), lambda: append_rows(path, [STEP_ROW])):
        with pytest.raises(ValueError, match=r"has name, value\. Set `--output_file`"):
            attempt()
    assert path.read_text() == "name,value\na,1\n"


def test_a_place_that_cannot_be_written_is_found_by_trying(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "rows.csv", tmp_path):
        with pytest.raises(OSError, match="`--output_file`"):
            check_can_append(path, StepRow)
    check_can_append(tmp_path / "new" / "rows.csv", StepRow)
    assert list((tmp_path / "new").iterdir()) == []


def test_the_report_shows_what_is_wrong_without_times(tmp_path):
    wrong = replace(STEP_ROW, algorithm="tree", mode="hooks", median_ms=None, p10_ms=None, p90_ms=None, proven=WRONG)
    table = report_steps([STEP_ROW, wrong], tmp_path / "rows.csv", "tree")
    (line,) = [line for line in table.splitlines() if line.startswith("tree, hooks")]
    assert "not timed" in line and line.endswith(WRONG)
    assert len(read_rows(tmp_path / "rows.csv", StepRow)) == 2
