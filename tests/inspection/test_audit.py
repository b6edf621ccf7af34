"""`tinylm audit`, on audits that are written here as the ranks of a run would write them."""

import configparser
import doctest
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from tests.distributed import ROOT
from tinylm import cli
from tinylm.data.order import GlobalBatches
from tinylm.inspection import audit
from tinylm.inspection.audit import audit_run
from tinylm.training.record_audit import RecordAudit


def write_audit(
    folder: Path,
    *,
    num_examples: int = 25,
    world_size: int = 2,
    epochs: int = 2,
    accumulation: int = 1,
    last_step: int = 10**9,
    contents: tuple[np.ndarray, np.ndarray] | None = None,
    save_steps: int = 3,
) -> None:
    """What the ranks of a run with a batch of 12 a step would leave."""
    audits = []
    for rank in range(world_size):
        batches = GlobalBatches(
            num_examples,
            per_rank_batch_size=12 // world_size // accumulation,
            accumulation_steps=accumulation,
            rank=rank,
            world_size=world_size,
            seed=5,
        )
        audits.append(RecordAudit(str(folder), batches, contents))
        audits[-1].begin(0)
    steps_per_epoch = audits[0].batches.steps_per_epoch
    for noted, epoch in product(audits, range(epochs)):
        noted.batches.set_epoch(epoch)
        for number, examples in enumerate(noted.batches):
            step = epoch * steps_per_epoch + number // accumulation + 1
            if step <= last_step:
                noted.add(step, *records_in(examples, contents))
            if (number + 1) % accumulation == 0 and step % save_steps == 0:
                noted.close_part()
        if epoch == epochs - 1:
            noted.close_part()


def records_in(examples: list[int], contents: tuple[np.ndarray, np.ndarray] | None) -> tuple[list[int], list[int]]:
    """The records of a micro-batch, and the example that each came in."""
    if contents is None:
        return examples, examples
    places = [place for example in examples for place in np.flatnonzero(contents[0] == example)]
    return contents[1][places].tolist(), contents[0][places].tolist()


