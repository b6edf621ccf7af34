"""`tinylm score` as it is typed."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import RunCLI, save
from tests.evaluation.tiny import START, byte_tokenizer, tiny_llama, tiny_tlm
from tests.recipes.running import run_here


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
