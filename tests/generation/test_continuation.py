import logging

import pytest
import torch
from torch import nn

from tests.evaluation.tiny import START, byte_tokenizer, tiny_gpt2, tiny_llama, tiny_tlm
from tinylm.generation.continuation import continue_ids, end_ids, generate_text

PROMPTS = ["", "ab", "a longer prompt"]


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2, tiny_tlm])
def test_a_batch_of_prompts_of_different_lengths_writes_what_each_prompt_alone_does(build: object) -> None:
    model, tokenizer = build(), byte_tokenizer(eos_token=START)
    together = generate_text(model, tokenizer, PROMPTS, max_new_tokens=11, temperature=0)
    alone = [generate_text(model, tokenizer, [prompt], max_new_tokens=11, temperature=0)[0] for prompt in PROMPTS]
    assert together == alone
    assert all(text.startswith(prompt) and len(text) > len(prompt) for text, prompt in zip(alone, PROMPTS, strict=True))


def test_every_prompt_follows_the_token_that_starts_a_document() -> None:
    model, tokenizer = tiny_gpt2(), byte_tokenizer(eos_token=START)
    seen: list[torch.Tensor] = []
    model.transformer.wte.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    generate_text(model, tokenizer, ["", "ab"], max_new_tokens=2)
    start = tokenizer.eos_token_id
    assert seen[0].tolist() == [[start] * 3, [start, *tokenizer("ab")["input_ids"]]]  # the first row is padded with eos


def test_the_seed_decides_the_samples_and_the_global_random_state_stays() -> None:
    model, tokenizer = tiny_llama(), byte_tokenizer(eos_token=START)

    def sample(seed: int) -> list[str]:
        return generate_text(model, tokenizer, PROMPTS, max_new_tokens=7, seed=seed, num_samples=2)

    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = sample(5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert sample(5) == first
    assert sample(6) != first


def test_samples_of_a_prompt_differ_and_stand_together() -> None:
    texts = generate_text(tiny_llama(), byte_tokenizer(eos_token=START), ["ab", "cd"], max_new_tokens=7, num_samples=3)
    assert [text[:2] for text in texts] == ["ab", "ab", "ab", "cd", "cd", "cd"]
    assert len(set(texts)) == 6


def test_top_k_and_top_p_of_one_token_are_the_likeliest_one() -> None:
    model, tokenizer = tiny_llama(), byte_tokenizer(eos_token=START)
    likeliest = generate_text(model, tokenizer, PROMPTS, max_new_tokens=7, temperature=0)
    assert generate_text(model, tokenizer, PROMPTS, max_new_tokens=7, top_k=1) == likeliest
    assert generate_text(model, tokenizer, PROMPTS, max_new_tokens=7, top_p=1e-6) == likeliest
    assert generate_text(model, tokenizer, PROMPTS, max_new_tokens=7) != likeliest


def test_sampling_is_among_all_tokens_by_default() -> None:
    """The library's own default keeps the 50 likeliest."""
    model, tokenizer = tiny_llama(), byte_tokenizer(eos_token=START)
    nn.init.zeros_(model.lm_head.weight)  # all tokens equally likely: ties with the 50th are kept, so break them
    nn.init.normal_(model.lm_head.weight, std=1e-4)
    ids = {token for text in generate_text(model, tokenizer, [""], max_new_tokens=30, num_samples=20) for token in text}
    assert len(ids) > 60


def test_a_prompt_longer_than_the_context_loses_its_beginning_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model, tokenizer = tiny_llama(context=37), byte_tokenizer(eos_token=START)
    prompt = "".join(chr(ord("a") + i % 26) for i in range(50))
    with caplog.at_level(logging.WARNING, logger="tinylm"):
        [text] = generate_text(model, tokenizer, [prompt], max_new_tokens=7, temperature=0)
    assert "A prompt of 51 tokens leaves no room: its last 30 are used" in caplog.text
    assert text.startswith(prompt) and len(text) > len(prompt)


def test_more_new_tokens_than_the_context_holds_are_refused_with_both_values() -> None:
    with pytest.raises(ValueError, match=r"`max_new_tokens` is 37, and the model's context holds 37 .* at most 36"):
        generate_text(tiny_llama(context=37), byte_tokenizer(eos_token=START), ["a"], max_new_tokens=37)


def test_an_empty_prompt_needs_a_start_token() -> None:
    tokenizer = byte_tokenizer()
    with pytest.raises(ValueError, match="no bos or eos to start a text from"):
        generate_text(tiny_llama(), tokenizer, [""], max_new_tokens=3)
    [text] = generate_text(tiny_llama(), tokenizer, ["x"], max_new_tokens=3)
    assert text[0] == "x"


def test_the_models_training_mode_comes_back() -> None:
    model = tiny_gpt2().train()
    generate_text(model, byte_tokenizer(eos_token=START), ["x"], max_new_tokens=2)
    assert model.training and model.transformer.h[0].training


def test_settings_that_came_with_the_model_do_not_change_the_choice() -> None:
    model, tokenizer = tiny_llama(), byte_tokenizer(eos_token=START)
    likeliest = generate_text(model, tokenizer, PROMPTS, max_new_tokens=11, temperature=0)
    sampled = generate_text(model, tokenizer, PROMPTS, max_new_tokens=11)
    model.generation_config.update(do_sample=True, temperature=0.1, top_k=2, top_p=0.1, repetition_penalty=9.0)
    assert generate_text(model, tokenizer, PROMPTS, max_new_tokens=11, temperature=0) == likeliest
    assert generate_text(model, tokenizer, PROMPTS, max_new_tokens=11) == sampled


@pytest.mark.parametrize("where", ["generation config", "list in the generation config", "tokenizer"])
def test_a_text_ends_before_the_end_token_wherever_it_is_named(where: str) -> None:
    model, tokenizer = tiny_llama(), byte_tokenizer()
    written: list[str] = []

    def continued() -> list[int]:
        greedy = {"max_new_tokens": 9, "temperature": 0, "top_k": 0, "top_p": 1.0, "seed": 0}
        stop_ids = end_ids(model, tokenizer)
        return continue_ids(model, tokenizer, [[97, 98]], stop_ids=stop_ids, write=written.append, **greedy)[0]

    whole = continued()
    end = whole[4]
    assert len(whole) == 9
    if where == "tokenizer":
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
        model.generation_config.eos_token_id = 262  # as with a base model: another one
    else:
        model.generation_config.eos_token_id = end if where == "generation config" else [262, end]
    written.clear()
    assert continued() == whole[: whole.index(end)]
    assert "".join(written) == tokenizer.decode(whole[: whole.index(end)])


def test_a_stream_says_what_the_call_returns() -> None:
    model, tokenizer = tiny_llama(), byte_tokenizer(eos_token=START)
    written: list[str] = []
    [text] = generate_text(model, tokenizer, ["abé"], max_new_tokens=30, seed=3, write=written.append)
    assert "abé" + "".join(written) == text and len(written) > 5
    with pytest.raises(ValueError, match="one text at a time, but 2 came"):
        generate_text(model, tokenizer, ["ab"], max_new_tokens=3, num_samples=2, write=written.append)
