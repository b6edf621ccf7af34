"""What is the tiny transformer's own: its size, its mask, its fields, and adapters past torch's fast path."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from tinylm.models import TinyTransformerConfig, TinyTransformerForCausalLM
from tinylm.models.tiny_transformer.modeling_tiny_transformer import causal_mask

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "configs" / "models" / "tiny-transformer"


def test_the_number_of_parameters_is_the_one_worked_out_by_hand() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FOLDER))
    assert type(model) is TinyTransformerForCausalLM
    embeddings, head = 258 * 64 + 128 * 64, 258 * 64
    attention = 3 * (64 * 64 + 64) + 64 * 64 + 64
    feed_forward = 64 * 256 + 256 + 256 * 64 + 64
    norms = 3 * 2 * 64
    assert model.num_parameters() == embeddings + head + attention + feed_forward + norms == 91_328


def test_the_recipes_file_is_the_one_that_ends_up_on_the_hub(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(FOLDER)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved.pop("transformers_version")
    assert saved == json.loads((FOLDER / "config.json").read_text())


def test_the_defaults_are_the_recipes_file() -> None:
    written = json.loads((FOLDER / "config.json").read_text())
    defaults = TinyTransformerConfig().to_dict()
    fields = written.keys() - {"architectures", "auto_map", "dtype"}
    assert {name: defaults[name] for name in fields} == {name: written[name] for name in fields}


def test_the_mask_is_true_above_the_diagonal() -> None:
    mask = causal_mask(5, torch.device("cpu"))
    assert mask.dtype == torch.bool
    assert mask.tolist() == [[column > row for column in range(5)] for row in range(5)]


def test_shapes_are_those_of_the_contract() -> None:
    model = TinyTransformerForCausalLM(TinyTransformerConfig())
    tokens = torch.randint(0, 256, (3, 17))
    output = model(tokens, labels=tokens, output_hidden_states=True)
    assert isinstance(model.model.encoder, torch.nn.TransformerEncoderLayer)
    assert output.hidden_states[0].shape == (3, 17, 64)
    assert output.logits.shape == (3, 17, 258)
    expected = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(output.loss, expected)


def test_norm_first_is_another_model() -> None:
    tokens = torch.randint(0, 256, (1, 7))
    logits = []
    for norm_first in (False, True):
        torch.manual_seed(0)
        model = TinyTransformerForCausalLM(TinyTransformerConfig(norm_first=norm_first))
        logits.append(model.eval()(tokens).logits)
    assert (logits[0] - logits[1]).abs().max() > 1e-3


@pytest.mark.parametrize("fast_path", [False, True])
@torch.no_grad()
def test_an_adapter_counts_in_evaluation_as_in_training(fast_path: bool) -> None:
    """With torch's fast path on, the adapters on `linear1` and `linear2` are left out in silence."""
    torch.manual_seed(0)
    model = TinyTransformerForCausalLM(TinyTransformerConfig())
    config = LoraConfig(r=3, target_modules=["linear1", "linear2", "lm_head"], init_lora_weights=False)
    adapted = get_peft_model(model, config)
    encoder = model.model.encoder
    if fast_path:
        encoder.activation_relu_or_gelu = 1
    tokens = torch.randint(0, 256, (2, 11))
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0  # no causal hint, which would keep the fast path away too
    in_training = adapted.train()(tokens, attention_mask=mask).logits
    in_evaluation = adapted.eval()(tokens, attention_mask=mask).logits
    difference = (in_training - in_evaluation)[mask.bool()].abs().max()
    assert difference > 1e-3 if fast_path else difference < 1e-6


def test_an_adapter_on_the_feed_forward_and_the_head_trains() -> None:
    model = TinyTransformerForCausalLM(TinyTransformerConfig())
    adapted = get_peft_model(model, LoraConfig(r=3, target_modules=["linear1", "linear2", "lm_head"]))
    tokens = torch.randint(0, 256, (2, 11))
    adapted(input_ids=tokens, labels=tokens).loss.backward()
    moving = {name: weight for name, weight in adapted.named_parameters() if weight.requires_grad}
    assert len(moving) == 6
    assert all(weight.grad.abs().sum() > 0 for name, weight in moving.items() if "lora_B" in name)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("hidden_size", 63, "must be a multiple of `num_attention_heads` = 4"),
        ("num_attention_heads", 0, "must be a whole number above 0"),
        ("max_position_embeddings", "128", "must be a whole number above 0"),
        ("num_hidden_layers", 2, "must be 1"),
        ("dropout", 1.0, r"must be in \[0, 1\)"),
        ("dropout", None, "must be a number"),
        ("norm_first", 1, "must be true or false"),
        ("eos_token_id", 258, r"must be null or in \[0, `vocab_size` = 258\)"),
    ],
)
def test_an_impossible_value_is_refused_with_rule_and_value(name: str, value: object, rule: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` {rule}, but it is {value!r}. Correct it in config.json"):
        TinyTransformerConfig(**{name: value})


def test_an_unknown_key_is_refused_and_the_nearest_field_named() -> None:
    with pytest.raises(ValueError, match=r"no field `num_heads`.*value 4.*Did you mean `num_attention_heads`"):
        TinyTransformerConfig(num_heads=4)
