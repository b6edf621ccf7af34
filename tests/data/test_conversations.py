import csv
import gzip
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.chats import answer, question
from tinylm.data import hub
from tinylm.data.chat_records import MAX_BYTES, BrokenRuleError, Conversation, conversation_of
from tinylm.data.conversations import ChatRows, open_rows

TURNS = [question("Why?"), answer("Because.")]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes rows as JSON lines and gives the path."""

    def write_lines(rows: Sequence[object], name: str = "rows.jsonl") -> str:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(tmp_path / name)

    return write_lines


def only(rows: ChatRows) -> Conversation:
    [conversation] = rows.conversations()
    return conversation


@pytest.mark.parametrize(
    ("row", "shape", "messages"),
    [
        ({"messages": TURNS, "id": 7}, "messages", TURNS),
        (
            {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]},
            "conversations",
            TURNS,
        ),
        ({"prompt": "Why?", "completion": "Because."}, "prompt_completion", TURNS),
        ({"instruction": "Why?", "output": "Because."}, "instruction", TURNS),
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, "instruction", [question("Add.\n\n1 2"), answer("3")]),
        ({"prompt": "x", "messages": TURNS, "text": "y"}, "messages", TURNS),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_the_shape_is_seen_from_the_columns_and_said(
    row: dict,
    shape: str,
    messages: list,
    streaming: bool,
    write: Callable[..., str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="tinylm")
    rows = open_rows(data_files=[write([row])], streaming=streaming)
    assert (rows.shape, rows.is_stream, only(rows).messages) == (shape, streaming, messages)
    [record] = caplog.records
    size = "streamed (1 shards)" if streaming else "1 rows"
    assert record.getMessage() == (
        f"Conversations: {rows.description}, {size}, read as `{shape}` (`--data_shape` sets it)"
    )


def test_texts_are_read_as_they_are(write: Callable[..., str]) -> None:
    rows = open_rows(data_files=[write([{"text": " a\n"}])])
    assert only(rows) == Conversation([], text=" a\n")


def test_prompt_and_completion_may_be_messages_and_only_the_completion_is_learned(write: Callable[..., str]) -> None:
    row = {"prompt": [*TURNS, question("And?")], "completion": [answer("So.")]}
    assert only(open_rows(data_files=[write([row])])) == Conversation(
        [*TURNS, question("And?"), answer("So.")], num_context=3
    )


def test_what_follows_the_last_answer_is_left_out() -> None:
    assert conversation_of({"messages": [*TURNS, question("And?")]}, "messages") == Conversation(TURNS)


def test_a_flag_sets_the_shape(write: Callable[..., str]) -> None:
    path = write([{"messages": TURNS, "text": "y"}])
    assert only(open_rows(data_files=[path], shape="text")).text == "y"
    with pytest.raises(ValueError, match=r"does not have the columns of the shape `instruction`; it has \['messages'"):
        open_rows(data_files=[path], shape="instruction")
    with pytest.raises(ValueError, match=r"`data_shape` is one of messages, .*, not `chat`. Set `--data_shape`"):
        open_rows(data_files=[path], shape="chat")


def test_a_source_of_no_shape_shows_its_columns_and_the_four_shapes(write: Callable[..., str]) -> None:
    path = write([{"query": "a"}, {"reply": "b"}])
    with pytest.raises(ValueError) as error:
        open_rows(data_files=[path])
    assert f"`{path}` does not have the columns of any of the four shapes; it has ['query', 'reply']." in str(
        error.value
    )
    for columns in ("`messages`", "`prompt` and `completion`", "`instruction` and `output`", "`text`"):
        assert columns in str(error.value)


def test_every_format_gives_the_same_conversations(write: Callable[..., str], tmp_path: Path) -> None:
    rows = [{"prompt": "1", "completion": ""}, {"prompt": 'a, "b"\nc', "completion": "NA"}]
    paths = [write(rows), write(rows, "lines.json")]
    (tmp_path / "array.json").write_text(json.dumps(rows, indent=1))
    with gzip.open(tmp_path / "zipped.jsonl.gz", "wt") as file:
        file.write(Path(paths[0]).read_text())
    with open(tmp_path / "rows.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "completion"])
        writer.writeheader()
        writer.writerows(rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    paths += [str(tmp_path / name) for name in ("array.json", "zipped.jsonl.gz", "rows.csv", "rows.parquet")]
    for path in paths:
        for streaming in (False, True):
            opened = open_rows(data_files=[path], streaming=streaming)
            assert only_second(opened).messages == [question('a, "b"\nc'), answer("NA")], path
            with pytest.raises(BrokenRuleError, match="an answer is not empty"):
                list(opened.conversations())


def only_second(rows: ChatRows) -> Conversation:
    """The second row: the first has an empty answer."""
    _, row = rows.rows
    return conversation_of(row, rows.shape)


def test_several_files_make_one_set_and_the_first_rows_of_it_can_be_taken(write: Callable[..., str]) -> None:
    paths = [write([{"text": f"{name}{row}"} for row in range(3)], f"{name}.jsonl") for name in "ab"]
    for streaming in (False, True):
        rows = open_rows(data_files=paths, streaming=streaming, max_examples=4)
        assert [conversation.text for conversation in rows.conversations()] == ["a0", "a1", "a2", "b0"]
    assert open_rows(data_files=paths).rows["row_number"][:] == [1, 2, 3, 4, 5, 6]


def test_empty_lines_and_line_separators_within_a_text_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\ufeff{"text": "a\u2028b"}\r\n\n  \n{"text": "c"}', encoding="utf-8")
    texts = [conversation.text for conversation in open_rows(data_files=[str(tmp_path / "a.jsonl")]).conversations()]
    assert texts == ["a\u2028b", "c"]


@pytest.mark.parametrize(
    ("messages", "rule"),
    [
        ([question("q"), answer(" \n")], r"an answer is not empty \(message 2\), and here is ' \\n'"),
        ([question("q"), {"content": "b"}], r"the role of message 2 is system, user or assistant, and here is None"),
        ([question("q"), {"role": "tool", "content": "b"}], r"the role of message 2 .* and here is 'tool'"),
        ([question("q"), {"role": ["user"], "content": "b"}], r"the role of message 2 .* and here is \['user'\]"),
        (
            [question("q"), question("r"), answer("a")],
            "take turns, the user first, and here is 'user, user, assistant'",
        ),
        ([answer("a"), question("r"), answer("a")], "take turns, the user first"),
        ([question("q"), {"role": "assistant", "content": 7}], "`content of message 2` is a string, and here is 7"),
        ([question("q"), {"role": "assistant"}], "`content of message 2` is a string, and here is None"),
        ([question("q" * MAX_BYTES), answer("a")], "`content of message 1` has less than 1,000,000 bytes"),
        ([question("q"), answer("é" * (MAX_BYTES // 2))], "`content of message 2` has less than 1,000,000 bytes"),
        ([question("q"), answer("\ud83d")], r"can be written as UTF-8, and here is .*ud83d"),
        ([*TURNS, {"role": "system", "content": "s"}], "a system message is the first, and here is 'one as message 3'"),
        ([question("q")], "a conversation has an answer of the assistant, and here is 'user'"),
        ([], r"`messages` is a list of messages, and here is \[\]"),
        ("x", "`messages` is a list of messages, and here is 'x'"),
        (["x"], "message 1 has a `role` and a `content`, and here is 'x'"),
        (None, r"a row has a `messages`, and here is \['id'\]"),
    ],
)
def test_a_row_that_is_no_conversation_shows_the_rule_and_the_value(messages: object, rule: str) -> None:
    """Case T8; the row's number is told by `encode_examples`."""
    with pytest.raises(BrokenRuleError, match=rule):
        conversation_of({"messages": messages, "id": 3}, "messages")


