"""What an offline run of W&B has written: its `.wandb` file, which is a LevelDB log of protobuf records.

It is read in another process, since tests look that nothing imports W&B in theirs.
"""

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.distributed import ROOT

_BLOCK, _FILE_HEADER, _HEADER = 32_768, 7, struct.Struct("<IHB")  # checksum, length, kind
_WHOLE, _LAST = 1, 4


@dataclass
class OfflineRun:
    """`history` has a row for each call of `log`; `files` are the names of what was saved."""

    config: dict[str, object] = field(default_factory=dict)
    history: list[dict[str, object]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)


def read_offline_run(folder: Path) -> OfflineRun:
    """The run in an `offline-run-*` folder."""
    command = [sys.executable, "-m", "tests.training.wandb_file", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return OfflineRun(**json.loads(done.stdout))


def _read(folder: Path) -> OfflineRun:
    from wandb.proto import wandb_internal_pb2

    [path] = folder.glob("*.wandb")
    run = OfflineRun()
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        for config in (record.config, record.run.config):
            run.config |= {item.key or item.nested_key[0]: json.loads(item.value_json) for item in config.update}
        if record.history.item:
            items = record.history.item
            run.history.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
        run.files += [file.path for file in record.files.files]
    return run


def _records(data: bytes) -> Iterator[bytes]:
    at, record = _FILE_HEADER, b""
    while at + _HEADER.size <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER.size:
            at += left
            continue
        _, length, kind = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        record += data[at : at + length]
        at += length
        if kind in (_WHOLE, _LAST):
            yield record
            record = b""


if __name__ == "__main__":
    print(json.dumps(asdict(_read(Path(sys.argv[1])))))
