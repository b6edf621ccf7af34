"""From the flags of fine-tuning to what the run needs: a tokenizer with its chat template, examples, held-out examples.

Conversations come in one of two ways. *In memory*: all rows are encoded before the first step (and found again in the
cache of `datasets`), joined into rows exactly, and epochs have an end. *Streamed*: rows are encoded while the model
trains. Held out is what `--eval_data_files` names, else one conversation in ten, by a hash of what is said in it.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch.utils.data import Dataset, IterableDataset
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from tinylm.data.chat import Examples, encode_examples
from tinylm.data.chat_encoder import ChatEncoder
from tinylm.data.chat_format import Message
from tinylm.data.chat_splits import first_prompts, held_out_of_stream, is_row_held_out, split_rows
from tinylm.data.conversations import ChatRows, open_rows
from tinylm.data.encoding import check_tokenizer_matches
from tinylm.data.order import usable_workers
from tinylm.data.rows import PackedRows, PadExamples, join_rows
from tinylm.data.streamed_examples import StreamedExamples
from tinylm.models.loading import load_base_tokenizer

from .finetune_arguments import ChatArguments, FinetuneArguments, LoraArguments
from .launch import rank_zero_first

logger = logging.getLogger(__name__)

_MAX_LENGTH = 1024
_NUM_PROMPTS = 3


@dataclass(frozen=True)
class ChatCorpus:
    """What a run trains on and is validated on.

    `description` is one line for the user and `run.json`; `previewed` are examples to look at (of a stream, held-out
    ones); `prompts` beginnings of held-out conversations that the model is to answer, none for plain text;
    `end_of_turn` is what the chat template writes behind an answer.
    """

    description: str
    tokenizer: PreTrainedTokenizerBase
    end_of_turn: str
    train_dataset: Dataset | IterableDataset
    eval_rows: Examples
    collate: Callable
    previewed: Examples
    prompts: list[list[Message]]


def load_chat_tokenizer(lora: LoraArguments, chat: ChatArguments, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """The tokenizer that is named, else the base model's, with the chat template that is named, else its own.

    Raises:
        FileNotFoundError: no such tokenizer or template.
        ValueError: the tokenizer has more tokens than the model.
    """
    tokenizer = load_base_tokenizer(lora.tokenizer_name_or_path or lora.model_name_or_path)
    check_tokenizer_matches(config.vocab_size, tokenizer)
    if chat.chat_template:
        path = Path(chat.chat_template).expanduser()
        if not path.is_file():
            raise FileNotFoundError(
                f"There is no file `{path}`. Set `--chat_template` to a file with a Jinja template."
            )
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    return tokenizer


def open_chat_corpus(
    chat: ChatArguments, run: FinetuneArguments, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> ChatCorpus:
    """The examples for a model of `config`. Rank 0 encodes them; the other ranks find them in the cache.

    Raises:
        ValueError: flags that contradict each other, and whatever is wrong with the rows.
        FileNotFoundError: no such file.
    """
    _check_flags(chat, run)
    encoder = ChatEncoder(tokenizer, train_on=chat.train_on, max_length=max_length_for(chat, config))
    with rank_zero_first("encode conversations"):
        training, held_out = _open_rows(chat)
        examples = None
        if not chat.streaming:
            examples = encode_examples(training, encoder, skip_bad_rows=chat.skip_bad_rows)
        logger.info("Held out:")
        eval_rows = encode_examples(held_out, encoder, skip_bad_rows=chat.skip_bad_rows)
    if examples is None:
        train_dataset = _stream(chat, run, training, encoder)
    else:
        train_dataset = PackedRows(examples, chat.row_tokens or encoder.max_length) if chat.packing else examples
    return ChatCorpus(
        description=f"{training.description}{', streamed' if chat.streaming else ''}",
        tokenizer=tokenizer,
        end_of_turn=encoder.format.end_of_turn,
        train_dataset=train_dataset,
        eval_rows=eval_rows,
        collate=join_rows if chat.packing else PadExamples.for_tokenizer(tokenizer),
        previewed=examples or eval_rows,
        prompts=first_prompts(held_out, _NUM_PROMPTS, encoder),
    )


def max_length_for(chat: ChatArguments, config: PreTrainedConfig) -> int:
    """`max_length`, or 1024 tokens, or the model's context if that is less.

    Raises:
        ValueError: an example would be longer than the context.
    """
    context = getattr(config, "max_position_embeddings", None)
    if chat.max_length is not None and context is not None and chat.max_length > context:
        raise ValueError(
            f"An example has to fit into the model's context of {context} tokens; `max_length` is {chat.max_length}."
            " Lower `--max_length`."
        )
    return chat.max_length or min(_MAX_LENGTH, context or _MAX_LENGTH)


def _check_flags(chat: ChatArguments, run: FinetuneArguments) -> None:
    if chat.max_eval_examples < 1:
        raise ValueError(
            f"At least one conversation is held out; `max_eval_examples` is {chat.max_eval_examples}. Set"
            " `--max_eval_examples`."
        )
    if chat.row_tokens is not None and not chat.packing:
        logger.warning("`row_tokens` is about packed rows; with `--packing false` it does nothing.")
    if chat.streaming and run.max_steps <= 0:
        raise ValueError(
            f"A stream has no length, so the run has to be told when it ends; `max_steps` is {run.max_steps}. Set"
            " `--max_steps`, or leave `--streaming` out."
        )
    if chat.streaming and run.record_audit:
        raise ValueError(
            "The examples of a stream have no lasting number. Leave out `--record_audit` or `--streaming`."
        )


def _open_rows(chat: ChatArguments) -> tuple[ChatRows, ChatRows]:
    """The training rows, which may be a stream, and the held-out rows, which are none."""
    rows = open_rows(
        dataset_name=chat.dataset_name,
        dataset_config_name=chat.dataset_config_name,
        dataset_split=chat.dataset_split,
        data_files=chat.data_files,
        shape=chat.data_shape,
        streaming=chat.streaming,
        max_examples=chat.max_examples,
    )
    if chat.eval_data_files:
        held_out = open_rows(
            data_files=chat.eval_data_files, shape=chat.data_shape, max_examples=chat.max_eval_examples
        )
        return rows, held_out
    if chat.streaming:
        return rows, held_out_of_stream(rows, chat.max_eval_examples)
    return split_rows(rows, chat.max_eval_examples)


def _stream(chat: ChatArguments, run: FinetuneArguments, rows: ChatRows, encoder: ChatEncoder) -> StreamedExamples:
    run.dataloader_num_workers = usable_workers(rows.rows.num_shards, run.world_size, run.dataloader_num_workers)
    return StreamedExamples(
        rows,
        encoder,
        row_tokens=(chat.row_tokens or encoder.max_length) if chat.packing else None,
        seed=run.seed if run.data_seed is None else run.data_seed,
        rank=run.process_index,
        world_size=run.world_size,
        num_workers=run.dataloader_num_workers,
        shuffle_window=chat.shuffle_window,
        skip_bad_rows=chat.skip_bad_rows,
        is_read=None if chat.eval_data_files else partial(_is_training_row, shape=rows.shape),
    )


def _is_training_row(row: Mapping[str, object], shape: str) -> bool:
    return not is_row_held_out(row, shape)
