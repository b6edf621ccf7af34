"""Which conversations are held out: one in ten, by a hash of what is said, whatever the order or the source."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from datasets import Dataset
from jinja2 import TemplateError

from tinylm.data.chat_encoder import ChatEncoder
from tinylm.data.chat_format import Message, UnstableTemplateError, answer_indices
from tinylm.data.chat_records import BrokenRuleError, conversation_of
from tinylm.data.conversations import ROW_NUMBER, ChatRows
from tinylm.data.splits import is_held_out


def first_prompts(chat_rows: ChatRows, num_prompts: int, encoder: ChatEncoder) -> list[list[Message]]:
    """The first conversations up to their first answer that is learned; none of plain text.

    Left out are those that the encoder refuses, and those that take more than half of its `max_length`: they have to
    leave room for an answer.
    """
    prompts: list[list[Message]] = []
    for row in chat_rows.rows:
        with suppress(BrokenRuleError, TemplateError, UnstableTemplateError):
            conversation = conversation_of(row, chat_rows.shape, is_plain=encoder.is_plain)
            if conversation and conversation.messages:
                end = conversation.num_context or answer_indices(conversation.messages)[0]
                prompt = conversation.messages[:end]
                if len(encoder.prompt_ids(prompt)) <= encoder.max_length // 2:
                    prompts.append(prompt)
        if len(prompts) == num_prompts:
            break
    return prompts


def split_rows(chat_rows: ChatRows, max_held_out: int) -> tuple[ChatRows, ChatRows]:
    """Training rows and held-out rows, at least one of each, of rows that are no stream.

    At most `max_held_out` are returned; the others that the hash picks are neither here nor there. Where it picks none,
    the last conversation is held out.

    Raises:
        ValueError: fewer than two rows.
    """
    rows = chat_rows.rows
    if len(rows) < 2:
        raise ValueError(
            f"{chat_rows.description} has {len(rows)} rows: there is none to hold out for validation. Give more, or"
            " other ones with `--eval_data_files`."
        )
    picked = [index for index, row in enumerate(rows) if is_row_held_out(row, chat_rows.shape)]
    if not 0 < len(picked) < len(rows):
        picked = [_last_conversation(chat_rows)]
    kept = sorted(set(range(len(rows))) - set(picked))
    return replace(chat_rows, rows=rows.select(kept)), replace(chat_rows, rows=rows.select(picked[:max_held_out]))


def _last_conversation(chat_rows: ChatRows) -> int:
    """The last row that is neither broken nor an empty line; of broken rows alone, which are named later, the last."""
    for index in range(len(chat_rows.rows) - 1, -1, -1):
        with suppress(BrokenRuleError):
            if conversation_of(chat_rows.rows[index], chat_rows.shape) is not None:
                return index
    return len(chat_rows.rows) - 1


def held_out_of_stream(chat_rows: ChatRows, max_held_out: int) -> ChatRows:
    """The first held-out rows of a stream, in memory; training leaves all of them out by `is_row_held_out`.

    Raises:
        ValueError: the hash picks none.
    """
    numbered = ({**row, ROW_NUMBER: number} for number, row in enumerate(chat_rows.rows, start=1))
    rows = list(islice((row for row in numbered if is_row_held_out(row, chat_rows.shape)), max_held_out))
    if not rows:
        raise ValueError(
            f"No row of {chat_rows.description} is held out for validation: it has too few. Name others with"
            " `--eval_data_files`, or leave `--streaming` out."
        )
    return replace(chat_rows, rows=Dataset.from_list(rows))


def is_row_held_out(row: Mapping[str, object], shape: str) -> bool:
    """Whether a row is a held-out conversation. One that is broken is not: it is named when it is encoded."""
    try:
        conversation = conversation_of(row, shape)
    except BrokenRuleError:
        return False
    if conversation is None:
        return False
    said = json.dumps([conversation.messages, conversation.text], ensure_ascii=False)
    return is_held_out(said)
