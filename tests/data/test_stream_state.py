"""Where a stream is, as a checkpoint keeps it: what comes behind it is what the undisturbed stream would have given."""

import json
import logging
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from time import process_time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tests.data.going_on import gone_on_with
from tests.data.tiny import numbered_documents, source_of, tokenizer_with_eos
from tinylm.data import encoding, hub, text_reader
from tinylm.data.documents import Shard, Source, from_texts
from tinylm.data.packing import PackedStream
from tinylm.data.sources import open_source
from tinylm.data.splits import training_part
from tinylm.data.stream_files import load_stream_state, save_stream_state

TOKENIZER = tokenizer_with_eos()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few documents at a time are tokenised, so that streams stop in the middle of a shard."""
    monkeypatch.setattr(encoding, "_CHARACTERS_AT_ONCE", 60)


def stream_of(source: Source, **settings: object) -> PackedStream:
    return PackedStream(source, TOKENIZER, **{"block_size": 10, **settings})


def ids_of(rows: Iterator[dict]) -> list[int]:
    """The numbers of documents that fill a block each."""
    return [int(TOKENIZER.decode(row["input_ids"][:-1])) for row in rows]


def tokens_of(rows: Iterator[dict]) -> list[list[int]]:
    return [row["input_ids"].tolist() for row in rows]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("window", [0, 20])
def test_a_stream_that_is_stopped_twice_gives_every_row_once_and_in_order(
    window: int, num_workers: int, tmp_path: Path
) -> None:
    """Cases S1 and S2: 30 rows, 20 more, the rest; the worker has read ahead meanwhile."""
    build = partial(stream_of, source_of(numbered_documents(100)), shuffle_window=window, num_workers=num_workers)
    undisturbed = ids_of(build())
    assert sorted(undisturbed) == list(range(100))
    assert (undisturbed == sorted(undisturbed)) == (window == 0)
    first, second, third = build(), build(), build()
    seen = ids_of(islice(first, 30))
    seen += ids_of(islice(gone_on_with(first, second, tmp_path), 20))
    assert seen == undisturbed[:50]
    assert seen + ids_of(gone_on_with(second, third, tmp_path)) == undisturbed


@settings(max_examples=60, deadline=None)
@given(
    shards=st.lists(st.lists(st.text(st.characters(codec="ascii"), max_size=35), max_size=9), min_size=1, max_size=4),
    stop=st.integers(0, 40),
    options=st.fixed_dictionaries(
        {
            "num_workers": st.integers(0, 3),
            "shuffle_window": st.integers(0, 6),
            "packing": st.booleans(),
            "max_tokens": st.sampled_from([None, 90, 200]),
        }
    ),
)
def test_any_stream_goes_on_where_it_was_stopped(
    shards: list[list[str]], stop: int, options: dict[str, int | bool | None], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Empty rows, several readers in one process, records, a bound on the tokens."""

    def build() -> PackedStream:
        stream = stream_of(source_of(*shards), seed=3, **options)
        stream.num_workers = 0  # its readers stay as many
        stream.set_epoch(2)
        return stream

    undisturbed, stopped = tokens_of(build()), build()
    seen = tokens_of(islice(stopped, stop))
    assert seen + tokens_of(gone_on_with(stopped, build(), tmp_path_factory.mktemp("checkpoint"))) == undisturbed


