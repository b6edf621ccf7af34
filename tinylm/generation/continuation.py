"""Continuations of prompts by a causal language model.

The choices:
- Prompts of one call are one batch, padded on the left, sampled under a seed of its own.
- What was asked for decides: sampling settings that came with the model, such as a repetition penalty, are not used.
- A text ends at any token that the generation config or the tokenizer calls its end.
"""

import logging
from collections.abc import Callable, Collection, Sequence

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from tinylm.evaluation.scoring import evaluation_mode, scoring_start_id

from .streaming import TextStreamer, text_after

logger = logging.getLogger(__name__)


def generate_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 100,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    num_samples: int = 1,
    write: Callable[[str], object] | None = None,
) -> list[str]:
    """Each prompt with its continuation, `num_samples` of the first prompt, then those of the second, and so on.

    A prompt is the beginning of a document: it follows the token that documents are scored after, so an empty prompt
    starts a new document. A prompt that leaves no room for `max_new_tokens` in the context loses tokens on the left,
    and that is said. The same `seed` and prompts give the same texts; the global random state stays as it is.

    Args:
        temperature: 0 takes the likeliest token every time.
        top_k: sample among the k likeliest tokens; 0 for all.
        top_p: sample among the likeliest tokens that have this much probability together; 1.0 for all.
        write: is handed the continuation piece by piece while it comes; for one prompt and one sample.

    Raises:
        ValueError: the context has no room for `max_new_tokens`, or a prompt is empty and the tokenizer has no bos or
            eos to start from.
    """
    room = room_for_prompt(model, max_new_tokens)
    once = [(prompt, _encode_prompt(tokenizer, prompt, room)) for prompt in prompts]
    asked = [pair for pair in once for _ in range(num_samples)]
    if not asked:
        return []
    added = continue_ids(
        model,
        tokenizer,
        [prompt_ids for _, prompt_ids in asked],
        stop_ids=end_ids(model, tokenizer),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        write=write,
    )
    return [text + text_after(tokenizer, ids, new_ids) for (text, ids), new_ids in zip(asked, added, strict=True)]


def continue_ids(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    stop_ids: Collection[int],
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    write: Callable[[str], object] | None = None,
) -> list[list[int]]:
    """The new token ids of each prompt, up to the first of `stop_ids`, which is left out.

    `prompts` are token ids that leave room for `max_new_tokens` in the context; the rest is as in `generate_text`.
    """
    width = max(map(len, prompts))
    pad_id = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    input_ids = torch.tensor([[pad_id] * (width - len(ids)) + list(ids) for ids in prompts])
    attention_mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    # All that a model's own generation config may hold and that would change the choice is set here.
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        temperature=temperature if temperature > 0 else 1.0,
        top_k=top_k if temperature > 0 else 50,  # the library's values without an effect
        top_p=top_p if temperature > 0 else 1.0,
        repetition_penalty=1.0,
        num_beams=1,
        pad_token_id=pad_id,
        eos_token_id=sorted(stop_ids) or None,
    )
    streamer = None if write is None else TextStreamer(tokenizer, write, stop_ids=stop_ids)
    with evaluation_mode(model), torch.random.fork_rng(devices=range(torch.accelerator.device_count())):
        torch.manual_seed(seed)
        output = model.generate(
            input_ids=input_ids.to(model.device),
            attention_mask=attention_mask.to(model.device),
            generation_config=settings,
            streamer=streamer,
        )
    return [_until(ids, stop_ids) for ids in output[:, width:].tolist()]


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The ids that end a text: those of the model's generation config, and the tokenizer's eos."""
    configured = model.generation_config.eos_token_id
    configured = configured if isinstance(configured, list) else [configured]
    return {token_id for token_id in (*configured, tokenizer.eos_token_id) if token_id is not None}


def context_size(model: PreTrainedModel) -> int | None:
    """The number of tokens that the model can read, prompt and continuation together; None for no limit."""
    return getattr(model.config, "max_position_embeddings", None)


def fitting_length(model: PreTrainedModel, wanted: int) -> int:
    """`wanted` new tokens, or half of the context where that is less."""
    context = context_size(model)
    return wanted if context is None else min(wanted, context // 2)


def room_for_prompt(model: PreTrainedModel, max_new_tokens: int) -> int | None:
    """How many tokens a prompt may have beside `max_new_tokens` in the context; None for no limit.

    Raises:
        ValueError: there is no room.
    """
    context = context_size(model)
    if context is not None and max_new_tokens >= context:
        raise ValueError(
            f"`max_new_tokens` is {max_new_tokens}, and the model's context holds {context} tokens, the prompt "
            f"included. Ask for at most {context - 1}."
        )
    return None if context is None else context - max_new_tokens


def _encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, room: int | None) -> list[int]:
    """The start token and the prompt's, the last `room` of them where they are more."""
    start_id = scoring_start_id(tokenizer)
    token_ids = tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
    token_ids = token_ids if start_id is None else [start_id, *token_ids]
    if not token_ids:
        raise ValueError(
            f"The prompt {prompt!r} has no tokens and the tokenizer no bos or eos to start a text from. Give a prompt."
        )
    if room is not None and len(token_ids) > room:
        logger.warning("A prompt of %d tokens leaves no room: its last %d are used.", len(token_ids), room)
        return token_ids[-room:]
    return token_ids


def _until(token_ids: list[int], stop_ids: Collection[int]) -> list[int]:
    """The ids before the first that stops."""
    return next((token_ids[:i] for i, token_id in enumerate(token_ids) if token_id in stop_ids), token_ids)
