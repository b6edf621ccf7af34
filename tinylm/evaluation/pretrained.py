"""A trained model from where it lies - a run's folder, an adapter, a repository of the Hub, a GGUF file.

An adapter stands on its base model, which is looked for in this order: the one that is named; `base_model` in the
`run.json` of the run that made the adapter, a file or folder of this machine; the id in its `adapter_config.json`.
Weights are read from safetensors (or GGUF) only, and no code that comes with them runs.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import find_adapter_config_file

from tinylm.models.loading import hub_answers, load_base_config, load_base_model, resolve_name


def pretrained_config(name_or_path: str, base_model: str | None = None) -> PreTrainedConfig:
    """The architecture of the model; of an adapter, that of its base model. Reads no weights.

    Raises:
        FileNotFoundError: no such file or folder, and no such repository where the Hub can be reached; or an adapter's
            base is not there.
        ValueError: the folder holds no model.
    """
    base = base_of(name_or_path, base_model)
    with _needing(base, name_or_path):
        return load_base_config(base or name_or_path)


def load_pretrained(
    name_or_path: str, base_model: str | None = None, *, dtype: torch.dtype = torch.float32
) -> PreTrainedModel | PeftModel:
    """The causal language model in evaluation mode on the CPU, its adapter on top of its base model if it is one.

    Args:
        base_model: what an adapter stands on, instead of what it names itself.
        dtype: what the weights are held in, whatever they were saved in; an adapter's stay in fp32.

    Raises:
        FileNotFoundError, ValueError: as `pretrained_config`; or the weights are not those of the architecture.
    """
    base = base_of(name_or_path, base_model)
    with _needing(base, name_or_path):
        model = load_base_model(base or name_or_path, dtype=dtype)
    if base is None:
        return model
    try:
        return PeftModel.from_pretrained(model, resolve_name(name_or_path)).eval()
    except RuntimeError as error:
        raise ValueError(
            f"The adapter `{name_or_path}` does not fit the base model `{base}`: {error} Name the one that it was"
            " trained on with `--base_model`."
        ) from error


def base_of(name_or_path: str, base_model: str | None = None) -> str | None:
    """What an adapter stands on: `base_model` if it is named. None for a whole model.

    Raises:
        FileNotFoundError: no such file or folder, or an adapter's base is one that is not there.
        ValueError: a base is named and there is no adapter, or the adapter names none.
    """
    place = resolve_name(name_or_path)
    if not is_adapter(name_or_path):
        if base_model is not None:
            raise ValueError(f"Adapters have a base model, and `{name_or_path}` is a whole one. Leave it out.")
        return None
    base = base_model or _base_in_run_json(Path(place)) or PeftConfig.from_pretrained(place).base_model_name_or_path
    if base is None:
        raise ValueError(f"The adapter `{name_or_path}` does not say what it was trained on. Set `--base_model`.")
    with _needing(base, name_or_path):
        resolve_name(base)
    return base


@contextmanager
def _needing(base: str | None, adapter: str) -> Iterator[None]:
    """What is said where an adapter's base is not there."""
    try:
        yield
    except FileNotFoundError as error:
        if base is None:
            raise
        raise FileNotFoundError(
            f"The adapter `{adapter}` needs its base model `{base}`, which is not there. Name it with `--base_model`."
            f" {error}"
        ) from error


def is_adapter(name_or_path: str) -> bool:
    """Whether it is an adapter and no whole model.

    Raises:
        FileNotFoundError: no such file or folder.
    """
    place = resolve_name(name_or_path)
    if Path(place).exists():
        return Path(place, "adapter_config.json").is_file()
    return find_adapter_config_file(place, local_files_only=not hub_answers(place)) is not None


def _base_in_run_json(folder: Path) -> str | None:
    """`base_model` of the run that wrote the adapter, or the checkpoint that it lies in, where it is still there."""
    for path in (folder / "run.json", folder.parent / "run.json"):
        if path.is_file():
            base = json.loads(path.read_text(encoding="utf-8")).get("base_model")
            try:
                return base if base is not None and Path(resolve_name(base)).exists() else None
            except FileNotFoundError:
                return None
    return None