@pytest.mark.parametrize("num_workers", [0, 2])
def test_nothing_is_tokenised_again(num_workers: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = source_of(numbered_documents(3000), numbered_documents(3000, first=3000))
    build = partial(stream_of, source, shuffle_window=50, num_workers=num_workers)
    first, second = build(), build()
    seen = set(ids_of(islice(first, 1000)))
    encoded: list[int] = []
    real = text_reader.encode

    def noted(tokenizer: object, texts: Iterator[str]) -> Iterator[tuple[list[str], list[list[int]]]]:
        for batch, token_lists in real(tokenizer, texts):
            encoded.extend(map(int, batch))
            yield batch, token_lists

    monkeypatch.setattr(text_reader, "encode", noted)
    second.num_workers = 0  # in this process, to be counted
    rest = ids_of(gone_on_with(first, second, tmp_path))
    assert sorted([*seen, *rest]) == list(range(6000))
    assert not seen & set(encoded)
    in_memory = set(rest) - set(encoded)
    assert 50 * second.num_readers <= len(in_memory) <= 60 * second.num_readers, "the windows and the rest of a chunk"


def states_of(ranks: int, source: Source, folder: Path, taken: int, **options: int) -> tuple[list[int], list[int]]:
    """Saves where `ranks` ranks are after so many rows each; what they saw, and what they would have seen then."""
    seen, rest = [], []
    for rank in range(ranks):
        stream = stream_of(source, rank=rank, world_size=ranks, shuffle_window=4, **options)
        rows = iter(stream)
        seen += ids_of(islice(rows, taken))
        save_stream_state(stream.state(), folder, rank)
        rest += ids_of(rows)
    return seen, rest


@pytest.mark.parametrize(("before", "workers", "now"), [(2, 1, 1), (1, 2, 2), (2, 2, 1), (2, 2, 4), (4, 1, 2)])
def test_other_ranks_share_the_readers_without_losing_or_repeating_a_row(
    before: int, workers: int, now: int, tmp_path: Path
) -> None:
    """Case S4."""
    source = source_of(*[numbered_documents(23 + number, first=100 * number) for number in range(5)])
    seen, rest = states_of(before, source, tmp_path, 11, num_workers=workers)
    read = []
    for rank in range(now):
        stream = stream_of(source, rank=rank, world_size=now, shuffle_window=4)
        stream.restore(load_stream_state(tmp_path, rank, now))
        mine = ids_of(stream)
        assert mine
        read += mine
    assert sorted(read) == sorted(rest)
    assert sorted(seen + read) == sorted(map(int, source.documents()))


def test_ranks_that_cannot_share_the_readers_are_refused(tmp_path: Path) -> None:
    """Case S4."""
    source = source_of(*[numbered_documents(20)] * 6)
    states_of(3, source, tmp_path, 2)
    stream = stream_of(source, world_size=2, shuffle_window=4)
    with pytest.raises(ValueError, match=r"There were 3, which 2 ranks cannot share equally.*`--prepared_corpus`"):
        stream.restore(load_stream_state(tmp_path, 0, 2))


def test_positions_that_another_machine_has_written_are_missed(tmp_path: Path) -> None:
    states_of(3, source_of(*[numbered_documents(20)] * 6), tmp_path, 2, num_workers=2)
    load_stream_state(tmp_path, 1, 3), load_stream_state(tmp_path, 0, 1)
    for rank, missing in ((2, r"4 of 6 readers; \[2, 5\]"), (1, r"2 of 6 readers; \[1, 2, 4, 5\]")):
        (tmp_path / f"data-rank-{rank}.safetensors").unlink()
        with pytest.raises(FileNotFoundError, match=rf"{missing} are missing.*all machines share"):
            load_stream_state(tmp_path, 0, 3)
    with pytest.raises(FileNotFoundError, match=r"2 of 6 readers; \[1, 2, 4, 5\] are missing"):
        load_stream_state(tmp_path, 0, 1)


def test_a_stream_goes_on_only_as_it_was_begun(tmp_path: Path) -> None:
    states_of(1, source_of(numbered_documents(20)), tmp_path, 2)
    state = load_stream_state(tmp_path, 0, 1)
    with pytest.raises(ValueError, match=r"its `block_size` was 10 and is 11 now"):
        stream_of(source_of(numbered_documents(20)), shuffle_window=4, block_size=11).restore(state)
    with pytest.raises(ValueError, match=r"its `shards` was 1 and is 2 now"):
        stream_of(source_of(["a"], ["b"]), shuffle_window=4).restore(state)
    other_tokenizer = tokenizer_with_eos()
    other_tokenizer.add_tokens("more")
    with pytest.raises(ValueError, match=r"its `tokenizer` was"):
        PackedStream(source_of(["a"]), other_tokenizer, block_size=10, shuffle_window=4).restore(state)
    stream_of(source_of(numbered_documents(20)), shuffle_window=4).restore(state)


def test_a_stream_goes_on_with_files_that_were_moved_and_with_no_other_ones(tmp_path: Path) -> None:
    def source(folder: str, *texts: str) -> Source:
        path = tmp_path / folder / "rows.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return training_part(open_source(data_files=[str(path)]))

    texts = numbered_documents(60)
    stream = stream_of(source("there", *texts), shuffle_window=4)
    undisturbed = tokens_of(stream_of(source("there", *texts), shuffle_window=4))
    seen = tokens_of(islice(stream, 7))
    moved = stream_of(source("elsewhere", *texts), shuffle_window=4)
    assert seen + tokens_of(gone_on_with(stream, moved, tmp_path / "checkpoint")) == undisturbed
    before, first = stream.data["fingerprint"], "another first"[:9]
    for other in ([*texts, "more"], [first, *texts[1:]]):
        changed = stream_of(source("changed", *other), shuffle_window=4)
        with pytest.raises(ValueError, match=rf"{before}\), and now there is .*{changed.data['fingerprint']}\): names"):
            changed.restore(stream.state())


def test_a_checkpoint_without_a_position_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"does not say how far.*data-rank-0.safetensors"):
        load_stream_state(tmp_path, 0, 1)


