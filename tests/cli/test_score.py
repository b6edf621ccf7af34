"""`tinylm score` as it is typed."""

import json
import os
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import RunCLI, save
from tests.evaluation.tiny import START, byte_tokenizer, tiny_llama, tiny_tlm
from tests.recipes.running import run_here
from tinylm.data.splits import is_held_out


def test_one_table_or_one_json_and_the_numbers_of_the_recipe(
    tinylm: RunCLI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [
        save(tmp_path / name, model, byte_tokenizer(eos_token=START))
        for name, model in (("tlm", tiny_tlm()), ("llama", tiny_llama()))
    ]
    text = tmp_path / "some.txt"
    text.write_text("Some words and a snowman ☃, again and again.\n" * 9, encoding="utf-8")
    code, table, error = tinylm("score", *models, "--corpus", text, "--output_file", tmp_path / "scores.json")
    rows = json.loads((tmp_path / "scores.json").read_text())
    assert code == 0 and error == "" and table.startswith(f"corpus {text}\n")
    assert [row["model"] for row in rows] == list(map(str, models)) and len(table.strip().splitlines()) == 6
    assert all(f"{row['bits_per_byte']:,.4f}" in table for row in rows)

    code, printed, _ = tinylm("score", models[0], "--corpus", text, "--json", "--stride", 18, "--block_size", 30)
    flags = ["--model_name_or_path", models[0], "--data_files", text, "--stride", 18, "--block_size", 30]
    assert run_here(monkeypatch, "evaluate_lm", *flags) == 0
    assert code == 0 and json.loads(printed) == json.loads((models[0] / "evaluation.json").read_text())
    assert json.loads(printed)["nats_per_token"] != pytest.approx(rows[0]["nats_per_token"], rel=1e-4)
    code, printed, _ = tinylm("score", models[0], "--corpus", text, "--json", "--split", "validation")
    assert code == 0 and json.loads(printed)["num_bytes"] < len(text.read_bytes()) / 4


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(tmp_path / "tlm", tiny_tlm(), byte_tokenizer(eos_token=START))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file of 40 documents between bars."""
    (tmp_path / "some.txt").write_text("|".join(f"Document {number} of them." for number in range(40)))
    return tmp_path / "some.txt"


def test_the_documents_that_are_held_out_are_those_of_a_run_with_the_same_flags(
    tinylm: RunCLI, model: Path, text: Path
) -> None:
    """Undivided, the file is one document, and the end that is scored holds some that such a run trains on."""
    words = ["score", model, "--corpus", text, "--json", "--split", "validation"]
    _, printed, _ = tinylm(*words, "--document_separator", "|")
    held_out = [document for document in text.read_text().split("|") if is_held_out(document)]
    scores = json.loads(printed)
    assert (scores["num_documents"], scores["num_bytes"]) == (len(held_out), len("".join(held_out))) and held_out
    _, printed, _ = tinylm(*words, "--document_separator", "|", "--max_documents", 30)
    assert 0 < json.loads(printed)["num_documents"] < len(held_out)


def test_scores_are_printed_before_they_are_written_and_a_place_for_them_is_looked_at_first(
    tinylm: RunCLI, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError("No space left on device")

    words = ["score", model, "--corpus", text, "--output_file", tmp_path / "scores.json"]
    (tmp_path / "scores.json").write_text("those of yesterday")
    with monkeypatch.context() as disk:
        disk.setattr("tinylm.training.run_record.flush", full)
        code, printed, error = tinylm(*words)
    assert code == 2 and "No space left" in error and "bits/byte" in printed
    assert (tmp_path / "scores.json").read_text() == "those of yesterday"

    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path and may(path, mode))
    monkeypatch.setattr("tinylm.evaluation.side_by_side.contestants", lambda *names, **flags: pytest.fail("too late"))
    code, printed, error = tinylm(*words)
    assert (code, printed) == (2, "") and f"`{tmp_path}` may not be written. Set `--output_file`" in error


def test_torch_that_was_built_for_a_gpu_which_is_not_there_runs_on_the_cpu(
    tinylm: RunCLI, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_the_build(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", of_the_build)
    for words in (["score", model, "--corpus", text], ["generate", model, "--prompt", "x", "--max_new_tokens", 2]):
        code, _, error = tinylm(*words)
        assert code == 0, error
