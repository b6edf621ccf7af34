"""A step that computes logits at its targets only, in chunks or not, beside the plain way."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.loss.loss_utils import ForCausalLMLoss

from tests.models.architectures import ARCHITECTURES
from tests.training.tiny import run_arguments
from tinylm.training import chunked_head
from tinylm.training.chunked_head import ChunkedHead
from tinylm.training.targets import TargetsOnly

VOCAB = 101
_SIZES = {"hidden_size": 28, "intermediate_size": 31, "num_hidden_layers": 2, "num_attention_heads": 2}
_SIZES |= {"vocab_size": VOCAB, "initializer_range": 0.2, "num_key_value_heads": 1, "head_dim": 14}
_SPECIALS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
CONFIGS = {
    "qwen2": Qwen2Config(**_SIZES, **_SPECIALS),
    "qwen2, tied": Qwen2Config(**_SIZES, **_SPECIALS, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_SIZES, **_SPECIALS),
    "mistral": MistralConfig(**_SIZES, **_SPECIALS),
    "llama": LlamaConfig(**_SIZES, **_SPECIALS),
    "tlm": ARCHITECTURES[0].config,
    "tiny_transformer": ARCHITECTURES[1].config,
}
IN_CHUNKS = sorted(CONFIGS.keys() - {"tiny_transformer"})


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(CONFIGS[name]).train()


def with_lora(model: PreTrainedModel, *targets: str) -> nn.Module:
    adapted = get_peft_model(model, LoraConfig(r=3, target_modules=list(targets), init_lora_weights=False))
    return adapted.train()


def packed() -> dict[str, torch.Tensor]:
    """One row of three examples, a third of it targets."""
    lengths = (7, 11, 5)
    ids = torch.randint(3, 90, (1, sum(lengths)), generator=torch.Generator().manual_seed(5))
    labels = ids.clone()
    labels[0, [0, 1, 2, 7, 8, 9, 10, 11, 12, 13, 18, 19, 20]] = -100
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def padded() -> dict[str, torch.Tensor]:
    """Three rows of different lengths and numbers of targets; the last has none."""
    ids = torch.randint(3, 90, (3, 11), generator=torch.Generator().manual_seed(6))
    mask = torch.arange(11)[None] < torch.tensor([[11], [7], [5]])
    labels = ids.masked_fill(~mask, -100)
    labels[0, :8] = labels[1, :4] = labels[2] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask.long()}


def loss_and_gradients(model: nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """Of one micro-batch in a window of 13 targets."""
    model.zero_grad()
    loss = model(**inputs, use_cache=False, num_items_in_batch=torch.tensor(13)).loss
    loss.backward()
    return loss.item(), {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.requires_grad}


def assert_equal(found: tuple, expected: tuple, tolerance: float = 1e-5) -> None:
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        difference = (found[1][name] - gradient).norm() / gradient.norm().clamp(min=1e-9)
        assert difference < tolerance, (name, difference)


def step(tmp_path: object, model: nn.Module, inputs: dict, **settings: object) -> tuple[tuple, list[tuple[int, ...]]]:
    """Loss and gradients as the Trainer's step gets them, and the shapes that the head was run on."""
    only = TargetsOnly(model, run_arguments(tmp_path, **settings), has_whole_weights=True)
    shapes = []
    with only.while_training(), only.batch(inputs) as batch:
        head = only.model.get_output_embeddings()
        with head.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape))):
            return loss_and_gradients(model, batch), shapes


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4 targets: 10 targets are 2 full ones and a rest."""
    monkeypatch.setattr(chunked_head, "MOST_LOGITS", 4 * VOCAB)


@pytest.mark.parametrize("batch", [packed, padded])
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_are_those_of_all_logits(name: str, batch: object, tmp_path: object) -> None:
    model, inputs = build(name), batch()
    num_targets = int((inputs["labels"][:, 1:] != -100).sum())
    assert num_targets in (10, 6) and num_targets < inputs["labels"].numel() / 2
    found, [shape] = step(tmp_path, model, inputs)
    assert shape[:-1] == ((1, num_targets) if batch is packed else (num_targets,))
    assert_equal(found, loss_and_gradients(model, inputs))
    masked = {**inputs, "labels": inputs["labels"].masked_fill(inputs["labels"] == inputs["labels"].max(), -100)}
    with pytest.raises(AssertionError):  # the control: one target less is another loss
        assert_equal(found, loss_and_gradients(model, masked))


@pytest.mark.parametrize("batch", [packed, padded])
@pytest.mark.parametrize("name", IN_CHUNKS)
def test_in_chunks_loss_and_gradients_are_the_same(
    name: str, batch: object, tmp_path: object, small_chunks: None
) -> None:
    model, inputs = build(name), batch()
    found, [shape] = step(tmp_path, model, inputs)
    assert shape[-1] == model.config.hidden_size, "the head has multiplied: nothing was left to the loss"
    assert_equal(found, loss_and_gradients(model, inputs))


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("q_proj", "lm_head")])
def test_adapters_get_the_same_gradients_also_one_of_the_head(
    targets: tuple[str, ...], tmp_path: object, small_chunks: None
) -> None:
    """A head with an adapter is two matrices and stays whole; a frozen one makes no gradient of its own."""
    model = with_lora(build("qwen2"), *targets)
    found, [shape] = step(tmp_path, model, packed())
    assert shape[-1] == (VOCAB if "lm_head" in targets else 28)
    assert all("lora" in name for name in found[1])
    assert_equal(found, loss_and_gradients(model, packed()))


def test_a_head_in_chunks_is_the_same_weight_under_the_same_name_and_goes_again(tmp_path: object) -> None:
    model = build("qwen2, tied")
    names, weight, batch = list(model.state_dict()), model.lm_head.weight, packed()
    only = TargetsOnly(model, run_arguments(tmp_path), has_whole_weights=True)
    plain = model(**batch, use_cache=False).logits
    with only.while_training():
        assert isinstance(model.lm_head, ChunkedHead)
        assert list(model.state_dict()) == names
        assert model.lm_head.weight is weight is model.model.embed_tokens.weight
        logits = model(**batch, use_cache=False).logits
        torch.testing.assert_close(logits, plain, rtol=1e-5, atol=1e-5)  # outside a step it is an ordinary head
    assert type(model.lm_head) is nn.Linear and model.lm_head.weight is weight
    assert model.loss_function is ForCausalLMLoss and model.config._attn_implementation == "sdpa"


def test_a_batch_without_a_target_has_no_loss_and_gradients_of_zero(tmp_path: object, small_chunks: None) -> None:
    """On one rank of two it happens, and that rank still has to send gradients."""
    model, inputs = build("qwen2"), packed()
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    (loss, gradients), _ = step(tmp_path, model, inputs)
    assert loss == 0
    assert all(gradient.eq(0).all() for gradient in gradients.values())


def test_under_autocast_the_chunks_stay_as_near_as_bf16_is(tmp_path: object, small_chunks: None) -> None:
    model, inputs = build("llama"), packed()
    exact = loss_and_gradients(model, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = step(tmp_path, model, inputs)
    assert found[1]["lm_head.weight"].dtype == torch.float32
    assert_equal(found, exact, tolerance=0.03)


def test_a_model_that_scales_its_logits_keeps_its_head_whole(tmp_path: object, small_chunks: None) -> None:
    config = GraniteConfig(**_SIZES, **_SPECIALS, logits_scaling=7.0)
    model = AutoModelForCausalLM.from_config(config).train()
    found, [shape] = step(tmp_path, model, packed())
    assert shape == (1, 10, VOCAB)
    assert_equal(found, loss_and_gradients(model, packed()))


@pytest.mark.parametrize(
    ("settings", "labels"),
    [({}, "all"), ({"label_smoothing_factor": 0.1}, "some"), ({"torch_compile": True}, "some")],
)
def test_the_plain_way_stays_where_nothing_is_masked_or_it_has_to(
    settings: dict[str, object], labels: str, tmp_path: object
) -> None:
    inputs = packed()
    if labels == "all":
        inputs["labels"] = inputs["input_ids"]
    only = TargetsOnly(build("llama"), run_arguments(tmp_path, **settings), has_whole_weights=True)
    with only.batch(inputs) as batch:
        assert batch is inputs


def test_sharded_weights_leave_the_head_whole(tmp_path: object, small_chunks: None) -> None:
    model = build("llama")
    only = TargetsOnly(model, run_arguments(tmp_path), has_whole_weights=False)
    with only.while_training(), only.batch(packed()) as batch:
        assert type(model.lm_head) is nn.Linear
        assert len(batch["shift_labels"]) == 10
