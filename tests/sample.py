"""Where the real Wikipedia excerpt of the `sample` extra lies, for tests that read it raw."""

from importlib.util import find_spec
from pathlib import Path

_NAME = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"


def sample_dump_path() -> Path:
    """The MediaWiki dump that the gensim wheel carries: 206 pages, 106 of them articles."""
    spec = find_spec("gensim")
    assert spec and spec.origin, "install the `sample` extra"
    return Path(spec.origin).parent / "test" / "test_data" / _NAME
