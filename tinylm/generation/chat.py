"""Answers in a conversation, which is written for the model exactly as it was in training."""

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tinylm.data.chat_format import ChatFormat, Message

from .continuation import continue_ids, end_ids, room_for_prompt
from .streaming import text_after

logger = logging.getLogger(__name__)

COMMANDS = "`/reset` forgets the conversation, `/save FILE` adds it to a .jsonl file, `/quit` ends"


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    write: Callable[[str], object] | None = None,
) -> str:
    """What the model answers to the last of `messages`, without space around it.

    The settings are those of `generate_text`. An answer ends with the token that the chat template writes behind
    answers, and with those that end a text. A conversation that does not fit into the context beside `max_new_tokens`
    loses its oldest turns, and that is said; a system message stays.

    Raises:
        ValueError: the tokenizer has no chat template, the template refuses the conversation, or its last question
            alone does not fit into the context.
    """
    chat_format = _chat_format(tokenizer)
    try:
        prompt_ids = _fitting_prompt(chat_format, messages, room_for_prompt(model, max_new_tokens))
    except TemplateError as error:
        raise ValueError(f"The chat template refuses the conversation: {error}. Set `--chat_template`.") from error
    [new_ids] = continue_ids(
        model,
        tokenizer,
        [prompt_ids],
        stop_ids=end_ids(model, tokenizer) | _turn_end(chat_format),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        write=write,
    )
    return text_after(tokenizer, prompt_ids, new_ids).strip()


class Chat:
    """A conversation that goes on. `messages` are its turns so far, the system message first where there is one."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system: str | None = None,
        seed: int = 0,
        **settings: float,
    ) -> None:
        """`system` is a message that stands before all turns; `settings` are those of `answer`.

        Raises:
            ValueError: the tokenizer has no chat template.
        """
        _chat_format(tokenizer)
        self._model = model
        self._tokenizer = tokenizer
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._seed = seed
        self._settings = settings
        self.messages = list(self._system)

    def ask(self, question: str, write: Callable[[str], object] | None = None) -> str:
        """The model's answer, handed to `write` piece by piece. Where that fails, the conversation stays as it was.

        Raises:
            ValueError: as `answer`; or the question is empty.
        """
        check_question(question)
        asked: list[Message] = [*self.messages, {"role": "user", "content": question}]
        seed = self._seed + len(self.messages)  # the same question twice is not answered with the same draws
        text = answer(self._model, self._tokenizer, asked, seed=seed, write=write, **self._settings)
        self.messages = [*asked, {"role": "assistant", "content": text}]
        return text

    def reset(self) -> None:
        """Forgets all turns; the system message stays."""
        self.messages = list(self._system)

    def save(self, path: str | Path) -> None:
        """Adds the conversation to a file as one line `{"messages": [...]}`, which can be trained on.

        Raises:
            ValueError: nothing was said yet.
            OSError: the file cannot be written.
        """
        if self.messages == self._system:
            raise ValueError("There is nothing to save: the conversation has no turns yet.")
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n")


def check_question(question: str) -> None:
    """Raises ValueError for a question without a word, which the template would write as a turn all the same."""
    if not question.strip():
        raise ValueError(f"A question has at least one word; `--prompt` is {question!r}. Ask something.")


def converse(chat: Chat, lines: Iterable[str], write: Callable[[str], object]) -> None:
    """Answers one line after another until `/quit`. What cannot be done is said, and the conversation goes on."""
    for line in map(str.strip, lines):
        if line == "/quit":
            return
        try:
            if line.startswith("/"):
                write(_obey(chat, line))
            elif line:
                chat.ask(line, write)
        except (ValueError, OSError) as error:
            write(str(error))
        write("\n")


def _obey(chat: Chat, line: str) -> str:
    """Does what a command says; what there is to say about it."""
    command, _, argument = line.partition(" ")
    if command == "/reset":
        chat.reset()
        return "The conversation begins anew."
    if command == "/save" and argument.strip():
        chat.save(Path(argument.strip()).expanduser())
        return f"Added to `{argument.strip()}`."
    raise ValueError(f"`{line}` is no command: {COMMANDS}.")


def _chat_format(tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
    if not tokenizer.chat_template:
        raise ValueError(
            f"A conversation needs a chat template, and the tokenizer `{tokenizer.name_or_path}` has none. Fine-tune "
            "with `--chat_template`, or continue plain text with `tinylm generate`."
        )
    return ChatFormat(tokenizer)


def _fitting_prompt(chat_format: ChatFormat, messages: Sequence[Message], room: int | None) -> list[int]:
    """The ids of the conversation, without so many of its oldest turns that at most `room` are left."""
    system = [message for message in messages[:1] if message["role"] == "system"]
    turns = [index for index, message in enumerate(messages) if message["role"] == "user"]
    for num_dropped, first in enumerate(turns):
        kept = messages if num_dropped == 0 else [*system, *messages[first:]]
        prompt_ids = chat_format.prompt_ids(kept)
        if room is None or len(prompt_ids) <= room:
            if num_dropped:
                logger.warning("The context is full: the oldest %d turns are left out of the prompt.", num_dropped)
            return prompt_ids
    raise ValueError(
        f"The question has {len(prompt_ids)} tokens as the chat template writes it, and the context leaves {room} "
        "beside the answer. Ask something shorter, or set a lower `--max_new_tokens`."
    )


def _turn_end(chat_format: ChatFormat) -> set[int]:
    """The id of the token that ends an answer, where that is one token."""
    token_id = chat_format.tokenizer.get_vocab().get(chat_format.end_of_turn.strip())
    return set() if token_id is None else {token_id}
