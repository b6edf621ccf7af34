"""The text of a generation while it comes, in whole characters, whatever the tokenizer."""

from collections.abc import Callable, Collection

from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

_REPLACEMENT = "\ufffd"  # what decoding gives for the bytes of a character that is not whole


def text_after(tokenizer: PreTrainedTokenizerBase, prompt_ids: list[int], new_ids: list[int]) -> str:
    """What the new tokens add to the text; alone they would lose a leading space with some tokenizers."""

    def decode(token_ids: list[int]) -> str:
        return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    # The prompt's last tokens are enough, from where a character begins; all of a long one would be slow to stream.
    tails = [prompt_ids[-length:] for length in range(8, 16)]
    tail = next((ids for ids in tails if not decode(ids).startswith(_REPLACEMENT)), prompt_ids)
    return decode(tail + new_ids)[len(decode(tail)) :]


class TextStreamer(BaseStreamer):
    """Writes the text of one `generate` while it comes, for any tokenizer, without the prompt and the special tokens.

    What all pieces say together is what the ids decode to at once. Bytes that do not make a character yet decode to
    U+FFFD and wait; they are written as that when the generation ends.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], object], *, stop_ids: Collection[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._write = write
        self._stop_ids = stop_ids
        self._prompt_ids: list[int] | None = None
        self._new_ids: list[int] = []
        self._num_written = 0

    def put(self, value: Tensor) -> None:
        """Takes the prompt `[1, T]` first, then each new id `[1]`.

        Raises:
            ValueError: more than one text at a time.
        """
        if value.ndim == 2 and len(value) > 1:
            raise ValueError(f"A streamer writes one text at a time, but {len(value)} came. Generate one by one.")
        if self._prompt_ids is None:
            self._prompt_ids = value[0].tolist()
            return
        self._new_ids += [token_id for token_id in value.tolist() if token_id not in self._stop_ids]
        self._write_up_to(self._text().rstrip(_REPLACEMENT))

    def end(self) -> None:
        """Writes what was waiting."""
        self._write_up_to(self._text())

    def _text(self) -> str:
        return text_after(self._tokenizer, self._prompt_ids or [], self._new_ids)

    def _write_up_to(self, text: str) -> None:
        if len(text) > self._num_written:
            self._write(text[self._num_written :])
            self._num_written = len(text)
