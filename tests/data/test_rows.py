import pickle
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.chats import chat_tokenizer, write_chats
from tinylm.data.chat import Examples, encode_examples
from tinylm.data.chat_encoder import ChatEncoder
from tinylm.data.conversations import open_rows
from tinylm.data.rows import PackedRows, PadExamples, best_fit_decreasing, join_rows

ENCODER = ChatEncoder(chat_tokenizer(), max_length=150)
END = ENCODER.tokenizer.eos_token_id


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def examples(tmp_path: Path) -> Examples:
    return encode_examples(open_rows(data_files=write_chats(tmp_path, 11)), ENCODER)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 37), min_size=1, max_size=60), st.integers(37, 101))
def test_every_example_is_in_one_row_and_no_row_is_over_its_budget(lengths: list[int], row_tokens: int) -> None:
    rows = best_fit_decreasing(np.array(lengths), row_tokens)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    totals = sorted(sum(lengths[index] for index in row) for row in rows)
    assert totals[-1] <= row_tokens
    assert len(rows) == 1 or totals[0] + totals[1] > row_tokens, "two rows would fit into one"
    assert rows == best_fit_decreasing(np.array(lengths), row_tokens)


def test_a_row_takes_the_example_that_fits_it_best() -> None:
    assert best_fit_decreasing(np.array([3, 6, 7, 4, 2]), 10) == [[0, 2], [1, 3], [4]]


def test_a_packed_row_holds_whole_examples_that_do_not_predict_each_other(examples: Examples) -> None:
    rows = PackedRows(examples, row_tokens=300)
    assert len(rows) < len(examples)
    for number, row in enumerate(rows):
        record_ids = rows.record_ids_of(number).tolist()
        assert row["record_ids"].tolist() == record_ids
        parts = [examples[index] for index in record_ids]
        assert torch.equal(row["input_ids"], torch.cat([part["input_ids"] for part in parts]))
        assert row["position_ids"].tolist() == [place for part in parts for place in range(len(part["labels"]))]
        starts = row["position_ids"] == 0
        assert starts.sum() == len(parts) and (row["labels"][starts] == -100).all()
        assert torch.equal(row["labels"], torch.cat([part["labels"] for part in parts]))
        assert all(tensor.dtype == torch.int64 for tensor in row.values())
    assert sorted(index for number in range(len(rows)) for index in rows.record_ids_of(number)) == list(range(11))
    numbers, record_ids = rows.contents()
    assert [record_ids[numbers == number].tolist() for number in range(len(rows))] == [
        rows.record_ids_of(number).tolist() for number in range(len(rows))
    ]
    assert torch.equal(pickle.loads(pickle.dumps(rows))[0]["input_ids"], rows[0]["input_ids"])


def test_a_fingerprint_is_that_of_the_same_rows_elsewhere_and_of_no_others(tmp_path: Path) -> None:
    def fingerprint(folder: str, row_tokens: int = 150, **change: str) -> str:
        (tmp_path / folder).mkdir()
        [path] = write_chats(tmp_path / folder, 11)
        for before, after in change.items():
            Path(path).write_text(Path(path).read_text().replace(before.removeprefix("n"), after))
        return PackedRows(encode_examples(open_rows(data_files=[path]), ENCODER), row_tokens).fingerprint()

    there = fingerprint("there")
    assert fingerprint("elsewhere") == there
    assert fingerprint("changed", n004="040") != there
    assert fingerprint("packed otherwise", row_tokens=160) != there


def test_the_first_label_of_an_example_is_no_target_even_where_the_example_says_so() -> None:
    class Learned:
        lengths = np.array([3, 2])

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            ids = torch.arange(1, 1 + int(self.lengths[index]))
            return {"input_ids": ids, "labels": ids}

    [row] = PackedRows(Learned(), row_tokens=5)
    assert row["labels"].tolist() == [-100, 2, 3, -100, 2]


def test_an_example_longer_than_a_row_is_refused_with_both_numbers(examples: Examples) -> None:
    longest = examples.lengths.max()
    assert len(PackedRows(examples, row_tokens=longest)) == 11
    with pytest.raises(ValueError, match=f"the longest has {longest} tokens, and `row_tokens` is {longest - 1}. Raise"):
        PackedRows(examples, row_tokens=longest - 1)
    with pytest.raises(IndexError, match="Rows are 0 to 10; -1 is outside"):
        PackedRows(examples, row_tokens=longest)[-1]


def test_rows_of_a_batch_are_joined_without_a_mask(examples: Examples) -> None:
    rows = PackedRows(examples, row_tokens=300)
    batch = join_rows([rows[0], rows[1]])
    assert batch.keys() == {"input_ids", "labels", "position_ids", "record_ids"}
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(batch[name], torch.cat([rows[0][name], rows[1][name]])[None])
    assert batch["record_ids"].tolist() == [*rows.record_ids_of(0), *rows.record_ids_of(1)]


def test_padding_is_masked_by_length_and_the_eos_that_equals_it_is_trained(examples: Examples) -> None:
    """Case T3."""
    collate = PadExamples.for_tokenizer(ENCODER.tokenizer)
    assert collate.pad_token_id == END
    short, long = examples[0], examples[4]
    batch = collate([short, long])
    length, width = len(short["labels"]), len(long["labels"])
    assert length < width and batch.keys() == {"input_ids", "attention_mask", "labels"}
    assert batch["input_ids"][0].tolist() == [*short["input_ids"], *[END] * (width - length)]
    assert batch["labels"][0].tolist() == [*short["labels"], *[-100] * (width - length)]
    assert batch["attention_mask"].sum(1).tolist() == [length, width]
    assert (batch["labels"] == END).sum(1).tolist() == [1, 1]
    assert torch.equal(batch["labels"][1], long["labels"])
