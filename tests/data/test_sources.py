"""Local files: every format and compression gives the same documents, and what is wrong is named with its place."""

import bz2
import csv
import gzip
import json
import logging
import lzma
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tinylm.data import local_files
from tinylm.data.sources import open_source

DOCUMENTS = [
    'Ein Fluß.\n\nTwo paragraphs, "quoted".',
    "a\tb  c\r\nd",
    "日本語 🦦",
    "x" * 200_000,
    " leading, trailing \n",
]


def _zstd(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": _zstd,
}


def _write(path: Path, documents: list[str]) -> None:
    """Writes the documents in the format that the suffix names."""
    if path.suffix == ".txt":
        path.write_bytes("<|next|>".join(documents).encode())
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in documents))
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["id", "text"], *(["1", text] for text in documents)])
    elif path.suffix == ".parquet":
        pq.write_table(pa.table({"text": documents, "id": range(len(documents))}), path, row_group_size=2)
    elif path.suffix == ".xml":
        pages = "".join(f"<page><ns>0</ns><revision><text>{text}</text></revision></page>" for text in documents)
        path.write_text(f"<mediawiki>{pages}</mediawiki>", encoding="utf-8")


def _open(*paths: Path, **flags: str | int) -> list[str]:
    return list(open_source(data_files=[str(path) for path in paths], **flags).documents())


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".csv", ".parquet"])
def test_every_format_and_compression_gives_the_same_documents(tmp_path: Path, suffix: str, compression: str) -> None:
    plain = tmp_path / f"corpus{suffix}"
    _write(plain, DOCUMENTS)
    path = tmp_path / f"packed{suffix}{compression}"
    path.write_bytes(COMPRESSIONS[compression](plain.read_bytes()))
    source = open_source(data_files=[str(path)], document_separator="<|next|>")
    assert list(source.documents()) == DOCUMENTS
    [shard] = source.shards
    assert [list(shard.read(start, 3)) for start in range(3)] == [DOCUMENTS[start::3] for start in range(3)]
    assert list(shard.read(4, 1)) == DOCUMENTS[4:]
    assert list(shard.read(9, 2)) == []
    assert "5 documents" in source.description


@pytest.mark.parametrize("compression", ["", ".gz", ".bz2"])
def test_a_dump_is_read_cleaned_and_counted(tmp_path: Path, compression: str, caplog: pytest.LogCaptureFixture) -> None:
    plain = tmp_path / "wiki.xml"
    _write(plain, ["'''A''' [[b]]", "{{only a template}}", "#REDIRECT [[A]]", "c"])
    path = tmp_path / f"wiki{compression or '2'}.xml-p1p4{compression}"
    path.write_bytes(COMPRESSIONS[compression](plain.read_bytes()))
    with caplog.at_level(logging.INFO):
        assert _open(path) == ["A b", "c"]
    assert "3 articles; skipped 1 redirects and 0 pages" in caplog.text
    [shard] = open_source(data_files=[str(path)]).shards
    assert [list(shard.read(start, 2)) for start in range(2)] == [["A b", "c"], []], "rows are numbered as they lie"


