"""Dumps as streams of articles."""

import bz2
import io
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sample import sample_dump_path
from tinylm.data.mediawiki import pages

_NAMESPACE = "http://www.mediawiki.org/xml/export-0.10/"


def _page(title: str, text: str, *, ns: int = 0, redirect: bool = False) -> str:
    mark = '<redirect title="x" />' if redirect else ""
    return f"<page><title>{title}</title><ns>{ns}</ns>{mark}<revision><text>{text}</text></revision></page>"


def _dump(*page_elements: str) -> bytes:
    return f'<mediawiki xmlns="{_NAMESPACE}"><siteinfo/>{"".join(page_elements)}</mediawiki>'.encode()


def _read(dump: bytes) -> tuple[list[str], Counter[str]]:
    counts: Counter[str] = Counter()
    return list(pages(io.BytesIO(dump), Path("d.xml"), counts)), counts


def test_articles_are_read_and_redirects_and_other_namespaces_counted() -> None:
    texts, counts = _read(
        _dump(
            _page("A", "one"), _page("B", "x", redirect=True), _page("C", "#redirect [[A]]"), _page("Talk:A", "x", ns=1)
        )
    )
    assert texts == ["one"]
    assert counts == {"article": 1, "redirect": 2, "other": 1}


def test_the_sample_has_106_articles_and_100_redirects() -> None:
    texts, counts = _read(bz2.decompress(sample_dump_path().read_bytes()))
    assert len(texts) == 106
    assert counts == {"article": 106, "redirect": 100}


def test_the_last_revision_counts() -> None:
    page = "<page><ns>0</ns><revision><text>old</text></revision><revision><text>new</text></revision></page>"
    assert _read(_dump(page))[0] == ["new"]


def test_memory_does_not_grow_with_the_dump() -> None:
    class Endless(io.RawIOBase):
        """A dump of 2,000 pages of 5 kB, made while it is read."""

        def __init__(self) -> None:
            self._parts: Iterator[bytes] = iter(
                [_dump()[:-12], *[_page("A", "x" * 5000).encode()] * 2000, b"</mediawiki>"]
            )

        def read(self, size: int = -1) -> bytes:
            return next(self._parts, b"")

    tracemalloc.start()
    assert sum(1 for _ in pages(Endless(), Path("d.xml"), Counter())) == 2000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000, "of 10 MB"


@pytest.mark.parametrize(
    ("dump", "message"),
    [
        (_dump(_page("A", "one"))[:-20], "`d.xml` is not a whole MediaWiki dump"),
        (b"<html></html>", "root element is `html`"),
        (b"no xml", "`d.xml` is not a whole MediaWiki dump"),
        (b"", "`d.xml` is not a whole MediaWiki dump"),
    ],
)
def test_what_is_no_whole_dump_is_an_error(dump: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _read(dump)
