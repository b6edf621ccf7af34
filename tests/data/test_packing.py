import logging
import pickle
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tests.data.tiny import EOS, numbered_documents, running_text, source_of, tokenizer_with_eos
from tests.evaluation.tiny import byte_tokenizer
from tinylm.data.documents import Shard, Source
from tinylm.data.order import usable_workers
from tinylm.data.packing import PackedStream, positions_in_documents
from tinylm.data.text_reader import TextReader

TOKENIZER = tokenizer_with_eos()


def stream_of(source: Source, block_size: int = 10, **settings: object) -> PackedStream:
    return PackedStream(source, TOKENIZER, block_size=block_size, **settings)


def rows(stream: PackedStream) -> list[list[int]]:
    """The blocks or records that a DataLoader gives."""
    return [example["input_ids"].tolist() for example in DataLoader(stream, batch_size=None)]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.text(st.characters(codec="ascii"), max_size=40), max_size=20), st.integers(1, 17))
def test_packing_keeps_the_order_and_loses_less_than_a_block(documents: list[str], block_size: int) -> None:
    source = source_of(documents)
    text = running_text(source.documents(), TOKENIZER)
    blocks = rows(stream_of(source, block_size))
    assert all(len(block) == block_size for block in blocks)
    packed = [token for block in blocks for token in block]
    assert packed == text[: len(packed)]
    assert 0 <= len(text) - len(packed) < block_size


def test_documents_shorter_than_a_block_are_not_thrown_away() -> None:
    """Case S5: per-batch packing keeps 620 of these 700 tokens."""
    documents = numbered_documents(100, length=6)  # 7 tokens with eos
    blocks = rows(stream_of(source_of(documents)))
    assert [token for block in blocks for token in block] == running_text(documents, TOKENIZER)[:700]
    assert len(blocks) == 70


def test_the_end_of_a_readers_epoch_is_counted_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tinylm")
    rows(stream_of(source_of(["a" * 16, "b" * 16])))
    [record] = caplog.records
    assert record.getMessage() == (
        "Data reader 1 of 1, epoch 0 ended: 2 documents, 34 tokens, 3 blocks of 10 tokens, 4 tokens left over."
    )


@pytest.mark.parametrize(("num_shards", "workers", "num_readers"), [(4, 2, 4), (1, 2, 2), (3, 2, 2), (5, 2, 4)])
def test_ranks_and_workers_read_every_document_once(
    num_shards: int, workers: int, num_readers: int, capfd: pytest.CaptureFixture
) -> None:
    """Case D11. A document fills a block, so that a block's text is its record id."""
    shards = [numbered_documents(7 + n, first=100 * n) for n in range(num_shards)]
    workers = usable_workers(num_shards, world_size=2, requested=workers)
    assert 2 * workers == num_readers
    seen = []
    for rank in range(2):
        stream = stream_of(source_of(*shards), rank=rank, world_size=2, num_workers=workers, shuffle_window=3)
        seen.append([TOKENIZER.decode(row[:-1]) for row in rows(stream)])
    assert not set(seen[0]) & set(seen[1])
    assert sorted(seen[0] + seen[1]) == sorted(text for shard in shards for text in shard)
    assert "huggingface/tokenizers" not in capfd.readouterr().err, "forked workers start quietly"


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.text(st.characters(codec="ascii"), max_size=30), max_size=9), min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(0, 6),
)
def test_each_reader_loses_less_than_a_block(shards: list[list[str]], num_readers: int, window: int) -> None:
    source = source_of(*shards)
    tokens = []
    for rank in range(num_readers):
        reader = TextReader(stream_of(source, shuffle_window=window, rank=rank, world_size=num_readers), rank)
        blocks = [token for block in reader.examples() for token in block]
        assert 0 <= reader.num_tokens - len(blocks) < 10
        tokens += [*blocks, *reader.rest]
    assert sorted(tokens) == sorted(running_text(source.documents(), TOKENIZER))


def test_one_shard_and_eight_workers_give_every_document_once() -> None:
    """Case S7."""
    documents = numbered_documents(23)
    workers = usable_workers(1, world_size=1, requested=8)
    assert [
        TOKENIZER.decode(row[:-1]) for row in rows(stream_of(source_of(documents), num_workers=workers))
    ] == documents


def test_the_order_is_fixed_by_seed_and_epoch() -> None:
    source = source_of(numbered_documents(40), numbered_documents(40, first=40))

    def order(seed: int, epoch: int, num_workers: int = 0) -> list[list[int]]:
        stream = stream_of(source, seed=seed, shuffle_window=16, num_workers=num_workers)
        stream.set_epoch(epoch)
        return rows(stream)

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(1, 0)
    assert order(0, 0) != order(0, 1)
    assert sorted(order(0, 0)) == sorted(order(1, 1)) == sorted(order(0, 2, num_workers=2))


def test_shards_change_hands_with_every_epoch() -> None:
    stream = stream_of(source_of(numbered_documents(5), numbered_documents(9)), world_size=2)
    shares = []
    for epoch in range(2):
        stream.set_epoch(epoch)
        shares.append([TextReader(stream, rank).parts for rank in range(2)])
    assert shares[0] == shares[1][::-1] != shares[1]


