"""Conversations to training examples: token ids, and labels on what is to be learned.

Choices:
- Learned is each answer and its end-of-turn mark, not the header before it nor the newline that a template puts behind
  it. Everything else is context with label -100, the template's own system prompt included. The mask comes from the
  pieces of the conversation (`chat_format`), never from token ids, so a pad token that is also eos changes nothing.
- A conversation that is too long loses whole turns from its front, so that every answer keeps its question; the system
  message stays. If the last question and answer are still too long, the answer is cut at its end and its end-of-turn
  mark is not learned. A prompt that leaves no room for an answer gives an example without a target.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import TypedDict

from transformers import PreTrainedTokenizerBase

from tinylm.data.chat_format import ChatFormat, Message, Piece, PlainFormat, answer_indices, chat_format
from tinylm.data.chat_records import Conversation
from tinylm.data.documents import fingerprint
from tinylm.data.encoding import tokenizer_hash

TRAIN_ON = ("all", "answers", "last_answer")
IGNORED = -100

_VERSION = 1  # of what the encoder does: raise it when the same conversation would give other ids or labels


class Encoded(TypedDict):
    """An example: `input_ids` and `labels` of one length, not shifted, and what it lost to `max_length`."""

    input_ids: list[int]
    labels: list[int]
    num_turns_dropped: int
    num_tokens_cut: int


class ChatEncoder:
    """Encodes conversations for one tokenizer; for one without chat template, prompts with completions, and texts.

    Args:
        train_on: `answers`, the `last_answer` of each conversation, or `all` tokens.
        max_length: tokens of an example at most.

    Raises:
        ValueError: an unknown `train_on`, a `max_length` without room for a target, a template or tokenizer that cannot
            be used.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, train_on: str = "answers", max_length: int) -> None:
        if train_on not in TRAIN_ON:
            raise ValueError(f"`train_on` is one of {', '.join(TRAIN_ON)}, not `{train_on}`. Set `--train_on`.")
        if max_length < 2:
            raise ValueError(
                f"An example needs a token to predict from and one to predict; `max_length` is {max_length}. Raise"
                " `--max_length`."
            )
        self.tokenizer, self.train_on, self.max_length = tokenizer, train_on, max_length
        self.format: ChatFormat | PlainFormat = chat_format(tokenizer)

    @property
    def is_plain(self) -> bool:
        """Whether there is no chat template."""
        return isinstance(self.format, PlainFormat)

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that change when the same conversation may be encoded differently."""
        specials = json.dumps(self.tokenizer.special_tokens_map, sort_keys=True, default=str)
        template = json.dumps(self.tokenizer.chat_template, sort_keys=True)
        settings = (self.train_on, self.max_length, _VERSION)
        return fingerprint(tokenizer_hash(self.tokenizer), specials, template, *settings)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """What generation is given for the next answer: a prefix of the `input_ids` of the longer conversation."""
        return self.format.prompt_ids(messages)

    def encode(self, messages: Sequence[Message], num_context: int = 0) -> Encoded:
        """The example that a conversation makes; its last message is an answer.

        Args:
            num_context: answers among the first so many messages are not learned.

        Raises:
            UnstableTemplateError: the template rewrites answers that are to be learned.
            jinja2.TemplateError: the template refuses the conversation.
        """
        kept = list(messages)
        pieces = self._pieces(kept)
        while (excess := _num_tokens(pieces) - self.max_length) > 0 and len(answer_indices(kept)) > 1:
            kept = _without_first_turns(kept, pieces, excess)
            pieces = self._pieces(kept)
        num_dropped = len(messages) - len(kept)
        first = sum(index < num_context - num_dropped for index in answer_indices(kept))
        return self._example(pieces, first, num_dropped)

    def encode_text(self, text: str) -> Encoded:
        """The example that a document makes, all of it learned; it follows what every document follows."""
        return self._example(self._plain.document(text), 0, 0)

    def encode_conversation(self, conversation: Conversation) -> Encoded:
        """Either of the two. Raises what `encode` raises."""
        if conversation.text is not None:
            return self.encode_text(conversation.text)
        return self.encode(conversation.messages, conversation.num_context)

    @cached_property
    def _plain(self) -> PlainFormat:
        return PlainFormat(self.tokenizer)

    def _pieces(self, messages: Sequence[Message]) -> list[Piece]:
        return self.format.pieces(messages, only_last=self.train_on != "answers")

    def _example(self, pieces: Sequence[Piece], first_answer: int, num_turns_dropped: int) -> Encoded:
        """The pieces in a row; answers are learned from the one with number `first_answer` on."""
        answers = [number for number, piece in enumerate(pieces) if piece.is_answer]
        learned = set(answers[-1:] if self.train_on == "last_answer" else answers[first_answer:])
        if self.train_on == "all":
            learned = set(range(len(pieces)))
        input_ids = [token_id for piece in pieces for token_id in piece.ids]
        labels = [
            token_id if number in learned else IGNORED for number, piece in enumerate(pieces) for token_id in piece.ids
        ]
        labels[0] = IGNORED  # nothing comes before it that could predict it
        return Encoded(
            input_ids=input_ids[: self.max_length],
            labels=labels[: self.max_length],
            num_turns_dropped=num_turns_dropped,
            num_tokens_cut=max(0, len(input_ids) - self.max_length),
        )


def _num_tokens(pieces: Sequence[Piece]) -> int:
    return sum(len(piece.ids) for piece in pieces)


def _without_first_turns(messages: list[Message], pieces: Sequence[Piece], excess: int) -> list[Message]:
    """Without the first question, and as many more as are sure to be too many, each with its answer."""
    system = messages[:1] if messages[0]["role"] == "system" else []
    turns = messages[len(system) :]
    most = len(answer_indices(messages)) - 1
    dropped, saved = 1, len(pieces[0].ids) + len(pieces[1].ids)  # at most: what comes before the first question stays
    while saved < excess and dropped < most and len(pieces) > 2 * dropped + 1:
        saved += len(pieces[2 * dropped].ids) + len(pieces[2 * dropped + 1].ids)
        dropped += 1
    return [*system, *turns[2 * dropped :]]
