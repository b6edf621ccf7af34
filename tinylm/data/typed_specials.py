"""Special tokens that somebody has typed into a message: they stay ordinary text, and only the template's count."""

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

AnyMessage = TypeVar("AnyMessage", bound=Mapping[str, str])

_PRIVATE_USE = range(0xF0000, 0xFFFFE)


class TypedSpecials:
    """Hides special tokens in messages while a template renders, and encodes what it has rendered.

    Each stands as one character of Unicode's private use that no message holds, so a template that looks for it in a
    message does not see it. Added tokens that the tokenizer does not call special (as `<tool_call>` often is) are not
    hidden: they are tokens wherever they stand.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        specials = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        longest_first = sorted(specials, key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")  # (?!) matches nothing

    def hidden(self, messages: Sequence[AnyMessage]) -> tuple[list[AnyMessage], dict[str, str]]:
        """The messages with stand-ins, and what each of these stands for; mostly the messages as they are, and {}."""
        contents = "".join(message["content"] for message in messages)
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in contents)
        stand_ins = dict(zip(dict.fromkeys(self._specials.findall(contents)), free, strict=False))
        if not stand_ins:
            return list(messages), {}
        hide = [
            {**message, "content": self._specials.sub(lambda found: stand_ins[found[0]], message["content"])}
            for message in messages
        ]
        return hide, {character: special for special, character in stand_ins.items()}

    def encode(self, texts: Sequence[str], typed: Mapping[str, str]) -> list[list[int]]:
        """The ids of rendered texts; `typed` is what `hidden` gave."""
        if not typed:
            return self._ids(list(texts), specials_are_text=False)
        stand_in = re.compile(f"([{''.join(typed)}])")
        return [
            [
                token_id
                for part in stand_in.split(text)
                for token_id in self._ids([typed.get(part, part)], specials_are_text=part in typed)[0]
            ]
            for text in texts
        ]

    def _ids(self, texts: list[str], *, specials_are_text: bool) -> list[list[int]]:
        settings = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        return self.tokenizer(texts, split_special_tokens=specials_are_text, **settings)["input_ids"] if texts else []
