"""Datasets of the Hub. There is no network in tests: local parquet files stand in for the Hub's."""

import pickle
from collections.abc import Iterator
from pathlib import Path

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tinylm.data import hub
from tinylm.data.sources import Source, open_source


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that answers as a dataset of three parquet files, two rows a group, with the splits `train`, `test`."""

    def load(name: str, config_name: str | None, *, split: str, streaming: bool) -> datasets.IterableDataset:
        parts = {"train": [str(path) for path in sorted(tmp_path.glob("*.parquet"))]}
        parts["test"] = parts["train"][:1]
        return datasets.load_dataset("parquet", data_files=parts, split=split, streaming=streaming)

    for shard in range(3):
        table = pa.table({"id": range(5), "text": [f"text {shard} {row}" for row in range(4)] + [" \n"]})
        pq.write_table(table, tmp_path / f"{shard}.parquet", row_group_size=2)
    monkeypatch.setattr(hub, "load_dataset", load)
    monkeypatch.setattr(hub, "HfApi", lambda: HubThatAnswers(None))
    return tmp_path


class HubThatAnswers:
    """Stands in for `HfApi`: `dataset_info` raises, or does not."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def dataset_info(self, name: str, timeout: float) -> None:
        if self.error:
            raise self.error


def _open(**flags: str | int) -> Source:
    return open_source(dataset_name="someone/something", **flags)


def test_every_file_is_a_shard_and_strides_cut_it(files: Path) -> None:
    source = _open(dataset_config_name="20231101.en")
    assert source.description == "`someone/something, 20231101.en, split train`, streamed from the Hub (3 shards)"
    assert [list(shard.read(0, 1)) for shard in source.shards] == [
        [f"text {shard} {row}" for row in range(4)] for shard in range(3)
    ], "and whitespace is no document"
    assert [list(source.shards[1].read(start, 2)) for start in range(2)] == [
        ["text 1 0", "text 1 2"],
        ["text 1 1", "text 1 3"],
    ]
    assert list(source.shards[1].read(3, 1)) == ["text 1 3"]


def test_a_streamed_source_can_be_pickled_into_workers(files: Path) -> None:
    source = _open(max_documents=6)
    assert list(pickle.loads(pickle.dumps(source)).documents()) == list(source.documents())
    assert list(source.documents())[4:] == ["text 1 0", "text 1 1"]


class Strides(IterableDataset):
    """What a DataLoader worker reads when we divide the rows, and what `datasets` would give it by its own division."""

    def __init__(self, source: Source, *, divided_by_us: bool) -> None:
        self.source, self.divided_by_us = source, divided_by_us

    def __iter__(self) -> Iterator[str]:
        worker = get_worker_info()
        for shard in self.source.shards:
            if self.divided_by_us:
                yield from shard.read(worker.id, worker.num_workers)
            else:
                yield from (row["text"] for row in shard.rows.dataset)


def test_workers_get_the_rows_that_we_give_them_and_datasets_divides_nothing_again(files: Path) -> None:
    source = _open()
    rows = list(DataLoader(Strides(source, divided_by_us=True), batch_size=None, num_workers=2))
    assert sorted(rows) == sorted(source.documents())
    native = list(DataLoader(Strides(source, divided_by_us=False), batch_size=None, num_workers=2))
    assert len(native) == 3 * 15, "each worker walked all shards three times, and `datasets` gave it only its own"


def test_the_fingerprint_changes_with_what_was_asked_for(files: Path) -> None:
    asked = [{}, {"dataset_split": "test"}, {"dataset_config_name": "b"}, {"max_documents": 2}]
    assert len({_open(**flags).fingerprint for flags in asked}) == len(asked)


def test_a_missing_column_names_those_that_are_there(files: Path) -> None:
    """Case S10."""
    with pytest.raises(ValueError, match=r"no column `content`; it has \['id', 'text'\]. Set `--text_column`"):
        _open(text_column="content")


def test_columns_that_are_not_declared_are_looked_up_in_the_first_row(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = datasets.IterableDataset.from_generator(lambda: iter([{"content": "a"}, {"content": "b"}]))
    assert stream.column_names is None
    monkeypatch.setattr(hub, "load_dataset", lambda *names, **options: stream)
    with pytest.raises(ValueError, match=r"it has \['content'\]"):
        _open()
    assert list(_open(text_column="content").documents()) == ["a", "b"]


def test_a_column_that_is_no_text_names_the_row(files: Path) -> None:
    with pytest.raises(ValueError, match=r"Shard 0 .* row 0: column `id` holds 0, which is not a string"):
        _open(text_column="id")


def test_a_wrong_split_names_those_that_are_there(files: Path) -> None:
    with pytest.raises(
        ValueError, match=r"`someone/something, split dev` cannot be opened: .*train.*test.*`--dataset_split`"
    ):
        _open(dataset_split="dev")


def test_a_dataset_without_any_document_is_an_error(files: Path) -> None:
    for path in files.glob("*.parquet"):
        pq.write_table(pa.table({"text": [" "]}), path)
    with pytest.raises(ValueError, match="holds no document"):
        _open()


def test_a_name_that_the_hub_does_not_know_is_an_error(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
    monkeypatch.setattr(hub, "HfApi", lambda: HubThatAnswers(error))
    with pytest.raises(ValueError, match="The Hub has no dataset `someone/something`"):
        _open()
    with pytest.raises(ValueError, match="'two words' is no name of a dataset"):
        monkeypatch.setattr(hub, "HfApi", huggingface_hub.HfApi)
        open_source(dataset_name="two words")


def test_a_hub_that_answers_oddly_does_not_stop_the_opening(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HfApi", lambda: HubThatAnswers(HfHubHTTPError.__new__(HfHubHTTPError)))
    assert len(_open().shards) == 3


@pytest.mark.parametrize("how", ["offline", "dead proxy"])
def test_without_the_hub_the_error_names_the_local_ways_after_one_try(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def retry_for_long(*names: str, **options: str) -> None:
        raise AssertionError("`load_dataset` retries for half a minute and must not be reached")

    monkeypatch.setattr(hub, "load_dataset", retry_for_long)
    if how == "offline":
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    else:
        monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    huggingface_hub.close_session()  # sessions read the environment when they start
    with pytest.raises(ValueError, match=r"cannot be reached .* `--config \S+/demo.yaml`, .* `--data_files`"):
        open_source(dataset_name="wikimedia/wikipedia", dataset_config_name="20231101.en")
    huggingface_hub.close_session()
