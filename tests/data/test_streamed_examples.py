"""Streams of conversations: every one read once, in a fixed order, and gone on with where they were stopped."""

import json
import logging
import pickle
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import datasets
import pytest
import torch
from torch import Tensor

from tests.data.chats import answer, chat_tokenizer, question, write_chats
from tests.data.going_on import gone_on_with
from tinylm.data import hub, streamed_examples
from tinylm.data.chat_encoder import ChatEncoder
from tinylm.data.conversations import ChatRows, one_by_one, open_rows
from tinylm.data.streamed_examples import StreamedExamples

ENCODER = ChatEncoder(chat_tokenizer(), max_length=150)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def streamed(rows: ChatRows, **settings: object) -> StreamedExamples:
    return StreamedExamples(rows, ENCODER, **{"row_tokens": None, **settings})


def answers(rows: Iterator[dict[str, Tensor]]) -> Iterator[list[str]]:
    """The answers in each row."""
    for row in rows:
        trained = row["labels"][row["labels"] != -100]
        yield ENCODER.tokenizer.decode(trained).split("<|im_end|>")[:-1]


@pytest.mark.parametrize(("shards", "num_workers"), [((5, 7, 3, 4), 2), ((9,), 0), ((4, 5, 6), 2), ((13,), 2)])
def test_ranks_and_workers_read_every_conversation_once(
    tmp_path: Path, shards: tuple[int, ...], num_workers: int
) -> None:
    rows = open_rows(data_files=write_chats(tmp_path, *shards), streaming=True)
    seen = []
    for rank in range(2):
        stream = streamed(rows, rank=rank, world_size=2, num_workers=num_workers, shuffle_window=3, row_tokens=300)
        seen.append([text for texts in answers(stream) for text in texts])
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
    caplog.set_level(logging.INFO, logger="tinylm.data.streamed_examples")
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


# Going on.


def as_lists(rows: Iterator[dict[str, Tensor]]) -> list[dict[str, list[int]]]:
    return [{name: ids.tolist() for name, ids in row.items()} for row in rows]


@pytest.mark.parametrize(
    ("window", "row_tokens", "num_workers"), [(0, None, 0), (5, 300, 0), (5, 300, 2), (40, 300, 0), (3, None, 3)]
)
def test_a_stream_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int, row_tokens: int | None, num_workers: int
) -> None:
    """Cases S1 and S2, at every row; of several readers in one process, so that this takes no minute."""
    monkeypatch.setattr(streamed_examples, "_ROWS_AT_ONCE", 2)
    paths = write_chats(tmp_path, 6, 1, 9, 4)
    Path(paths[2]).write_text("\n" + Path(paths[2]).read_text() + '{"messages": []}\n')
    rows = open_rows(data_files=paths, streaming=True)

    def build() -> StreamedExamples:
        settings = {"shuffle_window": window, "row_tokens": row_tokens, "num_workers": num_workers, "seed": 3}
        stream = streamed(rows, skip_bad_rows=True, **settings)
        stream.num_workers = 0  # its readers stay as many
        stream.set_epoch(1)
        return stream

    undisturbed = as_lists(build())
    assert len(undisturbed) > 8
    for stop in range(len(undisturbed) + 1):
        stopped, successor = build(), build()
        seen = as_lists(islice(stopped, stop))
        rest = as_lists(gone_on_with(stopped, successor, tmp_path / "checkpoint"))
        assert seen + rest == undisturbed, f"stopped behind row {stop}"
    counted = [reader.counts for reader in successor._readers]
    assert sum(each.num_bad for each in counted) == 1 and sum(each.num_examples for each in counted) == 20


def test_workers_change_nothing_and_may_be_others_when_a_stream_goes_on(tmp_path: Path) -> None:
    rows = open_rows(data_files=write_chats(tmp_path, 25, 30), streaming=True)
    stream, alone = (streamed(rows, num_workers=2, shuffle_window=4, row_tokens=300) for _ in range(2))
    alone.num_workers = 0
    undisturbed = as_lists(alone)
    seen = as_lists(islice(stream, 9))
    assert seen == undisturbed[:9]
    successor = streamed(rows, num_workers=0, shuffle_window=4, row_tokens=300)
    assert seen + as_lists(gone_on_with(stream, successor, tmp_path / "checkpoint")) == undisturbed


def test_a_row_that_is_at_fault_comes_behind_those_before_it(tmp_path: Path) -> None:
    [path] = write_chats(tmp_path, 5)
    Path(path).write_text(Path(path).read_text() + '{"messages": []}\n')
    rows = iter(streamed(open_rows(data_files=[path], streaming=True)))
    assert len(list(islice(rows, 5))) == 5
    with pytest.raises(ValueError, match=r"^Row 6 of shard 0 of"):
        next(rows)


def test_rows_of_a_stream_are_found_by_their_number(tmp_path: Path) -> None:
    rows = open_rows(data_files=write_chats(tmp_path, 600), streaming=True).rows
    every = list(one_by_one(rows))
    assert len(every) == 600
    for start, step in ((0, 1), (3, 1), (255, 1), (256, 1), (513, 7), (5, 300), (1, 511), (600, 1)):
        assert list(one_by_one(rows, start, step)) == every[start::step]


def test_a_stream_goes_on_only_over_the_same_conversations_encoded_in_the_same_way(tmp_path: Path) -> None:
    def rows(folder: str, count: int, text: str = "q") -> ChatRows:
        (tmp_path / folder).mkdir()
        [path] = write_chats(tmp_path / folder, count)
        Path(path).write_text(Path(path).read_text().replace('"q"', f'"{text}"'))
        return open_rows(data_files=[path], streaming=True)

    state = streamed(rows("there", 7)).state()
    streamed(rows("moved", 7)).restore(state)
    for other in (rows("longer", 8), rows("another", 7, text="p")):
        with pytest.raises(ValueError, match=rf"{state.data['fingerprint']}\), and now there is .*the same data"):
            streamed(other).restore(state)
    with pytest.raises(ValueError, match=r"its `skip_bad_rows` was False and is True now\. Set it back"):
        streamed(rows("skipping", 7), skip_bad_rows=True).restore(state)
    longer = StreamedExamples(rows("wide", 7), ChatEncoder(chat_tokenizer(), max_length=160), row_tokens=None)
    with pytest.raises(ValueError, match="its `max_length` was 150 and is 160 now"):
        longer.restore(state)


def test_a_row_that_the_network_loses_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(hub, "sleep", slept.append)
    real, left = streamed_examples.one_by_one, [3]

    def failing(rows: object, start: int = 0, step: int = 1) -> Iterator[dict[str, object]]:
        for row in real(rows, start, step):
            if "004" in row["json_line"] and left[0]:
                left[0] -= 1
                raise TimeoutError("no answer")
            yield row

    monkeypatch.setattr(streamed_examples, "one_by_one", failing)
    rows = open_rows(data_files=write_chats(tmp_path, 7), streaming=True)
    with pytest.raises(TimeoutError, match="no answer"):
        list(streamed(rows))
    seen = [text[:3] for [text] in answers(streamed(replace(rows, is_remote=True)))]
    assert seen == [f"{n:03d}" for n in range(7)]
    assert slept == list(hub.WAITS[:2]), "one of the three failures was that of the local file"
