import json
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tests.data.chats import answer, chat_tokenizer, question
from tinylm.data.chat import Examples, encode_examples
from tinylm.data.chat_encoder import ChatEncoder
from tinylm.data.conversations import ChatRows, open_rows
from tinylm.data.rows import PackedRows, PadExamples, StreamedExamples, best_fit_decreasing, join_rows

ENCODER = ChatEncoder(chat_tokenizer(), max_length=150)
END = ENCODER.tokenizer.eos_token_id


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write_chats(folder: Path, *shards: int) -> list[str]:
    """A file a shard, with so many conversations; the answers are numbered through, and of different lengths."""
    paths, first = [], 0
    for shard, num_rows in enumerate(shards):
        rows = [{"messages": [question("q"), answer(f"{n:03d}" * (1 + n % 5))]} for n in range(first, first + num_rows)]
        paths.append(str(folder / f"{shard}.jsonl"))
        Path(paths[-1]).write_text("".join(json.dumps(row) + "\n" for row in rows))
        first += num_rows
    return paths


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


# Streams.


def streamed(rows: ChatRows, **settings: object) -> StreamedExamples:
    return StreamedExamples(rows, ENCODER, **{"row_tokens": None, **settings})


def answers(stream: StreamedExamples, num_workers: int = 0) -> Iterator[list[str]]:
    """The answers in each row that a DataLoader gives."""
    for row in DataLoader(stream, batch_size=None, num_workers=num_workers):
        trained = row["labels"][row["labels"] != -100]
        yield ENCODER.tokenizer.decode(trained).split("<|im_end|>")[:-1]


@pytest.mark.parametrize(("shards", "num_workers"), [((5, 7, 3, 4), 2), ((9,), 0), ((4, 5, 6), 2), ((13,), 2)])
def test_ranks_and_workers_read_every_conversation_once(
    tmp_path: Path, shards: tuple[int, ...], num_workers: int
) -> None:
    rows = open_rows(data_files=write_chats(tmp_path, *shards), streaming=True)
    seen = []
    for rank in range(2):
        stream = streamed(rows, rank=rank, world_size=2, shuffle_window=3, row_tokens=300)
        seen.append([text for texts in answers(stream, num_workers) for text in texts])
    assert not set(seen[0]) & set(seen[1])
    assert sorted(text[:3] for text in seen[0] + seen[1]) == [f"{n:03d}" for n in range(sum(shards))]


def test_streamed_rows_hold_whole_examples_within_the_budget_and_the_last_one_is_not_lost(tmp_path: Path) -> None:
    rows = open_rows(data_files=write_chats(tmp_path, 7), streaming=True)
    singles, packed = list(streamed(rows)), list(streamed(rows, row_tokens=250))
    assert len(singles) == 7 > len(packed)
    assert torch.cat([row["input_ids"] for row in packed]).equal(torch.cat([row["input_ids"] for row in singles]))
    assert all(len(row["input_ids"]) <= 250 for row in packed)
    for row in packed:
        assert (row["labels"][row["position_ids"] == 0] == -100).all()
    with pytest.raises(ValueError, match=r"`max_length` 150 tokens; `row_tokens` is 149. Raise `--row_tokens`"):
        streamed(rows, row_tokens=149)


def test_a_streams_order_is_fixed_by_seed_and_epoch(tmp_path: Path) -> None:
    rows = open_rows(data_files=write_chats(tmp_path, 4, 9), streaming=True)
    stream = streamed(rows, shuffle_window=5)
    first = list(answers(stream))
    assert first == list(answers(stream)) == list(answers(pickle.loads(pickle.dumps(stream))))
    assert first != list(answers(streamed(rows, shuffle_window=5, seed=1)))
    assert list(answers(streamed(rows))) == [[text] for text in sorted(text for [text] in first)]
    stream.set_epoch(1)
    second = list(answers(stream))
    assert first != second and sorted(first) == sorted(second)


def test_readers_take_turns_at_the_shards(tmp_path: Path) -> None:
    stream = streamed(open_rows(data_files=write_chats(tmp_path, 3, 5), streaming=True), rank=0, world_size=2)
    assert len(list(stream)) == 3
    stream.set_epoch(1)
    assert len(list(stream)) == 5


def test_the_first_rows_of_a_stream_are_as_many_as_asked_for(tmp_path: Path) -> None:
    rows = open_rows(data_files=write_chats(tmp_path, 4, 4, 4), streaming=True, max_examples=6)
    seen = [text[:3] for rank in range(2) for [text] in answers(streamed(rows, rank=rank, world_size=2))]
    assert sorted(seen) == [f"{n:03d}" for n in range(6)]


def test_a_reader_says_what_became_of_its_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tinylm.data.rows")
    paths = write_chats(tmp_path, 2, 2)
    with open(paths[1], "a") as file:
        file.write('\n{"messages": []}\n' + json.dumps({"messages": [question("q" * 200), answer("a")]}) + "\n")
    rows = open_rows(data_files=paths, streaming=True)
    with pytest.raises(ValueError, match=r"^Row 4 of shard 1 of 2 local files \(.jsonl\): `messages` is a list"):
        list(streamed(rows))
    examples = list(streamed(rows, skip_bad_rows=True))
    num_tokens = sum(len(example["input_ids"]) for example in examples)
    num_targets = sum(int((example["labels"] != -100).sum()) for example in examples)
    assert caplog.messages == [
        f"Data reader 1 of 1, epoch 0 ended: 4 examples of 6 rows, {num_tokens} tokens, {num_targets} of them trained;"
        " 1 rows without a target dropped: the prompt leaves no room for an answer in 150 tokens; 1 bad rows skipped:"
        " row 4 of shard 1: `messages` is a list of messages, and here is []."
    ]
