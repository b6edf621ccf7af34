"""What a forward pass must do, whatever the architecture."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from .architectures import ARCHITECTURES, Architecture, having

everywhere = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
with_attention = pytest.mark.parametrize("architecture", having("attention"), ids=str)


def shifted_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The sum of nats over the real targets and their number, worked out without the model's loss."""
    total, count = torch.zeros(()), 0
    for row_logits, row_labels in zip(logits, labels, strict=True):
        for position in range(len(row_labels) - 1):
            target = int(row_labels[position + 1])
            if target != -100:
                total = total - row_logits[position].log_softmax(-1)[target]
                count += 1
    return total, count


@everywhere
def test_a_position_sees_itself_and_the_past_and_nothing_else(architecture: Architecture) -> None:
    model, num_tokens = architecture.build(), 11
    embeds = model.get_input_embeddings()(architecture.tokens(1, num_tokens)).detach().requires_grad_()
    logits = model(inputs_embeds=embeds).logits
    for position in range(num_tokens):
        (gradient,) = torch.autograd.grad(logits[0, position].square().sum(), embeds, retain_graph=True)
        reached = gradient[0].abs().sum(-1) > 0
        assert reached.tolist() == [seen <= position for seen in range(num_tokens)]


@everywhere
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_the_logits_of_real_tokens(architecture: Architecture, side: str) -> None:
    model, tokens = architecture.build(), architecture.tokens(1, 11)
    padding = torch.full((1, 5), architecture.config.pad_token_id)
    ones, zeros = torch.ones_like(tokens), torch.zeros_like(padding)
    halves = (padding, tokens) if side == "left" else (tokens, padding)
    masks = (zeros, ones) if side == "left" else (ones, zeros)
    real = slice(5, None) if side == "left" else slice(0, 11)
    alone = model(tokens).logits
    padded = model(torch.cat(halves, 1), attention_mask=torch.cat(masks, 1)).logits
    torch.testing.assert_close(padded[:, real], alone, atol=1e-5, rtol=0)
    assert padded.isfinite().all()
    if side == "left":  # on the right, causality alone hides the padding
        unmasked = model(torch.cat(halves, 1)).logits
        assert (unmasked[:, real] - alone).abs().max() > 1e-2, "this test would prove nothing"


@everywhere
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_trained_on(architecture: Architecture, side: str) -> None:
    tokens, pad = architecture.tokens(2, 11), architecture.config.pad_token_id
    width = (5, 0) if side == "left" else (0, 5)
    inputs = {
        "input_ids": torch.nn.functional.pad(tokens, width, value=pad),
        "attention_mask": torch.nn.functional.pad(torch.ones_like(tokens), width, value=0),
        "labels": torch.nn.functional.pad(tokens, width, value=-100),
    }
    if side == "left":
        inputs["labels"][:, 5] = -100  # alone, the first token is nobody's target
    alone, padded = architecture.build().train(), architecture.build().train()
    alone(tokens, labels=tokens).loss.backward()
    padded(**inputs).loss.backward()
    for (name, weight), other in zip(alone.named_parameters(), padded.parameters(), strict=True):
        torch.testing.assert_close(other.grad, weight.grad, atol=1e-5, rtol=1e-4, msg=name)


@everywhere
def test_the_loss_is_the_shifted_cross_entropy_over_real_targets(architecture: Architecture) -> None:
    model, tokens = architecture.build(), architecture.tokens(3, 13)
    labels = tokens.clone()
    labels[0, :5] = labels[1, 9:] = labels[2, 4:7] = -100
    output = model(tokens, labels=labels)
    total, count = shifted_cross_entropy(output.logits, labels)
    torch.testing.assert_close(output.loss, total / count, atol=1e-5, rtol=0)
    given = model(tokens, labels=labels, num_items_in_batch=torch.tensor(101)).loss
    torch.testing.assert_close(given, total / 101, atol=1e-5, rtol=0)


