"""A tokenizer and a model small enough to build in every test that scores or writes."""

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tinylm.models import TLMConfig, TLMForCausalLM

START, PAD = "<|start|>", "<|pad|>"


def byte_tokenizer(merges: Sequence[tuple[str, str]] = (), **specials: str) -> PreTrainedTokenizerFast:
    """One token a UTF-8 byte, `merges` of them, and `specials` such as `eos_token` behind."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **specials)


def tiny_llama(vocab_size: int = 263, context: int = 37, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=28,
        intermediate_size=31,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=context,
        initializer_range=0.2,  # far from uniform, so that rows differ in their loss
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def tiny_gpt2(vocab_size: int = 263, context: int = 37, seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=vocab_size,
        n_embd=26,
        n_layer=2,
        n_head=2,
        n_positions=context,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config).eval()


def tiny_tlm(vocab_size: int = 263, context: int = 37, seed: int = 0) -> TLMForCausalLM:
    torch.manual_seed(seed)
    config = TLMConfig(
        vocab_size=vocab_size,
        hidden_size=29,
        num_hidden_layers=2,
        num_attention_heads=3,
        head_dim=10,
        intermediate_size=31,
        max_position_embeddings=context,
        initializer_range=0.2,
    )
    return TLMForCausalLM(config).eval()
