"""What is tLM's own: its size, its fields, its initialisation."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tinylm.models import TLMConfig, TLMForCausalLM

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "configs" / "models" / "tlm-20m"
SMALL = {
    "vocab_size": 97,
    "hidden_size": 29,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "head_dim": 7,
    "intermediate_size": 43,
    "max_position_embeddings": 61,
}


def parameters_by_hand(config: TLMConfig) -> int:
    """The number of parameters that the fields of a configuration mean."""
    width, heads, inner = config.hidden_size, config.num_attention_heads * config.head_dim, config.intermediate_size
    norm = 2 * width
    attention = 3 * width * heads + heads * width + width  # q, k, v; o with its bias
    feed_forward = 2 * (width * inner + inner) + inner * width + width  # gate, up; down
    layers = config.num_hidden_layers * (attention + feed_forward + 2 * norm)
    head = 0 if config.tie_word_embeddings else config.vocab_size * width
    return (config.vocab_size + config.max_position_embeddings) * width + layers + norm + head


def test_tlm_20m_has_exactly_19831296_parameters() -> None:
    config = AutoConfig.from_pretrained(FOLDER)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert type(model) is TLMForCausalLM
    assert sum(weight.numel() for weight in model.parameters()) == 19_831_296
    assert parameters_by_hand(config) == 19_831_296


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_fields_tell_the_number_of_parameters(tied: bool) -> None:
    config = TLMConfig(**SMALL, tie_word_embeddings=tied)
    assert TLMForCausalLM(config).num_parameters() == parameters_by_hand(config)


def test_the_recipes_file_is_the_one_that_ends_up_on_the_hub(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(FOLDER)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved.pop("transformers_version")
    assert saved == json.loads((FOLDER / "config.json").read_text())


def test_the_defaults_are_tlm_20m() -> None:
    written = json.loads((FOLDER / "config.json").read_text())
    defaults = TLMConfig().to_dict()
    fields = written.keys() - {"architectures", "auto_map", "dtype"}
    assert {name: defaults[name] for name in fields} == {name: written[name] for name in fields}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("value", [0, -1, 2.5, "3", None, True])
def test_a_size_that_is_not_a_whole_number_above_0_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be a whole number above 0, but it is {value!r}"):
        TLMConfig(**{**SMALL, name: value})


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("attention_dropout", 1.0, r"must be in \[0, 1\)"),
        ("attention_dropout", "0.1", "must be a number"),
        ("initializer_range", 0.0, "must be above 0"),
        ("layer_norm_eps", -1e-5, "must be above 0"),
        ("tie_word_embeddings", "false", "must be true or false"),
        ("hidden_act", "swiglu", "must be one of .*'silu'"),
        ("pad_token_id", 97, r"must be null or in \[0, `vocab_size` = 97\)"),
        ("eos_token_id", [2, -1], r"must be null or in \[0, `vocab_size` = 97\)"),
    ],
)
def test_an_impossible_value_is_refused_with_rule_and_value(name: str, value: object, rule: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` {rule}.*, but it is .*Correct it in config.json"):
        TLMConfig(**{**SMALL, name: value})


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("hiden_size", "hidden_size"),
        ("num_layers", "num_hidden_layers"),
        ("dropout", "attention_dropout"),
        ("n_positions", "max_position_embeddings"),
        ("temperature", "[a-z_]+"),
    ],
)
def test_an_unknown_key_is_refused_and_the_nearest_field_named(wrong: str, right: str) -> None:
    with pytest.raises(ValueError, match=f"no field `{wrong}`.*value 5.*Did you mean `{right}`"):
        TLMConfig(**SMALL, **{wrong: 5})


def test_an_unknown_key_in_a_folder_s_config_is_refused_through_the_auto_class(tmp_path: Path) -> None:
    written = json.loads((FOLDER / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**written, "rope_theta": 1e4}))
    with pytest.raises(ValueError, match="no field `rope_theta`"):
        AutoConfig.from_pretrained(tmp_path)


def test_what_the_library_writes_or_passes_is_let_through(tmp_path: Path) -> None:
    model = TLMForCausalLM(TLMConfig(**SMALL))
    model.config.id2label = {0: "a", 1: "b"}
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.bfloat16, output_hidden_states=True
    )
    assert loaded.config._attn_implementation == "eager" and loaded.dtype == torch.bfloat16
    assert TLMConfig(**loaded.config.to_dict()).to_dict() == loaded.config.to_dict()
    assert TLMConfig(**SMALL, torch_dtype="float32", num_labels=3, name_or_path="x").num_labels == 3


def test_what_writes_to_the_residual_stream_starts_narrower() -> None:
    torch.manual_seed(0)
    model = TLMForCausalLM(TLMConfig(**{**SMALL, "hidden_size": 131, "num_hidden_layers": 2}))
    for layer in model.model.layers:
        assert layer.self_attn.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
        assert layer.self_attn.o_proj.weight.std().item() == pytest.approx(0.01, rel=0.1)
        assert layer.mlp.down_proj.weight.std().item() == pytest.approx(0.01, rel=0.1)
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert all(weight.abs().max() == 0 for name, weight in model.named_parameters() if name.endswith("bias"))
