import dataclasses
import json
import logging
import pickle
import resource
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.data.breaking import until_repaired
from tests.data.tiny import EOS, numbered_documents, running_text, source_of, tokenizer_with_eos
from tests.evaluation.tiny import byte_tokenizer
from tinylm.data.documents import Shard, Source, from_texts
from tinylm.data.packing import PackedStream
from tinylm.data.prepare import write_store
from tinylm.data.splits import training_part, validation_part
from tinylm.data.token_store import StoreBlocks, TokenStore, token_dtype

TOKENIZER = tokenizer_with_eos()
TEXTS = [f"{text} ümläut {'x' * (int(text) % 7)}" for text in numbered_documents(60, length=3)]
SOURCE = source_of(TEXTS[:25], TEXTS[25:27], TEXTS[27:])


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def rows(examples: StoreBlocks | PackedStream) -> list[list[int]]:
    return [example["input_ids"].tolist() for example in examples]


@pytest.mark.parametrize("settings", [{}, {"packing": False}, {"document_mask": True}, {"max_tokens": 700}])
def test_a_store_gives_what_the_stream_gives(tmp_path: Path, settings: dict) -> None:
    store = write_store(SOURCE, TOKENIZER, tmp_path / "store", num_shards=3)
    blocks = StoreBlocks(store, 11, **settings)
    stream = list(PackedStream(training_part(SOURCE), TOKENIZER, block_size=11, **settings))
    assert len(blocks) == len(stream) > 50
    for block, streamed in zip(blocks, stream, strict=True):
        assert block.keys() - {"record_ids"} == streamed.keys(), "a stream's records have no number"
        assert all(torch.equal(block[name], streamed[name]) for name in streamed)


def test_parts_of_a_shard_hold_every_document_once(tmp_path: Path) -> None:
    source = source_of(TEXTS)
    store = write_store(source, TOKENIZER, tmp_path / "store")
    assert len(store.parts) == 4
    records = StoreBlocks(store, 100, packing=False)
    assert sorted(TOKENIZER.decode(row[1:-1]) for row in rows(records)) == sorted(training_part(source).documents())


@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_validation_documents_come_in_the_sources_order(tmp_path: Path, num_shards: int) -> None:
    source = source_of(TEXTS)
    store = write_store(source, TOKENIZER, tmp_path / "store", num_shards=num_shards)
    held_out = list(validation_part(source).documents())
    assert len(held_out) > 3
    expected = [(TOKENIZER(text)["input_ids"], len(text.encode())) for text in held_out]
    assert list(store.validation_documents()) == expected


def test_the_manifest_counts_what_is_there(tmp_path: Path) -> None:
    store = write_store(SOURCE, TOKENIZER, tmp_path / "store")
    manifest = json.loads((tmp_path / "store" / "manifest.json").read_text())
    for split, part in (("train", training_part(SOURCE)), ("validation", validation_part(SOURCE))):
        texts = list(part.documents())
        expected = {
            "documents": len(texts),
            "tokens": len(running_text(texts, TOKENIZER)),
            "bytes": sum(len(text.encode()) for text in texts),
            "max_id": EOS,
        }
        assert store.counts[split] == manifest["splits"][split] == expected
    assert manifest["source"] == {"description": SOURCE.description, "fingerprint": SOURCE.fingerprint}
    assert not (tmp_path / "store" / "unfinished.json").exists()


def test_a_source_of_few_documents_is_split_like_the_stream(tmp_path: Path) -> None:
    source = source_of(["First paragraph. " * 20 + "\n\n" + "second paragraph", "\n\n".join(["third"] * 9)])
    store = write_store(source, TOKENIZER, tmp_path / "store", max_tokens=90)
    text = next(training_part(source).documents())
    assert rows(StoreBlocks(store, 90)) == [[*TOKENIZER(text)["input_ids"][:89], TOKENIZER.eos_token_id]]
    assert store.counts["train"]["bytes"] == 89, "a document that is cut counts the bytes of what is left"
    held_out = [(TOKENIZER(text)["input_ids"], len(text.encode())) for text in validation_part(source).documents()]
    assert list(store.validation_documents()) == held_out


def test_the_bound_on_tokens_takes_an_even_share_of_every_part(tmp_path: Path) -> None:
    store = write_store(SOURCE, TOKENIZER, tmp_path / "store", num_shards=6, max_tokens=203)
    assert [len(tokens) for tokens in store.tokens("train")] == [33, 33, 18, 19, 33, 33]
    with pytest.raises(ValueError, match=r"6 part\(s\), but is 5.*`--max_tokens`"):
        write_store(SOURCE, TOKENIZER, tmp_path / "other", num_shards=6, max_tokens=5)
    assert not (tmp_path / "other").exists()


