"""Rows of conversations, from the Hub or from local files: `open_rows` turns the user's flags into `ChatRows`.

Choices:
- Rows stay as they come until they are encoded. JSON is kept as text, a line a row: where the fields of some rows have
  other types than those of the first, Arrow would refuse the file, and here the row can be named.
- Each row has its number in the file or split, counted from 1, which it keeps when rows are selected.
"""

import csv
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from datasets import Dataset, Features, IterableDataset, Value, disable_progress_bars, load_dataset
from datasets.exceptions import DatasetsError
from pyarrow import ArrowException

from tinylm.data.chat_records import (
    JSON_LINE,
    SHAPES,
    SHAPES_IN_WORDS,
    BrokenRuleError,
    Conversation,
    conversation_of,
    parsed,
)
from tinylm.data.documents import fingerprint
from tinylm.data.file_formats import format_of
from tinylm.data.hub import BATCH, load_from_hub, title_of
from tinylm.data.local_files import matching_files, names_and_sizes
from tinylm.data.text_streams import open_bytes

logger = logging.getLogger(__name__)

ROW_NUMBER = "row_number"
_LINES_LOOKED_AT = 100  # to find out which keys a file has

_WITHOUT_NETWORK = (
    "Without network, fine-tune on local files with `--data_files` (jsonl, json, parquet, csv), or on our own"
    " conversations with `--config recipes/configs/finetune_qwen/smollm2_demo.yaml`."
)


@dataclass(frozen=True)
class ChatRows:
    """Rows of one shape; `description` names their source.

    `rows` has the columns of the source, or `json_line`, and `row_number` unless it is a stream. `identity` (hex)
    stands for the names and sizes of files, or for the dataset's name; `is_remote`: rows come over the network.
    """

    rows: Dataset | IterableDataset
    description: str
    shape: str
    identity: str = ""
    is_remote: bool = False

    @property
    def is_stream(self) -> bool:
        return isinstance(self.rows, IterableDataset)

    def conversations(self) -> Iterator[Conversation]:
        """The rows one after the other. Raises BrokenRuleError at one that breaks a rule."""
        conversations = (conversation_of(row, self.shape) for row in self.rows)
        return (conversation for conversation in conversations if conversation is not None)


def open_rows(
    *,
    dataset_name: str | None = None,
    dataset_config_name: str | None = None,
    dataset_split: str = "train",
    data_files: Sequence[str] | None = None,
    shape: str | None = None,
    streaming: bool = False,
    max_examples: int | None = None,
) -> ChatRows:
    """The rows that the flags name, announced in one line.

    Args:
        data_files: local files, globs or folders (jsonl, json, parquet, csv), instead of a dataset of the Hub.
        shape: one of `SHAPES`; None takes the first whose columns are there.
        streaming: rows are read while training.
        max_examples: the first so many rows.

    Raises:
        ValueError: the flags contradict each other, the Hub has no such data or does not answer, a file cannot be
            read, or the columns are of no shape.
        FileNotFoundError: no such file.
    """
    if bool(dataset_name) == bool(data_files):
        raise ValueError(
            f"One source of conversations is needed: `--dataset_name` (which is {dataset_name!r}) or `--data_files`"
            f" (which is {data_files!r}). Set one of them."
        )
    if max_examples is not None and max_examples < 1:
        raise ValueError(f"`max_examples` is at least 1, but is {max_examples}. Set `--max_examples`.")
    if not sys.stderr.isatty():
        disable_progress_bars()
    if data_files:
        paths = list({path.resolve(): path for pattern in data_files for path in matching_files(pattern)}.values())
        rows, columns, title = _open_files(paths, streaming)
        identity = fingerprint(names_and_sizes(paths), max_examples)
    else:
        title = f"`{title_of(dataset_name, dataset_config_name, dataset_split)}`"
        identity = fingerprint(title, max_examples)
        rows, columns = load_from_hub(
            dataset_name, dataset_config_name, dataset_split, streaming=streaming, without_network=_WITHOUT_NETWORK
        )
    chosen = _shape(columns, shape, title)
    if max_examples is not None:
        rows = _first_of_stream(rows, max_examples) if streaming else rows.take(max_examples)
    if isinstance(rows, Dataset):
        rows = rows.remove_columns([name for name in rows.column_names if name == ROW_NUMBER])
        rows = rows.add_column(ROW_NUMBER, range(1, len(rows) + 1))
    size = f"streamed ({rows.num_shards} shards)" if streaming else f"{len(rows):,} rows"
    logger.info("Conversations: %s, %s, read as `%s` (`--data_shape` sets it)", title, size, chosen)
    return ChatRows(rows, title, chosen, identity, is_remote=streaming and not data_files)


