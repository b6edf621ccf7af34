"""A dataset of the Hugging Face Hub, streamed."""

from collections.abc import Iterator
from dataclasses import dataclass

from datasets import IterableDataset, load_dataset

from tinylm.data.documents import Shard, Source, fingerprint
from tinylm.data.file_formats import check_column, strided, text_of


def open_hub_dataset(name: str, config_name: str | None, split: str, text_column: str) -> Source:
    """The dataset's own shards (files, mostly), streamed."""
    dataset = load_dataset(name, config_name, split=split, streaming=True)
    return dataset_source(dataset, f"{name}, {config_name}, split {split}", text_column)


def dataset_source(dataset: IterableDataset, name: str, text_column: str) -> Source:
    """A streamed dataset as a source."""
    columns = dataset.column_names or list(next(iter(dataset)))
    check_column(text_column, columns, f"The dataset {name}")
    shards = tuple(
        Shard(f"{name}, shard {index}", HubShard(dataset, index, text_column)) for index in range(dataset.num_shards)
    )
    return Source(name, fingerprint(name, text_column), shards)


@dataclass(frozen=True)
class HubShard:
    """`Shard.read` of one shard of a streamed dataset."""

    dataset: IterableDataset
    index: int
    text_column: str

    def __call__(self, start: int, step: int) -> Iterator[str]:
        """Documents of rows `start, start + step, ...`."""
        shard = self.dataset.shard(num_shards=self.dataset.num_shards, index=self.index)
        tables = shard.select_columns([self.text_column]).with_format("arrow").iter(batch_size=256)
        for number, value in strided((table.column(0) for table in tables), start, step):
            text = text_of(value, self.text_column, f"shard {self.index}, row {number}")
            if text.strip():
                yield text
