"""Bytes as tokens: byte b of the UTF-8 is id b, then padding 256 and end of text 257.

Nothing is learned and nothing is lost; a text is as many tokens as it has bytes. The tokenizer is a `tokenizer.json`
without merges, so it loads through `AutoTokenizer` with nothing of ours installed. While a text is generated, bytes are
held until their character is whole by `tinylm.generation.streaming`.
"""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

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