def _shape(columns: Sequence[str], asked: str | None, title: str) -> str:
    """The shape asked for, or the first whose columns are there."""
    if asked is not None and asked not in SHAPES:
        raise ValueError(f"`data_shape` is one of {', '.join(SHAPES)}, not `{asked}`. Set `--data_shape`.")
    for shape in SHAPES if asked is None else [asked]:
        if set(SHAPES[shape]) <= set(columns):
            return shape
    wanted = f"the columns of the shape `{asked}`" if asked else "the columns of any of the four shapes"
    raise ValueError(
        f"{title} does not have {wanted}; it has {sorted(columns)}. Rows have {SHAPES_IN_WORDS}. Rename the columns, or"
        " set `--data_shape`."
    )


def _open_files(paths: list[Path], streaming: bool) -> tuple[Dataset | IterableDataset, list[str], str]:
    """The rows of files of one format, their columns, and what messages call them."""
    formats = sorted({format_of(path) for path in paths})
    title = f"`{paths[0]}`" if len(paths) == 1 else f"{len(paths):,} local files ({', '.join(formats)})"
    if len(formats) > 1 or formats[0] not in (".jsonl", ".json", ".parquet", ".csv"):
        raise ValueError(
            f"Conversations are read from files of one format, jsonl, json, parquet or csv; {title} are of"
            f" {', '.join(formats)}. Set `--data_files`."
        )
    names = [str(path) for path in paths]
    try:
        if formats[0] == ".json" and any(_is_array(path) for path in paths):
            rows = _read_arrays(paths)
            rows = rows.to_iterable_dataset() if streaming else rows
        elif formats[0] == ".csv":
            features = Features({name: Value("string") for name in _csv_header(paths[0])})
            rows = _load("csv", names, streaming, features=features, keep_default_na=False)
        elif formats[0] == ".parquet":
            rows = _load("parquet", names, streaming)
        else:
            rows = _load(
                "text", names, streaming, features=Features({JSON_LINE: Value("string")}), encoding="utf-8-sig"
            )
        columns = rows.column_names if JSON_LINE not in rows.column_names else _keys_of_first_lines(rows)
    except (DatasetsError, ArrowException, UnicodeDecodeError, OSError, EOFError) as error:
        cause = error.__cause__ or error
        raise ValueError(f"{title} cannot be read ({cause}). Mend the file, or fetch it again.") from error
    return rows, columns, title


def _load(builder: str, names: list[str], streaming: bool, **settings: object) -> Dataset | IterableDataset:
    return load_dataset(builder, data_files=names, split="train", streaming=streaming, **settings)


def _first_of_stream(rows: IterableDataset, count: int) -> IterableDataset:
    """The first rows as one shard: `take` alone gives other rows when shards are read one by one."""
    return IterableDataset.from_generator(_read_first, gen_kwargs={"rows": rows, "count": count})


def _read_first(rows: IterableDataset, count: int) -> Iterator[dict[str, object]]:
    return one_by_one(rows.take(count))


def one_by_one(rows: IterableDataset, start: int = 0, step: int = 1) -> Iterator[dict[str, object]]:
    """Rows `start, start + step, ...` as they are, also in a DataLoader worker: `iter(rows)` would give each worker a
    part of them."""
    for batch in rows.iter(BATCH):
        columns = [column[start::step] for column in batch.values()]
        yield from (dict(zip(batch, row, strict=True)) for row in zip(*columns, strict=True))
        num_rows = len(next(iter(batch.values())))
        start = start - num_rows if start >= num_rows else (start - num_rows) % step


def _keys_of_first_lines(rows: Dataset | IterableDataset) -> list[str]:
    """The keys of the JSON objects among the first lines, some of which may be broken."""
    keys: dict[str, None] = {}
    for row in islice(rows, _LINES_LOOKED_AT):
        with suppress(BrokenRuleError):
            keys |= dict.fromkeys(parsed(row[JSON_LINE]))
    return list(keys)


def _is_array(path: Path) -> bool:
    with open_bytes(path) as stream:
        return stream.read(1 << 10).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _read_arrays(paths: Sequence[Path]) -> Dataset:
    """The elements of JSON arrays, one a row; they are held in memory."""
    elements = []
    for path in paths:
        try:
            with open_bytes(path) as stream:
                array = json.loads(stream.read().decode("utf-8-sig"))
        except json.JSONDecodeError as error:
            raise ValueError(f"`{path}` begins like a JSON array and is none ({error}). Mend the file.") from error
        elements += [json.dumps(element) for element in array]
    return Dataset.from_dict({JSON_LINE: elements})


def _csv_header(path: Path) -> list[str]:
    with open_bytes(path) as stream:
        return next(csv.reader(line.decode("utf-8-sig") for line in stream), [])
