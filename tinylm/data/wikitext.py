"""Wikitext to clean text."""

import mwparserfromhell

CLEANING_VERSION = 1
"""Raise it with every change of what `clean` gives: caches and fingerprints go by it."""


def clean(wikitext: str) -> str:
    """The text of an article without markup; its title is not part of it."""
    return mwparserfromhell.parse(wikitext).strip_code().strip()
