"""Training and validation parts of a source.

A document is held out by a hash of its text, so the same documents are held out whatever the order, the path, the
number of shards or ranks. A source of few documents is cut once instead, near its end, at a paragraph.
"""

import hashlib
from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import islice

from tinylm.data.documents import Shard, Source, fingerprint, from_texts

FEWEST_DOCUMENTS = 20
"""With fewer documents than this, 10 % of them may well be none."""


def is_held_out(text: str) -> bool:
    """Whether a document belongs to the validation part: 1 in 10, by a hash of its UTF-8 bytes."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 10 == 0


def training_part(source: Source) -> Source:
    """The documents that are not held out; of fewer than 20 documents, about the first 90 % of the bytes."""
    return _part(source, held_out=False)


def validation_part(source: Source) -> Source:
    """The documents that are held out; of fewer than 20 documents, about the last 10 % of the bytes.

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
    return Source(f"{name} part ({rule}) of {source.description}", fingerprint(source.fingerprint, name), shards)


def _read_part(shard: Shard, held_out: bool, start: int, step: int) -> Iterator[str]:
    return (text for text in shard.read(start, step) if is_held_out(text) == held_out)


@lru_cache(maxsize=2)  # both parts ask, and reading the first documents of a dump or of the Hub takes about a second
def _few_documents(source: Source) -> tuple[str, ...] | None:
    """All documents of a source that has fewer than `FEWEST_DOCUMENTS`, else None."""
    first = tuple(islice(source.documents(), FEWEST_DOCUMENTS))
    return first if len(first) < FEWEST_DOCUMENTS else None


def _cut(documents: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Both parts: the bytes of all documents in a row, cut near 90 %."""
    encoded = [document.encode() for document in documents]
    total = sum(map(len, encoded))
    target = total * 9 // 10
    index = before = 0
    while index < len(encoded) - 1 and before + len(encoded[index]) <= target:
        before += len(encoded[index])
        index += 1
    position = _paragraph_near(encoded[index], target - before, total // 10)
    head, tail = encoded[index][:position].decode(), encoded[index][position:].decode()
    training = tuple(text for text in (*documents[:index], head) if text.strip())
    validation = tuple(text for text in (tail, *documents[index + 1 :]) if text.strip())
    if not training or not validation:
        raise ValueError(
            f"The text is too short to hold out a validation part: {len(documents)} document(s), {total} bytes. "
            "Give more text."
        )
    return training, validation


def _paragraph_near(text: bytes, target: int, reach: int) -> int:
    """The byte nearest to `target` at which a paragraph starts; without one in reach, a line, a word, a character.

    A cut farther than `reach` bytes before the target, or half of it behind, would make the parts lopsided.
    """
    first, last = max(target - reach, 0), min(target + reach // 2, len(text))
    for separator in (b"\n\n", b"\n", b" "):
        cuts = [0, len(text)] if separator == b"\n\n" else []  # a document's own edges
        found = text.find(separator, first)
        while found != -1 and found + len(separator) <= last:
            cuts.append(found + len(separator))
            found = text.find(separator, found + 1)
        cuts = [cut for cut in cuts if first <= cut <= last and text[:cut].strip() and text[cut:].strip()]
        if cuts:
            return min(cuts, key=lambda cut: abs(cut - target))
    while 0 < target < len(text) and text[target] & 0xC0 == 0x80:  # inside a UTF-8 character
        target -= 1
    return target
