"""The byte transformer's run file: on two ranks through the launcher, audited, and what can be wrong with records."""

import json
import random
import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import tinylm.models  # noqa: F401
from tests.distributed import ROOT
from tests.recipes.running import CPU_GLOO, launch, output_of, run_here

RUN_FILE = ROOT / "recipes" / "configs" / "pretrain_tlm" / "tiny.yaml"
RECIPE = ROOT / "recipes" / "pretrain_tlm.py"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """43 short documents, some of them over 128 bytes, and 3 empty ones."""
    draw = random.Random(3)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "então", "another", "dog", "ran"]
    documents = [f"{number} " + " ".join(draw.choices(words, k=draw.randint(5, 60))) for number in range(43)]
    rows = [*documents[:9], "", *documents[9:], " \n", ""]
    path = tmp_path_factory.mktemp("texts") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    return path


@pytest.fixture(scope="module")
def run(texts):
    """The folder of a run on two ranks, and what the launch printed."""
    folder = texts.parent / "run"
    flags = ["--config", RUN_FILE, "--data_files", texts, "--output_dir", folder, "--per_device_train_batch_size", 2]
    return folder, output_of(launch("--config_file", CPU_GLOO, RECIPE, *flags))


def test_two_ranks_train_two_epochs_and_the_audit_is_clean(run):
    folder, _ = run
    record = json.loads((folder / "run.json").read_text())
    assert (record["world_size"], record["backend"], record["engine"]) == (2, "gloo", "ddp")
    done = subprocess.run(
        [sys.executable, "-m", "tinylm.cli", "audit", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    epochs = [line for line in done.stdout.splitlines() if line.startswith("epoch ")]
    assert [line.split(":")[0] for line in epochs] == ["epoch 0", "epoch 1"]
    assert all(", 0 never" in line for line in epochs)
    assert json.loads((folder / "STATUS").read_text())["status"] == "finished"


def test_records_are_counted_in_words(run):
    _, printed = run
    assert "texts, 3 empty ones dropped" in printed
    assert "longer than 128 tokens: split" in printed


def test_rank_0_alone_writes_and_the_ranks_leave_in_order(run):
    folder, printed = run
    assert printed.count("--- sample") == 3
    assert "[rank 1]" not in printed
    assert "destroy_process_group" not in printed and "leaked" not in printed
    assert [path.name for path in folder.glob(".*")] == [".lock"], "nothing half written is left"


def test_the_folder_loads_as_bytes(run):
    folder, _ = run
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert len(tokenizer) == model.config.vocab_size == 258
    assert tokenizer("é")["input_ids"] == [0xC3, 0xA9]


def wrong_inputs(texts, folder):
    """Flags that spoil a run of records, and a word of the message that each must give."""
    (folder / "empty.jsonl").write_text('{"text": ""}\n{"text": "  "}\n')
    (folder / "number.jsonl").write_text('{"text": "a"}\n' * 2 + '{"text": 7}\n')
    return {
        "only empty texts": (["--data_files", folder / "empty.jsonl"], "only empty ones"),
        "an entry that is no string": (["--data_files", folder / "number.jsonl"], "line 3"),
        "a block below 2": (["--data_files", texts, "--block_size", 1], "`block_size` is 1"),
        "a block over the positions": (["--data_files", texts, "--block_size", 129], "context of 128"),
        "split blocks": (["--data_files", texts, "--packing", "true"], "--packing false"),
        "an audit of a stream": (
            ["--data_files", texts, "--packing", "true", "--split_long", "false", "--max_steps", 3],
            "`record_audit` is True",
        ),
        "an epoch of a stream": (
            ["--data_files", texts, "--packing", "true", "--split_long", "false"],
            "--packing false",
        ),
        "too few tokens": (["--data_files", texts, "--max_tokens", 3], "--max_tokens"),
    }


def test_wrong_records_end_the_run_before_it_begins(texts, tmp_path, monkeypatch, capsys):
    for name, (flags, word) in wrong_inputs(texts, tmp_path).items():
        flags = ["--config", RUN_FILE, "--output_dir", tmp_path / "run", *flags]
        assert run_here(monkeypatch, "pretrain_tlm", *flags) == 2, name
        message = capsys.readouterr().err
        assert word in message, f"{name}: {message}"
        assert "Traceback" not in message
        assert not (tmp_path / "run").exists(), name


def test_records_that_are_cut_are_counted(texts, tmp_path, monkeypatch, capsys):
    flags = ["--config", RUN_FILE, "--data_files", texts, "--output_dir", tmp_path / "run", "--split_long", "false"]
    flags += ["--max_steps", 1, "--record_audit", "false"]
    assert run_here(monkeypatch, "pretrain_tlm", *flags) == 0
    assert "longer than 128 tokens: cut there, " in capsys.readouterr().out
    assert not (tmp_path / "run" / "audit").exists()
