"""`tinylm report` on the folders of real, tiny runs."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import TrainerCallback
from typer.testing import CliRunner

from tests.recipes.running import run_here
from tests.training.tiny import UnevenRows, run_arguments, tiny_model, trainer_for
from tests.training.tiny_run import write_tiny_run
from tinylm.cli import app
from tinylm.inspection.report import add_course_to_card, write_report
from tinylm.inspection.run_log import RunLog, read_run_log

CHARTS = ["report-gradient-norm", "report-learning-rate", "report-loss-time", "report-loss-tokens", "report-throughput"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretraining run of 12 steps, logged every 2, validated every 5."""
    folder = tmp_path_factory.mktemp("finished")
    run_file = write_tiny_run(folder)
    flags = ["--max_steps", 12, "--logging_steps", 2, "--eval_strategy", "steps", "--eval_steps", 5]
    with pytest.MonkeyPatch.context() as patch:
        assert run_here(patch, "pretrain_tlm", "--config", run_file, *flags) == 0
    return folder / "run"


class _Stop(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 8:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that Ctrl-C ended in step 9, with a checkpoint of step 6."""
    folder = tmp_path_factory.mktemp("other") / "run"
    settings = {"max_steps": 20, "save_strategy": "steps", "save_steps": 3, "logging_steps": 2}
    trainer = trainer_for(tiny_model(), UnevenRows(), run_arguments(folder, **settings), callbacks=[_Stop()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    return folder


def rows_of(report: Path) -> dict[str, list[str]]:
    lines = [line.strip("|").split("|") for line in report.read_text().splitlines() if line.startswith("| ")]
    return {title.strip(): [value.strip() for value in values] for title, *values in lines}


def test_runs_stand_side_by_side_with_what_their_folders_say(finished: Path, interrupted: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(finished), str(interrupted), "--output_dir", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    report = tmp_path / "out" / "report.md"
    rows, log = rows_of(report), read_run_log(finished)
    assert rows[""] == [f"{folder.parent.name}/run" for folder in (finished, interrupted)], "told apart"
    assert rows["state"] == ["finished", "interrupted"] and rows["steps"] == ["12 of 12", "6 of 20"]
    assert rows["tokens read"] == [f"{12 * 4 * 48:,}", f"{6 * 8 * 32:,}"]
    assert rows["validation loss, last"] == [f"{log.results['eval_loss']:.4f}", "-"]
    assert rows["validation bits a byte, last"][0] == f"{log.results['eval_bits_per_byte']:.4f}"
    assert rows["machine"][1] == "-" and "1 rank, " in rows["machine"][0]
    assert sorted(path.stem for path in (tmp_path / "out").glob("*.png")) == CHARTS
    assert len(re.findall(r"!\[.*\]\((.*)\)", report.read_text())) == len(CHARTS)
    assert str(tmp_path.parent) not in report.read_text(), "no path of this machine"


def test_every_chart_shows_a_line_of_each_run(finished: Path, interrupted: Path, tmp_path: Path) -> None:
    seconds = max(read_run_log(finished).times.values())  # one of the two may have been much faster
    (interrupted / "timing.jsonl").write_text(
        "".join(f'{{"step": {n}, "seconds": {n / 6 * seconds}}}\n' for n in (2, 4, 6))
    )
    both = write_report([finished, interrupted], tmp_path / "both").parent
    one = write_report([finished], tmp_path / "one").parent
    for name in CHARTS:
        assert {"blue", "orange"} == colors(both / f"{name}.png"), name
        assert {"blue"} == colors(one / f"{name}.png"), name


def colors(path: Path) -> set[str]:
    """Which of the first two colours of a chart is on 40 pixels at least, about."""
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    known = {"blue": (31, 119, 180), "orange": (255, 127, 14)}
    return {name for name, value in known.items() if (abs(pixels - value).sum(axis=-1) < 90).sum() >= 40}


def test_a_run_is_drawn_into_its_own_folder_and_a_report_replaced(finished: Path) -> None:
    path = write_report([finished])
    assert path == finished / "report" / "report.md"
    assert write_report([finished]) == path
    path.write_text("My notes.")
    with pytest.raises(FileExistsError, match="is kept"):
        write_report([finished])
    assert path.read_text() == "My notes."


def test_validations_lie_between_the_logged_steps_on_both_axes(finished: Path) -> None:
    log = read_run_log(finished)
    tokens, losses = log.against_tokens("eval_loss")
    assert tokens.tolist() == [step * 4 * 48 for step in (5, 10, 12)]
    assert losses.tolist() == [entry["eval_loss"] for entry in log.entries if "eval_loss" in entry]
    seconds = log.against_seconds("eval_loss")[0]
    assert log.times[4] < seconds[0] < log.times[6] and seconds[2] == log.times[12]


def test_a_validation_and_what_it_took_are_no_part_of_the_throughput() -> None:
    entries = [
        {"step": 0, "eval_loss": 5.0, "eval_runtime": 100.0},
        {"step": 2, "loss": 4.0, "num_tokens_read": 20},
        {"step": 2, "eval_loss": 4.0, "eval_runtime": 7.0},
        {"step": 4, "loss": 3.0, "num_tokens_read": 40},
    ]
    log = RunLog("run", 4, 4, "finished", entries, {2: 5.0, 4: 16.0}, {}, {})
    tokens, speeds = log.throughput()
    assert tokens.tolist() == [20, 40] and speeds.tolist() == [20 / 5, 20 / (11 - 7)]


def test_a_run_without_times_is_drawn_against_tokens_and_says_so(finished: Path, tmp_path: Path) -> None:
    (finished / "timing.jsonl").rename(tmp_path / "timing.jsonl")
    try:
        report = write_report([finished], tmp_path)
    finally:
        (tmp_path / "timing.jsonl").rename(finished / "timing.jsonl")
    assert "since no times were noted: run." in report.read_text() and "time of training" in rows_of(report)
    assert sorted(path.stem for path in tmp_path.glob("*.png")) == CHARTS[:2] + CHARTS[3:4]


def test_the_card_tells_how_the_run_went_and_is_renewed(finished: Path, tmp_path: Path) -> None:
    card = finished / "README.md"
    text, rows = card.read_text(), rows_of(write_report([finished], tmp_path))
    before, section = text.split("## How it went")
    told = dict(re.findall(r"^\| (.+?) \| (.+) \|$", section, re.MULTILINE))
    assert told["time of training"] == rows["time of training"][0]
    assert told["validation loss, best"] == rows["validation loss, best"][0]
    assert not [title for title in told if f"| {title} |" in before], "nothing is said twice"
    add_course_to_card(finished)
    assert card.read_text() == text


def test_what_is_no_run_is_refused_and_nothing_is_written(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    for folder, message in [(tmp_path, "holds notes.txt"), (tmp_path / "nowhere", "no folder")]:
        with pytest.raises(FileNotFoundError, match=message):
            write_report([finished, folder], tmp_path / "out")
    (tmp_path / "trainer_state.json").write_text("{")
    with pytest.raises(ValueError, match=r"trainer_state.json` is damaged"):
        write_report([tmp_path])
    assert not (tmp_path / "out").exists()
