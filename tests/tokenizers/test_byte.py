"""The byte tokenizer: every id, every string, and characters that arrive in pieces."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tinylm.models import TinyTransformerConfig, TinyTransformerForCausalLM
from tinylm.tokenizers.byte import ByteStreamer, byte_tokenizer

TOKENIZER = byte_tokenizer()
AWKWARD = " a  é<pad>\r\n\t漢🙂\ufffd<|endoftext|> \x00 ,. n't ﬁ①"


def test_there_are_258_ids_bytes_padding_and_end_of_text() -> None:
    assert len(TOKENIZER) == TOKENIZER.vocab_size == 258
    assert sorted(TOKENIZER.get_vocab().values()) == list(range(258))
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, TOKENIZER.bos_token_id) == (256, 257, None)
    config = TinyTransformerConfig()
    assert (config.vocab_size, config.pad_token_id, config.eos_token_id) == (258, 256, 257)


@given(st.text())
def test_every_string_is_its_bytes_and_comes_back(text: str) -> None:
    ids = TOKENIZER(text).input_ids
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_a_saved_tokenizer_loads_without_tinylm_and_gives_the_same_ids(tmp_path: Path) -> None:
    byte_tokenizer(model_max_length=128).save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.py"))
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert len(loaded) == 258 and loaded.model_max_length == 128
    assert loaded(AWKWARD).input_ids == list(AWKWARD.encode())
    assert loaded.decode(loaded(AWKWARD).input_ids) == AWKWARD
    code = (
        "import sys; sys.modules['tinylm'] = None\n"  # an import of it fails
        "from tokenizers import Tokenizer\n"
        f"ids = Tokenizer.from_file({str(tmp_path / 'tokenizer.json')!r}).encode('né').ids\n"
        "assert ids == [110, 195, 169], ids"
    )
    subprocess.run([sys.executable, "-I", "-c", code], check=True, timeout=60)


def test_a_batch_is_padded_with_256() -> None:
    batch = TOKENIZER(["a", "é🙂"], padding=True)
    assert batch["input_ids"][0] == [97, 256, 256, 256, 256, 256]
    assert batch["attention_mask"][0] == [1, 0, 0, 0, 0, 0]
    assert TOKENIZER.decode(batch["input_ids"][0], skip_special_tokens=True) == "a"


def streamed(token_ids: list[int]) -> list[str]:
    """What a streamer writes for a prompt and these ids, one by one."""
    written: list[str] = []
    streamer = ByteStreamer(written.append)
    streamer.put(torch.tensor([[63]]))
    for token in token_ids:
        streamer.put(torch.tensor([token]))
    streamer.end()
    return written


@given(st.text())
def test_a_stream_writes_whole_characters_only(text: str) -> None:
    assert streamed(list(text.encode())) == list(text)


def test_a_character_that_is_never_finished_is_never_written() -> None:
    smile = list("🙂".encode())
    assert streamed([104, *smile[:3]]) == ["h"]
    assert streamed([*smile, *smile[:1]]) == ["🙂"]


def test_bytes_of_no_character_are_replaced_once_that_is_certain() -> None:
    assert streamed([0xF0, 104, 105]) == ["\ufffdh", "i"]
    assert streamed([0xFF, 104]) == ["\ufffd", "h"]


def test_specials_are_not_written_and_several_texts_are_refused() -> None:
    assert streamed([104, 256, 105, 257]) == ["h", "i"]
    with pytest.raises(ValueError, match="one text at a time, but 2 came"):
        ByteStreamer(print).put(torch.zeros(2, 3))


def test_a_model_that_generates_writes_through_the_streamer() -> None:
    torch.manual_seed(0)
    model = TinyTransformerForCausalLM(TinyTransformerConfig()).eval()
    written: list[str] = []
    prompt = TOKENIZER("né", return_tensors="pt")
    options = {"max_new_tokens": 20, "do_sample": True, "eos_token_id": None}
    generated = model.generate(**prompt, **options, streamer=ByteStreamer(written.append))
    new = bytes(token for token in generated[0, 3:].tolist() if token < 256)
    text = new.decode(errors="replace")
    assert text.startswith("".join(written)) and len(text) - len("".join(written)) <= 1
    assert "".join(written)


@pytest.mark.parametrize("skip_prompt", [True, False])
def test_the_prompt_is_written_only_where_it_is_asked_for(skip_prompt: bool) -> None:
    written: list[str] = []
    streamer = ByteStreamer(written.append, skip_prompt=skip_prompt)
    streamer.put(torch.tensor([[104, 105]]))
    streamer.put(torch.tensor([33]))
    assert "".join(written) == ("!" if skip_prompt else "hi!")
