"""Streams' positions on disk, `data-rank-R.safetensors`: token ids as arrays, all else as JSON in the header.

A rank's file holds the states of its readers, with the shuffle window the largest part: 2 MB for 1,000 blocks of 512.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from tinylm.data.reader import ReaderState
from tinylm.data.stream import StreamState

_FIELDS = ("epoch", "num_readers", "turn", "settings", "data", "num_windows")


def save_stream_state(state: StreamState, folder: Path, rank: int) -> None:
    """Writes this rank's file into `folder`."""
    header = {name: getattr(state, name) for name in _FIELDS}
    header["readers"] = {number: reader.numbers for number, reader in state.readers.items()}
    arrays = {}
    for number, reader in state.readers.items():
        for name, pieces in reader.tokens.items():
            arrays[f"{number}.{name}"] = np.concatenate([np.empty(0, dtype=np.int32), *pieces])
            arrays[f"{number}.{name}.lengths"] = np.array([len(piece) for piece in pieces], dtype=np.int64)
    save_file(arrays, _path(folder, rank), metadata={"state": json.dumps(header)})


def load_stream_state(folder: Path, rank: int, world_size: int) -> StreamState:
    """Where `rank` is to go on: its own state, or on another number of ranks the readers of all together.

    Raises:
        FileNotFoundError: the checkpoint has no position in a stream, or not those of all its readers.
        ValueError: its fields are those of another version.
    """
    paths = sorted(folder.glob("data-rank-*.safetensors"))
    if not paths:
        raise FileNotFoundError(
            f"`{folder}` does not say how far its run had come in its stream. Go on from a checkpoint with"
            " `data-rank-0.safetensors`, or begin anew in another `--output_dir`."
        )
    if len(paths) == world_size and _path(folder, rank) in paths:
        state, needed = _load(_path(folder, rank)), slice(rank, None, world_size)
    else:
        states, needed = [_load(path) for path in paths], slice(None)
        readers = {number: reader for state in states for number, reader in state.readers.items()}
        state = replace(states[0], turn=0, readers=readers)
    missing = [number for number in range(state.num_readers)[needed] if number not in state.readers]
    if state.readers and missing:  # at the beginning of an epoch none has a state
        raise FileNotFoundError(
            f"`{folder}` holds the positions of {len(state.readers)} of {state.num_readers} readers; {missing} are"
            " missing: their ranks wrote into a folder of another machine. Copy their files `data-rank-R.safetensors`"
            " to it, and set `--output_dir` to a folder that all machines share."
        )
    return state


def _path(folder: Path, rank: int) -> Path:
    return folder / f"data-rank-{rank}.safetensors"


def _load(path: Path) -> StreamState:
    with safe_open(path, framework="np") as file:
        header = json.loads(file.metadata()["state"])
        if header.keys() != {*_FIELDS, "readers"}:
            raise ValueError(
                f"`{path}` tells a position in a stream in the words of another version of tinylm. Go on with that"
                " version, or begin anew in another `--output_dir`."
            )
        pieces: dict[str, dict[str, list[np.ndarray]]] = {number: {} for number in header["readers"]}
        for key in file.keys():  # noqa: SIM118 -- it is no dict
            number, name, *is_lengths = key.split(".")
            if not is_lengths:
                ends = np.cumsum(file.get_tensor(f"{key}.lengths"))
                pieces[number][name] = np.split(file.get_tensor(key), ends)[: len(ends)]
    numbers = header.pop("readers")
    readers = {int(number): ReaderState(numbers[number], pieces[number]) for number in numbers}
    return StreamState(**header, readers=readers)
