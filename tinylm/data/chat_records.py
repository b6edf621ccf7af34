"""One row of a data set as a conversation: the four shapes, and the rules that a row can break."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from tinylm.data.chat_format import Message

MAX_BYTES = 1_000_000
"""Texts of this size are no turn of a conversation but a file that got into the wrong column."""

JSON_LINE = "json_line"
"""The column that holds rows of JSON as they are in the file."""

ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
"""What a turn may be called, `from` of older data sets included, and whose it is."""

SHAPES = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
}
"""The columns that a row of each shape must have."""

SHAPES_IN_WORDS = (
    "`messages` (a list of `role` and `content`; or `conversations`, a list of `from` and `value`), `prompt` and"
    " `completion`, `instruction` and `output` (and `input`), or `text`"
)


class BrokenRuleError(ValueError):
    """A row that is no conversation: `rule` in words, `value` as it came."""

    def __init__(self, rule: str, value: object) -> None:
        self.rule, self.value = rule, value
        super().__init__(f"{rule}, and here is {_shortened(value)}")


@dataclass(frozen=True)
class Conversation:
    """Turns, the last of which is an answer. Answers among the first `num_context` messages are not to be learned.

    A document has no messages but a `text`.
    """

    messages: list[Message]
    num_context: int = 0
    text: str | None = None


def conversation_of(row: Mapping[str, object], shape: str, *, is_plain: bool = False) -> Conversation | None:
    """The conversation in a row; None for an empty line of a file.

    Args:
        is_plain: there is no chat template to set an instruction apart from its output: an empty line does.

    Raises:
        BrokenRuleError: what the row breaks.
    """
    if JSON_LINE in row:
        line = row[JSON_LINE]
        if not line.strip():
            return None
        row = parsed(line)
    for column in SHAPES[shape]:
        if row.get(column) is None:
            raise BrokenRuleError(f"a row has a `{column}`", sorted(key for key in row if row[key] is not None))
    return _READERS[shape](row, is_plain)


def parsed(line: str) -> dict[str, object]:
    """The JSON object in a line. Raises BrokenRuleError for anything else."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BrokenRuleError(f"a line is one JSON object ({error})", line) from error
    if not isinstance(row, dict):
        raise BrokenRuleError("a line is one JSON object", row)
    return row


def _from_messages(row: Mapping[str, object], is_plain: bool) -> Conversation:
    return Conversation(_conversation(_turns(row["messages"], "messages")))


def _from_conversations(row: Mapping[str, object], is_plain: bool) -> Conversation:
    return Conversation(_conversation(_turns(row["conversations"], "conversations")))


def _from_prompt_completion(row: Mapping[str, object], is_plain: bool) -> Conversation:
    """Either may be a text or a list of messages; what is learned is in `completion`."""
    prompt, completion = (
        [Message(role=role, content=_text(row[column], column))]
        if isinstance(row[column], str)
        else _turns(row[column], column)
        for column, role in (("prompt", "user"), ("completion", "assistant"))
    )
    return Conversation(_conversation([*prompt, *completion]), num_context=len(prompt))


def _from_instruction(row: Mapping[str, object], is_plain: bool) -> Conversation:
    parts = [_text(row["instruction"], "instruction")]
    if row.get("input"):
        parts.append(_text(row["input"], "input"))
    question = "\n\n".join([*parts, ""] if is_plain else parts)
    answer = _text(row["output"], "output")
    return Conversation(
        _conversation([Message(role="user", content=question), Message(role="assistant", content=answer)])
    )


def _from_text(row: Mapping[str, object], is_plain: bool) -> Conversation:
    text = _text(row["text"], "text")
    if not text.strip():
        raise BrokenRuleError("a text holds more than whitespace", text)
    return Conversation([], text=text)


_READERS: dict[str, Callable[[Mapping[str, object], bool], Conversation]] = {
    "messages": _from_messages,
    "conversations": _from_conversations,
    "prompt_completion": _from_prompt_completion,
    "instruction": _from_instruction,
    "text": _from_text,
}


def _turns(value: object, column: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise BrokenRuleError(f"`{column}` is a list of messages", value)
    return [_turn(message, number) for number, message in enumerate(value, start=1)]


def _turn(message: object, number: int) -> Message:
    if not isinstance(message, dict):
        raise BrokenRuleError(f"message {number} has a `role` and a `content`", message)
    role, content = (_first(message, names) for names in (("role", "from"), ("content", "value")))
    if not isinstance(role, str) or role not in ROLES:
        raise BrokenRuleError(f"the role of message {number} is system, user or assistant", role)
    return Message(role=ROLES[role], content=_text(content, f"content of message {number}"))


def _first(message: Mapping[str, object], names: Collection[str]) -> object:
    return next((message[name] for name in names if message.get(name) is not None), None)


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise BrokenRuleError(f"`{what}` is a string", value)
    try:
        num_bytes = len(value.encode())
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair: "\ud83d"
        raise BrokenRuleError(f"`{what}` is text that can be written as UTF-8", ascii(value)) from error
    if num_bytes >= MAX_BYTES:
        raise BrokenRuleError(f"`{what}` has less than {MAX_BYTES:,} bytes", f"{num_bytes:,} bytes: {value[:40]}")
    return value


def _conversation(messages: list[Message]) -> list[Message]:
    """The messages up to the last answer, if they take turns."""
    for number, message in enumerate(messages, start=1):
        if message["role"] == "system" and number > 1:
            raise BrokenRuleError("a system message is the first", f"one as message {number}")
    roles = [message["role"] for message in messages if message["role"] != "system"]
    for number, role in enumerate(roles):
        if role != ("user", "assistant")[number % 2]:
            raise BrokenRuleError("user and assistant take turns, the user first", ", ".join(roles))
    for number, message in enumerate(messages, start=1):
        if message["role"] == "assistant" and not message["content"].strip():
            raise BrokenRuleError(f"an answer is not empty (message {number})", message["content"])
    if len(roles) < 2:
        raise BrokenRuleError("a conversation has an answer of the assistant", ", ".join(roles))
    return messages[: -(len(roles) % 2)] if len(roles) % 2 else messages


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
