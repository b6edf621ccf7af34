"""Attention of packed rows by example: exact, and what every other row has always had."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from tests.models.architectures import ARCHITECTURES
from tinylm.training import segment_attention
from tinylm.training.segment_attention import SEGMENTS, attention_by_example, example_lengths

LENGTHS = (7, 1, 11, 5)
_SIZES = {"hidden_size": 40, "intermediate_size": 31, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 10}
_SIZES |= {"vocab_size": 101, "initializer_range": 0.3, "num_key_value_heads": 2}
_SPECIALS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
WINDOW = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}
CONFIGS = {
    "qwen2": Qwen2Config(**_SIZES, **_SPECIALS),
    "qwen2, windows": Qwen2Config(**_SIZES, **_SPECIALS, **WINDOW),
    "qwen3": Qwen3Config(**_SIZES, **_SPECIALS),
    "llama": LlamaConfig(**_SIZES, **_SPECIALS),
    "tlm": ARCHITECTURES[0].config,
}


def build(name: str, attention: str) -> PreTrainedModel:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation=attention).train()


def ids(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.randint(3, 90, shape, generator=torch.Generator().manual_seed(seed))


def positions(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def packed(seed: int = 5) -> dict[str, torch.Tensor]:
    return {"input_ids": ids(1, sum(LENGTHS), seed=seed), "position_ids": positions(*LENGTHS)}


def logits_and_gradients(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """All logits, and the gradients of all weights end to end."""
    model.zero_grad()
    logits = model(**batch, use_cache=False).logits
    (logits.float() * torch.linspace(-1, 1, logits.shape[-1])).tanh().mean().backward()
    return logits.detach(), torch.cat([weight.grad.flatten() for weight in model.parameters()])


def assert_close(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], tolerance: float = 1e-5) -> None:
    for this, that in zip(found, expected, strict=True):
        assert (this - that).norm() / that.norm() < tolerance


def count_parts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The query shapes of every call of the kernel from now on."""
    shapes, kernel = [], segment_attention.scaled_dot_product_attention

    def counted(query: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        shapes.append(tuple(query.shape))
        return kernel(query, *args, **kwargs)

    monkeypatch.setattr(segment_attention, "scaled_dot_product_attention", counted)
    return shapes


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_eager_attention_under_a_block_mask(name: str) -> None:
    found = logits_and_gradients(build(name, SEGMENTS), packed())
    assert_close(found, logits_and_gradients(build(name, "eager"), packed()))
    whole = {"input_ids": packed()["input_ids"]}
    with pytest.raises(AssertionError):  # the control: without the restarts it is another row
        assert_close(found, logits_and_gradients(build(name, "eager"), whole))


def test_a_packed_row_is_never_attended_to_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = count_parts(monkeypatch)
    build("qwen2", SEGMENTS)(**packed(), use_cache=False)
    assert shapes == [(1, 4, length, 10) for length in LENGTHS] * 2


@pytest.mark.parametrize("name", ["qwen2", "tlm"])
def test_a_changed_example_moves_no_logit_of_its_neighbours_and_its_own(name: str) -> None:
    model, batch = build(name, SEGMENTS), packed()
    before = model(**batch, use_cache=False).logits[0]
    batch["input_ids"][0, 8] += 1  # the first token of the third example
    moved = (model(**batch, use_cache=False).logits[0] - before).abs().amax(-1) > 0
    assert moved.nonzero()[:, 0].tolist() == list(range(8, 19))


@pytest.mark.parametrize("name", ["qwen2", "tlm"])
def test_the_loss_of_a_packed_row_is_that_of_its_examples_one_by_one(name: str) -> None:
    model, batch = build(name, SEGMENTS), packed()
    labels = batch["input_ids"].clone()
    labels[0, [0, 7, 8, 19]] = -100  # the first of each example has nothing before it
    num_targets = torch.tensor(sum(LENGTHS) - 4)
    joined = model(**batch, labels=labels, use_cache=False, num_items_in_batch=num_targets).loss
    plain = build(name, "eager")
    singly = sum(
        plain(input_ids=example, labels=example, use_cache=False, num_items_in_batch=num_targets).loss
        for example in batch["input_ids"].split(LENGTHS, 1)
        if example.shape[1] > 1
    )
    torch.testing.assert_close(joined, singly, rtol=1e-5, atol=0)


@pytest.mark.parametrize("restarting", [True, False])
def test_rows_of_a_batch_are_packed_each_in_its_own_way(restarting: bool) -> None:
    rows = torch.cat([positions(9, 4), positions(2, 11)] if restarting else [positions(13)] * 2)
    batch = {"input_ids": ids(2, 13), "position_ids": rows}
    assert_close(
        logits_and_gradients(build("qwen2", SEGMENTS), batch), logits_and_gradients(build("qwen2", "eager"), batch)
    )


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_are_attended_to_under_their_mask(side: str) -> None:
    real = torch.arange(13)[None] < torch.tensor([[13], [8]])
    real = real if side == "right" else real.flip(1)
    batch = {"input_ids": ids(2, 13), "attention_mask": real.long()}
    found, expected = (build("llama", name)(**batch, use_cache=False).logits[real] for name in (SEGMENTS, "eager"))
    assert_close((found,), (expected,))


def test_generation_with_a_cache_writes_what_it_always_has() -> None:
    prompts = {"input_ids": ids(2, 6), "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])}
    written = [build("qwen2", name).eval().generate(**prompts, max_new_tokens=9) for name in (SEGMENTS, "sdpa")]
    assert torch.equal(*written)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputed_forward_sees_the_same_examples(use_reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits_and_gradients(build("qwen2", "eager"), packed())
    model = build("qwen2", SEGMENTS)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    shapes = count_parts(monkeypatch)
    assert_close(logits_and_gradients(model, packed()), expected)
    assert len(shapes) == 2 * 2 * len(LENGTHS)


def test_half_precision_is_attended_to_in_fp32_while_training(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = logits_and_gradients(build("llama", SEGMENTS), packed())
    model = build("llama", SEGMENTS)
    dtypes, kernel = [], segment_attention.scaled_dot_product_attention

    def watched(query: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        dtypes.append(query.dtype)
        return kernel(query, *args, **kwargs)

    monkeypatch.setattr(segment_attention, "scaled_dot_product_attention", watched)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = logits_and_gradients(model, packed())
        assert set(dtypes) == {torch.float32}
        model.eval()(**packed(), use_cache=False)
    assert dtypes[-1] == torch.bfloat16
    assert_close(found, exact, tolerance=0.05)


def test_only_the_cpus_sdpa_is_replaced_and_only_for_a_while() -> None:
    for name, within in (("sdpa", SEGMENTS), ("eager", "eager")):
        model = build("llama", name)
        with attention_by_example(model):
            assert model.config._attn_implementation == within
            assert "attn" not in model.config.to_json_string()
        assert model.config._attn_implementation == name


def test_examples_begin_where_positions_do_not_go_on() -> None:
    rows = torch.tensor([[0, 1, 2, 0, 1], [3, 4, 0, 0, 1]])
    assert example_lengths(rows) == [3, 2, 2, 1, 2]
