"""Case E13: every command that the documentation or a run file shows runs here, on tiny data."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tinylm.models  # noqa: F401
from tests.data.chats import answer, question
from tests.distributed import ROOT
from tests.inspection.test_audit import write_audit
from tests.models.gguf_files import save_base
from tests.recipes.running import run_here
from tests.training.tiny import UnevenRows, run_arguments, tiny_model, trainer_for
from tinylm import cli
from tinylm.publish.merge import merge_adapter
from tinylm.tokenizers.sentencepiece_bpe import train_sentencepiece

PAGES = [
    ROOT / "README.md",
    ROOT / "recipes" / "README.md",
    ROOT / "accelerate_configs" / "README.md",
    ROOT / "tinylm" / "ddp" / "README.md",
]
RUN_FILES = sorted((ROOT / "recipes" / "configs").glob("*/*.yaml"))
COMMAND = re.compile(r"(?:^ {4}|`|^# )((?:accelerate launch|python recipes/|make |tinylm )[^`\n#]+)", re.MULTILINE)


def shown_commands() -> list[str]:
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    texts += [path.read_text(encoding="utf-8").splitlines()[0] for path in RUN_FILES]
    found = {match.strip() for text in texts for match in COMMAND.findall(text)}
    return sorted(command for command in found if "NAME" not in command)


COMMANDS = shown_commands()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A folder with a text, a tokenizer, an architecture, a model, and conversations with a base model for them."""
    folder = tmp_path_factory.mktemp("tiny")
    documents = [f"document {number} tells of {number * number} things\n" * 5 for number in range(40)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    model = tiny_model(vocab_size=300, max_position_embeddings=64)
    model.save_pretrained(folder / "model")
    (folder / "config.json").write_text((folder / "model" / "config.json").read_text())
    train_sentencepiece(documents, folder / "model", vocab_size=300)
    save_base(folder / "base")
    rows = [{"messages": [question(f"What is {n}?"), answer(f"It is {n * n}.")]} for n in range(43)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def small(recipe: str, tiny: Path, tmp_path: Path) -> list[object]:
    """Flags that make a command of a recipe small; given last, they win."""
    text, out = ["--data_files", tiny / "text.jsonl"], ["--output_dir", tmp_path / "out"]
    tokenizer = ["--tokenizer_name_or_path", tiny / "model"]
    return {
        "pretrain_tlm": [
            *(*text, *out, *tokenizer, "--config_name", tiny / "config.json", "--block_size", 16, "--max_steps", 1),
            *("--max_eval_tokens", 50, "--eval_strategy", "no", "--dataloader_num_workers", 0, "--precision", "fp32"),
            *("--per_device_train_batch_size", 1, "--warmup_steps", 0, "--use_cpu", "true"),
        ],
        "train_tokenizer": [*text, *out, "--vocab_size", 300],
        "prepare_corpus": [*text, *out, *tokenizer, "--num_proc", 1],
        "finetune_qwen": [
            *("--model_name_or_path", tiny / "base", "--data_files", tiny / "chats.jsonl", *out, "--max_steps", 1),
            *("--data_shape", "messages", "--streaming", "false", "--max_length", 200, "--row_tokens", 400),
            *("--warmup_steps", 0, "--eval_strategy", "no", "--precision", "fp32", "--use_cpu", "true"),
            *("--max_eval_examples", 2, "--gradient_accumulation_steps", 1),
        ],
        "evaluate_lm": [*text, "--model_name_or_path", tiny / "model", "--output_file", tmp_path / "scores.json"],
    }[recipe]


def test_the_documentation_shows_commands():
    assert len(COMMANDS) > 12
    assert {"make demo", "make test", "accelerate launch recipes/pretrain_tlm.py"} <= set(COMMANDS)


@pytest.mark.parametrize(
    "command", [command for command in COMMANDS if re.search(r"recipes/\w+\.py", command) and "bench" not in command]
)
def test_a_shown_recipe_runs(command, tiny, tmp_path, monkeypatch):
    words = shlex.split(command)
    if "--config_file" in words:
        assert (ROOT / words[words.index("--config_file") + 1]).is_file()
    place = next(number for number, word in enumerate(words) if word.startswith("recipes/"))
    recipe = Path(words[place]).stem
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("tinylm.inspection.before_after._NEW_TOKENS", 8)
    flags = [*words[place + 1 :], *small(recipe, tiny, tmp_path)]
    assert run_here(monkeypatch, recipe, *flags) == 0
    assert any(tmp_path.iterdir())


@pytest.fixture(scope="module")
def runs(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to work in, with the runs that the documentation has made before, small."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr("tinylm.inspection.before_after._NEW_TOKENS", 8)
        for recipe, run in [("finetune_qwen", "finetune/demo"), ("pretrain_tlm", "demo/tlm")]:
            flags = [*small(recipe, tiny, folder), "--output_dir", folder / "runs" / run]
            assert run_here(patch, recipe, *flags, "--save_strategy", "steps", "--save_steps", 1) == 0
    merge_adapter(folder / "runs" / "finetune" / "demo", folder / "runs" / "finetune" / "merged")
    (folder / "runs" / "tiny").mkdir()
    write_audit(folder / "runs" / "tiny")
    args = run_arguments(folder / "runs" / "demo" / "tlm", max_steps=1, save_strategy="steps")
    trainer_for(tiny_model(), UnevenRows(), args).train()
    return folder


TINYLM_COMMANDS = [command for command in COMMANDS if command.startswith("tinylm ")]


@pytest.mark.parametrize("command", TINYLM_COMMANDS)
def test_a_shown_command_of_tinylm_works(command, tiny, runs, tmp_path, monkeypatch):
    words = shlex.split(command)[1:]
    if words[0] == "merge":
        words[2] = str(tmp_path / "merged")  # what it names is there already
    if words[0] == "doctor" and "--config" in words:
        words += ["--output_dir", str(tmp_path / "run"), "--per_device_train_batch_size", "1"]
    if words[0] == "score":
        words = [str(tiny / "text.jsonl") if word == "sample" else word for word in words]
    if words[0] == "preview":
        words += ["--model_name_or_path", str(tiny / "base")]
    if words[0] == "chat":
        words += ["--prompt", "What is 3?", "--max_new_tokens", "3"]
    monkeypatch.chdir(runs)
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    assert result.output


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("make ")])
def test_a_shown_target_exists(command):
    done = subprocess.run(["make", "--dry-run", *shlex.split(command)[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
