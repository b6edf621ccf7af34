"""Where an answer ends: one token for the chat template, the tokenizer, the configuration and generation.

A model that is trained on answers learns to end them as the chat template does. It stops there only if tokenizer and
generation config call that token an end; base models and their instruct versions often name different ones.
"""

import logging

from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def align_end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, end_of_turn: str) -> None:
    """Makes `end_of_turn` the eos of the tokenizer and the model's configuration, and one of generation's.

    What was an end stays one for generation. A tokenizer without a pad token pads with its eos. It is said where the
    base model did not know this end, and where it is no single token, so that nothing can stop at it.

    Args:
        end_of_turn: what the chat template writes behind an answer; empty where there is no template.
    """
    known = known_end_ids(model, tokenizer)
    end_id = tokenizer.get_vocab().get(end_of_turn) if end_of_turn else tokenizer.eos_token_id
    if end_id is None:
        logger.warning(
            "The chat template ends answers with %r, which is no single token: generation cannot stop there. It stops"
            " at %s alone. Set `--chat_template` to one that ends answers with a special token.",
            end_of_turn,
            tokenizer.eos_token,
        )
        end_id = tokenizer.eos_token_id
    elif end_id not in known:
        logger.warning(
            "The base model does not end answers with %r, as the chat template does: it has to learn that. From now on"
            " this token ends a text, beside %s.",
            end_of_turn,
            ", ".join(map(repr, tokenizer.convert_ids_to_tokens(sorted(known)))) or "no other",
        )
    if end_id is None:
        raise ValueError(
            f"Nothing can end an answer: the tokenizer `{tokenizer.name_or_path}` has no eos token. Set"
            " `--tokenizer_name_or_path` to one that has."
        )
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end_id)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.config.eos_token_id = end_id
    model.generation_config.eos_token_id = [end_id, *sorted(known - {end_id})] if known - {end_id} else end_id


def known_end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """All that the tokenizer, the configuration and the generation config call an end."""
    named = (tokenizer.eos_token_id, model.config.eos_token_id, model.generation_config.eos_token_id)
    lists = [value if isinstance(value, list) else [value] for value in named]
    return {token_id for values in lists for token_id in values if token_id is not None}


def mend_generation_config(model: PreTrainedModel) -> None:
    """Settings for sampling without `do_sample` could not be saved with the model (case E6): sampling is turned on.

    Raises:
        ValueError: something else is wrong with the generation config.
    """
    settings = model.generation_config
    try:
        settings.validate(strict=True)
        return
    except ValueError:
        asked, settings.do_sample = settings.do_sample, True
    try:
        settings.validate(strict=True)
    except ValueError as error:
        raise ValueError(
            f"The base model's generation config cannot be saved again: {error} Mend its `generation_config.json`."
        ) from error
    logger.warning(
        "The base model's generation config has settings for sampling and `do_sample: %s`; it is saved with"
        " `do_sample: true`.",
        str(asked).lower(),
    )