@pytest.mark.parametrize(
    ("row", "shape", "rule"),
    [
        ({"prompt": "a", "completion": 3}, "prompt_completion", "`completion` is a list of messages, and here is 3"),
        ({"prompt": "a", "completion": [question("b")]}, "prompt_completion", "take turns"),
        ({"instruction": "a", "input": 3, "output": "b"}, "instruction", "`input` is a string, and here is 3"),
        ({"instruction": "a", "output": ""}, "instruction", "an answer is not empty"),
        ({"text": " "}, "text", "a text holds more than whitespace"),
        ({"json_line": "nonsense"}, "text", r"a line is one JSON object \(.*\), and here is 'nonsense'"),
        ({"json_line": "[1]"}, "text", r"a line is one JSON object, and here is \[1\]"),
        ({"json_line": "[" * 100_000}, "text", r"a line is one JSON object \("),
    ],
)
def test_the_other_shapes_have_rules_too(row: dict, shape: str, rule: str) -> None:
    with pytest.raises(BrokenRuleError, match=rule) as error:
        conversation_of(row, shape)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, r"One source of conversations .*`--dataset_name` \(which is None\) or `--data_files`"),
        ({"dataset_name": "a", "data_files": ["b"]}, "One source of conversations"),
        ({"data_files": ["/nowhere.jsonl"]}, "`/nowhere.jsonl` does not exist"),
        ({"data_files": ["rows.jsonl"], "max_examples": 0}, "`max_examples` is at least 1, but is 0"),
    ],
)
def test_flags_that_name_no_source_are_refused(flags: dict, message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        open_rows(**flags)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "\xff"}\n', r"cannot be read \('utf-8' codec can't decode byte 0xff"),
        ("a.parquet", b"PAR1", r"a.parquet` cannot be read \("),
        ("a.csv", b'text,b\n1,2,3,4\n"x', r"a.csv` cannot be read \(Error tokenizing data"),
        ("a.json", b'[{"text": "a"}, ', r"a.json` begins like a JSON array and is none \("),
        ("a.jsonl", b"nonsense\n", r"does not have the columns of any of the four shapes; it has \[\]"),
        ("a.txt", b"text", r"one format, jsonl, json, parquet or csv; .* are of .txt"),
    ],
)
def test_a_broken_file_is_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        open_rows(data_files=[str(tmp_path / name)])


def test_a_dataset_of_the_hub_is_opened_with_its_columns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """There is no network in tests: a local parquet file stands in for the Hub's."""
    pq.write_table(pa.Table.from_pylist([{"messages": TURNS, "row_number": 9}] * 3), tmp_path / "a.parquet")

    def load(name: str, config: str, *, split: str, streaming: bool) -> datasets.Dataset | datasets.IterableDataset:
        files = [str(tmp_path / "a.parquet")]
        return datasets.load_dataset("parquet", data_files=files, split=split, streaming=streaming)

    monkeypatch.setattr(hub, "load_dataset", load)
    monkeypatch.setattr(hub, "_check_hub_has", lambda name, without_network: None)
    for streaming in (False, True):
        rows = open_rows(dataset_name="someone/chats", dataset_config_name="all", streaming=streaming)
        assert rows.description == "`someone/chats, all, split train`"
        assert [conversation.messages for conversation in rows.conversations()] == [TURNS] * 3


@pytest.mark.parametrize("streaming", [False, True])
def test_without_the_hub_the_error_names_the_local_ways(streaming: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases E4 and E8."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"cannot be reached .*someone/chats.* `--data_files` .* `--config \S+yaml`"):
        open_rows(dataset_name="someone/chats", streaming=streaming)
