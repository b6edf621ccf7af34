"""A dataset of the Hugging Face Hub."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from time import sleep
from typing import TypeVar

from datasets import Dataset, IterableDataset, load_dataset
from datasets.exceptions import DatasetsError
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

from tinylm.data.columns import check_column, strided_texts
from tinylm.data.documents import Shard, Source, blanked, fingerprint

SECONDS_TO_ANSWER = 10
"""How long the Hub may take to answer at all: `load_dataset` alone retries for half a minute on a dead network."""
BATCH = 256
"""Rows that are taken from a stream at a time."""
WAITS = (5, 15, 45, 135)
"""Seconds before each new try of a row; `datasets` by itself retries for up to 100 s in each of them. Together that is
below the half hour that the other ranks wait."""

logger = logging.getLogger(__name__)

Row = TypeVar("Row")

_WITHOUT_NETWORK = (
    "Without network, train on the Wikipedia excerpt with `--config recipes/configs/pretrain_tlm/demo.yaml`, or on your"
    " own text with `--data_files`."
)


def load_from_hub(
    name: str, config_name: str | None, split: str, *, streaming: bool, without_network: str
) -> tuple[Dataset | IterableDataset, list[str]]:
    """A split of a dataset of the Hub, and its columns.

    Without network, what was downloaded before is found, unless it is streamed.

    Args:
        without_network: what the user can do if the Hub cannot be reached, a sentence for the message.

    Raises:
        ValueError: the Hub does not answer, or has no such dataset, configuration or split.
    """
    if streaming or not constants.HF_HUB_OFFLINE:
        _check_hub_has(name, without_network)
    try:
        dataset = load_dataset(name, config_name, split=split, streaming=streaming)
        return dataset, dataset.column_names or list(next(iter(dataset), {}))  # a stream may not declare them
    except ConnectionError as error:
        raise _unreachable(name, error, without_network) from error
    except (ValueError, RuntimeError, DatasetsError) as error:
        raise ValueError(
            f"The dataset `{title_of(name, config_name, split)}` cannot be opened: {error} "
            "Set `--dataset_name`, `--dataset_config_name` and `--dataset_split`."
        ) from error


def title_of(name: str, config_name: str | None, split: str) -> str:
    """How a message calls a split of a dataset."""
    return f"{name}{f', {config_name}' if config_name else ''}, split {split}"


def open_hub_dataset(name: str, config_name: str | None, split: str, text_column: str) -> Source:
    """One shard for each of the dataset's own (mostly its files), read as a stream.

    Raises:
        ValueError: what `load_from_hub` raises; or there is no such column, or no document.
    """
    title = title_of(name, config_name, split)
    dataset, columns = load_from_hub(name, config_name, split, streaming=True, without_network=_WITHOUT_NETWORK)
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
    """`Shard.rows` of one shard of a streamed dataset."""

    dataset: IterableDataset
    index: int
    text_column: str

    def __call__(self, start: int, step: int) -> Iterator[str]:
        """The documents of rows `start, start + step, ...`, "" for a row that has none.

        Raises:
            ValueError: a row that is not text.
            ConnectionError: what `patient` raises.
        """
        return patient(self._rows, start, step, f"Shard {self.index} of the dataset")

    def _rows(self, start: int, step: int) -> Iterator[str]:
        shard = self.dataset.shard(num_shards=self.dataset.num_shards, index=self.index)
        tables = shard.select_columns([self.text_column]).with_format("arrow").iter(BATCH)
        arrays = (chunk for table in tables for chunk in table.column(0).chunks)
        where = f"Shard {self.index} of the dataset"
        texts = strided_texts(arrays, start, step, text_column=self.text_column, where=where)
        return blanked(texts)


def patient(rows: Callable[[int, int], Iterator[Row]], start: int, step: int, where: str) -> Iterator[Row]:
    """`rows(start, step)`; after an error of the network it is opened again at the row that was to come next.

    Raises:
        ConnectionError: the same row has failed once more than there are `WAITS`.
    """
    waits = iter(WAITS)
    while True:
        try:
            for row in rows(start, step):
                start += step
                waits = iter(WAITS)
                yield row
            return
        except (ValueError, TypeError, LookupError, AttributeError):  # the row itself is at fault, or this code
            raise
        except Exception as error:  # the classes depend on the HTTP library, which changes with huggingface_hub
            seconds = next(waits, None)
            if seconds is None:
                raise ConnectionError(
                    f"{where} cannot be read from row {start} on, in {len(WAITS) + 1} tries: {error}. Go on when the"
                    " network is back."
                ) from error
            logger.warning("%s, row %d: %s. Trying again in %d s.", where, start, error, seconds)
            sleep(seconds)


def _check_hub_has(name: str, without_network: str) -> None:
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
        raise _unreachable(name, error, without_network) from error


def _unreachable(name: str, error: Exception, without_network: str) -> ValueError:
    return ValueError(f"The Hub cannot be reached for the dataset `{name}` ({error}). {without_network}")
