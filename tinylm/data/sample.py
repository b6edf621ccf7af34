"""The `sample` source: a real excerpt of English Wikipedia (106 articles, CC BY-SA) that the gensim wheel carries.

Cleaning it takes about 4 s, too dear for every rank and worker of every recipe: the clean text is kept as a parquet
file in a cache folder, under a name that changes with the dump and with the cleaning.
"""

import hashlib
import logging
import os
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from tinylm.data.documents import Shard, Source, fingerprint, from_texts
from tinylm.data.file_formats import FileReader
from tinylm.data.wikitext import CLEANING_VERSION

logger = logging.getLogger(__name__)

DUMP_NAME = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"


def open_sample() -> Source:
    """The 106 articles of the excerpt, as one shard.

    Raises:
        FileNotFoundError: the `sample` extra is not installed.
    """
    dump = _dump_path()
    digest = hashlib.sha256(dump.read_bytes()).hexdigest()[:16]
    cached = _cache_folder() / f"sample-{digest}-{CLEANING_VERSION}.parquet"
    shard = Shard("sample", FileReader(cached))
    if not cached.exists():
        texts = tuple(filter(None, FileReader(dump)(0, 1)))
        try:
            _write_atomically(pa.table({"text": texts}), cached)
        except OSError as error:
            logger.info("The cleaned sample is kept in memory: `%s` cannot be written (%s).", cached, error)
            shard = Shard("sample", partial(from_texts, texts))
    sizes = [len(text.encode()) for text in shard.read(0, 1)]  # 30 ms
    return Source(
        description=f"`sample`, {len(sizes)} articles of English Wikipedia, {sum(sizes) / 1e6:.2f} MB (CC BY-SA)",
        fingerprint=fingerprint("sample", digest, CLEANING_VERSION),
        shards=(shard,),
    )


def _dump_path() -> Path:
    spec = find_spec("gensim")  # finds without importing
    path = Path(spec.origin).parent / "test" / "test_data" / DUMP_NAME if spec and spec.origin else None
    if path is None or not path.exists():
        raise FileNotFoundError(
            "The source `sample` is not installed: gensim, which carries it, or its test data is missing. "
            "Install it with `pip install 'tinylm[sample]'`."
        )
    return path


def _cache_folder() -> Path:
    if folder := os.environ.get("TINYLM_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tinylm"


def _write_atomically(table: pa.Table, path: Path) -> None:
    """Writes beside and renames, so that two ranks at once are fine and no half file is ever seen."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    os.close(descriptor)
    try:
        pa.parquet.write_table(table, beside)
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise
