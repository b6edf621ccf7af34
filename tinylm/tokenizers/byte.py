"""Bytes as tokens: byte b of the UTF-8 is id b, then padding 256 and end of text 257.

Nothing is learned and nothing is lost; a text is as many tokens as it has bytes. The tokenizer is a `tokenizer.json`
without merges, so it loads through `AutoTokenizer` with nothing of ours installed.
"""

import codecs
from collections.abc import Callable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.generation.streamers import BaseStreamer

PAD, END_OF_TEXT = "<pad>", "<|endoftext|>"


def byte_tokenizer(model_max_length: int | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer of 258 ids. It adds no special tokens, and reads their names in a text as ordinary bytes.

    A string comes back exactly; a lone surrogate, which UTF-8 cannot hold, is refused by the tokenizers library.
    `model_max_length` is the number of tokens that the model can read, to be noted in `tokenizer_config.json`.
    """
    symbols = bytes_to_unicode()  # the byte-level alphabet: one printable character a byte
    vocabulary = {symbols[byte]: byte for byte in range(256)} | {PAD: 256, END_OF_TEXT: 257}
    backend = Tokenizer(models.BPE(vocabulary, merges=[]))
    # No regex: without merges there is nothing to keep apart, and one long piece is encoded 1.6 times faster.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([PAD, END_OF_TEXT])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END_OF_TEXT,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_max_length=model_max_length,
    )


class ByteStreamer(BaseStreamer):
    """Writes the text of `generate` while it comes, holding bytes until their character is complete.

    Bytes that can be no part of any character are written as U+FFFD once that is certain; what is incomplete when the
    generation ends is never written. Special tokens are skipped.
    """

    def __init__(self, write: Callable[[str], object], *, skip_prompt: bool = True) -> None:
        self._write = write
        self._skip_next = skip_prompt
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def put(self, value: Tensor) -> None:
        """Takes the prompt `[1, T]` first, then each new id `[1]`.

        Raises:
            ValueError: more than one text at a time.
        """
        if value.ndim == 2 and len(value) > 1:
            raise ValueError(f"A streamer writes one text at a time, but {len(value)} came. Generate one by one.")
        if self._skip_next:
            self._skip_next = False
            return
        text = self._decoder.decode(bytes(token for token in value.flatten().tolist() if token < 256))
        if text:
            self._write(text)

    def end(self) -> None:
        """Forgets what is incomplete."""
        self._decoder.reset()
