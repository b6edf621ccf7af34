"""A trained model with its tokenizer, from where it lies, or one paragraph on why that cannot be.

A file that is cut off, weights that are pickled, and an adapter of another base are found here: the libraries
underneath raise something of their own, run what is in the file, or take what fits and leave the rest random.
"""

from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tinylm.models.loading import load_base_tokenizer, resolve_name

from .pretrained import base_of, load_pretrained

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def load_with_tokenizer(
    name_or_path: str, base_model: str | None = None, *, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel | PeftModel, PreTrainedTokenizerBase]:
    """The model as `load_pretrained` gives it, and the tokenizer: an adapter's own, else that of its base.

    Raises:
        FileNotFoundError, ValueError: as `load_pretrained`; or a weights file is cut off or pickled, or an adapter's
            weights are not those that it has on this base.
    """
    base = base_of(name_or_path, base_model)
    for place in (name_or_path, base):
        if place is not None:
            _refuse_pickles(Path(resolve_name(place)))
    try:
        model = load_pretrained(name_or_path, base_model, dtype=dtype)
        if isinstance(model, PeftModel):
            _check_adapter(model, Path(resolve_name(name_or_path)), str(base))
    except SafetensorError as error:
        held_by = f"`{name_or_path}`" if base is None else f"`{name_or_path}` or of its base `{base}`"
        raise ValueError(
            f"A weights file of {held_by} is cut off or damaged ({error}). Copy or train it again."
        ) from error
    has_tokenizer = base is None or any(Path(resolve_name(name_or_path)).glob("tokenizer*"))
    return model, load_base_tokenizer(name_or_path if has_tokenizer else base)


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
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        held = set(file.keys())
    expected = set(get_peft_model_state_dict(model, save_embedding_layers=False))
    missing, left_over = sorted(expected - held), sorted(name for name in held - expected if "lora_" in name)
    if missing or left_over:
        raise ValueError(
            f"The adapter `{folder}` does not fit the base model `{base}`: {len(missing)} of its weights are missing "
            f"and {len(left_over)} have no place there, such as `{(missing + left_over)[0]}`. Name the one it was "
            "trained on with `--base_model`."
        )
