"""A trained model with its tokenizer, from where it lies, or one paragraph on why that cannot be.

A file that is cut off, weights that are pickled, and an adapter of another base are found here: the libraries
underneath raise something of their own, run what is in the file, or take what fits and leave the rest random.
"""

from pathlib import Path

import torch
from huggingface_hub import file_exists, try_to_load_from_cache
from peft import PeftModel, get_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tinylm.models.loading import cut_off, hub_answers, load_base_tokenizer, resolve_name

from .pretrained import base_of, load_pretrained

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def load_with_tokenizer(
    name_or_path: str, base_model: str | None = None, *, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel | PeftModel, PreTrainedTokenizerBase]:
    """The model as `load_checked` gives it, and its tokenizer as `tokenizer_of`.

    Raises:
        FileNotFoundError, ValueError: as these two.
    """
    return load_checked(name_or_path, base_model, dtype=dtype), tokenizer_of(name_or_path, base_model)


def load_checked(
    name_or_path: str, base_model: str | None = None, *, dtype: torch.dtype = torch.float32
) -> PreTrainedModel | PeftModel:
    """The model as `load_pretrained` gives it, after a look at its files.

    Raises:
        FileNotFoundError, ValueError: as `load_pretrained`; or a weights file is cut off or pickled, or an adapter's
            weights are not those that it has on this base.
    """
    base = check_weights(name_or_path, base_model)
    try:
        model = load_pretrained(name_or_path, base_model, dtype=dtype)
        if isinstance(model, PeftModel):
            _check_adapter(model, Path(resolve_name(name_or_path)), str(base))
    except SafetensorError as error:  # of a file in the Hub's cache
        raise cut_off(name_or_path, error) from error
    return model


def tokenizer_of(name_or_path: str, base_model: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; an adapter's own, else that of its base.

    Raises:
        FileNotFoundError, ValueError: there is none, or no such model.
    """
    base = base_of(name_or_path, base_model)
    has_tokenizer = base is None or any(Path(resolve_name(name_or_path)).glob("tokenizer*"))
    return load_base_tokenizer(name_or_path if has_tokenizer else base)


def check_weights(name_or_path: str, base_model: str | None = None) -> str | None:
    """Looks at the weights files of a local model, and of an adapter's base, and reads no weights; gives the base.

    Raises:
        FileNotFoundError, ValueError: as `base_of`; or a file is cut off, or weights are missing or pickled.
    """
    base = base_of(name_or_path, base_model)
    if base is not None:
        check_adapters_file(name_or_path)
    for place in (name_or_path, base):
        if place is not None:
            folder = Path(resolve_name(place))
            _refuse_pickles(folder)
            for path in sorted(folder.glob("*.safetensors")):
                try:
                    with safe_open(path, "pt"):
                        pass
                except SafetensorError as error:
                    raise cut_off(str(path), error) from error
    return base


def check_adapters_file(name_or_path: str) -> None:
    """Raises ValueError for an adapter without `adapter_model.safetensors`: PEFT would take a pickle in its place."""
    place = resolve_name(name_or_path)
    if Path(place).is_dir():
        _refuse_pickles(Path(place))
        is_there = Path(place, SAFETENSORS_WEIGHTS_NAME).is_file()
    elif hub_answers(place):
        is_there = file_exists(place, SAFETENSORS_WEIGHTS_NAME)
    else:
        is_there = isinstance(try_to_load_from_cache(place, SAFETENSORS_WEIGHTS_NAME), str)
    if not is_there:
        raise ValueError(
            f"The adapter `{name_or_path}` lacks its weights, `{SAFETENSORS_WEIGHTS_NAME}`, and pickled ones are not"
            " read. If its run was stopped, name a checkpoint of it; else save it with safetensors."
        )


def _refuse_pickles(folder: Path) -> None:
    """Raises ValueError for a folder whose only weights are pickled."""
    files = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    pickles = [name for name in files if name.endswith(_PICKLES) and name != "training_args.bin"]
    if pickles and not any(name.endswith(".safetensors") for name in files):
        raise ValueError(
            f"`{folder}` holds its weights as a pickle (`{sorted(pickles)[0]}`), which can run any code when it is "
            "read, so it is not. Save them with safetensors, as `save_pretrained` does."
        )


def _check_adapter(model: PeftModel, folder: Path, base: str) -> None:
    """Raises ValueError where a local adapter's file does not hold exactly the weights that it has on its base."""
    if not folder.is_dir():
        return
    with safe_open(folder / SAFETENSORS_WEIGHTS_NAME, "pt") as file:
        held = set(file.keys())
    expected = set(get_peft_model_state_dict(model, save_embedding_layers=False))
    missing, left_over = sorted(expected - held), sorted(name for name in held - expected if "lora_" in name)
    if missing or left_over:
        raise ValueError(
            f"The adapter `{folder}` does not fit the base model `{base}`: {len(missing)} of its weights are missing "
            f"and {len(left_over)} have no place there, such as `{(missing + left_over)[0]}`. Name the one it was "
            "trained on with `--base_model`."
        )
