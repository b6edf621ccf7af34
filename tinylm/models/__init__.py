"""Our architectures. Importing this package teaches the Auto classes their names, and makes saving copy their code."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .tlm.configuration_tlm import TLMConfig
from .tlm.modeling_tlm import TLMForCausalLM, TLMModel

__all__ = ["TLMConfig", "TLMForCausalLM", "TLMModel"]

AutoConfig.register(TLMConfig.model_type, TLMConfig)
AutoModel.register(TLMConfig, TLMModel)
AutoModelForCausalLM.register(TLMConfig, TLMForCausalLM)
TLMConfig.register_for_auto_class()
TLMModel.register_for_auto_class("AutoModel")
TLMForCausalLM.register_for_auto_class("AutoModelForCausalLM")
