import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.distributed import ROOT
from tests.evaluation.tiny import START, byte_tokenizer, tiny_llama
from tests.recipes.running import CPU_GLOO, launch, output_of, run_here
from tinylm.evaluation.scoring import encode_documents, score, scoring_rows

RECIPE = ROOT / "recipes" / "evaluate_lm.py"
TEXT = "".join(f"Line {i}:  tabs\tand  spaces, a snowman ☃ and {i * i} more words.\n\n" for i in range(17))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(folder)
    byte_tokenizer(eos_token=START).save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the recipe in this process; what it returns is the exit code."""
    return partial(run_here, monkeypatch, "evaluate_lm")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "some.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def expected(text: str, stride: int | None = None) -> dict[str, float | int]:
    tokenizer = byte_tokenizer(eos_token=START)
    rows = scoring_rows(encode_documents(tokenizer, [text]), context=37, start_id=256, stride=stride)
    return score(tiny_llama(), rows, batch_size=4, device=torch.device("cpu"))


def test_the_same_numbers_at_every_batch_size_and_on_two_ranks(
    recipe: Callable[..., int], model_folder: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = []
    flags = ["--model_name_or_path", model_folder, "--data_files", text]
    for batch_size in (1, 8):
        output = text.with_name(f"{batch_size}.json")
        assert recipe(*flags, "--per_device_eval_batch_size", batch_size, "--output_file", output) == 0
        numbers.append(json.loads(output.read_text()))
    printed = capsys.readouterr().out
    output = text.with_name("ranks.json")
    on_two_ranks = output_of(launch("--config_file", CPU_GLOO, RECIPE, *flags, "--output_file", output))
    assert on_two_ranks.count("bits/byte") == 1, "one rank prints"
    numbers.append(json.loads(output.read_text()))

    assert numbers[0].keys() == expected(TEXT).keys()
    for found in numbers:
        assert found == pytest.approx(expected(TEXT), rel=1e-6)
        assert found["num_bytes"] == len(TEXT.encode()) and found["num_documents"] == 1
    assert f"{numbers[0]['bits_per_byte']:,.4f}" in printed and f"{numbers[0]['num_tokens']:,}" in printed


def test_scores_lie_in_the_models_folder_unless_told_otherwise(
    recipe: Callable[..., int], model_folder: Path, text: Path
) -> None:
    assert recipe("--model_name_or_path", model_folder, "--data_files", text, "--stride", 18) == 0
    found = json.loads((model_folder / "evaluation.json").read_text())
    assert found == pytest.approx(expected(TEXT, stride=18), rel=1e-6)
    assert found["nats_per_token"] != pytest.approx(expected(TEXT)["nats_per_token"], rel=1e-4)
    assert found["num_tokens"] == expected(TEXT)["num_tokens"]


def test_the_validation_split_is_the_held_out_part(recipe: Callable[..., int], model_folder: Path, text: Path) -> None:
    output = text.with_name("held_out.json")
    flags = ["--model_name_or_path", model_folder, "--data_files", text, "--output_file", output]
    assert recipe(*flags, "--eval_split", "validation") == 0
    share = json.loads(output.read_text())["num_bytes"] / len(TEXT.encode())
    assert 0.05 < share < 0.2


def test_models_and_corpora_side_by_side_are_one_table_and_one_list(
    recipe: Callable[..., int], model_folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, more = tmp_path / "other", tmp_path / "more.txt"
    tiny_llama(seed=1).save_pretrained(other)
    byte_tokenizer(eos_token=START).save_pretrained(other)
    more.write_text(TEXT.upper(), encoding="utf-8")
    flags = ["--model_name_or_path", model_folder, other, "--corpora", text, more]
    assert recipe(*flags, "--output_file", tmp_path / "e.json") == 0
    rows = json.loads((tmp_path / "e.json").read_text())
    pairs = [(row.pop("model"), row.pop("corpus")) for row in rows]
    assert pairs == [(str(model), str(corpus)) for model in (model_folder, other) for corpus in (text, more)]
    assert rows[0] == pytest.approx(expected(TEXT), rel=1e-6) and rows[1] == pytest.approx(expected(TEXT.upper()))
    printed = capsys.readouterr().out
    assert printed.count("bits/byte") == 1 and all(f"{row['bits_per_byte']:,.4f}" in printed for row in rows)
    assert len({row["bits_per_byte"] for row in rows}) == 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"model_name_or_path": "./runs/nobody"}, "There is no folder or file `./runs/nobody`"),
        ({"model_name_or_path": "runs/nobody"}, "There is no folder `runs/nobody`"),
        ({"model_name_or_path": str(ROOT / "tests")}, "A model's folder holds `config.json`"),
        ({"stride": "38"}, "context of 37 tokens, not 38. Set `--stride 18`"),
        ({"block_size": "38"}, "`block_size` is 38"),
        ({"eval_split": "test"}, "`eval_split` is `all` or `validation`, not `test`"),
        ({"output_file": "no/such/folder/e.json"}, "`no/such/folder/e.json` is not that. Set `--output_file`"),
        ({"data_files": "nowhere.txt"}, "nowhere.txt"),
        ({"per_device_eval_batch_size": "0"}, "`per_device_eval_batch_size` is 0"),
        ({"precision": "fp8"}, "`precision` is one of"),
        ({"corpora": "sample"}, "Put all of them behind `--corpora`"),
        ({"base_model": "some/base"}, "Leave `--base_model` out"),
    ],
)
def test_wrong_input_ends_with_one_paragraph_before_the_model_is_loaded(
    recipe: Callable[..., int],
    model_folder: Path,
    text: Path,
    flags: dict[str, str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("tinylm.evaluation.side_by_side.load_checked", refuse)
    output = text.with_name("e.json")
    given = {"model_name_or_path": str(model_folder), "data_files": str(text), "output_file": str(output), **flags}
    assert recipe(*(word for name, value in given.items() for word in (f"--{name}", value))) == 2
    assert message in capsys.readouterr().err
    assert not output.exists()


def test_a_text_without_tokens_and_a_tokenizer_too_large_are_refused(
    recipe: Callable[..., int], model_folder: Path, text: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text.write_text(" \n\n ")
    assert recipe("--model_name_or_path", model_folder, "--data_files", text) == 2
    assert "some.txt" in capsys.readouterr().err
    text.write_text(TEXT, encoding="utf-8")
    large = byte_tokenizer(eos_token=START)
    large.add_tokens([f"word{i}" for i in range(17)])
    large.save_pretrained(tmp_path / "large")
    flags = ["--model_name_or_path", model_folder, "--data_files", text]
    assert recipe(*flags, "--tokenizer_name_or_path", tmp_path / "large") == 2
    error = capsys.readouterr().err
    assert "263" in error and "274" in error
