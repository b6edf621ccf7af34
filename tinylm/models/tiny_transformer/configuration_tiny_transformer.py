"""The shape of the tiny transformer: one `torch.nn.TransformerEncoderLayer` over bytes.

This file travels to the Hub beside the weights, so it imports nothing of ours (its checks repeat tLM's for that).
"""

import difflib
from dataclasses import fields

from transformers import PreTrainedConfig

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
SIZES = ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size", "max_position_embeddings")


class TinyTransformerConfig(PreTrainedConfig):
    """The fields of a tiny transformer; the defaults read bytes: 0 to 255, padding 256, end of text 257.

    `use_cache` is there because the library sets it, and is ignored: torch's layer has no cache.

    Raises:
        ValueError: a size that is not a whole number above 0, heads that do not divide `hidden_size`, more than one
            layer, a probability outside [0, 1), an id outside the vocabulary, or a key that is neither a field nor
            one that the library writes.
    """

    model_type = "tiny_transformer"

    vocab_size: int = 258
    hidden_size: int = 64
    num_hidden_layers: int = 1
    num_attention_heads: int = 4
    intermediate_size: int = 256
    max_position_embeddings: int = 128
    dropout: float = 0.0
    norm_first: bool = False
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    use_cache: bool = False
    pad_token_id: int | None = 256
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 257

    def __post_init__(self, **kwargs: object) -> None:
        self._reject_unknown_keys(kwargs)
        self._reject_impossible_values()
        super().__post_init__(**kwargs)

    def _reject_unknown_keys(self, keys: dict[str, object]) -> None:
        known = {field.name for field in fields(self)} | LIBRARY_KEYS
        for key, value in keys.items():
            if key in known or key.startswith("_"):
                continue
            nearest = difflib.get_close_matches(key, list(TinyTransformerConfig.__annotations__), n=1, cutoff=0)[0]
            raise ValueError(
                f"`{type(self).__name__}` has no field `{key}` (it came with the value {value!r}). "
                f"Did you mean `{nearest}`? Rename the key or remove it from config.json."
            )

    def _reject_impossible_values(self) -> None:
        for name in SIZES:
            value = getattr(self, name)
            self._require(name, type(value) is int and value >= 1, "must be a whole number above 0")
        heads = self.num_attention_heads
        divides = self.hidden_size % heads == 0
        self._require("hidden_size", divides, f"must be a multiple of `num_attention_heads` = {heads}")
        self._require("num_hidden_layers", self.num_hidden_layers == 1, "must be 1")
        self._require("dropout", 0 <= self._number("dropout") < 1, "must be in [0, 1)")
        for name in ("initializer_range", "layer_norm_eps"):
            self._require(name, self._number(name) > 0, "must be above 0")
        for name in ("norm_first", "tie_word_embeddings", "use_cache"):
            self._require(name, isinstance(getattr(self, name), bool), "must be true or false")
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
