"""A conversation as token ids, in pieces: what the model is given, and what it is to answer.

Choices:
- What belongs to an answer is found by rendering: the prompt of an answer is what the chat template makes of the
  messages before it with `add_generation_prompt=True`, and the answer is what its message adds to that. No token ids
  are searched for, and a template needs no generation markers.
- A piece is tokenised behind the piece before it, or alone where the two would grow together: a newline that ends the
  prompt and one that begins the answer are one token in many vocabularies, but when the model answers, the prompt is
  tokenised before the answer exists. So the ids of a prompt are always a prefix of the ids of the whole conversation.
- Special tokens that somebody has typed into a message stay ordinary text (`TypedSpecials`).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TypedDict

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from tinylm.data.encoding import document_start_id, scoring_start_id
from tinylm.data.typed_specials import TypedSpecials


class Message(TypedDict):
    """One turn; `role` is `system`, `user` or `assistant`."""

    role: str
    content: str


@dataclass(frozen=True)
class Piece:
    """Token ids of an answer with its end-of-turn mark, or of what stands between answers."""

    ids: list[int]
    is_answer: bool


class UnstableTemplateError(ValueError):
    """A chat template writes the beginning of a conversation differently once the conversation goes on."""


class ChatFormat:
    """Conversations as the tokenizer's chat template writes them.

    `end_of_turn` is the text that it puts behind an answer (`<|im_end|>`), without the whitespace that follows.

    Raises:
        ValueError: the template cannot be rendered, or leaves answers out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._typed = TypedSpecials(tokenizer)
        probe: list[Message] = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "the_answer"}]
        try:
            _, found, behind = self._render(probe).rpartition("the_answer")
        except TemplateError as error:
            raise ValueError(f"{self._title} cannot be rendered ({error}). Set `--chat_template`.") from error
        if not found:
            raise ValueError(f"{self._title} leaves the assistant's messages out. Set `--chat_template`.")
        self.end_of_turn = behind.rstrip() or behind  # where nothing but whitespace ends a turn, that is the mark
        self._after_turn = behind[len(self.end_of_turn) :]

    @property
    def _title(self) -> str:
        return f"The chat template of the tokenizer `{self.tokenizer.name_or_path}`"

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """What generation is given: the conversation so far and the beginning of the assistant's turn.

        Raises:
            jinja2.TemplateError: the template refuses the conversation.
        """
        messages, typed = self._typed.hidden(messages)
        text = self._render(messages, generate=True)
        return list(chain.from_iterable(self._tokenised(text, self._cuts(messages, text, required=()), typed)))

    def pieces(self, messages: Sequence[Message], *, only_last: bool = False) -> list[Piece]:
        """The whole conversation. With `only_last` the template may rewrite every answer but the last one.

        Raises:
            UnstableTemplateError: an answer does not stand where generation is prompted for it.
            jinja2.TemplateError: the template refuses the conversation.
        """
        messages, typed = self._typed.hidden(messages)
        text = self._render(messages)
        answers = answer_indices(messages)
        cuts = self._cuts(messages, text, required=answers[-1:] if only_last else answers)
        parts = self._tokenised(text, cuts, typed)
        return [Piece(ids, is_answer=number % 2 == 1) for number, ids in enumerate(parts)]

    def _cuts(self, messages: Sequence[Message], text: str, required: Collection[int]) -> list[int]:
        """Where answers begin and end in the rendered text, by turns; raises for a `required` one that is rewritten."""
        cuts = []
        for index in answer_indices(messages):
            try:
                cuts += self._cut(messages, index, text)
            except UnstableTemplateError:
                if index in required:
                    raise
        return cuts

    def _cut(self, messages: Sequence[Message], index: int, text: str) -> tuple[int, int]:
        prompt, turn = self._render(messages[:index], generate=True), self._render(messages[: index + 1])
        answer = f"the answer {messages[index]['content']!r:.40}"
        if not turn.startswith(prompt):
            fault = f"prompts with {prompt[-40:]!r}, and writes something else before {answer}"
        elif not text.startswith(turn):
            fault = (
                f"rewrites {answer} when more messages follow. With `--train_on last_answer` it can be used: then only"
                " the last answer of each conversation is trained"
            )
        elif not turn.endswith(self.end_of_turn + self._after_turn):
            fault = f"does not end {answer} with {self.end_of_turn!r}, as it ends others"
        else:
            return len(prompt), len(turn) - len(self._after_turn)
        raise UnstableTemplateError(f"{self._title} {fault}. Or set another one with `--chat_template`.")

    def _render(self, messages: Sequence[Message], *, generate: bool = False) -> str:
        return self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generate)

    def _tokenised(self, text: str, cuts: Sequence[int], typed: dict[str, str]) -> list[list[int]]:
        texts = [text[begin:end] for begin, end in pairwise([0, *cuts, len(text)])]
        return one_behind_the_other(texts, lambda parts: self._typed.encode(parts, typed))


class PlainFormat:
    """Prompt and completion as one document, `start prompt completion eos`: for tokenizers without a chat template.

    `start` is what every document follows, when it is scored and when a text is generated.

    Raises:
        ValueError: the tokenizer has no eos.
    """

    end_of_turn = ""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._start, self._eos = [scoring_start_id(tokenizer)], document_start_id(tokenizer)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """What generation is given. Raises ValueError for more than one message."""
        self._check(messages, ["user"])
        return self._start + self._encode([messages[0]["content"]])[0]

    def pieces(self, messages: Sequence[Message], *, only_last: bool = False) -> list[Piece]:
        """The prompt and the completion with its eos. Raises ValueError for more than one message of each."""
        self._check(messages, ["user", "assistant"])
        prompt, completion = one_behind_the_other([message["content"] for message in messages], self._encode)
        return [Piece(self._start + prompt, False), Piece([*completion, self._eos], True)]

    def document(self, text: str) -> list[Piece]:
        """A text of which all is learned."""
        return [Piece(self._start, False), Piece([*self._encode([text])[0], self._eos], True)]

    def _check(self, messages: Sequence[Message], roles: list[str]) -> None:
        found = [message["role"] for message in messages]
        if found != roles:
            raise ValueError(
                "Without a chat template a conversation is one prompt and one completion; the tokenizer"
                f" `{self.tokenizer.name_or_path}` has none, and these messages are {', '.join(found)}. Set"
                " `--chat_template` to a file with one, or take an instruct model's tokenizer."
            )

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        settings = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        return self.tokenizer(list(texts), return_attention_mask=False, **settings)["input_ids"]


def chat_format(tokenizer: PreTrainedTokenizerBase) -> ChatFormat | PlainFormat:
    """How conversations are written for this tokenizer: by its chat template, or plainly where it has none."""
    return ChatFormat(tokenizer) if tokenizer.chat_template else PlainFormat(tokenizer)


def answer_indices(messages: Sequence[Message]) -> list[int]:
    """Which messages are the assistant's."""
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


def one_behind_the_other(texts: Sequence[str], encode: Callable[[Sequence[str]], list[list[int]]]) -> list[list[int]]:
    """The ids of each text as they are behind the text before it, or those it has alone where the two grow together."""
    alone = encode(texts)
    in_pairs = encode([before + text for before, text in pairwise(texts)])
    ids = alone[:1]
    for (before, after), both in zip(pairwise(alone), in_pairs, strict=True):
        ids.append(both[len(before) :] if both[: len(before)] == before else after)
    return ids
