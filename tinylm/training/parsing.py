"""A run file and flags become dataclasses: `--config run.yaml --learning_rate 1e-3`.

A run file is a list of flags written down: each of its keys is the name of a flag, each value goes through the very
conversion that the command line uses (so `2e-4`, a string to YAML, is a number here), and flags given by hand win.
"""

import difflib
import json
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser

# Naming a source by hand replaces the run file's source as a whole, not one half of it.
_SOURCES = {"dataset_name", "data_files", "prepared_corpus"}
_SOURCE_FLAGS = {*_SOURCES, "dataset_config_name", "eval_data_files"}


def parse_arguments(
    dataclass_types: Sequence[type], argv: Sequence[str] | None = None, default_config: str | None = None
) -> tuple[Any, ...]:
    """One instance of each of `dataclass_types`, from `--config FILE` (a YAML mapping) and flags, which win.

    Args:
        argv: the flags; `sys.argv[1:]` if None.
        default_config: the run file if `--config` is not given.

    Raises:
        ValueError: an unknown key or flag (the nearest known one is named), a run file that is not a mapping.
        FileNotFoundError: no such run file.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = HfArgumentParser(dataclass_types, allow_abbrev=False)
    parser.add_argument("--config", default=default_config, help="A run file (YAML): its keys are the flags below.")
    config = _config_path(argv, default_config)
    known = {name.lstrip("-").replace("-", "_") for action in parser._actions for name in action.option_strings}
    given = {flag.split("=")[0].lstrip("-").replace("-", "_") for flag in argv if flag.startswith("--")}
    from_file = _read_run_file(config, known) if config else {}
    if given & _SOURCES:
        from_file = {key: value for key, value in from_file.items() if key not in _SOURCE_FLAGS}
    flags = [word for key, value in from_file.items() for word in _as_flag(key, value)]
    *instances, _, unknown = parser.parse_args_into_dataclasses(
        [*flags, *argv], look_for_args_file=False, return_remaining_strings=True
    )
    if unknown:
        raise ValueError(f"There is no flag `{unknown[0]}`.{_nearest(unknown[0], known, '--')} `--help` lists all.")
    return tuple(instances)


def _config_path(argv: Sequence[str], default: str | None) -> str | None:
    """What `--config` says, without a look at any other flag."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default=default)
    return parser.parse_known_args(argv)[0].config


def _read_run_file(path: str, known: set[str]) -> dict[str, Any]:
    if not Path(path).is_file():
        raise FileNotFoundError(f"The run file `{path}` does not exist. Give `--config` the path of a YAML file.")
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"The run file `{path}` is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"A run file is a mapping of flags to values; `{path}` holds a {type(values).__name__}.")
    for key in values:
        if key not in known:
            raise ValueError(f"`{path}` has the unknown key `{key}`.{_nearest(str(key), known)}")
    return values


def _nearest(name: str, known: set[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(name.lstrip("-").replace("-", "_"), known, n=1, cutoff=0.5)
    return f" Did you mean `{prefix}{close[0]}`?" if close else ""


def _as_flag(key: str, value: Any) -> list[str]:
    """A key of a run file as words of a command line; null leaves the default."""
    if value is None:
        return []
    if isinstance(value, list):
        return [f"--{key}", *map(str, value)]
    if isinstance(value, bool):
        value = str(value).lower()
    return [f"--{key}={json.dumps(value) if isinstance(value, dict) else value}"]
