import json
import logging
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from tests.data.tiny import numbered_documents, source_of
from tinylm.data.collators import PadRecords, tiny_collator
from tinylm.data.prepare import write_store
from tinylm.data.records import CollateNumbered, IndexedTextDataset, NumberedExamples, RecordCuts, RecordExamples
from tinylm.data.sources import open_source
from tinylm.data.splits import training_part
from tinylm.data.token_store import StoreBlocks
from tinylm.tokenizers.byte import byte_tokenizer

TOKENIZER, EOS = byte_tokenizer(), 257


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="tinylm")
    return caplog


def test_record_ids_are_dense_and_the_dropped_empties_are_counted(said: pytest.LogCaptureFixture) -> None:
    dataset = IndexedTextDataset(["a", "", " \n\t", "b ", "", "c"])
    assert [dataset[index] for index in range(len(dataset))] == list(dataset) == [(0, "a"), (1, "b "), (2, "c")]
    assert [record.getMessage() for record in said.records] == ["Records: 3 texts, 3 empty ones dropped"]


def test_a_file_gives_the_records_that_its_texts_give(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    texts = ["a", "", "b", "  ", "c"]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"words": text}) + "\n" for text in texts))
    (tmp_path / "t.txt").write_text("\n\n".join(texts))
    from_lines = IndexedTextDataset.from_file(str(tmp_path / "t.jsonl"), text_column="words")
    from_pieces = IndexedTextDataset.from_file(str(tmp_path / "t.txt"), document_separator="\n\n")
    assert list(from_lines) == list(from_pieces) == list(IndexedTextDataset(texts))
    assert [record.getMessage() for record in said.records] == ["Records: 3 texts, 2 empty ones dropped"] * 3


def test_any_source_gives_records_and_says_what_it_dropped(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    source = source_of(["a", "", "b"], [" ", "c"])
    assert list(IndexedTextDataset.from_source(source)) == [(0, "a"), (1, "b"), (2, "c")]
    assert "2 empty ones dropped" in said.text
    part = training_part(source_of(numbered_documents(40), ["", ""]))
    assert [text for _, text in IndexedTextDataset.from_source(part)] == list(part.documents())
    assert "2 empty ones dropped" in said.records[-1].getMessage()
    said.clear()
    assert len(IndexedTextDataset.from_source(open_source(dataset_name="sample", max_documents=5))) == 5
    assert not said.records


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "there are no texts at all"),
        (["", " \n"], "all 2 texts are empty"),
        (["a", 7], "row 1 is of type `int` \\(7\\)"),
        (["a", "b", None], "row 2 is of type `NoneType`"),
        (["a", b"b"], "row 1 is of type `bytes`"),
        ("abc", "this is one `str`"),
    ],
)
def test_what_is_no_list_of_texts_is_refused(texts: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        IndexedTextDataset(texts)


@pytest.mark.parametrize("record_id", [2, -1])
def test_a_record_id_outside_the_dataset_is_refused_with_the_range(record_id: int) -> None:
    with pytest.raises(IndexError, match=f"Record ids are 0 to 1; {record_id} is outside"):
        IndexedTextDataset(["a", "b"])[record_id]
    examples = RecordExamples(IndexedTextDataset(["a", "b"]), TOKENIZER, 3)
    with pytest.raises(IndexError, match=f"Examples are 0 to 1; {record_id} is outside"):
        examples[record_id]


def test_long_records_are_cut_at_the_block_size_and_that_is_counted(said: pytest.LogCaptureFixture) -> None:
    examples = RecordExamples(IndexedTextDataset(["ab", "cdefg", "hijk"]), TOKENIZER, 5)
    rows = [example["input_ids"].tolist() for example in examples]
    assert rows == [[EOS, *b"ab", EOS], [EOS, *b"cdef"], [EOS, *b"hijk"]]
    assert [int(example["record_ids"]) for example in examples] == [0, 1, 2]
    examples.cuts.report()
    expected = "Records: 3, as 3 examples; 2 longer than 5 tokens: cut there, 3 tokens not used (`--split_long true`"
    assert said.records[-1].getMessage().startswith(expected)


def test_split_records_are_whole_and_keep_their_number(said: pytest.LogCaptureFixture) -> None:
    examples = RecordExamples(IndexedTextDataset(["ab", "cdefghi"]), TOKENIZER, 4, split_long=True)
    rows = [example["input_ids"].tolist() for example in examples]
    assert rows == [[EOS, *b"ab", EOS], [EOS, *b"cde"], [*b"efgh"], [*b"hi", EOS]]
    assert [int(example["record_ids"]) for example in examples] == examples.cuts.contents()[1].tolist() == [0, 1, 1, 1]
    examples.cuts.report()
    assert said.records[-1].getMessage() == "Records: 2, as 4 examples; 1 longer than 4 tokens: split"


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=9), block_size=st.integers(2, 17))
def test_every_token_of_a_split_record_is_a_target_once(lengths: list[int], block_size: int) -> None:
    ends = np.cumsum(lengths)
    cuts = RecordCuts(ends, block_size, split_long=True)
    located = [cuts.locate(index) for index in range(len(cuts))]
    targets = [token for _, begin, end in located for token in range(begin + 1, end)]
    assert targets == list(range(1, ends[-1] + 1)), "all but the eos before the first document"
    assert all(end - begin <= block_size for _, begin, end in located)
    assert [record_id for record_id, *_ in located] == cuts.contents()[1].tolist()


