from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from tinylm.evaluation.pretrained import load_pretrained, pretrained_config

from .tiny import tiny_gpt2, tiny_llama

IDS = torch.tensor([[3, 5, 7, 11]])


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])  # the second ties its head
def test_a_saved_model_comes_back_in_fp32_and_evaluation_mode(build: object, tmp_path: Path) -> None:
    model = build()
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    expected = model(IDS).logits
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    assert pretrained_config(str(tmp_path)).max_position_embeddings == 37
    loaded = load_pretrained(str(tmp_path))
    assert loaded.dtype == torch.float32 and not loaded.training
    torch.testing.assert_close(loaded(IDS).logits, expected)


def test_an_adapter_comes_back_on_its_base_model(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    tiny_llama().save_pretrained(base)
    settings = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(type(tiny_llama()).from_pretrained(base), settings).eval()
    model.save_pretrained(adapter)
    assert pretrained_config(str(adapter)).vocab_size == 263
    loaded = load_pretrained(str(adapter))
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits)
    assert not torch.allclose(loaded(IDS).logits, tiny_llama()(IDS).logits)  # the adapter does something


def test_weights_that_are_not_there_are_refused_and_not_made_up(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"not those of a LlamaForCausalLM: 1 are missing, such as `model\.norm"):
        load_pretrained(str(tmp_path))


@pytest.mark.parametrize("name", ["./nowhere", "runs/of/nobody", "/nowhere"])
def test_a_folder_that_is_missing_is_named(name: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"There is no folder or file `{name}`"):
        pretrained_config(name)


def test_a_file_and_a_folder_without_a_model_are_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"A model's folder holds `config.json`; .* holds \['notes.txt'\]"):
        pretrained_config(str(tmp_path))
    with pytest.raises(ValueError, match=r"is a file that does not end in `\.gguf`"):
        pretrained_config(str(tmp_path / "notes.txt"))


def test_a_name_that_only_the_hub_could_know_ends_at_once_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        FileNotFoundError, match=r"no folder `runs/nobody`, no copy of it in the cache, .*`--model_name"
    ):
        pretrained_config("runs/nobody")