def change_part(folder: Path, name: str, change: object) -> None:
    """Replaces `audit/NAME` by what `change` makes of its table."""
    path = folder / "audit" / name
    pyarrow.parquet.write_table(change(pyarrow.parquet.read_table(path)), path)


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (2, 1), (3, 1), (2, 3), (3, 2)])
def test_a_run_that_kept_the_order_is_clean_and_its_repetitions_are_named(
    tmp_path: Path, world_size: int, accumulation: int
) -> None:
    write_audit(tmp_path, world_size=world_size, accumulation=accumulation)
    epochs = audit_run(tmp_path)
    assert [epoch.epoch for epoch in epochs] == [0, 1]
    for epoch in epochs:
        batches = GlobalBatches(25, per_rank_batch_size=12, seed=5)
        batches.set_epoch(epoch.epoch)
        assert (epoch.expected, epoch.once, epoch.more_than_once, epoch.never) == (25, 14, 11, 0)
        assert epoch.filled_up.tolist() == sorted(batches.repeated().tolist())
        assert epoch.examples_per_rank == {rank: 36 // world_size for rank in range(world_size)}
        assert epoch.is_clean
    rows = pyarrow.parquet.read_table(tmp_path / "audit" / "rank-0" / "step-4.parquet").to_pydict()
    assert list(rows) == ["step", "micro_step", "epoch", "record_id", "example"]
    assert set(rows["step"]) == {4, 5, 6} and set(rows["epoch"]) == {1}
    assert set(rows["micro_step"]) == set(range(accumulation))


def test_an_epoch_that_was_not_finished_owes_only_the_steps_taken(tmp_path: Path) -> None:
    write_audit(tmp_path, last_step=4)
    whole, begun = audit_run(tmp_path)
    assert (whole.num_steps, begun.num_steps, begun.steps_per_epoch) == (3, 1, 3)
    assert (begun.expected, begun.once, begun.more_than_once, begun.never) == (12, 12, 0, 0)
    assert begun.is_clean and not len(begun.filled_up)
    assert "epoch 1 (1 of 3 steps): 12 records expected; 12 seen once" in next(begun.lines())


def test_a_record_missed_or_repeated_without_reason_is_named(tmp_path: Path) -> None:
    write_audit(tmp_path)
    filled_up = set(repeated(25, epoch=1).tolist())
    changed = []

    def spoil(table):
        ids = table["record_id"].to_pylist()
        missed, again = [index for index, record_id in enumerate(ids) if record_id not in filled_up][:2]
        changed.extend((ids[missed], ids[again]))
        ids[missed] = ids[again]
        return table.set_column(3, "record_id", [ids]).set_column(4, "example", [ids])

    change_part(tmp_path, "rank-1/step-4.parquet", spoil)
    first, second = audit_run(tmp_path)
    assert first.is_clean
    assert [second.missed.tolist(), second.repeated.tolist()] == [[changed[0]], [changed[1]]]
    assert f"REPEATED without reason: record {changed[1]}" in "\n".join(second.lines())
    assert not second.is_clean


def test_rows_that_a_rank_lost_are_missed_and_the_ranks_uneven(tmp_path: Path) -> None:
    write_audit(tmp_path)
    (tmp_path / "audit" / "rank-1" / "step-1.parquet").unlink()
    first, second = audit_run(tmp_path)
    assert second.is_clean and not first.is_clean
    assert first.never == len(first.missed) > 5
    lines = list(first.lines())
    assert "18 on 0" in lines[1]
    assert any(line.strip().startswith("MISSED: records ") for line in lines)
    change_part(tmp_path, "rank-1/step-4.parquet", lambda table: table.slice(1))
    assert "(UNEVEN)" in "\n".join(audit_run(tmp_path)[1].lines())


def test_an_epoch_in_the_order_of_another_one_is_found(tmp_path: Path) -> None:
    """A sampler whose `set_epoch` nobody calls: all records are seen, but the last step repeats the wrong ones."""
    write_audit(tmp_path)
    for rank in range(2):
        first = pyarrow.parquet.read_table(tmp_path / "audit" / f"rank-{rank}" / "step-1.parquet")

        def as_in_the_first_epoch(table, first=first):
            for place, name in [(3, "record_id"), (4, "example")]:
                table = table.set_column(place, name, first[name])
            return table

        change_part(tmp_path, f"rank-{rank}/step-4.parquet", as_in_the_first_epoch)
    first, second = audit_run(tmp_path)
    assert first.is_clean and second.never == 0
    assert len(second.repeated)


LONG_RECORDS = np.repeat(np.arange(10), [1, 5, 1, 2, 1, 1, 7, 1, 1, 1])
CUT = (np.arange(len(LONG_RECORDS)), LONG_RECORDS)
PACKED = (np.repeat(np.arange(20), [1, 3] * 10), np.random.default_rng(3).permutation(40))


@pytest.mark.parametrize("contents", [CUT, PACKED], ids=["cut", "packed"])
def test_a_record_of_several_examples_and_an_example_of_several_records_are_seen_once(
    tmp_path: Path, contents: tuple[np.ndarray, np.ndarray]
) -> None:
    num_examples, num_records = int(contents[0][-1]) + 1, int(contents[1].max()) + 1
    write_audit(tmp_path, num_examples=num_examples, contents=contents)
    for epoch in audit_run(tmp_path):
        assert (epoch.expected, epoch.never, epoch.is_clean) == (num_records, 0, True)
        again = repeated(num_examples, epoch.epoch)
        assert epoch.filled_up.tolist() == np.unique(contents[1][np.isin(contents[0], again)]).tolist()
        assert sum(epoch.examples_per_rank.values()) == -(-num_examples // 12) * 12


def test_an_example_seen_twice_does_not_make_up_for_another_of_the_same_record(tmp_path: Path) -> None:
    write_audit(tmp_path, num_examples=len(LONG_RECORDS), contents=CUT)
    of_one_record = np.flatnonzero(LONG_RECORDS == 6).tolist()

    def spoil(table):
        examples = table["example"].to_pylist()
        missed, again = [place for place, example in enumerate(examples) if example in of_one_record][:2]
        examples[missed] = examples[again]
        return table.set_column(4, "example", [examples])

    change_part(tmp_path, "rank-0/step-1.parquet", spoil)
    first, _ = audit_run(tmp_path)
    assert (first.missed.tolist(), first.repeated.tolist()) == ([6], [6])


def repeated(length: int, epoch: int) -> np.ndarray:
    batches = GlobalBatches(length, per_rank_batch_size=12, seed=5)
    batches.set_epoch(epoch)
    return batches.repeated()


def test_the_command_prints_each_epoch_and_exits_with_1_where_something_is_wrong(tmp_path: Path) -> None:
    write_audit(tmp_path)
    result = CliRunner().invoke(cli.app, ["audit", str(tmp_path)])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0] == "epoch 0: 25 records expected; 14 seen once, 11 more than once, 0 never"
    assert lines[1] == "  examples per rank: 18 on 0, 18 on 1 (even)"
    assert lines[2].startswith("  the epoch's last step is filled up with records ")
    (tmp_path / "audit" / "rank-0" / "step-1.parquet").unlink()
    result = CliRunner().invoke(cli.app, ["audit", str(tmp_path)])
    assert result.exit_code == 1
    assert "MISSED" in result.output


def test_the_console_script_says_in_one_paragraph_what_is_wrong_and_needs_no_torch(tmp_path: Path) -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert setup["options.entry_points"]["console_scripts"].strip() == "tinylm = tinylm.cli:main"
    script = "import sys; from tinylm.cli import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script, "audit", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (2, "False")
    assert done.stderr.startswith("There is no audit of a run in") and "--record_audit true" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_record_id_outside_the_dataset_and_a_damaged_part_are_refused(tmp_path: Path) -> None:
    write_audit(tmp_path)
    change_part(
        tmp_path,
        "rank-1/step-4.parquet",
        lambda table: table.set_column(3, "record_id", [[25, *table["record_id"].to_pylist()[1:]]]),
    )
    with pytest.raises(
        ValueError, match=r"rank-1/step-4.parquet` names record 25 in an example where the data has none"
    ):
        audit_run(tmp_path)
    path = tmp_path / "audit" / "rank-1" / "step-4.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"step-4.parquet` is damaged"):
        audit_run(tmp_path)


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(audit).failed == 0