def test_readers_do_not_share_their_randomness() -> None:
    stream = stream_of(source_of(*[numbered_documents(40)] * 2), shuffle_window=16, world_size=2)
    first, second = ([block.tolist() for block in TextReader(stream, number).examples()] for number in range(2))
    assert sorted(first) == sorted(second)
    assert first != second


def test_the_readers_of_a_rank_take_turns_and_workers_change_no_order() -> None:
    source = source_of(numbered_documents(3), numbered_documents(5, first=100))
    stream = stream_of(source, num_workers=2)
    read = [int(TOKENIZER.decode(row[:-1])) for row in rows(stream)]
    assert read == [0, 100, 1, 101, 2, 102, 103, 104]
    stream.num_workers = 0  # the same readers, in this process
    assert [int(TOKENIZER.decode(row[:-1])) for row in rows(stream)] == read


@pytest.mark.parametrize(("world_size", "expected"), [(1, 100), (2, 50), (3, 30)])
def test_the_bound_on_tokens_is_shared_among_readers(world_size: int, expected: int) -> None:
    source = source_of(*[numbered_documents(40, length=12, first=100 * n) for n in range(3)])
    for rank in range(world_size):
        blocks = rows(stream_of(source, max_tokens=105, rank=rank, world_size=world_size))
        assert sum(map(len, blocks)) == expected
    with_window = [rows(stream_of(source, max_tokens=105, shuffle_window=30, seed=seed)) for seed in (0, 1)]
    tokens = [sorted(token for row in blocks for token in row) for blocks in with_window]
    assert with_window[0] != with_window[1]
    assert abs(len(tokens[0]) - 100) < 10, "the same corpus, in another order"


def test_a_bound_below_one_block_a_reader_is_refused() -> None:
    with pytest.raises(ValueError, match=r"each of the 4 data reader.*10 tokens, but is 39.*`--max_tokens`"):
        stream_of(source_of(["a"]), max_tokens=39, world_size=4)


def test_positions_restart_behind_every_eos() -> None:
    """Case S6, the data's side."""
    [block, *_] = stream_of(source_of(["abc", "de", "", "fghijklmnop"]), document_mask=True)
    assert block["input_ids"].tolist()[3::3] == [EOS, EOS, block["input_ids"][9]]
    assert block["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2]
    [plain, *_] = stream_of(source_of(["abc", "de", "", "fghijklmnop"]))
    assert "position_ids" not in plain


@given(st.lists(st.sampled_from([1, 2, EOS]), min_size=1, max_size=30))
def test_positions_count_the_tokens_since_the_last_eos(ids: list[int]) -> None:
    expected, count = [], 0
    for token in ids:
        expected.append(count)
        count = 0 if token == EOS else count + 1
    assert positions_in_documents(np.array(ids), EOS).tolist() == expected


def test_without_packing_a_document_is_a_record_and_the_cut_ones_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tinylm")
    documents = ["abc", "d" * 8, "e" * 9, "f" * 50]
    records = rows(stream_of(source_of(documents), packing=False))
    assert [len(record) for record in records] == [5, 10, 10, 10]
    assert {record[0] for record in records} == {EOS}, "as before every document that is scored"
    assert [record[-1] == EOS for record in records] == [True, True, False, False]
    [record] = caplog.records
    assert "4 records, 2 of them cut at 10 tokens" in record.getMessage()


def test_reserved_strings_in_a_document_are_ordinary_text() -> None:
    [record] = rows(stream_of(source_of(["a</s>b"]), packing=False))
    assert record == [EOS, *(TOKENIZER(c)["input_ids"][0] for c in "a</s>b"), EOS]
    assert TOKENIZER("</s>")["input_ids"] == [EOS], "the tokenizer's own habit is another one"


def test_documents_longer_than_the_models_context_are_no_reason_for_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("transformers")
    caplog.set_level(logging.WARNING, logger="transformers")  # another test may have left it quieter
    logger.addHandler(caplog.handler)  # it does not propagate
    try:
        list(PackedStream(source_of(["a" * 100]), tokenizer_with_eos(model_max_length=16), block_size=10))
        assert "sequence length" not in caplog.text
        tokenizer_with_eos(model_max_length=16)("a" * 100)
        assert "sequence length" in caplog.text
    finally:
        logger.removeHandler(caplog.handler)


def test_a_tokenizer_without_eos_is_refused() -> None:
    with pytest.raises(ValueError, match=r"eos token.*has none.*`--tokenizer_name_or_path`"):
        PackedStream(source_of(["a"]), byte_tokenizer(), block_size=10)


def _broken(start: int, step: int) -> Iterator[str]:
    yield "a" * 20
    raise ValueError("`broken.txt` is not UTF-8 at byte 7.")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_is_wrong_with_a_source_reaches_the_user(num_workers: int) -> None:
    source = Source("broken", "0", (Shard("broken", _broken),))
    with pytest.raises(ValueError, match=r"^`broken.txt` is not UTF-8 at byte 7.$"):
        rows(stream_of(source, num_workers=num_workers))


def test_blocks_are_int64_tensors() -> None:
    [block] = stream_of(source_of(["abcdefghi"]))
    assert block["input_ids"].dtype == torch.int64
    assert block["input_ids"].shape == (10,)


def test_a_stream_travels_to_workers_by_pickle() -> None:
    stream = stream_of(source_of(numbered_documents(20)), shuffle_window=5, seed=3)
    stream.set_epoch(2)
    assert rows(pickle.loads(pickle.dumps(stream))) == rows(stream)
