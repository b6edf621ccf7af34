import json
import runpy
import sys
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

from tests.distributed import ROOT
from tinylm.data.splits import is_held_out
from tinylm.tokenizers.sentencepiece_bpe import train_sentencepiece
from tinylm.training.arguments import DataArguments, TokenizerArguments, parse_arguments

RECIPE = ROOT / "recipes" / "train_tokenizer.py"
RUN_FILE = ROOT / "recipes" / "configs" / "train_tokenizer" / "demo.yaml"


def train(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    """What `python recipes/train_tokenizer.py FLAGS` does, in this process."""
    monkeypatch.setattr(sys, "argv", [str(RECIPE), *flags])
    runpy.run_path(str(RECIPE), run_name="__main__")


def test_the_run_file_starts_with_its_command_and_its_keys_are_flags() -> None:
    command, *_ = RUN_FILE.read_text(encoding="utf-8").splitlines()
    assert command == f"# python recipes/train_tokenizer.py --config {RUN_FILE.relative_to(ROOT)}"
    data_args, tokenizer_args = parse_arguments((DataArguments, TokenizerArguments), ["--config", str(RUN_FILE)])
    assert (data_args.dataset_name, tokenizer_args.output_dir) == ("sample", "runs/sample/tokenizer")
    assert yaml.safe_load(RUN_FILE.read_text(encoding="utf-8"))["vocab_size"] == tokenizer_args.vocab_size == 4096


@pytest.fixture
def documents() -> list[str]:
    """Every held-out document speaks of жук, and no other does."""
    seen = (f"document {number} says word{number % 7} and so on" for number in range(300))
    held_out = (f"жук number {number} жук" for number in range(300))
    return [text for text in seen if not is_held_out(text)] + [text for text in held_out if is_held_out(text)]


def test_the_recipe_learns_from_the_training_part_only(
    documents: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    flags = ["--data_files", str(tmp_path / "text.jsonl"), "--output_dir", str(tmp_path / "out"), "--vocab_size", "300"]
    train(monkeypatch, *flags)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("ж") == ["<0xD0>", "<0xB6>"]
    assert len(tokenizer) == 300
    assert train_sentencepiece(documents, tmp_path / "all", vocab_size=300).tokenize("ж") == ["ж"]

    with pytest.raises(SystemExit) as stopped:  # the folder holds a tokenizer now
        train(monkeypatch, *flags)
    assert stopped.value.code == 2
    train(monkeypatch, *flags, "--model_type", "unigram", "--overwrite_tokenizer")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 300


def test_a_vocabulary_out_of_reach_ends_with_one_paragraph(
    documents: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("\n".join(documents), encoding="utf-8")
    with pytest.raises(SystemExit) as stopped:
        train(monkeypatch, "--data_files", str(tmp_path / "text.txt"), "--output_dir", str(tmp_path / "out"))
    assert stopped.value.code == 2
    assert "A vocabulary of 4,096 pieces cannot be reached with this text: it allows" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