def test_a_position_in_the_words_of_another_version_is_refused(tmp_path: Path) -> None:
    header = {"epoch": 0, "num_readers": 1, "turn": 0, "settings": {}, "readers": {}}
    save_file({}, tmp_path / "data-rank-0.safetensors", metadata={"state": json.dumps(header)})
    with pytest.raises(ValueError, match=r"data-rank-0.safetensors` .* another version of tinylm"):
        load_stream_state(tmp_path, 0, 1)


# Rows as positions

ROWS = ["one", "two\nlines", " \n", "three", "", "four"]


def write_rows(path: Path) -> None:
    if path.suffix == ".jsonl":
        lines = [json.dumps({"text": row}) for row in ROWS]
        path.write_text("\ufeff\n" + "\n \n".join(lines) + "\n", encoding="utf-8")
    elif path.suffix == ".csv":
        path.write_text("text\n" + "".join(f'"{row}"\n' for row in ROWS))
    elif path.suffix == ".parquet":
        pq.write_table(pa.table({"text": ROWS}), path, row_group_size=2)
    elif path.suffix == ".txt":
        path.write_text("|".join(ROWS))
    else:
        pages = "".join(f"<page><ns>0</ns><revision><text>{row}</text></revision></page>" for row in ROWS)
        path.write_text(f"<mediawiki>{pages}</mediawiki>")


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet", ".txt", ".xml"])
def test_every_row_is_a_position_that_can_be_read_from(suffix: str, tmp_path: Path) -> None:
    write_rows(tmp_path / f"rows{suffix}")
    source = open_source(data_files=[str(tmp_path)], document_separator="|")
    [shard] = source.shards
    rows = list(shard.rows(0, 1))
    assert [" ".join(row.split()) for row in rows] == ["one", "two lines", "", "three", "", "four"]
    assert list(shard.read(0, 1)) == [row for row in rows if row]
    for start in range(8):
        assert list(shard.rows(start, 1)) == rows[start:]
        assert list(shard.rows(start, 3)) == rows[start::3]


