"""The one list of model classes that the suite of this folder runs over, each small and with what it is exempt from.

Sizes are distinct primes where they can be, so that a swapped axis cannot pass. The initialisation is wide, so that a
wrong mask or position shows in the logits.
"""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tinylm.models import TinyTransformerConfig, TLMConfig


@dataclass(frozen=True)
class Architecture:
    """A tiny configuration, and the abilities that this class does not have.

    Abilities: `cache`, `attention` (a choice of implementation, and weights from the eager one), `q_proj` (LoRA on
    `q_proj` and `v_proj`).
    """

    config: PreTrainedConfig
    exempt: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.config.model_type

    def build(self, **changes: object) -> PreTrainedModel:
        """The same weights every time, in evaluation mode; `changes` go into the configuration."""
        fields = {**self.config.to_dict(), **changes}
        implementation = fields.pop("attn_implementation", None)
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(type(self.config)(**fields), attn_implementation=implementation)
        return model.eval()

    def tokens(self, *shape: int, seed: int = 0) -> torch.Tensor:
        """Random ids without the special ones."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, 90, shape, generator=generator)


ARCHITECTURES = [
    Architecture(
        TLMConfig(
            vocab_size=97,
            hidden_size=29,
            num_hidden_layers=2,
            num_attention_heads=5,
            head_dim=7,
            intermediate_size=43,
            max_position_embeddings=61,
            initializer_range=0.2,
        )
    ),
    # What torch's encoder layer does not have.
    Architecture(
        TinyTransformerConfig(
            vocab_size=101,
            hidden_size=34,  # two heads of 17: an even number, or the fast path stays off by itself
            num_attention_heads=2,
            intermediate_size=47,
            max_position_embeddings=59,
            initializer_range=0.2,
            pad_token_id=97,
            eos_token_id=100,
        ),
        exempt=frozenset({"cache", "attention", "q_proj"}),
    ),
]


def having(*abilities: str) -> list[Architecture]:
    """The architectures that are exempt from none of `abilities`."""
    return [architecture for architecture in ARCHITECTURES if not architecture.exempt & set(abilities)]
