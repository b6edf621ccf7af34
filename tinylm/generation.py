"""Text from a causal language model: prompts in one batch, padded on the left, sampled under a seed of its own."""

import logging
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tinylm.evaluation.scoring import evaluation_mode, scoring_start_id

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
) -> list[str]:
    """Each prompt with its continuation, `num_samples` of the first prompt, then those of the second, and so on.

    A prompt is the beginning of a document: it follows the token that documents are scored after, so an empty prompt
    starts a new document. A prompt that leaves no room for `max_new_tokens` in the context loses tokens on the left,
    and that is said. The same `seed` and prompts give the same texts; the global random state stays as it is.

    Args:
        temperature: 0 takes the likeliest token every time.
        top_k: sample among the k likeliest tokens; 0 for all.
        top_p: sample among the likeliest tokens that have this much probability together; 1.0 for all.

    Raises:
        ValueError: the context has no room for `max_new_tokens`, or a prompt is empty and the tokenizer has no bos or
            eos to start from.
    """
    context = getattr(model.config, "max_position_embeddings", None)
    if context is not None and max_new_tokens >= context:
        raise ValueError(
            f"`max_new_tokens` is {max_new_tokens}, and the model's context holds {context} tokens, the prompt "
            f"included. Ask for at most {context - 1}."
        )
    room = None if context is None else context - max_new_tokens
    once = [(prompt, _encode_prompt(tokenizer, prompt, room)) for prompt in prompts]
    asked = [pair for pair in once for _ in range(num_samples)]
    if not asked:
        return []
    encoded = [prompt_ids for _, prompt_ids in asked]
    width = max(map(len, encoded))
    pad_id = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    input_ids = torch.tensor([[pad_id] * (width - len(ids)) + ids for ids in encoded])
    attention_mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in encoded])
    sampling = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    with evaluation_mode(model), torch.random.fork_rng(devices=range(torch.accelerator.device_count())):
        torch.manual_seed(seed)
        output = model.generate(
            input_ids=input_ids.to(model.device),
            attention_mask=attention_mask.to(model.device),
            max_new_tokens=max_new_tokens,
            pad_token_id=pad_id,
            eos_token_id=tokenizer.eos_token_id,
            **sampling,
        )
    added = output[:, width:].tolist()
    return [text + _continuation(tokenizer, ids, new_ids) for (text, ids), new_ids in zip(asked, added, strict=True)]


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


def _continuation(tokenizer: PreTrainedTokenizerBase, prompt_ids: list[int], new_ids: list[int]) -> str:
    """What the new tokens add to the text; alone they would lose a leading space with some tokenizers."""

    def decode(token_ids: list[int]) -> str:
        return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    return decode(prompt_ids + new_ids)[len(decode(prompt_ids)) :]
