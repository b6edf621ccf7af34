"""The same documents are held out whatever the order, the path and the shards; few documents are cut once."""

import pickle
import random
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinylm.data.documents import Shard, Source, from_texts
from tinylm.data.splits import is_held_out, training_part, validation_part

_DOCUMENTS = [f"document {number}\n\nof some words" for number in range(300)]


def _source(*shards: list[str]) -> Source:
    return Source("a source", "0", tuple(Shard("s", partial(from_texts, tuple(texts))) for texts in shards))


def _parts(source: Source) -> tuple[list[str], list[str]]:
    return list(training_part(source).documents()), list(validation_part(source).documents())


def test_a_tenth_is_held_out_and_nothing_is_lost_or_twice() -> None:
    training, validation = _parts(_source(_DOCUMENTS))
    assert sorted(training + validation) == sorted(_DOCUMENTS)
    assert 15 <= len(validation) <= 45


def test_the_same_documents_are_held_out_whatever_the_order_the_shards_and_the_strides() -> None:
    expected = set(_parts(_source(_DOCUMENTS))[1])
    shuffled = random.Random(0).sample(_DOCUMENTS, len(_DOCUMENTS))
    three = _source(shuffled[:7], shuffled[7:150], shuffled[150:])
    assert set(_parts(three)[1]) == expected
    strided = [text for shard in validation_part(three).shards for start in range(3) for text in shard.read(start, 3)]
    assert sorted(strided) == sorted(expected)
    assert expected == {text for text in _DOCUMENTS if is_held_out(text)}


def test_the_hash_of_the_text_is_fixed_for_ever() -> None:
    assert [number for number in range(40) if is_held_out(str(number))] == [1, 2, 7, 30]


def test_parts_can_be_pickled_and_have_fingerprints_of_their_own() -> None:
    source = _source(_DOCUMENTS)
    part = validation_part(source)
    assert list(pickle.loads(pickle.dumps(part)).documents()) == list(part.documents())
    assert len({source.fingerprint, part.fingerprint, training_part(source).fingerprint}) == 3


def test_a_corpus_of_which_the_hash_picks_none_is_cut_as_well() -> None:
    none = [text for text in _DOCUMENTS if not is_held_out(text)][:30]
    training, validation = _parts(_source(none))
    assert "".join(training + validation) == "".join(none) and validation
    with_one = [*none, next(text for text in _DOCUMENTS if is_held_out(text))]
    assert _parts(_source(with_one)) == (none, with_one[-1:])


def test_of_one_text_the_last_tenth_is_held_out_at_a_blank_line() -> None:
    paragraphs = [f"paragraph {number}\nof two lines" for number in range(100)]
    training, validation = _parts(_source(["\n\n".join(paragraphs)]))
    assert training + validation == ["\n\n".join(paragraphs[:90]) + "\n\n", "\n\n".join(paragraphs[90:])]


def test_without_a_blank_line_near_the_cut_is_at_a_line_then_a_word_then_a_character() -> None:
    lines = "first\n\n" + "\n".join(f"line {number:03}" for number in range(100))
    assert _parts(_source([lines]))[1][0].startswith("line 09")
    words = " ".join(f"word{number:03}" for number in range(100))
    assert _parts(_source([words]))[1][0].startswith("word0")
    assert _parts(_source(["é" * 50]))[1] == ["é" * 5]


def test_19_documents_are_cut_once_and_20_held_out_one_by_one() -> None:
    training, validation = _parts(_source(_DOCUMENTS[:19]))
    assert (training, validation) == (_DOCUMENTS[:17], _DOCUMENTS[17:19])
    _, validation = _parts(_source(_DOCUMENTS[:20]))
    assert validation == [text for text in _DOCUMENTS[:20] if is_held_out(text)]


@given(
    st.lists(st.text(alphabet="ab é\n", min_size=1), min_size=1, max_size=19).filter(
        lambda d: len("".join("".join(d).split())) > 1
    )
)
def test_the_cut_loses_no_byte_but_of_empty_documents(documents: list[str]) -> None:
    training, validation = _parts(_source(documents))
    kept = "".join(text for text in documents if text.strip())
    assert "".join("".join(training + validation).split()) == "".join(kept.split())
    assert training and validation


def test_one_character_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match=r"too short to hold out .* 1 document\(s\), 1 bytes"):
        validation_part(_source(["a"]))


def test_a_source_is_looked_at_once_for_both_parts() -> None:
    reads: list[int] = []

    def read(start: int, step: int) -> list[str]:
        reads.append(start)
        return ["some words in one document"]

    source = Source("a source", "1", (Shard("s", read),))
    training_part(source)
    validation_part(source)
    assert reads == [0]
