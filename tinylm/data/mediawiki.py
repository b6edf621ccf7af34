"""MediaWiki dumps: pages as a stream, in constant memory.

Format: https://www.mediawiki.org/wiki/Help:Export. A page with several revisions counts with its last one.
"""

from collections.abc import Iterator
from typing import BinaryIO
from xml.etree.ElementTree import Element, ParseError, iterparse


def page_texts(dump: BinaryIO, path: str) -> Iterator[str | None]:
    """One item a page: the wikitext of an article, None for a redirect or a page outside the article namespace.

    Raises:
        ValueError: the XML is broken, or is not a MediaWiki dump.
    """
    try:
        events = iterparse(dump, events=("start", "end"))
        _, root = next(events)
        if _local_name(root) != "mediawiki":
            raise ValueError(f"`{path}` is not a MediaWiki dump: its root element is `{_local_name(root)}`.")
        for event, element in events:
            if event == "end" and _local_name(element) == "page":
                yield _article_text(element)
                root.clear()
    except ParseError as error:
        raise ValueError(f"`{path}` is not a whole MediaWiki dump: {error}. Download it again.") from error


def _local_name(element: Element) -> str:
    """The name without the dump version's XML namespace."""
    return element.tag.rpartition("}")[2]


def _article_text(page: Element) -> str | None:
    fields = {_local_name(element): element for element in page.iter()}
    if "redirect" in fields or ("ns" in fields and fields["ns"].text != "0"):
        return None
    text = (fields["text"].text if "text" in fields else None) or ""
    return None if text.lstrip()[:9].upper() == "#REDIRECT" else text
