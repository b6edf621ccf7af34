"""Training and validation parts of a source.

A document is held out by a hash of its text, so the same documents are held out whatever the order, the path, the
number of shards or ranks. A source of few documents, or of which the hash picks none, is cut once instead, near its
end, at a paragraph.
"""

import hashlib
from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import accumulate, pairwise

from tinylm.data.documents import Shard, Source, fingerprint, from_texts

FEWEST_DOCUMENTS = 20
"""With fewer documents than this, 10 % of them may well be none."""


def is_held_out(text: str) -> bool:
    """Whether a document belongs to the validation part: 1 in 10, by a hash of its UTF-8 bytes."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 10 == 0


def training_part(source: Source) -> Source:
    """The documents that are not held out; of few documents (`_few_documents`), about the first 90 % of the bytes."""
    return _part(source, held_out=False)


def validation_part(source: Source) -> Source:
    """The documents that are held out; of few documents, about the last 10 % of the bytes.

    Raises:
        ValueError: the source is too short to be cut in two.
    """
    return _part(source, held_out=True)


def _part(source: Source, *, held_out: bool) -> Source:
    name = "validation" if held_out else "training"
    few = _few_documents(source)
    if few is None:
        shards = tuple(Shard(shard.name, partial(_read_part, shard, held_out)) for shard in source.shards)
        rule = "10 %" if held_out else "90 %"
    else:
        shards = (Shard(name, partial(from_texts, _cut(few)[held_out])),)
        rule = "the last 10 %" if held_out else "the first 90 %"
    return Source(
        f"{name} part ({rule}) of {source.description}",
        fingerprint(source.fingerprint, name),
        shards,
        identity=fingerprint(source.identity, name),
    )


def _read_part(shard: Shard, held_out: bool, start: int, step: int) -> Iterator[str]:
    return (text if text and is_held_out(text) == held_out else "" for text in shard.rows(start, step))


@lru_cache(maxsize=2)  # both parts ask, and reading the first documents of a dump or of the Hub takes about a second
def _few_documents(source: Source) -> tuple[str, ...] | None:
    """All documents of a source that has fewer than `FEWEST_DOCUMENTS`, or of which none is held out, else None."""
    read: list[str] = []
    any_held_out = False
    for document in source.documents():
        read.append(document)
        any_held_out = any_held_out or is_held_out(document)
        if any_held_out and len(read) >= FEWEST_DOCUMENTS:
            return None
    return tuple(read)


def _cut(documents: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Both parts: the bytes of all documents in a row, cut near 90 %."""
    encoded = [document.encode() for document in documents]
    edges = [0, *accumulate(map(len, encoded))]
    text = b"".join(encoded)
    cut = _paragraph_near_its_end(text, edges)
    parts: tuple[list[str], list[str]] = ([], [])
    for start, end in pairwise(edges):
        parts[0].append(text[start : min(end, max(start, cut))].decode())
        parts[1].append(text[max(start, min(end, cut)) : end].decode())
    training, validation = (tuple(piece for piece in part if piece.strip()) for part in parts)
    if not training or not validation:
        raise ValueError(
            f"The text is too short to hold out a validation part: {len(documents)} document(s), {len(text)} bytes. "
            "Give more text."
        )
    return training, validation


def _paragraph_near_its_end(text: bytes, edges: list[int]) -> int:
    """The byte nearest to 90 % at which a document or a paragraph starts; else a line, a word, a character.

    Only paragraphs, lines and words that start between 80 % and 95 % are taken: others would make the parts lopsided.
    """
    target = len(text) * 9 // 10
    first_visible, last_visible = len(text) - len(text.lstrip()), len(text.rstrip()) - 1
    first = max(len(text) * 8 // 10, first_visible + 1)
    last = min(len(text) * 95 // 100, last_visible)
    for separator in (b"\n\n", b"\n", b" "):
        cuts = [edge for edge in edges if first <= edge <= last]
        found = text.find(separator, first, last)
        while found != -1:
            cuts.append(found + len(separator))
            found = text.find(separator, found + 1, last)
        if cuts:
            return min(cuts, key=lambda cut: abs(cut - target))
    cut = max(min(target, last_visible), first_visible + 1)
    while 0 < cut < len(text) and text[cut] & 0xC0 == 0x80:  # inside a character
        cut -= 1
    return cut
