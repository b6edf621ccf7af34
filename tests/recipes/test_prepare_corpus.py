import json
import logging
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from tests.data.tiny import tokenizer_with_eos
from tests.distributed import ROOT
from tinylm.data.token_store import StoreBlocks, TokenStore
from tinylm.training.arguments import DataArguments, PrepareArguments, parse_arguments

RECIPE = ROOT / "recipes" / "prepare_corpus.py"
CONFIGS = sorted((ROOT / "recipes" / "configs" / "prepare_corpus").glob("*.yaml"))


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the recipe's `main` on two small files with these flags; the flags that all runs need are set."""
    tokenizer_with_eos().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "a.txt").write_text("\n\n".join(f"document {n}" for n in range(30)))
    main = runpy.run_path(str(RECIPE))["main"]

    def run(*flags: str) -> Path:
        command = ["prepare_corpus.py", "--data_files", str(tmp_path / "a.txt"), "--document_separator", r"\n\n"]
        command += ["--tokenizer_name_or_path", str(tmp_path / "tokenizer"), "--output_dir", str(tmp_path / "store")]
        monkeypatch.setattr(sys, "argv", [*command, "--num_proc", "1", *flags])
        main()
        return tmp_path / "store"

    return run


def test_the_recipe_prepares_a_corpus_and_says_what_is_in_it(prepare, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tinylm")
    store = TokenStore.open(prepare("--num_shards", "2"))
    assert len(StoreBlocks(store, 16)) > 10
    assert sum(counts["documents"] for counts in store.counts.values()) == 30
    counts = store.counts["train"]
    line = f"train: {counts['documents']} documents, {counts['tokens']} tokens, {counts['bytes']} bytes"
    messages = [record.getMessage() for record in caplog.records]
    assert line in messages
    assert any(message.startswith("Part 2 of 2") for message in messages)


def test_the_recipe_bounds_the_tokens_and_refuses_to_change_a_store(prepare) -> None:
    folder = prepare("--max_tokens", "80")
    assert json.loads((folder / "manifest.json").read_text())["splits"]["train"]["tokens"] == 80
    with pytest.raises(ValueError, match="max_tokens is 80, asked is 100"):
        prepare("--max_tokens", "100")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_run_file_parses_and_its_first_line_starts_it(path: Path) -> None:
    command = shlex.split(path.read_text().splitlines()[0].removeprefix("# "))
    assert command == ["python", "recipes/prepare_corpus.py", "--config", str(path.relative_to(ROOT))]
    data, arguments = parse_arguments((DataArguments, PrepareArguments), ["--config", str(path)])
    values = yaml.safe_load(path.read_text())
    assert {**vars(data), **vars(arguments)}.items() >= values.items()
