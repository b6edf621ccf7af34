"""The shape of a tLM: a GPT with a gated feed-forward and an explicit head size.

This file travels to the Hub beside the weights, so it imports nothing of ours.
"""

import difflib
from dataclasses import fields
from typing import ClassVar

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

# What the library itself writes into a config.json, or passes to the constructor, without a field of that name.
LIBRARY_KEYS = {
    "attn_implementation",
    "auto_map",
    "custom_pipelines",
    "experts_implementation",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "per_layer_config",
    "quantization_config",
    "tie_last_hidden_states",
    "torch_dtype",
}

SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
)


class TLMConfig(PreTrainedConfig):
    """The fields of a tLM; the defaults are `tlm-20m`, 19,831,296 parameters.

    `num_attention_heads * head_dim` need not equal `hidden_size`: 7 x 54 = 378 is not 384.

    Raises:
        ValueError: a size that is not a whole number above 0, a probability outside [0, 1), an id outside the
            vocabulary, an unknown activation, or a key that is neither a field nor one that the library writes.
    """

    model_type = "tlm"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache"]

    vocab_size: int = 4096
    hidden_size: int = 384
    num_hidden_layers: int = 7
    num_attention_heads: int = 7
    head_dim: int = 54
    intermediate_size: int = 1536
    max_position_embeddings: int = 512
    hidden_act: str = "silu"
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    attention_dropout: float = 0.0
    tie_word_embeddings: bool = False
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    def __post_init__(self, **kwargs: object) -> None:
        self._reject_unknown_keys(kwargs)
        self._reject_impossible_values()
        super().__post_init__(**kwargs)

    def _reject_unknown_keys(self, keys: dict[str, object]) -> None:
        known = {field.name for field in fields(self)} | LIBRARY_KEYS
        for key, value in keys.items():
            if key in known or key.startswith("_"):
                continue
            nearest = difflib.get_close_matches(key, list(TLMConfig.__annotations__), n=1, cutoff=0)[0]
            raise ValueError(
                f"`{type(self).__name__}` has no field `{key}` (it came with the value {value!r}). "
                f"Did you mean `{nearest}`? Rename the key or remove it from config.json."
            )

    def _reject_impossible_values(self) -> None:
        for name in SIZES:
            value = getattr(self, name)
            self._require(name, type(value) is int and value >= 1, "must be a whole number above 0")
        self._require("attention_dropout", 0 <= self._number("attention_dropout") < 1, "must be in [0, 1)")
        for name in ("initializer_range", "layer_norm_eps"):
            self._require(name, self._number(name) > 0, "must be above 0")
        for name in ("tie_word_embeddings", "use_cache"):
            self._require(name, isinstance(getattr(self, name), bool), "must be true or false")
        self._require("hidden_act", self.hidden_act in ACT2FN, f"must be one of {sorted(ACT2FN)}")
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            value = getattr(self, name)
            ids = value if isinstance(value, list) else [] if value is None else [value]
            inside = all(type(token_id) is int and 0 <= token_id < self.vocab_size for token_id in ids)
            self._require(name, inside, f"must be null or in [0, `vocab_size` = {self.vocab_size})")

    def _number(self, name: str) -> float:
        value = getattr(self, name)
        self._require(name, type(value) in (int, float), "must be a number")
        return value

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ValueError(f"`{name}` {rule}, but it is {getattr(self, name)!r}. Correct it in config.json.")
