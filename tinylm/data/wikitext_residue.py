"""What dropped wiki markup leaves behind, mended: stray tokens, hollow brackets, empty items and sections."""

import re

HEADING = "\x02"
"""A line `HEADING + level + title` is a heading."""

_TOKENS = re.compile(r"\{\{|\}\}|\[\[|\]\]|</?ref\b[^<>]*/?>|</?ref", re.IGNORECASE)
_INNER_TEMPLATE = re.compile(r"\{\{[^{}]*\}\}")
_INNER_LINK = re.compile(r"\[\[([^\[\]]*)\]\]")
_STRAY_TAG = re.compile(
    r"</?(?:div|span|small|big|center|font|sup|sub|br|p|b|i|u|s|li|ul|ol|blockquote|nowiki|onlyinclude|noinclude|includeonly"
    r"|gallery|table|tr|td|th|references|code|poem|cite)\b[^<>]*>",
    re.IGNORECASE,
)
_MAGIC_WORD = re.compile(r"__[A-Z]{3,}__")
_TABLE_LINE = re.compile(r"^[ \t:]*(?:\{\||\|).*$", re.MULTILINE)
_VERBATIM = re.compile("\0(\\d+)\0")
_SPACES = re.compile(r"[^\S\n]+")

_MENDS: list[tuple[re.Pattern[str], str]] = [
    (re.compile(r"'{2,}"), ""),  # quotes of bold or italics that nobody closed
    (re.compile(r"(?<=[(\[])(?:\s*[,;:/\N{EN DASH}])+\s*"), ""),  # "(, born" -> "(born"
    (re.compile(r"(?:\s*[,;:/\N{EN DASH}])+\s*(?=[)\]])"), ""),  # "born; )" -> "born)"
    (re.compile(r"[ \t]*\((?:pronounced|or|also|and|IPA|\W)?\s*\)(?!\w)"), ""),
    (re.compile(r"(?<=\w)[ \t]*\[\s*\]"), ""),
    (re.compile(r"(?<=\() +| +(?=\))"), ""),
    (re.compile(r"([,;])(?:\s*[,;])+(?=\s)"), r"\1"),  # ", ," -> ","
    (
        re.compile(
            r"(?<=[\w)\"\N{RIGHT DOUBLE QUOTATION MARK}\N{RIGHT SINGLE QUOTATION MARK}]) +(?=[,.;:](?:\s|$))",
            re.MULTILINE,
        ),
        "",
    ),  # "word ." -> "word."
    (re.compile(r":(?:\s*,)+"), ":"),  # "Dari: , Afghanistan" -> "Dari: Afghanistan"
    (re.compile(r"^(- )[ ,;:.)]+", re.MULTILINE), r"\1"),  # "- , third edition" -> "- third edition"
    (re.compile(r"^-[^\w\0\n]*\n", re.MULTILINE), ""),  # list items with nothing in them
    (re.compile(r"^[ ,.;:|*#]+$", re.MULTILINE), ""),
]


def mend(text: str, verbatim: list[str]) -> str:
    r"""Clean text of rendered wikitext, in which `\0number\0` stands for an item of `verbatim`."""
    text = _MAGIC_WORD.sub("", _STRAY_TAG.sub("", text))
    text = _TABLE_LINE.sub("", _without_tokens(text))
    text = _SPACES.sub(" ", text)
    text = "\n".join(line.strip(" ") for line in text.split("\n"))
    for pattern, replacement in _MENDS:
        text = pattern.sub(replacement, text)
    text = _without_empty_sections(text)
    text = _VERBATIM.sub(lambda match: _pulled_apart(verbatim[int(match[1])]), text)
    text = re.sub(r"\n{3,}", "\n\n", text)
    text = re.sub(r"^(- .*)\n\n(?=- )", r"\1\n", text, flags=re.MULTILINE)
    return _without_halves(text).strip()  # mending may have brought two halves together


def _without_tokens(text: str) -> str:
    """Without templates and without the brackets of links that the parser did not see as such."""
    while (shorter := _INNER_TEMPLATE.sub("", text)) != text:
        text = shorter
    return _without_halves(_INNER_LINK.sub(lambda match: match[1].rpartition("|")[2], text))


def _without_halves(text: str) -> str:
    while (shorter := _TOKENS.sub("", text)) != text:
        text = shorter
    return text


def _pulled_apart(verbatim: str) -> str:
    r"""TeX and code as written, but `{{` becomes `{ {`, `[[` becomes `[ [`, `<ref` becomes `< ref`."""
    verbatim = re.sub(r"([{}\[\]])(?=\1)", r"\1 ", verbatim)
    return re.sub(r"<(?=/?ref)", "< ", verbatim, flags=re.IGNORECASE).strip()


def _without_empty_sections(text: str) -> str:
    """Headings as paragraphs of their own, but for those with no text under them."""
    kept: list[str] = []
    following = 0  # level of what comes next: a kept heading's, 0 at the end, 7 for text
    for line in reversed(text.split("\n")):
        if not line.startswith(HEADING):
            kept.append(line)
            following = 7 if line else following
        elif (level := int(line[1])) < following:
            kept.extend(["", line[2:].strip(), ""])
            following = level
    return "\n".join(reversed(kept))
