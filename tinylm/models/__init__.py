"""Our architectures. Importing this package teaches the Auto classes their names, and makes saving copy their code."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .tiny_transformer.configuration_tiny_transformer import TinyTransformerConfig
from .tiny_transformer.modeling_tiny_transformer import TinyTransformerForCausalLM, TinyTransformerModel
from .tlm.configuration_tlm import TLMConfig
from .tlm.modeling_tlm import TLMForCausalLM, TLMModel

__all__ = [
    "TLMConfig",
    "TLMForCausalLM",
    "TLMModel",
    "TinyTransformerConfig",
    "TinyTransformerForCausalLM",
    "TinyTransformerModel",
]

for config, body, causal_lm in (
    (TLMConfig, TLMModel, TLMForCausalLM),
    (TinyTransformerConfig, TinyTransformerModel, TinyTransformerForCausalLM),
):
    AutoConfig.register(config.model_type, config)
    AutoModel.register(config, body)
    AutoModelForCausalLM.register(config, causal_lm)
    config.register_for_auto_class()
    body.register_for_auto_class("AutoModel")
    causal_lm.register_for_auto_class("AutoModelForCausalLM")
