import copy

import pytest
from transformers import AutoTokenizer

from tests.data.tiny import EOS, tokenizer_with_eos
from tests.evaluation.tiny import byte_tokenizer
from tinylm.data.encoding import check_tokenizer_matches, encode, tokenizer_hash, vocabulary_size


def test_batches_hold_every_document_in_order() -> None:
    documents = ["a" * 60_000, "b" * 60_000, "", "c" * 150_000, "d"]
    batches = list(encode(tokenizer_with_eos(), documents))
    assert [len(texts) for texts, _ in batches] == [2, 2, 1]
    assert [text for texts, _ in batches for text in texts] == documents
    assert [len(token_ids) for _, lists in batches for token_ids in lists] == [len(text) for text in documents]


def test_a_tokenizers_hash_survives_saving_and_use_but_no_change(tmp_path) -> None:
    tokenizer = tokenizer_with_eos(pad_token="<pad>")
    before = tokenizer_hash(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_hash(AutoTokenizer.from_pretrained(tmp_path)) == before
    tokenizer(["a", "bb"], padding=True, truncation=True, max_length=1)
    assert tokenizer_hash(tokenizer) == before
    assert tokenizer_hash(byte_tokenizer(merges=[("a", "b")], eos_token="</s>", pad_token="<pad>")) != before
    other_end = copy.deepcopy(tokenizer)
    other_end.eos_token = "<pad>"
    assert tokenizer_hash(other_end) != before


def test_a_tokenizer_larger_than_the_models_vocabulary_is_refused() -> None:
    """Case S9."""
    tokenizer = tokenizer_with_eos()
    assert vocabulary_size(tokenizer) == EOS + 1
    check_tokenizer_matches(EOS + 1, tokenizer)
    check_tokenizer_matches(320, tokenizer)
    with pytest.raises(ValueError, match=r"`vocab_size` 256, the tokenizer .* has 257 tokens"):
        check_tokenizer_matches(256, tokenizer)
