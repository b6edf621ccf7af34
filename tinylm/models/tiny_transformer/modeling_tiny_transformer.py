"""The tiny transformer: embeddings, one `torch.nn.TransformerEncoderLayer` under a causal mask, LayerNorm, head.

For learning and for tests of everything around a model: about 0.1 M parameters over bytes. Torch's layer has neither a
KV cache nor a choice of attention nor separate q and v projections, so neither has this model; the rest of the
library's contract it keeps.

This file travels to the Hub beside the weights, so it imports nothing of ours but its configuration.
Shapes: B batch, T tokens, C hidden size, H heads, V vocabulary.
"""

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from .configuration_tiny_transformer import TinyTransformerConfig


def causal_mask(num_tokens: int, device: torch.device) -> Tensor:
    """Boolean `[T, T]`, true above the diagonal: what torch's layer must not look at."""
    return torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).triu(1)


class TinyTransformerLayer(GradientCheckpointingLayer, nn.TransformerEncoderLayer):
    """Torch's layer with gradient checkpointing and without its fast path for evaluation.

    The fast path reads the weights itself, past any adapter on `linear1` and `linear2`, without a word.
    """

    def __init__(self, config: TinyTransformerConfig) -> None:
        super().__init__(
            d_model=config.hidden_size,
            nhead=config.num_attention_heads,
            dim_feedforward=config.intermediate_size,
            dropout=config.dropout,
            layer_norm_eps=config.layer_norm_eps,
            batch_first=True,
            norm_first=config.norm_first,
        )
        self.activation_relu_or_gelu = 0  # torch's own condition for the fast path


class TinyTransformerPreTrainedModel(PreTrainedModel):
    config: TinyTransformerConfig
    config_class = TinyTransformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["TinyTransformerLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": TinyTransformerLayer}  # noqa: RUF012


class TinyTransformerModel(TinyTransformerPreTrainedModel):
    """The network without its head: token ids to normalised hidden states."""

    def __init__(self, config: TinyTransformerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.encoder = TinyTransformerLayer(config)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: object,
    ) -> BaseModelOutput:
        """Hidden states `[B, T, C]` of `input_ids` `[B, T]` (or `inputs_embeds` `[B, T, C]`).

        Positions that are not given are counted over the real tokens of `attention_mask` `[B, T]`, so padding on
        either side changes nothing. `position_ids` that restart in a row keep the documents of a packed row apart,
        but only without `attention_mask`.

        Raises:
            ValueError: both or neither of the inputs; more tokens than `max_position_embeddings`.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Exactly one of `input_ids` and `inputs_embeds` must be given.")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        mask = self._mask(inputs_embeds, attention_mask, position_ids)
        positions = self._positions(inputs_embeds, attention_mask, position_ids)
        embedded = inputs_embeds + self.embed_positions(positions)
        encoded = self.encoder(embedded, mask, is_causal=mask.ndim == 2)
        return BaseModelOutput(last_hidden_state=self.norm(encoded))

    def _mask(self, inputs_embeds: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> Tensor:
        """Boolean, true where not to look: `[T, T]`, or `[B * H, T, T]` where rows differ."""
        batch_size, num_tokens = inputs_embeds.shape[:2]
        blocked = causal_mask(num_tokens, inputs_embeds.device)
        if attention_mask is not None:
            padding = attention_mask[:, None, :] == 0  # B 1 T
            # Padding still sees itself: with nothing to look at, a plain softmax gives NaN (the CPU kernel 0).
            itself = torch.eye(num_tokens, dtype=torch.bool, device=blocked.device)
            blocked = blocked | padding & ~itself
        elif position_ids is not None:
            restarts = torch.diff(position_ids, prepend=position_ids[:, :1] - 1) != 1
            document = restarts.cumsum(-1).expand(batch_size, -1)
            blocked = blocked | (document[:, :, None] != document[:, None, :])
        else:
            return blocked
        return blocked.repeat_interleave(self.config.num_attention_heads, dim=0)

    def _positions(self, inputs_embeds: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> Tensor:
        """The given positions or counted ones, `[B or 1, T]`, inside the table.

        Given positions are read on CPU only: elsewhere it would cost a synchronisation a step.
        """
        num_tokens, device = inputs_embeds.shape[1], inputs_embeds.device
        limit = self.config.max_position_embeddings
        if position_ids is not None:
            if device.type == "cpu" and not torch.compiler.is_compiling() and position_ids.max() >= limit:
                raise ValueError(_too_long(int(position_ids.max()) + 1, limit))
            return position_ids
        if num_tokens > limit:
            raise ValueError(_too_long(num_tokens, limit))
        if attention_mask is not None:
            return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        return torch.arange(num_tokens, device=device).unsqueeze(0)


def _too_long(num_tokens: int, limit: int) -> str:
    return (
        f"The model has {limit} positions (`max_position_embeddings`), but {num_tokens} tokens are asked of it. "
        f"Shorten the text or the number of new tokens, or pack documents with `position_ids` that restart."
    )


class TinyTransformerForCausalLM(TinyTransformerPreTrainedModel, GenerationMixin):
    """The tiny transformer with its language-modelling head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: TinyTransformerConfig) -> None:
        super().__init__(config)
        self.model = TinyTransformerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: object,
    ) -> CausalLMOutput:
        """Logits `[B, T, V]`, and with `labels` `[B, T]` (-100 is no target) the loss in nats.

        The loss is shifted here, once (unless `shift_labels` comes, already shifted), computed in fp32, summed over
        the real targets and divided by `num_items_in_batch`, or by their own number where that is not given. Without
        one real target the mean is NaN, because 0 / 0 has no value, and the sum with a given number is 0.
        `logits_to_keep` keeps the last n positions, or those that an index tensor names.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, next_sequence_length: int | None = None, cache: Cache | None = None, **kwargs: object
    ) -> dict[str, object]:
        """The whole text at every step: nothing is remembered between them."""
        return super().prepare_inputs_for_generation(input_ids, **kwargs)

    def _validate_generated_length(
        self, generation_config: GenerationConfig, input_ids_length: int, has_default_max_length: bool
    ) -> None:
        """Refuse a generation that would run out of positions before it writes its first token."""
        super()._validate_generated_length(generation_config, input_ids_length, has_default_max_length)
        limit = self.config.max_position_embeddings
        if generation_config.max_length > limit:
            raise ValueError(_too_long(generation_config.max_length, limit))