def test_globs_and_folders_are_read_sorted_and_once(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.txt", "deep/c.jsonl"):
        _write(tmp_path / name, [name])
    (tmp_path / "notes.md").write_text("not read")
    assert _open(tmp_path) == ["a.txt", "b.txt", "deep/c.jsonl"]
    assert _open(tmp_path / "*") == ["a.txt", "b.txt"]
    assert _open(tmp_path / "**" / "*.jsonl", tmp_path / "b.txt", tmp_path / "*.txt") == [
        "deep/c.jsonl",
        "b.txt",
        "a.txt",
    ]


def test_a_text_file_is_one_document_unless_a_separator_is_given(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\n\n\n\ntwo\n\n  \n\nthree".encode())
    assert _open(path) == ["one\n\n\n\ntwo\n\n  \n\nthree"], "without the byte order mark"
    assert _open(path, document_separator="\n\n") == _open(path, document_separator=r"\n\n") == ["one", "two", "three"]


def test_a_separator_across_the_chunks_that_are_read_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("é<|é|>\n\n\n" * 9, encoding="utf-8")
    for chunk in (1, 2, 3, 5):
        monkeypatch.setattr("tinylm.data.text_streams.CHUNK", chunk)
        assert _open(path, document_separator="<|é|>") == ["é", *["\n\n\né"] * 8]
    monkeypatch.undo()
    assert _open(path, document_separator="<|é|>") == ["é", *["\n\n\né"] * 8]


def test_max_documents_keeps_the_first_in_one_shard_and_changes_the_fingerprint(tmp_path: Path) -> None:
    for name in "abc":
        _write(tmp_path / f"{name}.jsonl", [f"{name}{number}" for number in range(3)])
    whole = open_source(data_files=[str(tmp_path)])
    first = open_source(data_files=[str(tmp_path)], max_documents=4)
    assert list(first.documents()) == ["a0", "a1", "a2", "b0"]
    assert list(first.shards[0].read(1, 2)) == ["a1", "b0"]
    assert first.fingerprint != whole.fingerprint
    with pytest.raises(ValueError, match="at least 1, but is 0"):
        whole.take(0)


def test_the_fingerprint_changes_with_the_file_the_column_and_the_separator(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "other": "b"}\n')
    sources = [partial(open_source, data_files=[str(path)], **flags) for flags in _FLAGS]
    fingerprints = [source().fingerprint for source in sources]
    assert fingerprints == [source().fingerprint for source in sources]
    os.utime(path, ns=(1, 1))
    assert len({*fingerprints, sources[0]().fingerprint}) == 4


_FLAGS = [{}, {"text_column": "other"}, {"document_separator": "x"}]


def test_a_source_can_be_pickled_into_workers(tmp_path: Path) -> None:
    _write(tmp_path / "a.jsonl", DOCUMENTS)
    source = open_source(data_files=[str(tmp_path)], max_documents=4)
    assert list(pickle.loads(pickle.dumps(source)).documents()) == DOCUMENTS[:4]


def test_null_is_an_empty_document(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": null}\n\n{"text": "a"}\n')
    pq.write_table(pa.table({"text": [None, "b"]}), tmp_path / "b.parquet")
    assert _open(tmp_path) == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"good \xc3\xa9 \xff", r"a.txt` is not UTF-8: byte 0xff at offset 8"),
        ("a.txt", b"\xef\xbb\xbfgood \xff", r"byte 0xff at offset 8"),
        ("a.txt", b"cut \xe2\x82", r"byte 0xe2 at offset 4"),
        ("a.txt.gz", gzip.compress(b"good \xff", mtime=0), r"byte 0xff at offset 5"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"byte 0xff at offset 24"),
        ("a.csv", b"\xef\xbb\xbftext\na\n\xff\n", r"byte 0xff at offset 10"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a.jsonl`, line 2: not JSON"),
        ("a.json", b'[\n{"text": "a"}\n]', r"a.json`, line 1: not JSON"),
        ("a.json", b'[{"text": "a"}]', r"line 1: .* is not a JSON object"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": 7}\n', r"line 3: column `text` holds 7, which is not a string"),
        ("a.jsonl", b'{"text": "\\ud83d"}', r"line 1: column `text` holds half of a surrogate pair"),
        ("a.jsonl", b'{"content": "a"}', r"no column `text`; it has \['content'\]. Set `--text_column`"),
        ("a.csv", b"content,id\na,1\n", r"no column `text`; it has \['content', 'id'\]. Set `--text_column`"),
        ("a.csv", b"text,id\na,1,2\n", r"line 2: 3 fields, but the header has 2"),
        ("a.csv", b'text,id\n"a,1\n', r"a.csv`, line 2: not CSV"),
        ("a.txt", b"", r"no document in `.*a.txt`"),
        ("a.txt", b" \n\t\n", r"no document in"),
        ("a.csv", b"text\n", r"no document in"),
        ("a.txt.gz", b"", r"no document in"),
        ("a.txt.gz", gzip.compress(bytes(range(99)), mtime=0)[:-30], r"a.txt.gz` cannot be read: Compressed"),
        ("a.txt.gz", b"plain", r"a.txt.gz` cannot be read: Not a gzipped file"),
        ("a.txt.bz2", bz2.compress(b"text" * 99)[:-9], r"a.txt.bz2` cannot be read: Compressed file ended"),
        ("a.xml.bz2", b"BZh9 broken", r"a.xml.bz2` cannot be read: Invalid data stream"),
        ("a.txt.xz", lzma.compress(b"text" * 99)[:-9], r"a.txt.xz` cannot be read: Compressed file ended"),
        ("a.txt.zst", _zstd(b"text" * 99)[:-4], r"a.txt.zst` cannot be read"),
        ("a.txt.zst", b"plain text", r"a.txt.zst` cannot be read"),
        ("a.parquet", b"PAR1 broken", r"a.parquet` cannot be read"),
        ("a.parquet", b"", r"a.parquet` cannot be read"),
        ("a.xml", b"<mediawiki><page>", r"a.xml` is not a whole MediaWiki dump"),
        ("a.docx", b"text", r"an ending that is not known. Files must end in .txt, .jsonl"),
    ],
)
def test_a_file_that_is_wrong_is_an_error_at_opening(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        open_source(data_files=[str(path)])


def test_a_parquet_column_that_is_no_text_or_missing_is_an_error_at_opening(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"content": ["a"], "id": [7]}), path)
    with pytest.raises(ValueError, match=r"no column `text`; it has \['content', 'id'\]. Set `--text_column`"):
        open_source(data_files=[str(path)])
    with pytest.raises(ValueError, match="row 0: column `id` holds 7, which is not a string"):
        open_source(data_files=[str(path)], text_column="id")


def test_missing_files_and_folders_without_text_are_errors_that_say_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing.txt` does not exist. Set `--data_files`"):
        open_source(data_files=[str(tmp_path / "missing.txt")])
    (tmp_path / "notes.md").write_text("text")
    with pytest.raises(FileNotFoundError, match=r"The folder `.*` holds no file that ends in .txt, .jsonl"):
        open_source(data_files=[str(tmp_path)])
    with pytest.raises(FileNotFoundError, match=r"The glob `.*\*\.md` holds no file"):
        open_source(data_files=[str(tmp_path / "*.md")])


def test_one_empty_file_among_good_ones_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_text("b")
    assert _open(tmp_path) == ["b"]
    assert "a.txt` holds no document" in caplog.text


def test_of_big_files_only_the_beginning_is_read_at_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": 7}\n')
    monkeypatch.setattr(local_files, "CHECKED_BYTES", 10)
    source = open_source(data_files=[str(path)])
    with pytest.raises(ValueError, match="line 2: column `text` holds 7"):
        list(source.documents())


@pytest.mark.parametrize("flags", [{}, {"dataset_name": "sample", "data_files": ["a.txt"]}])
def test_exactly_one_source_must_be_named(flags: dict) -> None:
    with pytest.raises(ValueError, match="One source of text is needed"):
        open_source(**flags)


def test_an_empty_separator_is_an_error() -> None:
    with pytest.raises(ValueError, match="`--document_separator` is empty"):
        open_source(data_files=["a.txt"], document_separator="")
