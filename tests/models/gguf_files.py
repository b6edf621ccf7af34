"""GGUF files of tiny models, written as llama.cpp's converter writes them."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config
from transformers import Qwen2ForCausalLM as Qwen2

from tests.data.chats import CHATML, chat_tokenizer

SIZES = {
    "vocab_size": 265,
    "hidden_size": 16,
    "intermediate_size": 23,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 262,
    "pad_token_id": None,
}
FAMILIES = {"llama": (LlamaForCausalLM, LlamaConfig), "qwen2": (Qwen2, Qwen2Config)}


def tiny_base(family: str = "qwen2", **changes: object) -> PreTrainedModel:
    """A two-layer model for `chat_tokenizer`, the same every time."""
    model_class, config_class = FAMILIES[family]
    torch.manual_seed(0)
    return model_class(config_class(**{**SIZES, **changes})).eval()


def save_base(folder: Path, family: str = "qwen2", template: str | None = CHATML, **changes: object) -> Path:
    """`tiny_base` and its tokenizer in a folder."""
    tiny_base(family, **changes).save_pretrained(folder)
    chat_tokenizer(template).save_pretrained(folder)
    return folder


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    family: str,
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> None:
    """The model and its tokenizer in a file that calls itself `family`; `more` adds to it."""
    config, writer = model.config, gguf.GGUFWriter(path, family)
    writer.add_name("a model of /some/path")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if family == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    more(writer)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = tokenizer.get_vocab()
    specials = set(tokenizer.all_special_ids) | {vocabulary["<|im_start|>"], vocabulary["<|endoftext|>"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.get))
    writer.add_token_types([3 if token_id in specials else 1 for token_id in range(len(vocabulary))])
    writer.add_token_merges([" ".join(pair) for pair in _merges(tokenizer)])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_bos_token_id(vocabulary["<|endoftext|>"])
    writer.add_chat_template(tokenizer.chat_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, kind = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{kind}", _as_stored(name, tensor.float().numpy(), config, family))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _as_stored(name: str, weights: np.ndarray, config: LlamaConfig | Qwen2Config, family: str) -> np.ndarray:
    """Llama's files hold the halves of each query and key head interleaved."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, num_heads in heads.items():
        if family == "llama" and f"{part}.weight" in name:
            half = weights.shape[0] // num_heads // 2
            return weights.reshape(num_heads, 2, half, -1).swapaxes(1, 2).reshape(weights.shape).copy()
    return weights


def _merges(tokenizer: PreTrainedTokenizerFast) -> list[tuple[str, str]]:
    return json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
