"""Runs that push: refused before their first step, or on the Hub at their end, with a card of their own."""

import json
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from tests.data.chats import answer, question
from tests.models.gguf_files import save_base
from tests.recipes.running import run_here
from tests.training.tiny_run import write_tiny_run

from .conftest import TOKEN
from .hub_server import HubServer, user
from .test_push import held


@pytest.fixture(scope="module")
def pretraining(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_run(tmp_path_factory.mktemp("pretraining"))


@pytest.fixture(scope="module")
def finetuning(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finetuning")
    save_base(folder / "base")
    rows = [{"messages": [question(f"What is {n}?"), answer(f"It is {n * n}.")]} for n in range(23)]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"model_name_or_path": str(folder / "base"), "data_files": [str(folder / "chat.jsonl")]}
    values |= {"max_length": 200, "max_steps": 1, "precision": "fp32", "use_cpu": True, "save_strategy": "no"}
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    return folder / "run.yaml"


def test_a_pretraining_run_is_pushed_privately_with_a_card_that_the_hub_accepts(
    hub: HubServer, pretraining: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    flags = ["--output_dir", tmp_path / "tlm", "--push_to_hub", "true", "--max_steps", 2, "--save_steps", 1]
    assert run_here(monkeypatch, "pretrain_tlm", "--config", pretraining, *flags) == 0
    said = capsys.readouterr().out
    assert f"The result will be pushed to {hub.url}/me/tlm (private), as me" in said
    assert f"files to {hub.url}/me/tlm (private, commit" in said
    repository = hub.repositories["model", "me/tlm"]
    assert repository.private and len(repository.commits) == 2  # no checkpoint was pushed
    files = held(hub, "me/tlm")
    assert {"model.safetensors", "modeling_tlm.py", "tokenizer.model", "loss.png"} <= files.keys()
    assert not any(str(tmp_path.parent).encode() in data or TOKEN.encode() in data for data in files.values())
    assert not {"run.json", "STATUS", "trainer_state.json", "pushed.json"} & files.keys()
    card = ModelCard(files["README.md"].decode())
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["tinylm"],
    }
    for words in ('"text-generation", "me/tlm", trust_remote_code=True', "| learning rate, schedule | 0.01, linear |"):
        assert words in card.text
    assert "| steps, rows a step | 2, 4 |" in card.text and "| licence of the data | not recorded |" in card.text


def test_a_run_that_could_not_be_pushed_ends_before_its_first_step(
    hub: HubServer, pretraining: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Case E7."""
    hub.users[TOKEN] = user("me", role="read")
    flags = ["--output_dir", tmp_path / "tlm", "--push_to_hub", "true"]
    assert run_here(monkeypatch, "pretrain_tlm", "--config", pretraining, *flags) == 2
    printed = capsys.readouterr()
    assert "The token of `me` may only read" in printed.err and "step 1" not in printed.out
    assert not (tmp_path / "tlm").exists()


def test_a_push_that_fails_leaves_a_run_that_is_finished(
    hub: HubServer, pretraining: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Case E7: saved first, and the message says how to repeat the push."""
    hub.fail("POST", "/commit/", status=403)
    flags = ["--output_dir", tmp_path / "tlm", "--push_to_hub", "true", "--max_steps", 1, "--save_steps", 1]
    flags += ["--resume_from_checkpoint", "auto"]
    assert run_here(monkeypatch, "pretrain_tlm", "--config", pretraining, *flags) == 0
    assert f"Push it with: tinylm push {tmp_path / 'tlm'} --repo_id me/tlm\n" in capsys.readouterr().out
    assert json.loads((tmp_path / "tlm" / "STATUS").read_text())["status"] == "finished"

    card = (tmp_path / "tlm" / "README.md").read_bytes()
    (tmp_path / "tlm" / "README.md").unlink()  # as if it had been killed before
    hub.users[TOKEN] = user("me", role="read")
    assert run_here(monkeypatch, "pretrain_tlm", "--config", pretraining, *flags) == 0
    said = capsys.readouterr().out
    assert "is finished" in said and "was not pushed: The token of `me` may only read" in said
    assert (tmp_path / "tlm" / "README.md").read_bytes() == card and "me/tlm --public" not in said
    hub.users[TOKEN] = user("me")
    for _ in range(2):
        assert run_here(monkeypatch, "pretrain_tlm", "--config", pretraining, *flags) == 0
        assert len(hub.repositories["model", "me/tlm"].commits) == 2, "its making, and one push of the run"


@pytest.mark.parametrize("full", [False, True], ids=["adapter", "all weights"])
def test_a_finetuning_run_from_a_local_base_is_pushed_without_its_path(
    full: bool, hub: HubServer, finetuning: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Case E3."""
    monkeypatch.setattr("tinylm.inspection.before_after._NEW_TOKENS", 2)
    flags = ["--output_dir", tmp_path / "tuned", "--push_to_hub", "true", "--full", str(full).lower()]
    if not full:
        assert run_here(monkeypatch, "finetune_qwen", "--config", finetuning, *flags) == 2
        assert "Set `--base_model_id`" in capsys.readouterr().err and not (tmp_path / "tuned").exists()
        flags += ["--base_model_id", "me/base"]
    assert run_here(monkeypatch, "finetune_qwen", "--config", finetuning, *flags) == 0
    files = held(hub, "me/tuned")
    assert not any(str(tmp_path.parent).encode() in data for data in files.values())
    card = ModelCard(files["README.md"].decode())
    assert "`tinylm chat me/tuned`" in card.text and 'from_pretrained("me/tuned")' in card.text
    if full:
        assert card.data.base_model is None and "of the local model `base`" in card.text
        assert "config.json" in files
    else:
        assert card.data.base_model == "me/base" and card.data.library_name == "peft"
        assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "me/base"
