import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import Qwen2Config
from typer.testing import CliRunner

from tests.data.chats import answer, chat_tokenizer, question
from tests.data.tiny import tokenizer_with_eos
from tinylm.cli import app
from tinylm.data.chat import Examples, encode_examples
from tinylm.data.chat_encoder import ChatEncoder
from tinylm.data.collators import PadRecords
from tinylm.data.conversations import open_rows
from tinylm.data.order import GlobalBatches
from tinylm.inspection.preview import marked_text, preview_examples, rows_in_words

TOKENIZER = chat_tokenizer()
CHATS = [[question("Hi"), answer("Hello.")], [question("And?"), answer("So é."), question("x" * 400), answer("Bye.")]]


@pytest.fixture
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    return str(path)


@pytest.fixture
def examples(chats: str) -> Examples:
    return encode_examples(open_rows(data_files=[chats]), ChatEncoder(TOKENIZER, max_length=900))


@pytest.fixture
def run_file(tmp_path: Path, chats: str) -> Path:
    """A fine-tuning run of a Qwen2 that has no weights: none are needed."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 24, "vocab_size": 300, "max_position_embeddings": 512}
    Qwen2Config(**sizes).save_pretrained(tmp_path / "base")
    TOKENIZER.save_pretrained(tmp_path / "base")
    run = {"model_name_or_path": str(tmp_path / "base"), "data_files": chats, "output_dir": str(tmp_path / "run")}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**run, "use_cpu": True, "report_to": "none"}))
    return tmp_path / "run.yaml"


def test_the_trained_part_is_marked_and_everything_else_is_there(examples: Examples) -> None:
    text = preview_examples(TOKENIZER, examples, 2, in_full=True)
    for chat in CHATS:
        rendered = TOKENIZER.apply_chat_template(chat, tokenize=False)
        for message in chat:
            if message["role"] == "assistant":
                ended = message["content"] + "<|im_end|>"
                rendered = rendered.replace(ended, f"⟦{ended}⟧")
        assert rendered in text
    assert text.count("⟦") == 2 + 3, "two of them say what the brackets mean"


def test_in_colour_the_trained_part_is_green(examples: Examples) -> None:
    text = preview_examples(TOKENIZER, examples, in_colour=True)
    assert "assistant\n\x1b[32mHello.<|im_end|>\x1b[0m\n" in text and "⟦" not in text


def test_tokens_are_counted_and_long_stretches_shown_by_their_ends(examples: Examples) -> None:
    lines = preview_examples(TOKENIZER, examples, 5).splitlines()
    headers = [line for line in lines if line.startswith("--- example")]
    for number, header in enumerate(headers):
        total, context, trained = map(int, re.findall(r"(\d+)(?: tokens,| of context| trained)", header))
        assert total == context + trained == examples.lengths[number] and trained == examples.num_targets[number]
    assert len(headers) == 2
    assert "x" * 100 + " [… " in "\n".join(lines) and "x" * 400 not in "\n".join(lines)
    assert lines[-1] == f"--- {examples.counts.in_words()}"


def test_stretches_begin_and_end_where_labels_do() -> None:
    ids = torch.tensor(TOKENIZER("abcde")["input_ids"]).numpy()
    shown = {}
    for places in ([], [0], [4], [1, 2], [0, 1, 2, 3, 4], [0, 2, 4]):
        labels = ids.copy()
        labels[[place for place in range(5) if place not in places]] = -100
        shown[tuple(places)] = marked_text(TOKENIZER, ids, labels, in_full=True, in_colour=False)
    assert list(shown.values()) == ["abcde", "⟦a⟧bcde", "abcd⟦e⟧", "a⟦bc⟧de", "⟦abcde⟧", "⟦a⟧b⟦c⟧d⟦e⟧"]


def test_the_padding_of_an_epoch_is_counted_as_its_batches_have_it() -> None:
    lengths = torch.randint(3, 90, (23,)).numpy()
    rows = [{"input_ids": torch.zeros(length, dtype=torch.int64)} for length in lengths.tolist()]
    batches = list(GlobalBatches(23, per_rank_batch_size=4, seed=5))
    masks = [PadRecords(0)([rows[index] for index in batch])["attention_mask"] for batch in batches[:-1]]
    last = [rows[index] for index in batches[-1][:3]]  # the fourth repeats the epoch's first
    masks.append(PadRecords(0)(last)["attention_mask"])
    padding, read = sum(int((mask == 0).sum()) for mask in masks), sum(mask.numel() for mask in masks)
    assert rows_in_words(lengths, row_tokens=None, batch_size=4, seed=5) == (
        f"Padded: batches of 4 examples, {padding:,} of {read:,} tokens are padding ({padding / read:.0%})"
    )


def test_packed_rows_say_how_full_they_are() -> None:
    assert rows_in_words(np.array([7, 5, 6, 2]), row_tokens=12, batch_size=2, seed=0) == (
        "Packed: 2 rows of up to 12 tokens, 83% full, 2 a batch; nothing is padded"
    )


def test_the_command_shows_a_fine_tuning_run_and_writes_nothing(run_file: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run_file.parent.rglob("*") if path.suffix != ".lock"}
    result = CliRunner().invoke(app, ["preview", "--config", str(run_file), "--max_length", "200"])
    assert result.exit_code == 0, result.output
    assert "⟦Hello.<|im_end|>⟧" in result.output
    assert "--- 1 examples of 2 rows, " in result.output and "1 rows without a target dropped" in result.output
    assert "--- Packed: 1 rows of up to 200 tokens" in result.output
    assert "--- Steps: about 3, each of up to 8 x 105 tokens on a rank" in result.output
    assert re.search(r"--- Parameters: [\d,]+, trained: 512\n--- Memory of a rank, estimated: ", result.output)
    result = CliRunner().invoke(app, ["preview", "--config", str(run_file), "--packing=false"])
    assert "--- Padded: batches of 8 examples" in result.output
    after = {path: path.stat().st_mtime_ns for path in run_file.parent.rglob("*") if path.suffix != ".lock"}
    assert {path for path in after if path.is_file()} == {path for path in before if path.is_file()}
    assert not (run_file.parent / "run").exists()


def test_the_command_refuses_what_the_recipe_would(run_file: Path) -> None:
    for flags, message in [(["--max_lenght", "9"], "Did you mean `--max_length`"), (["--max_length", "600"], "of 512")]:
        with pytest.raises(ValueError, match=message):
            CliRunner().invoke(app, ["preview", "--config", str(run_file), *flags], catch_exceptions=False)


def test_the_command_shows_the_blocks_of_a_pretraining_run(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"Paragraph {n}.\n\n" for n in range(60)))
    tokenizer_with_eos().save_pretrained(tmp_path / "tokenizer")
    run = {"data_files": str(tmp_path / "text.txt"), "document_separator": r"\n\n", "output_dir": str(tmp_path / "run")}
    run |= {"max_steps": 3, "use_cpu": True, "report_to": "none", "block_size": 40}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    untrained = CliRunner().invoke(app, ["preview", "--config", str(tmp_path / "run.yaml")])
    assert "--- document 1, 12 characters\nParagraph 0." in untrained.output
    flags = ["--tokenizer_name_or_path", str(tmp_path / "tokenizer")]
    result = CliRunner().invoke(app, ["preview", "--config", str(tmp_path / "run.yaml"), *flags])
    assert re.search(r"--- block 2: 40 tokens\n.*</s>Paragraph", result.output), result.output
    assert "--- Steps: 3, each of up to 8 x 40 tokens on a rank, up to 960 together" in result.output
    assert "--- Parameters: 19,831,296, trained: 19,831,296\n" in result.output
    assert not (tmp_path / "run").exists()
