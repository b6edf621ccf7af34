"""Every command on input that is wrong: one paragraph, exit code 2, and nothing on standard output."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model

from tests.cli.conftest import RunCLI, save
from tests.evaluation.tiny import START, byte_tokenizer, tiny_llama
from tests.training.tiny_run import write_tiny_run


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is good, and what is wrong with it, by name."""
    root = tmp_path_factory.mktemp("places")
    tokenizer = byte_tokenizer(eos_token=START)
    tokenizer.chat_template = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    good = save(root / "model", tiny_llama(), tokenizer)
    settings = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    base = type(tiny_llama()).from_pretrained(good)
    get_peft_model(base, settings).save_pretrained(root / "adapter")
    for kind, weights in (("model", "model.safetensors"), ("adapter", "adapter_model.safetensors")):
        cut, pickled = (root / f"{fault}-{kind}" for fault in ("cut", "pickled"))
        for folder in (cut, pickled):
            shutil.copytree(root / kind, folder)
        (cut / weights).write_bytes((cut / weights).read_bytes()[:2000])
        (pickled / weights).unlink()
        torch.save({}, pickled / ("pytorch_model.bin" if kind == "model" else "adapter_model.bin"))
    shutil.copytree(root / "adapter", root / "orphan")
    config = json.loads((root / "orphan" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(root / "gone")
    (root / "orphan" / "adapter_config.json").write_text(json.dumps(config))
    (root / "weightless").mkdir()
    shutil.copy(root / "adapter" / "adapter_config.json", root / "weightless")
    (root / "empty").mkdir()
    (root / "empty" / "empty.txt").write_text(" \n\n\t\n")
    (root / "text.txt").write_text("Some words.")
    run_file = write_tiny_run(root / "empty")
    run = {**yaml.safe_load(run_file.read_text()), "data_files": str(root / "empty" / "empty.txt")}
    del run["prepared_corpus"]
    (root / "textless.yaml").write_text(yaml.safe_dump(run))
    tuned = {"model_name_or_path": str(root / "empty"), "data_files": "x.jsonl", "output_dir": str(root / "out")}
    (root / "empty.yaml").write_text(yaml.safe_dump(tuned))
    files = {"out": root / "out", "empty.txt": root / "empty" / "empty.txt"}
    return {name: str(path) for name, path in [*files.items(), *((path.name, path) for path in root.iterdir())]}


FAULTS = {
    "empty": "holds `config.json`",
    "nowhere": "no folder",
    "cut-model": "are cut off or damaged",
    "cut-adapter": "are cut off or damaged",
    "pickled-model": "can run any code",
    "pickled-adapter": "can run any code",
    "orphan": "needs its base model",
}
OF_MODELS = [
    (command.format(fault), said)
    for command in ("generate {} --prompt x", "chat {} --prompt x", "score {} --corpus text.txt")
    for fault, said in FAULTS.items()
]
OF_ONE_MODEL = [
    ("merge empty out", "An adapter is a folder with `adapter_config.json`"),
    ("merge nowhere out", "no such folder"),
    ("merge model out", "An adapter is a folder with `adapter_config.json`"),
    ("merge cut-adapter out", "are cut off or damaged"),
    ("merge pickled-adapter out", "can run any code"),
    ("merge adapter out --base_model cut-model", "are cut off or damaged"),
    ("merge adapter out --base_model pickled-model", "can run any code"),
    ("merge orphan out", "needs its base model"),
    ("merge weightless out", "adapter_model.safetensors"),
    ("generate weightless --prompt x", "adapter_model.safetensors"),
    ("push empty --repo_id me/x", "can be pushed"),
    ("push nowhere --repo_id me/x", "no folder"),
    ("push cut-model --repo_id me/x", "is cut off or damaged"),
    ("push pickled-adapter --repo_id me/x --base_model_id some/base", "can run any code"),
    ("push orphan --repo_id me/x", "means nothing on another machine"),
    ("push model --repo_id me//x", "is no name for a repository"),
    ("push model --repo_id -x", "is no name for a repository"),
    ("push model --repo_id a/b/c", "is no name for a repository"),
]
OF_RUNS = [
    ("audit empty", "no audit"),
    ("audit nowhere", "no audit"),
    ("report empty", "A run's folder holds `trainer_state.json`"),
    ("report nowhere", "no folder"),
    ("doctor --run empty", "holds no run"),
    ("doctor --run nowhere", "holds no run"),
    ("preview --config nowhere", "does not exist"),
    ("preview --config textless.yaml", "no document in"),
    ("preview --config empty.yaml", "holds `config.json`"),
]
OF_PROMPTS_AND_TEXTS = [
    ("chat model --prompt ''", "at least one word"),
    ("chat model --prompt long", "Ask something shorter"),
    ("score model --corpus empty.txt", "no document in"),
    ("score model --corpus nowhere.txt", "`nowhere.txt` does not exist"),
    ("score model --corpus text.txt --corpus text.txt", "named twice"),
    ("score model model --corpus text.txt", "named twice"),
    ("score model --corpus text.txt --stride 38", "context of 37 tokens, not 38"),
    ("score model --corpus text.txt --block_size 38", "`block_size` is 38"),
    ("score model --corpus text.txt --output_file nowhere/x.json", "is not that. Set `--output_file`"),
    ("score model --corpus text.txt --base_model model", "Leave `--base_model` out"),
]
CASES = [*OF_MODELS, *OF_ONE_MODEL, *OF_RUNS, *OF_PROMPTS_AND_TEXTS]


@pytest.mark.parametrize(("command", "said"), CASES)
def test_wrong_input_is_one_paragraph_and_exit_code_2(
    command: str, said: str, places: dict[str, str], tinylm: RunCLI
) -> None:
    name, *words = command.split()
    given = {**places, "''": "", "long": "why " * 40}
    code, output, error = tinylm(name, *(given.get(word, word) for word in words))
    assert code == 2 and output == "", f"{output}{error}"
    assert said in error and error.count("\n") == 1 and len(error) < 1500 and "Traceback" not in error
    assert not Path(places["out"]).exists()


def test_every_command_is_tried() -> None:
    from tests.cli.test_commands import COMMANDS

    assert {command.split()[0] for command, _ in CASES} == set(COMMANDS)
