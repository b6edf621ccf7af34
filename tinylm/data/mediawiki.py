"""MediaWiki dumps: articles as a stream, in constant memory.

Format: https://www.mediawiki.org/wiki/Help:Export. A page with several revisions counts with its last one.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO
from xml.etree.ElementTree import Element, ParseError, iterparse


def pages(dump: BinaryIO, path: Path, counts: Counter[str]) -> Iterator[str]:
    """The wikitext of each article.

    `counts` is kept up to date: "article", "redirect" (skipped), and "other" (skipped: talk, user, template pages...).

    Raises:
        ValueError: the XML is broken, or is not a MediaWiki dump.
    """
    events = iterparse(dump, events=("start", "end"))
    try:
        _, root = next(events)
        if _local_name(root) != "mediawiki":
            raise ValueError(f"`{path}` is not a MediaWiki dump: its root element is `{_local_name(root)}`.")
        for event, element in events:
            if event == "end" and _local_name(element) == "page":
                kind, text = _kind_and_text(element)
                counts[kind] += 1
                if kind == "article":
                    yield text
                root.clear()
    except ParseError as error:
        raise ValueError(f"`{path}` is not a whole MediaWiki dump: {error}. Fetch it again.") from error


def _local_name(element: Element) -> str:
    """The name without the XML namespace, which changes with the dump's version."""
    return element.tag.rpartition("}")[2]


def _kind_and_text(page: Element) -> tuple[str, str]:
    fields = {_local_name(element): element for element in page.iter()}
    text = (fields["text"].text if "text" in fields else None) or ""
    if "redirect" in fields or text.lstrip()[:9].upper() == "#REDIRECT":  # dumps before 2010 have only the text
        return "redirect", text
    if "ns" in fields and fields["ns"].text != "0":
        return "other", text
    return "article", text
