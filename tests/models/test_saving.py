"""What comes back from a folder: weights, ties, sizes, and the code that travels with them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .architectures import ARCHITECTURES, Architecture

everywhere = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)

# An environment without tinylm, as on somebody else's machine: the import fails as if it had never been installed.
ELSEWHERE = """
import importlib.abc, json, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "tinylm":
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Absent())
import torch
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    tokens = torch.load(f"{folder}/tokens.pt", weights_only=True)
    written = model.generate(tokens, max_new_tokens=5, do_sample=False, eos_token_id=None)
    torch.save({"logits": model(tokens).logits.detach(), "written": written}, f"{folder}/result.pt")
    model.save_pretrained(f"{folder}/again")
try:
    import tinylm
    sys.exit("tinylm could be imported: this proves nothing")
except ModuleNotFoundError:
    pass
"""


@everywhere
def test_a_saved_model_comes_back_through_the_auto_classes(architecture: Architecture, tmp_path: Path) -> None:
    model, tokens = architecture.build(), architecture.tokens(2, 13)
    model.save_pretrained(tmp_path)
    reloaded, loading = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(reloaded) is type(model)
    assert not any(loading.values()), loading
    assert torch.equal(reloaded(tokens).logits, model(tokens).logits)
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == {**reloaded.config.to_dict()}
    body = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(body(tokens).last_hidden_state, model.get_decoder()(tokens).last_hidden_state)


@everywhere
def test_bf16_weights_come_back_as_bf16(architecture: Architecture, tmp_path: Path) -> None:
    model, tokens = architecture.build().bfloat16(), architecture.tokens(2, 13)
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert reloaded.dtype == torch.bfloat16
    assert torch.equal(reloaded(tokens).logits, model(tokens).logits)


@everywhere
def test_a_tied_head_is_stored_once_and_comes_back_tied_after_a_step(
    architecture: Architecture, tmp_path: Path
) -> None:
    """Case E1."""
    model, tokens = architecture.build(tie_word_embeddings=True).train(), architecture.tokens(2, 13)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert architecture.build().lm_head.weight is not architecture.build().get_input_embeddings().weight
    model(tokens, labels=tokens).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.eval().save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert reloaded.lm_head.weight is reloaded.get_input_embeddings().weight
    assert torch.equal(reloaded(tokens).logits, model(tokens).logits)


@everywhere
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_vocabulary_can_grow_and_shrink(architecture: Architecture, tied: bool, tmp_path: Path) -> None:
    model, tokens = architecture.build(tie_word_embeddings=tied), architecture.tokens(2, 13)
    before, old_size = model(tokens).logits, architecture.config.vocab_size
    model.resize_token_embeddings(old_size + 6)
    assert model.config.vocab_size == old_size + 6
    grown = model(tokens, labels=tokens)
    assert grown.logits.shape[-1] == old_size + 6 and grown.loss.isfinite()
    torch.testing.assert_close(grown.logits[..., :old_size], before)
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(reloaded(tokens).logits, grown.logits)
    model.resize_token_embeddings(old_size)
    torch.testing.assert_close(model(tokens).logits, before)


def test_saved_folders_load_where_tinylm_is_not_installed(tmp_path: Path) -> None:
    """Case E12, one process for every architecture."""
    expected = {}
    for architecture in ARCHITECTURES:
        model, tokens = architecture.build(), architecture.tokens(2, 13)
        folder = tmp_path / str(architecture)
        model.save_pretrained(folder)
        torch.save(tokens, folder / "tokens.pt")
        expected[folder] = (
            model(tokens).logits,
            model.generate(tokens, max_new_tokens=5, do_sample=False, eos_token_id=None),
        )
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-I", "-c", ELSEWHERE, *map(str, expected)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    for folder, (logits, written) in expected.items():
        result = torch.load(folder / "result.pt", weights_only=True)
        torch.testing.assert_close(result["logits"], logits, atol=1e-6, rtol=0)
        assert torch.equal(result["written"], written)
        again = {path.name for path in (folder / "again").iterdir()}
        assert {path.name for path in folder.glob("*.py")} <= again, "the code is lost when it is saved elsewhere"


@everywhere
def test_the_code_that_travels_imports_nothing_of_ours(architecture: Architecture, tmp_path: Path) -> None:
    architecture.build().save_pretrained(tmp_path)
    code = sorted(tmp_path.glob("*.py"))
    assert {path.name.split("_")[0] for path in code} == {"configuration", "modeling"}
    assert all("tinylm" not in path.read_text(encoding="utf-8") for path in code)
    mapped = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert {"AutoConfig", "AutoModelForCausalLM"} <= mapped.keys()
