"""A dataset of the Hugging Face Hub, streamed."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from datasets import IterableDataset, load_dataset
from datasets.exceptions import DatasetsError
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

from tinylm.data.columns import check_column, strided_texts
from tinylm.data.documents import Shard, Source, fingerprint, without_empty

SECONDS_TO_ANSWER = 10
"""How long the Hub may take to answer at all: `load_dataset` alone retries for half a minute on a dead network."""
BATCH = 256
"""Rows that are taken from a stream at a time."""


def open_hub_dataset(name: str, config_name: str | None, split: str, text_column: str) -> Source:
    """One shard for each of the dataset's own (mostly its files), read as a stream.

    Raises:
        ValueError: the Hub does not answer, or has no such dataset, configuration, split or column, or no document.
    """
    title = f"{name}{f', {config_name}' if config_name else ''}, split {split}"
    _check_hub_has(name)
    try:
        dataset = load_dataset(name, config_name, split=split, streaming=True)
        columns = dataset.column_names or list(next(iter(dataset), {}))
    except ConnectionError as error:
        raise _unreachable(name, error) from error
    except (ValueError, RuntimeError, DatasetsError) as error:
        raise ValueError(
            f"The dataset `{title}` cannot be opened: {error} "
            "Set `--dataset_name`, `--dataset_config_name` and `--dataset_split`."
        ) from error
    check_column(text_column, columns, f"The dataset `{title}`")
    shards = tuple(
        Shard(f"{title}, shard {index}", HubShard(dataset, index, text_column)) for index in range(dataset.num_shards)
    )
    source = Source(
        description=f"`{title}`, streamed from the Hub ({len(shards)} shards)",
        fingerprint=fingerprint(name, config_name, split, text_column),
        shards=shards,
    )
    if not any(islice(source.documents(), 1)):
        raise ValueError(f"The dataset `{title}` holds no document. Set `--dataset_name` or `--text_column`.")
    return source


@dataclass(frozen=True)
class HubShard:
    """`Shard.read` of one shard of a streamed dataset."""

    dataset: IterableDataset
    index: int
    text_column: str

    def __call__(self, start: int, step: int) -> Iterator[str]:
        """Documents of rows `start, start + step, ...`.

        Raises:
            ValueError: a row that is not text.
        """
        shard = self.dataset.shard(num_shards=self.dataset.num_shards, index=self.index)
        tables = shard.select_columns([self.text_column]).with_format("arrow").iter(BATCH)
        arrays = (chunk for table in tables for chunk in table.column(0).chunks)
        where = f"Shard {self.index} of the dataset"
        texts = strided_texts(arrays, start, step, text_column=self.text_column, where=where)
        return without_empty(texts)


def _check_hub_has(name: str) -> None:
    try:
        HfApi().dataset_info(name, timeout=SECONDS_TO_ANSWER)
    except HFValidationError as error:
        raise ValueError(
            f"`--dataset_name` {name!r} is no name of a dataset: {error} For files: `--data_files`."
        ) from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"The Hub has no dataset `{name}`, or only for those who log in (`hf auth login`). Set `--dataset_name`; "
            "for local files, `--data_files`."
        ) from error
    except HfHubHTTPError:
        pass  # it answers, if oddly; what is wrong, `load_dataset` says better
    except Exception as error:  # the classes depend on the HTTP library, which changes with huggingface_hub
        raise _unreachable(name, error) from error


def _unreachable(name: str, error: Exception) -> ValueError:
    return ValueError(
        f"The Hub cannot be reached for the dataset `{name}` ({error}). Without network, train on the Wikipedia "
        "excerpt with `--config recipes/configs/pretrain_tlm/demo.yaml`, or on your own text with `--data_files`."
    )
