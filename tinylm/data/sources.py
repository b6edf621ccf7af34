"""Where the text comes from: `open_source` turns the user's flags into a `Source`.

Three ways in: `sample` (the real English Wikipedia excerpt of the `sample` extra), local files, and the Hub, streamed.
What can be wrong is found here, before anything is built.
"""

import re
from collections.abc import Sequence

from tinylm.data.documents import Shard, Source
from tinylm.data.local_files import open_local_files
from tinylm.data.sample import open_sample

__all__ = ["Shard", "Source", "open_source"]

_ESCAPES = {r"\n": "\n", r"\r": "\r", r"\t": "\t", r"\\": "\\"}


def open_source(
    *,
    dataset_name: str | None = None,
    dataset_config_name: str | None = None,
    dataset_split: str = "train",
    text_column: str = "text",
    data_files: Sequence[str] | None = None,
    document_separator: str | None = None,
    max_documents: int | None = None,
) -> Source:
    r"""The corpus that the flags name.

    Args:
        dataset_name: `sample`, or a dataset of the Hub (with its `dataset_config_name` and `dataset_split`).
        text_column: column of the Hub dataset or of jsonl, csv and parquet files.
        data_files: local files, globs or folders, instead of a dataset.
        document_separator: what stands between the documents of a text file; `\n`, `\r`, `\t` and `\\` may be written
            out, as on a command line. Without it a text file is one document.
        max_documents: keep only the first ones.

    Raises:
        ValueError: the flags contradict each other, or the data is broken or holds no document.
        FileNotFoundError: no such file, or a folder or glob without any that can be read.
    """
    if bool(dataset_name) == bool(data_files):
        raise ValueError(
            f"One source of text is needed: `--dataset_name` (which is {dataset_name!r}) or `--data_files` "
            f"(which is {data_files!r}). Set one of them; `--dataset_name sample` needs no network."
        )
    if document_separator is not None:
        document_separator = re.sub(r"\\[nrt\\]", lambda match: _ESCAPES[match[0]], document_separator)
    if document_separator == "":
        raise ValueError(r"`--document_separator` is empty. Give the text between two documents, such as '\n\n'.")
    if data_files:
        source = open_local_files(data_files, text_column, document_separator)
    elif dataset_name == "sample":
        source = open_sample()
    else:
        from tinylm.data.hub import open_hub_dataset  # importing `datasets` takes 2 s, which local text does not need

        source = open_hub_dataset(dataset_name, dataset_config_name, dataset_split, text_column)
    return source if max_documents is None else source.take(max_documents)