def test_the_tokenizer_is_in_the_store(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "tokenizer.model").write_bytes(b"sentencepiece")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    store = write_store(SOURCE, tokenizer, tmp_path / "store")
    shutil.rmtree(tmp_path / "tokenizer")
    reloaded = AutoTokenizer.from_pretrained(store.tokenizer_path)
    assert reloaded(TEXTS[0])["input_ids"] == TOKENIZER(TEXTS[0])["input_ids"]
    assert (store.tokenizer_path / "tokenizer.model").read_bytes() == b"sentencepiece"


def test_large_vocabularies_take_four_bytes_a_token(tmp_path: Path) -> None:
    assert token_dtype(2**16).itemsize == 2
    assert token_dtype(2**16 + 1).itemsize == 4
    pieces = [*(f"piece {n}" for n in range(2**16)), "</s>"]
    words = models.WordLevel({piece: n for n, piece in enumerate(pieces)}, unk_token="piece 7")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="</s>")
    assert tokenizer.eos_token_id == 2**16
    store = write_store(SOURCE, tokenizer, tmp_path / "store")
    assert rows(StoreBlocks(store, 100, packing=False))[0] == [2**16, 7, 2**16]


# Restarting and reusing


def test_processes_write_the_same_store_and_a_failed_run_goes_on(tmp_path: Path) -> None:
    flag, folder = tmp_path / "broken", tmp_path / "store"
    shards = [Shard(str(n), partial(from_texts, tuple(TEXTS[20 * n : 20 * n + 20]))) for n in range(2)]
    shards.append(Shard("2", partial(until_repaired, tuple(TEXTS[40:]), flag)))
    source = Source("three shards", "3", tuple(shards))

    flag.touch()
    with pytest.raises(ValueError, match=r"^`broken.txt` is not UTF-8 at byte 7. Convert it.$"):
        write_store(source, TOKENIZER, folder, num_proc=2, num_shards=3)
    assert not (folder / "manifest.json").exists()
    assert not (folder / "part-00002").exists()
    with pytest.raises(FileNotFoundError, match="unfinished"):
        TokenStore.open(folder)
    flag.unlink()

    finished = {path: path.stat().st_mtime_ns for path in folder.glob("part-*[0-9]/*")}
    assert finished, "one of the parts that are fine was done before the third broke"
    write_store(source, TOKENIZER, folder, num_shards=3)
    assert {path: path.stat().st_mtime_ns for path in finished} == finished, "finished parts are kept"
    write_store(source, TOKENIZER, tmp_path / "at once", num_shards=3)
    assert files_of(folder) == files_of(tmp_path / "at once")


def test_a_finished_store_is_reused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tinylm")
    write_store(SOURCE, TOKENIZER, tmp_path / "store")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*")}
    write_store(SOURCE, TOKENIZER, tmp_path / "store", num_proc=2)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*")} == before
    assert "is prepared already" in caplog.records[-1].getMessage()


@pytest.mark.parametrize("finished", [True, False])
def test_a_store_of_something_else_is_refused_with_both_values(tmp_path: Path, finished: bool) -> None:
    folder = tmp_path / "store"
    write_store(SOURCE, TOKENIZER, folder)
    if not finished:
        (folder / "manifest.json").rename(folder / "unfinished.json")
    before = files_of(folder)
    other_source = dataclasses.replace(SOURCE, fingerprint="abc", description="another")
    with pytest.raises(ValueError, match=f"fingerprint {SOURCE.fingerprint}, asked is .*fingerprint abc"):
        write_store(other_source, TOKENIZER, folder)
    other_tokenizer = byte_tokenizer(merges=[("a", "b")], eos_token="</s>")
    with pytest.raises(ValueError, match=r"vocab_size 257 .*asked is .*vocab_size 258 .*`--output_dir`"):
        write_store(SOURCE, other_tokenizer, folder)
    with pytest.raises(ValueError, match="max_tokens is None, asked is 500"):
        write_store(SOURCE, TOKENIZER, folder, max_tokens=500)
    assert files_of(folder) == before


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="is not empty and holds no prepared corpus"):
        write_store(SOURCE, TOKENIZER, tmp_path)
    assert files_of(tmp_path) == {"thesis.txt": b"years of work"}


def test_a_disk_that_takes_no_more_leaves_nothing_half_written(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    source = source_of(TEXTS, [text * 300 for text in TEXTS])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # the second part needs more than that
    try:
        with pytest.raises(ValueError, match=r"store` cannot be written: File too large\. .*`--output_dir`"):
            write_store(source, TOKENIZER, folder, num_shards=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (folder / "part-00000").exists()
    assert sorted(path.name for path in folder.iterdir()) == ["part-00000", "tokenizer", "unfinished.json"]
    (folder / "part-00001-1.partial").mkdir()  # as a killed process leaves it
    write_store(source, TOKENIZER, folder, num_shards=2)
    assert not list(folder.glob("*.partial"))


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ValueError, match=r"file/store` cannot be written: Not a directory"):
        write_store(SOURCE, TOKENIZER, tmp_path / "file" / "store")


# Opening


def test_a_model_with_a_smaller_vocabulary_is_refused(tmp_path: Path) -> None:
    """Case S9."""
    store = write_store(SOURCE, TOKENIZER, tmp_path / "store")
    store.check_vocabulary(257)
    with pytest.raises(ValueError, match=r"vocabulary of 257 tokens.*`vocab_size` 256"):
        store.check_vocabulary(256)


def test_an_id_beyond_the_vocabulary_is_refused_when_the_store_is_opened(tmp_path: Path) -> None:
    """Case S9."""
    store = write_store(SOURCE, TOKENIZER, tmp_path / "store")
    tokens = np.memmap(tmp_path / "store" / "part-00001" / "train.tokens", "<u2", mode="r+")
    tokens[3] = 300
    tokens.flush()
    with pytest.raises(ValueError, match="token id 300, its vocabulary has 257 tokens"):
        TokenStore.open(store.folder)
    with pytest.raises(ValueError, match="token id 300, its vocabulary has 257 tokens"):
        rows(StoreBlocks(store, 11))  # as for an id farther behind than what opening looks at


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "part-00000" / "train.tokens").write_bytes(b"abcd"), "and holds 4"),
        (lambda folder: (folder / "part-00000" / "train.tokens").unlink(), "and holds 0"),
        (lambda folder: (folder / "manifest.json").write_text('{"format": 1,'), "manifest.json` is damaged"),
        (lambda folder: (folder / "manifest.json").write_text('{"format": 99}'), "has format 99.*reads format 1"),
    ],
)
def test_damage_is_found_when_a_store_is_opened(tmp_path: Path, damage, message: str) -> None:
    write_store(SOURCE, TOKENIZER, tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message):
        TokenStore.open(tmp_path)


def test_a_folder_without_a_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere`: `manifest.json` is missing.*prepare_corpus.py"):
        TokenStore.open(tmp_path / "nowhere")


# Blocks


def test_blocks_cross_the_edges_of_files(tmp_path: Path) -> None:
    store = write_store(SOURCE, TOKENIZER, tmp_path / "store", num_shards=9)
    running = np.concatenate(store.tokens("train")).tolist()
    assert min(len(tokens) for tokens in store.tokens("train")) < 37
    blocks = StoreBlocks(store, 37)
    assert rows(blocks) == [running[37 * n : 37 * n + 37] for n in range(len(running) // 37)]
    with pytest.raises(IndexError):
        blocks[len(blocks)]


def test_blocks_travel_to_workers_without_the_tokens(tmp_path: Path) -> None:
    blocks = StoreBlocks(write_store(SOURCE, TOKENIZER, tmp_path / "store"), 11)
    rows(blocks)
    pickled = pickle.dumps(blocks)
    assert blocks.store.tokens("train")[0].tobytes() not in pickled
    assert rows(pickle.loads(pickled)) == rows(blocks)


def test_a_store_of_less_than_a_block_is_refused(tmp_path: Path) -> None:
    store = write_store(SOURCE, TOKENIZER, tmp_path / "store")
    with pytest.raises(ValueError, match=r"no example: 50 tokens, and `block_size` is 51.*`--block_size`"):
        StoreBlocks(store, 51, max_tokens=50)


def test_a_fingerprint_is_that_of_the_same_store_elsewhere_and_of_no_other(tmp_path: Path) -> None:
    store = write_store(SOURCE, TOKENIZER, tmp_path / "store")
    shutil.copytree(tmp_path / "store", tmp_path / "moved")
    other = write_store(source_of([text[::-1] for text in TEXTS]), TOKENIZER, tmp_path / "other")
    there = StoreBlocks(store, 11).fingerprint()
    assert StoreBlocks(TokenStore.open(tmp_path / "moved"), 11).fingerprint() == there
    others = [StoreBlocks(other, 11), StoreBlocks(store, 12), StoreBlocks(store, 11, max_tokens=700)]
    assert there not in [blocks.fingerprint() for blocks in others]
