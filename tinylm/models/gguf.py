"""Models out of GGUF files of the Llama and Qwen2 families: architecture, tokenizer with its chat template, weights.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
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

_NEEDED = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_MORE = {
    "attention.head_count_kv": "num_key_value_heads",
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
        ValueError: no GGUF, a family that is not supported, a part of the model that is not read, or a file that ends
            too soon.
    """
    family = _supported_family(place)
    with _reading(place):
        metadata, tensors = read_gguf_metadata(place)
        settings = {name: metadata[f"{family}.{key}"] for key, name in _NEEDED.items()}
        settings["vocab_size"] = metadata["tokenizer.ggml.tokens"]  # how many there are
        settings["num_key_value_heads"] = settings["num_attention_heads"]
        more = {f"{family}.{key}": name for key, name in _MORE.items()}
        more |= {f"tokenizer.ggml.{key}": name for key, name in _IDS.items()}
        if family == "llama":
            more["llama.rope.dimension_count"] = "head_dim"
        settings |= {name: metadata[key] for key, name in more.items() if key in metadata}
        config = AutoConfig.for_model(family, tie_word_embeddings="output.weight" not in tensors, **settings)
    if lacks := _what_is_not_read(family, metadata, tensors):
        raise ValueError(f"`{place}` has {lacks}, which is not read from GGUF. Take the model's safetensors instead.")
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    return config


def _what_is_not_read(family: str, metadata: dict[str, object], tensors: tuple[str, ...]) -> str | None:
    """What a model of these families may have, and would lose without a word."""
    scaling = [metadata.get(f"{family}.rope.{key}", 1) for key in ("scaling.factor", "scale_linear")]
    kind = metadata.get(f"{family}.rope.scaling.type", "none")
    if kind != "none" or scaling != [1, 1] or "rope_freqs.weight" in tensors:
        return "positions that are scaled for a longer context"
    if metadata.get(f"{family}.expert_count"):
        return "a mixture of experts"
    if family == "llama" and any(name.endswith("attn_q.bias") for name in tensors):
        return "biases in its attention"
    return None


def load_gguf_tokenizer(place: str) -> PreTrainedTokenizerBase:
    """What `AutoTokenizer` gives, which would read the whole header once more to find the class. Raises as above."""
    tokenizer_class = GGUF_FAMILIES[_supported_family(place)]
    with _reading(place):
        return tokenizer_class.from_pretrained(str(Path(place).parent), gguf_file=Path(place).name)


def load_gguf_model(place: str, dtype: torch.dtype, attn_implementation: str | None = None) -> PreTrainedModel:
    """The weights, made whole, in a model that knows nothing of GGUF, so that it can be saved. Raises as above."""
    config = load_gguf_config(place)
    with _reading(place):
        from_file, found = AutoModelForCausalLM.from_pretrained(
            str(Path(place).parent),
            gguf_file=Path(place).name,
            config=deepcopy(config),
            quantization_config=GgufConfig(dequantize=True),  # or, with its kernels, the weights stay in GGUF's blocks
            dtype=dtype,
            output_loading_info=True,
        )
    if missing := sorted(found["missing_keys"]):
        raise ValueError(
            f"`{place}` lacks {len(missing)} weights of a {type(from_file).__name__}, such as `{missing[0]}`, which"
            " would be random. Fetch it again, or take the model's safetensors."
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
    except (ValueError, IndexError, KeyError, struct.error, StrictDataclassError) as error:  # and past a file's end
        raise ValueError(
            f"`{place}` cannot be read as GGUF; it may be cut off ({error}). Fetch it again, or take the model's"
            " safetensors."
        ) from error


def _supported_family(place: str) -> str:
    """The first entry of the file's header, `general.architecture`.

    Raises:
        ValueError: no GGUF, or none of `GGUF_FAMILIES`.
    """
    with open(place, "rb") as file:
        head = file.read(1 << 16)
    name = b"general.architecture"
    at = head.find(name) + len(name)
    if head[:4] != b"GGUF" or at < len(name):
        raise ValueError(
            f"`{place}` is not a GGUF file: it begins with {head[:8]!r}. Name a GGUF file, a folder with `config.json`"
            " and safetensors, or a repository of the Hub."
        )
    _, length = struct.unpack_from("<IQ", head.ljust(1 << 17, b"\0"), at)  # the value's type, a string's bytes
    family = head[at + 12 : at + 12 + length].decode(errors="replace")
    if family not in GGUF_FAMILIES:
        raise ValueError(
            f"GGUF files of the families {' and '.join(GGUF_FAMILIES)} can be read; `{place}` holds a `{family}`. Take"
            " its safetensors instead: a local folder or a repository of the Hub."
        )
    return family