@everywhere
def test_labels_that_come_shifted_are_not_shifted_again(architecture: Architecture) -> None:
    model, tokens = architecture.build(), architecture.tokens(2, 13)
    shifted = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    loss = model(tokens, labels=tokens, shift_labels=shifted).loss
    torch.testing.assert_close(loss, model(tokens, labels=tokens).loss)


@everywhere
def test_without_one_target_the_mean_is_nan_and_the_sum_is_zero(architecture: Architecture) -> None:
    model, tokens = architecture.build(), architecture.tokens(2, 7)
    labels = torch.full_like(tokens, -100)
    assert model(tokens, labels=labels).loss.isnan()
    loss = model(tokens, labels=labels, num_items_in_batch=torch.tensor(5)).loss
    loss.backward()
    assert loss == 0
    assert all(weight.grad.abs().sum() == 0 for weight in model.parameters())


@everywhere
def test_under_bf16_autocast_the_loss_is_in_fp32(architecture: Architecture) -> None:
    model, tokens = architecture.build(), architecture.tokens(2, 13)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(tokens, labels=tokens)
    assert output.logits.dtype == torch.bfloat16
    assert output.loss.dtype == torch.float32
    expected = cross_entropy(output.logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(output.loss, expected)


@everywhere
def test_a_fresh_model_is_about_as_surprised_as_a_uniform_guess(architecture: Architecture) -> None:
    model, tokens = architecture.build(initializer_range=0.02), architecture.tokens(8, 31)
    loss = model(tokens, labels=tokens).loss
    assert abs(loss.item() - math.log(architecture.config.vocab_size)) < 0.1


@everywhere
def test_the_same_seed_builds_the_same_weights(architecture: Architecture) -> None:
    first, second = architecture.build().state_dict(), architecture.build().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


@everywhere
def test_logits_to_keep_gives_the_last_positions_or_the_named_ones(architecture: Architecture) -> None:
    model, tokens = architecture.build(), architecture.tokens(2, 13)
    everything = model(tokens).logits
    torch.testing.assert_close(model(tokens, logits_to_keep=3).logits, everything[:, -3:])
    named = torch.tensor([1, 5, 6])
    torch.testing.assert_close(model(tokens, logits_to_keep=named).logits, everything[:, named])


@everywhere
def test_embeddings_can_come_instead_of_ids(architecture: Architecture) -> None:
    model, tokens = architecture.build(), architecture.tokens(2, 13)
    embeds = model.get_input_embeddings()(tokens)
    torch.testing.assert_close(model(inputs_embeds=embeds).logits, model(tokens).logits)
    with pytest.raises(ValueError, match="Exactly one of `input_ids` and `inputs_embeds`"):
        model(tokens, inputs_embeds=embeds)
    with pytest.raises(ValueError, match="Exactly one of `input_ids` and `inputs_embeds`"):
        model()


@everywhere
def test_hidden_states_are_the_embeddings_and_each_layer_s_output(architecture: Architecture) -> None:
    model, tokens = architecture.build(), architecture.tokens(2, 13)
    output = model(tokens, output_hidden_states=True)
    assert len(output.hidden_states) == architecture.config.num_hidden_layers + 1
    assert {state.shape for state in output.hidden_states} == {(2, 13, architecture.config.hidden_size)}
    torch.testing.assert_close(model.lm_head(output.hidden_states[-1]), output.logits)


@everywhere
def test_a_text_longer_than_the_positions_is_refused_with_both_lengths(architecture: Architecture) -> None:
    model, limit = architecture.build(), architecture.config.max_position_embeddings
    assert model(architecture.tokens(1, limit)).logits.shape[1] == limit
    with pytest.raises(ValueError, match=f"{limit} positions .* but {limit + 2} tokens"):
        model(architecture.tokens(1, limit + 2))


@everywhere
def test_tuples_come_where_they_are_asked_for(architecture: Architecture) -> None:
    model, tokens = architecture.build(), architecture.tokens(2, 13)
    loss, logits = model(tokens, labels=tokens, return_dict=False)[:2]
    assert loss.shape == () and logits.shape == (2, 13, architecture.config.vocab_size)


@with_attention
@pytest.mark.parametrize(
    "implementation", ["sdpa", pytest.param("flex_attention", marks=pytest.mark.slow, id="flex_attention")]
)
@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
@torch.no_grad()
def test_every_attention_gives_the_eager_logits(architecture: Architecture, implementation: str, padded: bool) -> None:
    tokens = architecture.tokens(2, 13)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    inputs = {"input_ids": tokens, "attention_mask": mask if padded else None}
    eager = architecture.build(attn_implementation="eager")(**inputs).logits
    other = architecture.build(attn_implementation=implementation)
    assert other.config._attn_implementation == implementation
    real = mask.bool() if padded else torch.ones_like(mask).bool()
    torch.testing.assert_close(other(**inputs).logits[real], eager[real], atol=1e-5, rtol=0)


@with_attention
def test_eager_attention_gives_its_weights(architecture: Architecture) -> None:
    model, tokens = architecture.build(attn_implementation="eager"), architecture.tokens(2, 13)
    attentions = model(tokens, output_attentions=True).attentions
    assert len(attentions) == architecture.config.num_hidden_layers
    for weights in attentions:
        assert weights.shape == (2, architecture.config.num_attention_heads, 13, 13)
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
        assert weights.triu(1).abs().max() == 0


@everywhere
@pytest.mark.parametrize("implementation", [None, "eager"], ids=["default", "eager"])
@torch.no_grad()
def test_restarting_positions_keep_the_documents_of_a_row_apart(
    architecture: Architecture, implementation: str | None
) -> None:
    """Case S6: another first document must not move the second one's logits."""
    model = architecture.build(attn_implementation=implementation)
    first, other, second = (architecture.tokens(1, length, seed=seed) for length, seed in ((5, 1), (5, 2), (8, 3)))
    positions = torch.cat([torch.arange(5), torch.arange(8)]).unsqueeze(0)

    def second_logits(document: torch.Tensor, **inputs: object) -> torch.Tensor:
        return model(torch.cat([document, second], 1), use_cache=False, **inputs).logits[:, 5:]

    apart = second_logits(first, position_ids=positions)
    torch.testing.assert_close(apart, second_logits(other, position_ids=positions), atol=1e-6, rtol=0)
    torch.testing.assert_close(apart, model(second).logits, atol=1e-5, rtol=0)
    moved = (second_logits(first) - second_logits(other)).abs().max()
    assert moved > 1e-2, "without restarting positions they must leak, or this test would prove nothing"


@everywhere
def test_a_packed_row_with_labels_needs_no_use_cache_to_stay_apart(architecture: Architecture) -> None:
    model = architecture.build()
    rows = architecture.tokens(2, 13)
    rows[1, 5:] = rows[0, 5:]  # the same second document behind two first ones
    labels = rows.clone()
    labels[:, :6] = -100
    positions = torch.cat([torch.arange(5), torch.arange(8)]).expand(2, -1)
    losses = [model(rows[i : i + 1], labels=labels[i : i + 1], position_ids=positions[:1]).loss for i in range(2)]
    torch.testing.assert_close(losses[0], losses[1], atol=1e-6, rtol=0)


@everywhere
def test_a_packed_row_may_be_longer_than_the_positions(architecture: Architecture) -> None:
    model, limit = architecture.build(), architecture.config.max_position_embeddings
    positions = torch.arange(limit).repeat(2).unsqueeze(0)
    tokens = architecture.tokens(1, 2 * limit)
    logits = model(tokens, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(logits[:, limit:], model(tokens[:, limit:]).logits, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match=f"{limit} positions .* but {2 * limit} tokens"):
        model(tokens, position_ids=positions + limit, use_cache=False)
