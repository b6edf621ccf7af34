"""The byte tokenizer: every id, every string, with and without this package."""

import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tinylm.models import TinyTransformerConfig
from tinylm.tokenizers.byte import byte_tokenizer

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
