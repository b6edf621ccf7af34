"""tLM: a small GPT for the Hugging Face stack.

The choices: learned positions, pre-LayerNorm, q/k/v without bias and an output projection with one, a gated SiLU
feed-forward with biases, an untied head, an explicit head size. q, k and v stay three projections: one fused matrix
would be a little faster and out of LoRA's reach. Attention is whatever `attn_implementation` names; `sdpa` takes
no mask at all when nothing is padded.

This file travels to the Hub beside the weights, so it imports nothing of ours but its configuration.
Shapes: B batch, T tokens, C hidden size, H heads, D head size, V vocabulary, S tokens seen with the cache (S >= T).
"""

import math

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, slice_logits_to_keep
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_tlm import TLMConfig


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, Tensor]:
    """Attention spelled out, for those who want the weights: `[B, T, H, D]` and the weights `[B, H, T, S]`.

    The softmax of half-precision scores adds up in fp32 inside the kernel.
    """
    scores = query @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1).to(value.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights


class TLMAttention(nn.Module):
    """Causal multi-head attention whose heads need not add up to the hidden size; `o_proj` brings them back to it."""

    def __init__(self, config: TLMConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.scaling = config.head_dim**-0.5
        self.is_causal = True  # read by the attention interface
        heads_size = config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, heads_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, heads_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, heads_size, bias=False)
        self.o_proj = nn.Linear(heads_size, config.hidden_size)
        self.o_proj.writes_residual = True  # read by `_init_weights`

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, cache: Cache | None = None, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        """`[B, T, C]` to `[B, T, C]`, and the weights `[B, H, T, S]` where the attention in use has them."""
        query = self.q_proj(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # B H T D
        key = self.k_proj(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        value = self.v_proj(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)  # B H S D

        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        dropout = self.config.attention_dropout if self.training else 0.0
        heads, weights = attention(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return self.o_proj(heads.flatten(2)), weights  # heads: B T H D


class TLMMLP(nn.Module):
    """Gated feed-forward, `down(act(gate(x)) * up(x))`: https://arxiv.org/abs/2002.05202, with biases."""

    def __init__(self, config: TLMConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)
        self.down_proj.writes_residual = True
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class TLMDecoderLayer(GradientCheckpointingLayer):
    """One block: each half normalises its input and adds its output to the residual stream."""

    def __init__(self, config: TLMConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attn = TLMAttention(config, layer_idx)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = TLMMLP(config)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, cache: Cache | None = None, **kwargs: object
    ) -> Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), attention_mask, cache=cache, **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class TLMPreTrainedModel(PreTrainedModel):
    config: TLMConfig
    config_class = TLMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["TLMDecoderLayer"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": TLMDecoderLayer, "attentions": TLMAttention}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Normal weights, zero biases; what writes to the residual stream is narrower by sqrt(2 * layers) (GPT-2)."""
        super()._init_weights(module)
        if getattr(module, "writes_residual", False):
            std = self.config.initializer_range / math.sqrt(2 * self.config.num_hidden_layers)
            init.normal_(module.weight, mean=0.0, std=std)


class TLMModel(TLMPreTrainedModel):
    """The network without its head: token ids to normalised hidden states."""

    def __init__(self, config: TLMConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(TLMDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: object,
    ) -> BaseModelOutputWithPast:
        """Hidden states `[B, T, C]` of `input_ids` `[B, T]` (or `inputs_embeds` `[B, T, C]`).

        Positions that are not given are counted over the real tokens of `attention_mask` `[B, S]`, so padding on
        either side changes nothing. `position_ids` that restart in a row keep the documents of a packed row apart,
        but only without `attention_mask` and with `use_cache=False`.

        Raises:
            ValueError: both or neither of the inputs; more tokens than `max_position_embeddings`.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Exactly one of `input_ids` and `inputs_embeds` must be given.")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        position_ids = self._positions(inputs_embeds, attention_mask, position_ids, cache)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            cache=cache,
            position_ids=position_ids,
        )
        hidden_states = inputs_embeds + self.embed_positions(position_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask, cache=cache, position_ids=position_ids, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), cache=cache)

    def _positions(
        self, inputs_embeds: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """The given positions or counted ones, `[B or 1, T]`, inside the table.

        Given positions are read on CPU only: elsewhere it would cost a synchronisation a step.
        """
        num_tokens, device = inputs_embeds.shape[1], inputs_embeds.device
        past = cache.get_seq_length() if cache is not None else 0  # a tensor in a static cache
        limit = self.config.max_position_embeddings
        if position_ids is not None:
            if device.type == "cpu" and not torch.compiler.is_compiling() and position_ids.max() >= limit:
                raise ValueError(_too_long(int(position_ids.max()) + 1, limit))
            return position_ids
        if isinstance(past, int) and past + num_tokens > limit:
            raise ValueError(_too_long(past + num_tokens, limit))
        if attention_mask is not None and attention_mask.ndim == 2:
            return (attention_mask.long().cumsum(-1)[:, -num_tokens:] - 1).clamp(min=0)
        return (torch.arange(num_tokens, device=device) + past).unsqueeze(0)


def _too_long(num_tokens: int, limit: int) -> str:
    return (
        f"The model has {limit} positions (`max_position_embeddings`), but {num_tokens} tokens are asked of it. "
        f"Shorten the text or the number of new tokens, or pack documents with `position_ids` that restart."
    )


class TLMForCausalLM(TLMPreTrainedModel, GenerationMixin):
    """tLM with its language-modelling head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: TLMConfig) -> None:
        super().__init__(config)
        self.model = TLMModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: object,
    ) -> CausalLMOutputWithPast:
        """Logits `[B, T, V]`, and with `labels` `[B, T]` (-100 is no target) the loss in nats.

        The loss is shifted here, once (unless `shift_labels` comes, already shifted), computed in fp32, summed over
        the real targets and divided by `num_items_in_batch`, or by their own number where that is not given. Without
        one real target the mean is NaN, because 0 / 0 has no value, and the sum with a given number is 0.
        `logits_to_keep` keeps the last n positions, or those that an index tensor names. A call with labels makes no
        cache unless it is asked to: nobody continues from it, and with a cache a packed row's documents would mix.
        """
        if labels is not None and use_cache is None:
            use_cache = False
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _validate_generated_length(
        self, generation_config: GenerationConfig, input_ids_length: int, has_default_max_length: bool
    ) -> None:
        """Refuse a generation that would run out of positions before it writes its first token."""
        super()._validate_generated_length(generation_config, input_ids_length, has_default_max_length)
        limit = self.config.max_position_embeddings
        if generation_config.max_length > limit:
            raise ValueError(_too_long(generation_config.max_length, limit))
