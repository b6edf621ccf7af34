"""A trained model from where it lies - a run's folder, an adapter, a repository of the Hub - ready to be scored.

Weights are read from safetensors only, as float32 whatever they were saved in, and no code that comes with them runs.
"""

from pathlib import Path

import torch
from peft import AutoPeftModelForCausalLM, PeftConfig, PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import find_adapter_config_file

import tinylm.models  # noqa: F401  (registers the Auto classes)


def pretrained_config(name_or_path: str) -> PreTrainedConfig:
    """The architecture of the model; of an adapter, that of its base model. Reads no weights.

    Raises:
        FileNotFoundError: no such folder, and no such repository where the Hub can be reached.
        ValueError: the folder holds no model.
    """
    folder = Path(name_or_path)
    if not folder.is_dir():
        if folder.exists() or folder.is_absolute() or name_or_path.startswith(".") or name_or_path.count("/") > 1:
            raise FileNotFoundError(
                f"A model is a folder or a repository of the Hub; there is no folder `{name_or_path}`. "
                "Set `--model_name_or_path`."
            )
    elif not (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
        held = sorted(path.name for path in folder.iterdir())
        raise ValueError(
            f"A model's folder holds `config.json` or, for an adapter, `adapter_config.json`; `{name_or_path}` holds "
            f"{held or 'nothing'}. Set `--model_name_or_path` to the folder that a run has written."
        )
    try:
        return AutoConfig.from_pretrained(_base_of(name_or_path) or name_or_path)
    except OSError as error:
        raise FileNotFoundError(
            f"No architecture could be read from `{name_or_path}`, as a folder or from the Hub: {error} "
            "Set `--model_name_or_path`."
        ) from error


def load_pretrained(name_or_path: str) -> PreTrainedModel | PeftModel:
    """The causal language model in evaluation mode on the CPU, its adapter on top of its base model if it is one.

    Raises:
        ValueError: the folder's weights are not those of its architecture.
        OSError: no weights in safetensors.
    """
    if _base_of(name_or_path):
        return AutoPeftModelForCausalLM.from_pretrained(name_or_path, dtype=torch.float32).eval()
    model, loading = AutoModelForCausalLM.from_pretrained(
        name_or_path, dtype=torch.float32, use_safetensors=True, output_loading_info=True
    )
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(
            f"The weights of `{name_or_path}` are not those of a {type(model).__name__}: {len(missing)} are missing, "
            f"such as `{missing[0]}`, and would be random. Train or copy the model again."
        )
    return model.eval()


def _base_of(name_or_path: str) -> str | None:
    """What an adapter was trained on; None for a whole model."""
    if find_adapter_config_file(name_or_path) is None:
        return None
    return PeftConfig.from_pretrained(name_or_path).base_model_name_or_path