def test_held_out_documents_are_positions_too() -> None:
    source = source_of(numbered_documents(200))
    [whole], [part] = source.shards, training_part(source).shards
    rows = list(part.rows(0, 1))
    assert len(rows) == 200
    assert 10 < rows.count("") < 30
    assert [row or text for row, text in zip(rows, whole.rows(0, 1), strict=True)] == numbered_documents(200)
    assert list(part.rows(150, 7)) == rows[150::7]


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_going_on_behind_a_million_rows_reads_no_text_before_them(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Prints what the first example costs: half a second of CPU for the million rows, less for parquet."""
    monkeypatch.undo()  # chunks as they are
    texts = [f"{number:07d} some words of a row, always the same" for number in range(1_010_000)]
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), path, row_group_size=100_000)
    else:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    stream = stream_of(open_source(data_files=[str(path)]), block_size=64, shuffle_window=100)
    next(iter(stream))
    state, encoded = stream.state(), []
    real = text_reader.encode
    monkeypatch.setattr(text_reader, "encode", lambda tokenizer, texts: real(tokenizer, noted(texts, encoded)))
    for position in (1_000, 1_000_000):
        state.readers[0].numbers["num_rows"] = position
        state.readers[0].tokens.update(rest=[np.empty(0, dtype=np.int32)], window=[])
        stream.restore(state)
        began = process_time()
        next(iter(stream))
        seconds = process_time() - began
        assert encoded[0].startswith(f"{position:07d} ")
        assert len(encoded) < 10_000
        encoded.clear()
        with capsys.disabled():
            print(f"\n{suffix}: first example after {seconds:.2f} s of CPU, going on at row {position:,}")


def noted(texts: Iterator[str], into: list[str]) -> Iterator[str]:
    for text in texts:
        into.append(text)
        yield text


# The network


def failing_at(row: int, times: int) -> Callable[[int, int], Iterator[str]]:
    """The rows of a shard; the connection is lost as often at one of them."""
    left = [times]

    def rows(start: int, step: int) -> Iterator[str]:
        for number in range(start, 20, step):
            if number == row and left[0]:
                left[0] -= 1
                raise TimeoutError("no answer")
            yield f"row {number}"

    return rows


def test_a_row_that_the_network_loses_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(hub, "sleep", slept.append)
    caplog.set_level(logging.WARNING, logger="tinylm")
    tries = len(hub.WAITS)
    assert list(hub.patient(failing_at(9, tries), 1, 2, "Shard 3")) == [f"row {number}" for number in range(1, 20, 2)]
    assert slept == list(hub.WAITS)
    assert slept == sorted(slept)
    assert caplog.messages[0] == "Shard 3, row 9: no answer. Trying again in 5 s."
    given = hub.patient(failing_at(9, tries + 1), 1, 2, "Shard 3")
    assert list(islice(given, 4)) == ["row 1", "row 3", "row 5", "row 7"]
    with pytest.raises(ConnectionError, match=r"Shard 3 cannot be read from row 9 on, in 5 tries: no answer"):
        next(given)


@pytest.mark.parametrize("kind", [ValueError, TypeError, KeyError, AttributeError])
def test_a_row_that_is_wrong_is_not_asked_for_again(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one that this code stumbles over: no network that comes back would mend it."""

    def rows(start: int, step: int) -> Iterator[str]:
        yield "row"
        raise kind("not a string")

    monkeypatch.setattr(hub, "sleep", lambda seconds: pytest.fail("it waits for the network"))
    with pytest.raises(kind, match="not a string"):
        list(hub.patient(rows, 0, 1, "Shard 3"))


def test_what_a_worker_cannot_read_is_told_in_its_own_words(tmp_path: Path) -> None:
    def rows(start: int, step: int) -> Iterator[str]:
        yield from from_texts(tuple(numbered_documents(30)), start, step)
        raise ConnectionError("The Hub is gone.")

    stream = stream_of(Source("breaks", "0", (Shard("0", rows),)), num_workers=1)
    read = iter(stream)
    assert ids_of(islice(read, 28)) == list(range(28))  # the other two were in one chunk with what is broken
    with pytest.raises(ConnectionError, match=r"^The Hub is gone.$"):
        next(read)
    mended = stream_of(Source("mended", "0", source_of(numbered_documents(40)).shards))
    assert ids_of(gone_on_with(stream, mended, tmp_path)) == list(range(28, 40))
