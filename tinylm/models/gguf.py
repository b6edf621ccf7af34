"""Models out of GGUF files of the Llama and Qwen2 families: architecture, tokenizer with its chat template, weights.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)
from transformers.integrations.gguf import read_gguf_metadata

GGUF_FAMILIES = {"llama": PreTrainedTokenizerFast, "qwen2": Qwen2Tokenizer}
"""Those whose weights were seen to come out right (the library converts more), and the class of their tokenizers."""

_SETTINGS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_IDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}


def is_gguf(name_or_path: str) -> bool:
    """Whether a name means a GGUF file, by its ending."""
    return name_or_path.lower().endswith(".gguf")


def load_gguf_config(place: str) -> PreTrainedConfig:
    """The architecture, from the file's header. (`AutoConfig` reads every token of the vocabulary for it: seconds.)

    Raises:
        ValueError: no GGUF, a family that is not supported, positions that are scaled, or a file that ends too soon.
    """
    family = _supported_family(place)
    with _reading(place):
        metadata, tensors = read_gguf_metadata(place)
        if metadata.get(f"{family}.rope.scaling.type", "none") != "none" or "rope_freqs.weight" in tensors:
            raise ValueError("its positions are scaled for a longer context, which is not read")
        keys = {f"{family}.{key}": name for key, name in _SETTINGS.items()}
        keys |= {f"tokenizer.ggml.{key}": name for key, name in _IDS.items()}
        if family == "llama":
            keys["llama.rope.dimension_count"] = "head_dim"
        settings = {"vocab_size": metadata["tokenizer.ggml.tokens"]}  # how many
        settings |= {name: metadata[key] for key, name in keys.items() if key in metadata}
        config = AutoConfig.for_model(family, tie_word_embeddings="output.weight" not in tensors, **settings)
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    return config


def load_gguf_tokenizer(place: str) -> PreTrainedTokenizerBase:
    """What `AutoTokenizer` gives, which would read the whole header once more to find the class. Raises as above."""
    tokenizer_class = GGUF_FAMILIES[_supported_family(place)]
    with _reading(place):
        return tokenizer_class.from_pretrained(str(Path(place).parent), gguf_file=Path(place).name)


def load_gguf_model(place: str, dtype: torch.dtype, attn_implementation: str | None = None) -> PreTrainedModel:
    """The weights, made whole, in a model that knows nothing of GGUF, so that it can be saved. Raises as above."""
    config = load_gguf_config(place)
    with _reading(place):
        from_file = AutoModelForCausalLM.from_pretrained(
            str(Path(place).parent),
            gguf_file=Path(place).name,
            config=deepcopy(config),
            quantization_config=GgufConfig(dequantize=True),  # or, with its kernels, the weights stay in GGUF's blocks
            dtype=dtype,
        )
    model, loading = type(from_file).from_pretrained(
        None,
        config=config,
        state_dict=from_file.state_dict(),
        dtype=dtype,
        attn_implementation=attn_implementation,
        output_loading_info=True,
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"], loading
    return model.eval()


@contextmanager
def _reading(place: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, IndexError, KeyError, struct.error) as error:  # what reading past the end of a file comes to
        raise ValueError(
            f"`{place}` cannot be read as GGUF; it may be cut off ({error}). Fetch it again, or take its safetensors."
        ) from error


def _supported_family(place: str) -> str:
    """The first entry of the file's header, `general.architecture`.

    Raises:
        ValueError: no GGUF, or none of `GGUF_FAMILIES`.
    """
    with open(place, "rb") as file:
        head = file.read(1 << 10)
    name = b"general.architecture"
    at = head.find(name) + len(name)
    if head[:4] != b"GGUF" or at < len(name):
        raise ValueError(
            f"`{place}` is not a GGUF file: it begins with {head[:8]!r}. Name another with `--model_name_or_path`."
        )
    _, length = struct.unpack_from("<IQ", head.ljust(1 << 11, b"\0"), at)  # the value's type, a string's bytes
    family = head[at + 12 : at + 12 + length].decode(errors="replace")
    if family not in GGUF_FAMILIES:
        raise ValueError(
            f"GGUF files of the families {' and '.join(GGUF_FAMILIES)} can be read; `{place}` holds a `{family}`. Take"
            " its safetensors instead: a local folder or a repository of the Hub."
        )
    return family
