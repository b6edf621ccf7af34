"""The real Wikipedia excerpt: what cleaning leaves, and how the clean text is kept."""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tinylm.data import sample
from tinylm.data.sources import Source, open_source
from tinylm.data.splits import training_part, validation_part


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder that is empty at first: the dump is cleaned once in this file, in about 4 s."""
    folder = tmp_path_factory.mktemp("cache") / "new"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINYLM_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def excerpt(cache: Path) -> Source:
    return open_source(dataset_name="sample")


def test_106_articles_come_out_without_markup(excerpt: Source) -> None:
    articles = list(excerpt.documents())
    assert len(articles) == 106
    left = {token: sum(text.count(token) for text in articles) for token in ("{{", "}}", "[[", "]]", "<ref", "</ref")}
    assert set(left.values()) == {0}, left
    patterns = (
        r"\|\s*thumb\b|\b\d+px\b",
        r"\A\s|\s\Z",
        r"\n{3}",
        r"(?m)^- *$",
        r"''",
        r"\(\s*[,;]",
        r"&nbsp;",
        r"\0|\x02",
    )
    assert not [(pattern, text[:40]) for pattern in patterns for text in articles if re.search(pattern, text)]


def test_the_articles_keep_their_prose(excerpt: Source) -> None:
    articles = list(excerpt.documents())
    assert articles[0].startswith("Anarchism is a political philosophy that advocates self-governed societies")
    assert "\n\nEtymology and terminology\n\n" in articles[0]
    assert 2_900_000 < sum(len(text.encode()) for text in articles) < 3_100_000


def test_the_description_counts_and_both_parts_cover_the_excerpt(excerpt: Source) -> None:
    assert excerpt.description == "`sample`, 106 articles of English Wikipedia, 2.94 MB (CC BY-SA)"
    parts = [list(part(excerpt).documents()) for part in (training_part, validation_part)]
    assert sum(map(len, parts)) == 106
    assert 5 <= len(parts[1]) <= 20


def test_the_clean_text_is_kept_and_read_again(excerpt: Source, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [path.suffix for path in cache.iterdir()] == [".parquet"], "nothing half-written lies beside"
    monkeypatch.setattr("tinylm.data.file_formats.clean", None)  # would fail if anything were cleaned again
    again = open_source(dataset_name="sample")
    assert list(again.documents()) == list(excerpt.documents())
    assert again.fingerprint == excerpt.fingerprint


def test_where_nothing_can_be_written_the_text_is_held_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way of a folder")
    monkeypatch.setenv("TINYLM_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("tinylm.data.file_formats.clean", lambda wikitext: wikitext[:100])
    assert len(list(open_source(dataset_name="sample").documents())) == 106


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(table: object, path: str) -> None:
        Path(path).write_text("half")
        raise OSError("No space left on device")

    monkeypatch.setenv("TINYLM_CACHE", str(tmp_path))
    monkeypatch.setattr("tinylm.data.file_formats.clean", lambda wikitext: wikitext[:100])
    monkeypatch.setattr(sample.pa.parquet, "write_table", full)
    assert len(list(open_source(dataset_name="sample").documents())) == 106
    assert list(tmp_path.iterdir()) == []


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINYLM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert sample._cache_folder() == Path("/x/tinylm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert sample._cache_folder() == Path.home() / ".cache" / "tinylm"


def test_without_the_extra_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "find_spec", lambda name: None if name == "gensim" else find_spec(name))
    with pytest.raises(FileNotFoundError, match=r"pip install 'tinylm\[sample\]'"):
        open_source(dataset_name="sample")
