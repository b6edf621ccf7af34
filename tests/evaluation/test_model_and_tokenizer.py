from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from tests.evaluation.tiny import START, byte_tokenizer, tiny_llama
from tinylm.evaluation import model_and_tokenizer
from tinylm.evaluation.model_and_tokenizer import load_with_tokenizer


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with `base`, its tokenizer, and `adapter` without one."""
    tiny_llama().save_pretrained(tmp_path / "base")
    byte_tokenizer(eos_token=START).save_pretrained(tmp_path / "base")
    settings = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(LlamaForCausalLM.from_pretrained(tmp_path / "base"), settings)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path


def test_an_adapter_has_its_bases_tokenizer_or_its_own(saved: Path) -> None:
    _, tokenizer = load_with_tokenizer(str(saved / "adapter"))
    assert tokenizer.eos_token == START and tokenizer.pad_token is None
    byte_tokenizer(eos_token=START, pad_token="<|pad|>").save_pretrained(saved / "adapter")
    model, tokenizer = load_with_tokenizer(str(saved / "adapter"), dtype=torch.bfloat16)
    assert tokenizer.pad_token == "<|pad|>"
    assert model.get_base_model().model.norm.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("cut", ["base/model.safetensors", "adapter/adapter_model.safetensors"])
def test_a_weights_file_that_is_cut_off_is_said_to_be(saved: Path, cut: str) -> None:
    content = (saved / cut).read_bytes()
    (saved / cut).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=rf"The weights in `.*/{cut}` are cut off or damaged .*again"):
        load_with_tokenizer(str(saved / "adapter"))


def test_pickled_weights_are_refused_and_not_read(saved: Path) -> None:
    for folder, name in (("base", "pytorch_model.bin"), ("adapter", "adapter_model.bin")):
        [file] = (saved / folder).glob("*.safetensors")
        torch.save(load_file(file), saved / folder / name)
        file.unlink()
    with pytest.raises(ValueError, match=r"`.*/adapter` holds its weights as a pickle \(`adapter_model.bin`\)"):
        load_with_tokenizer(str(saved / "adapter"))
    with pytest.raises(ValueError, match=r"pickle \(`pytorch_model.bin`\), which can run any code .* safetensors"):
        load_with_tokenizer(str(saved / "base"))


def test_an_adapter_whose_weights_are_missing_or_only_pickled_on_the_hub_is_refused(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (saved / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"`.*/adapter` lacks its weights, `adapter_model.safetensors`, and pickled"):
        load_with_tokenizer(str(saved / "adapter"))
    monkeypatch.setattr(model_and_tokenizer, "base_of", lambda *names: str(saved / "base"))
    monkeypatch.setattr(model_and_tokenizer, "load_pretrained", lambda *args, **kwargs: 1 / 0)
    for answers in (True, False):
        monkeypatch.setattr(model_and_tokenizer, "hub_answers", lambda name, answers=answers: answers)
        monkeypatch.setattr(model_and_tokenizer, "file_exists", lambda name, file: file == "adapter_model.bin")
        with pytest.raises(ValueError, match="`some/adapter` lacks its weights"):
            load_with_tokenizer("some/adapter")
    monkeypatch.setattr(model_and_tokenizer, "try_to_load_from_cache", lambda name, file: f"/cache/{file}")
    with pytest.raises(ZeroDivisionError):
        load_with_tokenizer("some/adapter")


def test_an_adapter_of_another_base_is_refused_where_it_would_load_in_part(saved: Path) -> None:
    """A base with fewer or more layers of the same sizes: the libraries say nothing, or warn."""
    for num_layers, match in ((1, "0 of its weights are missing and 4 have no place"), (3, "4 .* missing and 0 have")):
        config = tiny_llama().config
        config.num_hidden_layers = num_layers
        LlamaForCausalLM(config).save_pretrained(saved / "other")
        with pytest.raises(ValueError, match=rf"(?s)does not fit the base model `.*/other`: {match}.*`--base_model`"):
            load_with_tokenizer(str(saved / "adapter"), str(saved / "other"))
    wider = tiny_llama().config
    wider.hidden_size = 32
    LlamaForCausalLM(wider).save_pretrained(saved / "wider")
    with pytest.raises(ValueError, match=r"(?s)does not fit the base model `.*/wider`.*size mismatch"):
        load_with_tokenizer(str(saved / "adapter"), str(saved / "wider"))