def test_max_tokens_keeps_the_first_whole_records() -> None:
    records = IndexedTextDataset(["abc", "de", "fgh"])
    assert len(RecordExamples(records, TOKENIZER, 9, max_tokens=7)) == 2
    assert len(RecordExamples(records, TOKENIZER, 9, max_tokens=6)) == 1
    with pytest.raises(ValueError, match=r"`max_tokens` is 3, and the first record has 4 tokens"):
        RecordExamples(records, TOKENIZER, 9, max_tokens=3)


@pytest.mark.parametrize("split_long", [False, True])
def test_a_prepared_corpus_gives_the_records_that_memory_gives(tmp_path: Path, split_long: bool) -> None:
    source = source_of(numbered_documents(40, length=13))
    store = StoreBlocks(
        write_store(source, TOKENIZER, tmp_path / "store", num_shards=1), 6, packing=False, split_long=split_long
    )
    records = IndexedTextDataset.from_source(training_part(source))
    examples = RecordExamples(records, TOKENIZER, 6, split_long=split_long)
    rows = sorted((e["input_ids"].tolist(), e["record_ids"].dim()) for e in pickle.loads(pickle.dumps(store)))
    assert rows == sorted((e["input_ids"].tolist(), 0) for e in examples)
    assert store.cuts.contents()[1].tolist() == [int(e["record_ids"]) for e in store]
    assert store.cuts.num_records == len(records)


def test_the_examples_of_any_dataset_can_be_numbered() -> None:
    rows = [{"input_ids": torch.tensor([number])} for number in (7, 8, 9)]
    examples = NumberedExamples(rows)
    assert [(index, int(row["input_ids"]), int(row["record_ids"])) for index, row in examples] == [
        (0, 7, 0),
        (1, 8, 1),
        (2, 9, 2),
    ]
    assert len(NumberedExamples(TensorDataset(torch.arange(5)))) == 5


def test_a_batch_tells_which_record_came_in_which_example() -> None:
    """A long record is several examples, and a packed row holds several records."""
    examples = [
        {"input_ids": torch.tensor([1]), "record_ids": torch.tensor(4)},
        {"input_ids": torch.tensor([2]), "record_ids": torch.tensor([9, 0, 5])},
    ]
    numbered = NumberedExamples(examples)
    batch = CollateNumbered(lambda rows: {"input_ids": torch.stack([row["input_ids"] for row in rows])})(
        [numbered[1], numbered[0]]
    )
    assert batch["input_ids"].tolist() == [[2], [1]]
    assert batch["record_ids"].tolist() == [9, 0, 5, 4]
    assert batch["example_ids"].tolist() == [1, 1, 1, 0]


def test_the_collator_gives_ids_masks_labels_and_records() -> None:
    batch = tiny_collator([(5, "abc"), (2, "é"), (9, "defghijk")], seq_len=6)
    short, tiny, cut = [257, *b"abc", 257], [257, 0xC3, 0xA9, 257], [257, *b"defgh"]
    assert batch["input_ids"].tolist() == [[*short, 256], [*tiny, 256, 256], cut]
    assert batch["labels"].tolist() == [[*short, -100], [*tiny, -100, -100], cut]
    assert batch["attention_mask"].tolist() == [[1] * 5 + [0], [1] * 4 + [0] * 2, [1] * 6]
    assert batch["record_ids"].tolist() == [5, 2, 9]
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())
    examples = RecordExamples(IndexedTextDataset(["abc", "d"]), TOKENIZER, 9)
    assert PadRecords(EOS)(list(examples))["record_ids"].tolist() == [0, 1]


def test_a_row_without_a_target_is_refused() -> None:
    with pytest.raises(ValueError, match="`seq_len` is 1"):
        tiny_collator([(0, "a")], seq_len=1)


def test_a_fingerprint_is_that_of_the_same_records_and_of_no_others() -> None:
    def fingerprint(*texts: str, **settings: object) -> str:
        return RecordExamples(IndexedTextDataset(texts), TOKENIZER, **{"block_size": 7, **settings}).fingerprint()

    there = fingerprint("one", "two", "many more")
    assert fingerprint("one", "two", "many more") == there
    others = [fingerprint("two", "one", "many more"), fingerprint("one", "two", "many more", split_long=True)]
    others += [fingerprint("one", "two", "many more", max_tokens=8), fingerprint("onet", "wo", "many more")]
    assert len({there, *others}) == 5
