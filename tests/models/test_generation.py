"""Writing token after token, with and without a cache."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, pipeline
from transformers.cache_utils import DynamicCache

from .architectures import ARCHITECTURES, Architecture, having

everywhere = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
with_cache = pytest.mark.parametrize("architecture", having("cache"), ids=str)

# No end-of-text: every generation here has the full length.
ENDLESS = {"eos_token_id": None, "max_new_tokens": 9, "use_cache": True}


def greedy_by_hand(model: torch.nn.Module, tokens: torch.Tensor, num_new: int) -> torch.Tensor:
    """The likeliest continuation `[1, T + num_new]`, from the whole text each time."""
    for _ in range(num_new):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    return tokens


@with_cache
@torch.no_grad()
def test_cached_logits_are_the_uncached_ones(architecture: Architecture) -> None:
    model, tokens = architecture.build(), architecture.tokens(2, 19)
    whole = model(tokens).logits
    cache, pieces = DynamicCache(config=model.config), []
    for start, stop in ((0, 7), (7, 8), (8, 13), (13, 19)):
        output = model(tokens[:, start:stop], cache=cache, use_cache=True)
        assert output.cache is cache and cache.get_seq_length() == stop
        pieces.append(output.logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=1e-5, rtol=0)


@with_cache
@torch.no_grad()
def test_cached_logits_of_a_left_padded_batch_are_those_of_each_text_alone(architecture: Architecture) -> None:
    model, tokens = architecture.build(), architecture.tokens(1, 12)
    padded = torch.cat([torch.full((1, 4), architecture.config.pad_token_id), tokens], 1)
    mask = torch.tensor([[0] * 4 + [1] * 12])
    first = model(padded[:, :10], attention_mask=mask[:, :10], use_cache=True)
    rest = model(padded[:, 10:], attention_mask=mask, cache=first.cache, use_cache=True)
    torch.testing.assert_close(rest.logits, model(tokens).logits[:, 6:], atol=1e-5, rtol=0)


@with_cache
def test_a_cache_that_runs_over_the_positions_is_refused(architecture: Architecture) -> None:
    model, limit = architecture.build(), architecture.config.max_position_embeddings
    cache = model(architecture.tokens(1, limit), use_cache=True).cache
    with pytest.raises(ValueError, match=f"{limit} positions .* but {limit + 1} tokens"):
        model(architecture.tokens(1, 1), cache=cache)


@everywhere
@torch.no_grad()
@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_generation_takes_the_likeliest_token_each_time(architecture: Architecture, use_cache: bool) -> None:
    model, tokens = architecture.build(), architecture.tokens(1, 5)
    generated = model.generate(tokens, **{**ENDLESS, "use_cache": use_cache}, do_sample=False)
    assert generated.tolist() == greedy_by_hand(model, tokens, 9).tolist()


@everywhere
@torch.no_grad()
@pytest.mark.parametrize("mode", [{"do_sample": False}, {"num_beams": 3}], ids=["greedy", "beam"])
def test_a_left_padded_batch_writes_what_each_prompt_writes_alone(architecture: Architecture, mode: dict) -> None:
    model, pad = architecture.build(), architecture.config.pad_token_id
    prompts = [architecture.tokens(1, 3, seed=1), architecture.tokens(1, 8, seed=2)]
    alone = [model.generate(prompt, **ENDLESS, **mode)[0, prompt.shape[1] :].tolist() for prompt in prompts]
    batch = torch.cat([torch.cat([torch.full((1, 5), pad), prompts[0]], 1), prompts[1]])
    mask = torch.ones_like(batch)
    mask[0, :5] = 0
    together = model.generate(batch, attention_mask=mask, **ENDLESS, **mode)[:, 8:].tolist()
    assert together == alone


@everywhere
@torch.no_grad()
def test_sampling_follows_the_seed(architecture: Architecture) -> None:
    model, tokens = architecture.build(initializer_range=0.02), architecture.tokens(1, 5)

    def sample(seed: int) -> list[int]:
        torch.manual_seed(seed)
        options = {"do_sample": True, "temperature": 0.9, "top_k": 50, "top_p": 0.95}
        return model.generate(tokens, **ENDLESS, **options)[0].tolist()

    assert sample(3) == sample(3)
    assert sample(3) != sample(4)


@everywhere
@torch.no_grad()
def test_several_samples_and_beams_come_back_for_one_prompt(architecture: Architecture) -> None:
    model, tokens = architecture.build(), architecture.tokens(1, 5)
    beams = model.generate(tokens, **ENDLESS, num_beams=3, num_return_sequences=2)
    samples = model.generate(tokens, **ENDLESS, do_sample=True, num_return_sequences=2)
    assert beams.shape == samples.shape == (2, 14)
    assert beams[0].tolist() != beams[1].tolist()


@everywhere
@torch.no_grad()
def test_generation_stops_at_the_end_of_text(architecture: Architecture) -> None:
    model, tokens = architecture.build(), architecture.tokens(1, 5)
    fourth = int(greedy_by_hand(model, tokens, 4)[0, -1])
    generated = model.generate(tokens, max_new_tokens=9, do_sample=False, eos_token_id=fourth)
    assert generated[0, -1] == fourth
    assert generated.shape[1] <= 5 + 4


@with_cache  # without one, the library forgets the embeddings after the first token
@torch.no_grad()
def test_generation_can_start_from_embeddings(architecture: Architecture) -> None:
    model, tokens = architecture.build(), architecture.tokens(1, 5)
    embeds = model.get_input_embeddings()(tokens)
    generated = model.generate(inputs_embeds=embeds, **ENDLESS, do_sample=False)
    assert generated.tolist() == greedy_by_hand(model, tokens, 9)[:, 5:].tolist()


@everywhere
def test_generation_that_would_run_out_of_positions_is_refused_at_once(architecture: Architecture) -> None:
    model, limit = architecture.build(), architecture.config.max_position_embeddings
    full = model.generate(architecture.tokens(1, limit - 3), max_new_tokens=3, eos_token_id=None)
    assert full.shape[1] == limit
    with pytest.raises(ValueError, match=f"{limit} positions .* but {limit + 1} tokens"):
        model.generate(architecture.tokens(1, limit - 3), max_new_tokens=4)


@with_cache
@torch.no_grad()
def test_a_static_cache_writes_the_same_text(architecture: Architecture) -> None:
    model, tokens = architecture.build(), architecture.tokens(2, 5)
    options = {**ENDLESS, "do_sample": False, "disable_compile": True}
    static = model.generate(tokens, **options, cache_implementation="static")
    assert static.tolist() == model.generate(tokens, **options).tolist()


@everywhere
def test_the_text_generation_pipeline_writes(architecture: Architecture) -> None:
    words = {f"w{index}": index for index in range(3, architecture.config.vocab_size)}
    backend = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, **words}, unk_token="w3"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    model = architecture.build()
    writer = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    (written,) = writer("w5 w7 w11", max_new_tokens=4, do_sample=False, eos_token_id=None)
    expected = greedy_by_hand(model, torch.tensor([[5, 7, 11]]), 4)[0]
    assert written["generated_text"] == "w5 w7 w11" + tokenizer.decode(expected[3:])
