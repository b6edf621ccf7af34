"""Wikitext to clean text, as a reader would want to read it.

mwparserfromhell parses; we walk its tree and decide what each kind of node is worth, then mend what dropped nodes leave
behind. Kept: prose, headings (each a paragraph of its own), list items (`- `), link texts, TeX and code as written, and
the few templates whose text belongs to a sentence. Dropped: other templates, tables, references, comments, files,
galleries, categories, links to other languages, and sections that are empty after that. `{{`, `}}`, `[[`, `]]` and
`<ref` never occur in the result: inside TeX and code they are pulled apart by a space.
"""

import re
from collections.abc import Callable
from html import unescape

import mwparserfromhell
from mwparserfromhell.nodes import ExternalLink, Heading, HTMLEntity, Tag, Template, Text, Wikilink
from mwparserfromhell.parser import ParserError
from mwparserfromhell.wikicode import Wikicode

from tinylm.data.wikitext_residue import HEADING, mend

CLEANING_VERSION = 1
"""Raise it with every change of what `clean` gives: caches and fingerprints go by it."""

_DROPPED_TAGS = {
    *("ref", "references", "table", "gallery", "timeline", "imagemap", "score", "hiero", "graph", "mapframe"),
    *("templatedata", "categorytree", "inputbox", "indicator", "style"),
}
_VERBATIM_TAGS = {"math", "chem", "ce", "code", "tt", "pre", "source", "syntaxhighlight"}
_LINE_TAGS = {"br", "hr"}
_DROPPED_PREFIXES = {"file", "image", "media", "category"}
_LANGUAGE_PREFIX = re.compile(r"[a-z]{2,3}(-[a-z]+)*|simple")
_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
# References are more than half of an article's markup; without them the parser takes half the time.
_REFERENCE = re.compile(r"<ref\b[^<>]*(?:/>|>(?:(?!<ref\b).)*?</ref\s*>)", re.DOTALL | re.IGNORECASE)
_MINUS = "\N{MINUS SIGN}"
_POWER = re.compile(rf"[-+{_MINUS}]?[\dn]+")


def clean(wikitext: str) -> str:
    """The text of an article without markup; its title, which the markup does not hold, is not part of it."""
    wikitext = _COMMENT.sub("", wikitext.replace("\0", "").replace(HEADING, ""))
    wikitext = _without_tables(_REFERENCE.sub("", wikitext))
    try:
        tree = mwparserfromhell.parse(wikitext)
    except ParserError:  # rare: then the residue's own rules do what they can
        return mend(wikitext, [])
    renderer = _Renderer()
    return mend(renderer.text(tree), renderer.verbatim)


def _without_tables(wikitext: str) -> str:
    """Without the lines from `{|` to `|}`, nested or not; the parser loses its way in many real tables."""
    kept: list[str] = []
    opened: list[int] = []  # for each table that is open, how many lines had been kept before it
    for line in wikitext.split("\n"):
        start = line.lstrip(" \t:")
        if start.startswith("{|"):
            opened.append(len(kept))
            kept.append(line)
        elif opened and start.startswith("|}") and not start.startswith("|}}"):
            del kept[opened.pop() :]
            kept.append(start[2:])
        else:
            kept.append(line)
    return "\n".join(kept)


class _Renderer:
    """Renders parts of a tree; TeX and code are set aside in `verbatim`, and `\0number\0` stands in the text."""

    def __init__(self) -> None:
        self.verbatim: list[str] = []

    def text(self, code: Wikicode | None) -> str:
        rendered = ""
        for node in code.nodes if code is not None else ():
            if isinstance(node, Text):
                rendered += node.value
            elif isinstance(node, Wikilink):
                rendered += self._link(node)
            elif isinstance(node, Tag):
                rendered += self._tag(node, rendered)
            elif isinstance(node, Template):
                rendered += self._template(node)
            elif isinstance(node, ExternalLink):
                rendered += self.text(node.title) if node.brackets else str(node.url)
            elif isinstance(node, HTMLEntity):
                rendered += unescape(str(node))
            elif isinstance(node, Heading):
                title = " ".join(self.text(node.title).split())
                rendered += f"\n{HEADING}{node.level}{title}\n" if title else "\n"
        return rendered

    def _link(self, link: Wikilink) -> str:
        prefix, colon, rest = str(link.title).strip().lower().partition(":")
        if colon and prefix.strip() in _DROPPED_PREFIXES:
            return ""
        if colon and link.text is None and _LANGUAGE_PREFIX.fullmatch(prefix) and not rest.startswith(" "):
            return ""
        return self.text(link.text).strip("\n") or self.text(link.title).lstrip(":")

    def _tag(self, tag: Tag, before: str) -> str:
        name = str(tag.tag).strip().lower()
        at_line_start = before[-1:] in ("", "\n") or before.endswith("\n- ")
        if tag.wiki_markup in ("*", "#"):
            return "- " if not before.endswith("\n- ") else ""
        if tag.wiki_markup in (":", ";"):
            return "" if at_line_start else ": "
        if name in _DROPPED_TAGS:
            return ""
        if name in _LINE_TAGS:
            return "\n"
        if name in _VERBATIM_TAGS:
            self.verbatim.append(unescape(str(tag.contents or "")))
            return f"\0{len(self.verbatim) - 1}\0"
        contents = self.text(tag.contents)
        if name == "sup" and _POWER.fullmatch(contents) and (before[-1:].isalnum() or before[-1:] == ")"):
            return f"^{contents}"
        if name == "li":
            return f"\n- {contents}"
        return f"\n{contents}\n" if name in ("blockquote", "poem", "div", "p") else contents

    def _template(self, template: Template) -> str:
        name = str(template.name).strip().lower().replace("_", " ")
        if name not in _SENTENCE_TEMPLATES and not name.startswith("lang-"):
            return ""
        values = [self.text(param.value).strip() for param in template.params if not param.showkey]
        return _SENTENCE_TEMPLATES.get(name, _last)(values)


def _first(values: list[str]) -> str:
    return values[0] if values else ""


def _last(values: list[str]) -> str:
    return values[-1] if values else ""


def _measure(values: list[str]) -> str:
    """`{{convert|3|to|5|km|mi}}`: the numbers, what joins them, and the first unit."""
    for count, value in enumerate(values):
        if not value.lstrip(f"-+{_MINUS}")[:1].isdigit() and value.lower() not in _JOINTS:
            return " ".join(values[: count + 1])
    return " ".join(values)


_JOINTS = {"to", "and", "or", "by", "x", "+", "-", "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"}
_SENTENCE_TEMPLATES: dict[str, Callable[[list[str]], str]] = {
    **dict.fromkeys(("convert", "cvt"), _measure),
    **dict.fromkeys(("lang", "transl", "transliteration"), _last),
    **dict.fromkeys(("nowrap", "nobr", "small", "smaller", "vanchor", "flag", "nihongo", "val", "angbr"), _first),
    **dict.fromkeys(("abbr", "quote", "blockquote", "cquote", "poemquote", "nts", "keypress", "tooltip"), _first),
    **dict.fromkeys(("chem", "chem2"), "".join),
    "as of": lambda values: " ".join(["As of", *values]),
}
