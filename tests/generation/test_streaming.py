from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.evaluation.tiny import byte_tokenizer
from tinylm.generation.streaming import TextStreamer
from tinylm.tokenizers import byte
from tinylm.tokenizers.sentencepiece_bpe import train_sentencepiece

BYTES = byte.byte_tokenizer()
MERGED = byte_tokenizer(merges=[("Ã", "©"), ("ð", "Ł")])  # é in one token, and the first two bytes of an emoji


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """As a pretrained tLM has it: words with their space, and bytes for what it has not seen."""
    folder: Path = tmp_path_factory.mktemp("sentencepiece")
    train_sentencepiece(["a word and another word, and some more words\n"] * 30, folder, vocab_size=290)
    return AutoTokenizer.from_pretrained(folder)


def streamed(tokenizer: PreTrainedTokenizerBase, prompt: str, new_ids: list[int]) -> list[str]:
    """The pieces that come for these ids, one by one, after a prompt."""
    written: list[str] = []
    streamer = TextStreamer(tokenizer, written.append)
    streamer.put(torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]]))
    for token_id in new_ids:
        streamer.put(torch.tensor([token_id]))
    streamer.end()
    return written


@settings(deadline=None)
@given(st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"])))
def test_a_stream_is_the_text_in_whole_characters(text: str) -> None:
    for tokenizer in (BYTES, MERGED):
        written = streamed(tokenizer, "né🙂", tokenizer(text, add_special_tokens=False)["input_ids"])
        assert "".join(written) == text
        assert not any("\ufffd" in piece for piece in written)


@pytest.mark.parametrize("text", [" and a word", "and é漢🙂 more", "🙂🙂🙂", "words\n\n  and\tmore 漢字"])
@pytest.mark.parametrize("prompt", ["a word", "漢字漢字漢字", "a word 🙂é"])
def test_spaces_and_fallen_back_bytes_come_as_they_are(
    sentencepiece: PreTrainedTokenizerBase, prompt: str, text: str
) -> None:
    whole = sentencepiece(prompt + text, add_special_tokens=False)["input_ids"]
    start = sentencepiece(prompt, add_special_tokens=False)["input_ids"]
    assert whole[: len(start)] == start
    written = streamed(sentencepiece, prompt, whole[len(start) :])
    assert "".join(written) == text and len(written) > 2
    assert not any("\ufffd" in piece for piece in written)


def test_a_character_waits_for_its_last_byte_and_one_that_never_comes_is_written_as_missing() -> None:
    smile = list("🙂".encode())
    assert streamed(BYTES, "x", [104, *smile, 105]) == ["h", "🙂", "i"]
    assert streamed(BYTES, "x", [104, *smile[:3]]) == ["h", BYTES.decode(smile[:3])]
    assert streamed(BYTES, "x", [0xFF, 104]) == ["\ufffdh"]
