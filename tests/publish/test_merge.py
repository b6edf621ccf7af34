"""Case E2: adapter, merge, save, reload gives the adapter's model; case E3: without a path of this machine."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from peft.tuners.lora import LoraModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.evaluation.tiny import START, byte_tokenizer, tiny_llama, tiny_tlm
from tests.models.architectures import ARCHITECTURES
from tinylm.models.loading import load_base_model
from tinylm.publish import merge
from tinylm.publish.merge import merge_adapter

IDS = torch.tensor([[3, 5, 7, 11, 13, 17]])
Q_AND_V = {"target_modules": ["q_proj", "v_proj"]}


def qwen2(tied: bool = True, num_hidden_layers: int = 2, hidden_size: int = 28) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=263,
        hidden_size=hidden_size,
        intermediate_size=31,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=tied,
    )
    return Qwen2ForCausalLM(config).eval()


def tiny_transformer() -> PreTrainedModel:
    [architecture] = [one for one in ARCHITECTURES if str(one) == "tiny_transformer"]
    return architecture.build(vocab_size=263)


def saved_adapter(folder: Path, base: PreTrainedModel, **settings: object) -> PeftModel:
    """`folder/base` and `folder/adapter`, all of whose weights do something."""
    base.save_pretrained(folder / "base")
    byte_tokenizer(eos_token=START).save_pretrained(folder / "base")
    base = type(base).from_pretrained(folder / "base")
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)).eval()
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "modules_to_save" in name or "magnitude" in name:
            weight.data += torch.randn_like(weight) * 0.1
    model.save_pretrained(folder / "adapter")
    return model


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    saved_adapter(tmp_path, qwen2(), **Q_AND_V)
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    ("build", "settings", "is_tied"),
    [
        pytest.param(qwen2, Q_AND_V, True, id="lora"),
        pytest.param(qwen2, {**Q_AND_V, "use_dora": True}, True, id="dora"),
        pytest.param(qwen2, {"target_modules": "all-linear", "use_rslora": True}, True, id="rslora"),
        pytest.param(qwen2, {"target_modules": ["q_proj", "lm_head"]}, False, id="head"),
        pytest.param(qwen2, {"target_modules": ["q_proj", "embed_tokens"]}, False, id="embedding"),
        pytest.param(qwen2, {**Q_AND_V, "modules_to_save": ["lm_head"]}, False, id="head trained whole"),
        pytest.param(qwen2, {**Q_AND_V, "modules_to_save": ["embed_tokens"]}, False, id="embedding trained whole"),
        pytest.param(
            qwen2, {**Q_AND_V, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True, id="both whole"
        ),
        pytest.param(tiny_llama, Q_AND_V, False, id="llama"),
        pytest.param(tiny_tlm, Q_AND_V, False, id="tlm"),
        pytest.param(tiny_transformer, {"target_modules": ["linear1", "linear2"]}, False, id="tiny transformer"),
    ],
)
@pytest.mark.filterwarnings("ignore:Model .*tie_word_embeddings", "ignore:.*no longer tied")
def test_a_merged_model_is_the_adapters_after_it_was_saved_and_read_again(
    build: Callable[[], PreTrainedModel], settings: dict, is_tied: bool, tmp_path: Path
) -> None:
    adapted = saved_adapter(tmp_path, build(), **settings)
    expected = adapted(IDS).logits
    with adapted.disable_adapter():
        assert (adapted(IDS).logits - expected).abs().max() > 0.1, "this test would prove nothing"
    result = merge_adapter(tmp_path / "adapter", tmp_path / "out", dtype="float32")
    again = load_base_model(str(tmp_path / "out"), dtype=torch.float32)
    torch.testing.assert_close(again(IDS).logits, expected, atol=1e-4, rtol=0)
    assert result.merged_difference < 1e-4 and result.cast_difference == 0 and result.top1_agreement == 1
    weights = again.get_input_embeddings().weight, again.get_output_embeddings().weight
    assert (weights[0] is weights[1]) == is_tied == again.config.tie_word_embeddings
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "out"]  # nothing left beside


@pytest.mark.filterwarnings("ignore:Model .*tie_word_embeddings")
def test_a_head_that_goes_on_sharing_its_weights_would_be_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_adapter(tmp_path, qwen2(), target_modules=["lm_head"])
    monkeypatch.setattr(merge, "_untie", lambda model: None)
    with pytest.raises(ValueError, match="The merged model is not the adapter's"):
        merge_adapter(tmp_path / "adapter", tmp_path / "out")


@pytest.mark.parametrize("changed_by", [0.01, float("nan")])
def test_a_weight_changed_between_adapter_and_merged_model_stops_the_merge(
    adapter: Path, monkeypatch: pytest.MonkeyPatch, changed_by: float
) -> None:
    merge_and_unload = LoraModel.merge_and_unload

    def disturbed(self: LoraModel) -> PreTrainedModel:
        model = merge_and_unload(self)
        model.model.layers[1].mlp.down_proj.weight.data[3] += changed_by
        return model

    monkeypatch.setattr(LoraModel, "merge_and_unload", disturbed)
    with pytest.raises(
        ValueError, match=r"logits differ by up to \S+, where rounding stays under 1.0e-04. Nothing was wri"
    ):
        merge_adapter(adapter, adapter.parent / "out")
    assert sorted(path.name for path in adapter.parent.iterdir()) == ["adapter", "base"]


def test_the_rounding_of_large_logits_does_not_count_as_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = qwen2(tied=False)
    base.lm_head.weight.data *= 30
    saved_adapter(tmp_path, base, **Q_AND_V)
    result = merge_adapter(tmp_path / "adapter", tmp_path / "out")
    assert result.merged_difference < 1e-4
    monkeypatch.setattr(merge, "_LARGE_LOGITS", float("inf"))
    in_fp32 = merge_adapter(tmp_path / "adapter", tmp_path / "again").merged_difference
    assert in_fp32 > 2 * result.merged_difference, "this test would prove nothing"


def test_a_folder_that_would_be_read_as_another_model_is_not_kept(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Qwen2ForCausalLM.save_pretrained

    def forgetful(self: PreTrainedModel, folder: Path) -> None:
        save(self, folder)
        weights = load_file(folder / "model.safetensors")
        weights["model.norm.weight"][0] += 0.5
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(Qwen2ForCausalLM, "save_pretrained", forgetful)
    with pytest.raises(ValueError, match=r"not the merged one: `model\.norm\.weight` and 0 other weights come back"):
        merge_adapter(adapter, adapter.parent / "out")
    assert sorted(path.name for path in adapter.parent.iterdir()) == ["adapter", "base"]


@pytest.mark.parametrize(("asked", "dtype"), [(None, torch.bfloat16), ("float32", torch.float32)])
def test_the_dtype_is_the_bases_unless_another_is_asked_for_and_its_cost_is_said(
    tmp_path: Path, asked: str | None, dtype: torch.dtype
) -> None:
    saved_adapter(tmp_path, qwen2().bfloat16(), **Q_AND_V)
    result = merge_adapter(tmp_path / "adapter", tmp_path / "out", dtype=asked)
    assert {weight.dtype for weight in load_file(tmp_path / "out" / "model.safetensors").values()} == {dtype}
    assert result.merged_difference < 1e-4
    merged, cast = result.lines()
    if asked is None:
        assert 0.001 < result.cast_difference < 1 and 0.8 < result.top1_agreement <= 1
        assert f"Cast to bfloat16: largest logit difference {result.cast_difference:.1e}" in cast
    else:
        assert result.cast_difference == 0
    assert "Merged in fp32" in merged and "64 tokens" in merged


def test_tokenizer_template_and_end_tokens_are_those_of_the_training(adapter: Path) -> None:
    tokenizer = byte_tokenizer(eos_token=START, pad_token="<|pad|>")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(adapter)
    GenerationConfig(eos_token_id=[256, 7]).save_pretrained(adapter)
    out = adapter.parent / "out"
    out.mkdir()  # an empty folder is as good as none
    merge_adapter(adapter, out)
    assert AutoTokenizer.from_pretrained(out).chat_template == "{{ messages[0]['content'] }}"
    assert AutoTokenizer.from_pretrained(out).pad_token == "<|pad|>"
    assert load_base_model(str(out), dtype=torch.float32).generation_config.eos_token_id == [256, 7]


def test_no_path_of_this_machine_is_in_the_merged_folder(adapter: Path) -> None:
    assert str(adapter.parent) in (adapter / "adapter_config.json").read_text()
    out = adapter.parent / "out"
    merge_adapter(adapter, out)
    assert len(list(out.iterdir())) > 4
    assert not [path for path in out.iterdir() if str(adapter.parent).encode() in path.read_bytes()]


def test_a_base_somewhere_else_is_named(adapter: Path) -> None:
    (adapter.parent / "base").rename(adapter.parent / "moved")
    with pytest.raises((ValueError, FileNotFoundError), match=r"There is no folder or file `.*/base`"):
        merge_adapter(adapter, adapter.parent / "out")
    assert merge_adapter(adapter, adapter.parent / "out", base_model=str(adapter.parent / "moved")).top1_agreement > 0.9


def test_what_is_no_lora_adapter_is_refused(adapter: Path) -> None:
    out = adapter.parent / "out"
    with pytest.raises(ValueError, match=r"a folder with `adapter_config.json`; `.*/base`: \['config.json'"):
        merge_adapter(adapter.parent / "base", out)
    with pytest.raises(ValueError, match="no such folder"):
        merge_adapter(adapter.parent / "nowhere", out)
    prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    base = Qwen2ForCausalLM.from_pretrained(adapter.parent / "base")
    get_peft_model(base, prompts).save_pretrained(adapter.parent / "prompts")
    with pytest.raises(ValueError, match=r"LoRA adapters can be merged, and .* is of the kind PROMPT_TUNING"):
        merge_adapter(adapter.parent / "prompts", out)
    assert not out.exists()


def test_what_exists_is_not_written_over(adapter: Path) -> None:
    for name in ("file", "folder/file"):
        path = adapter.parent / "taken" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
        taken = path if name == "file" else path.parent
        with pytest.raises(ValueError, match=r"needs a folder of its own, and `.*` exists"):
            merge_adapter(adapter, taken)
        assert path.read_text() == "mine"
