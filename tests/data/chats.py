"""Tokenizers with chat templates, made here: what they give can be read off; and files of conversations."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

DEFAULT_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."

# As Qwen2.5's template does, in our own words: a system message of its own where there is none.
CHATML = (
    "{%- if messages[0].role != 'system' -%}<|im_start|>system\n" + DEFAULT_SYSTEM + "<|im_end|>\n{% endif -%}"
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)
# Shows an answer's thoughts only as long as it is the last message, as reasoning models' templates do.
THINKING = CHATML.replace(
    "{{ message.content }}",
    "{{ message.content if loop.last or message.role != 'assistant' else"
    " message.content.split('</think>')[-1].lstrip() }}",
)


def chat_tokenizer(template: str | None = CHATML, **specials: str) -> PreTrainedTokenizerFast:
    """Bytes, a few merges (two newlines are one token), and Qwen's special tokens; pad is eos."""
    merges = [("Ċ", "Ċ"), ("u", "s"), ("e", "r"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("i", "m")]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    specials = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", **specials}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **specials)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]})
    tokenizer.chat_template = template
    tokenizer.name_or_path = "our/tokenizer"
    return tokenizer


def question(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def answer(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


def write_chats(folder: Path, *shards: int) -> list[str]:
    """A file a shard, with so many conversations; the answers are numbered through, and of different lengths."""
    paths, first = [], 0
    for shard, num_rows in enumerate(shards):
        rows = [{"messages": [question("q"), answer(f"{n:03d}" * (1 + n % 5))]} for n in range(first, first + num_rows)]
        paths.append(str(folder / f"{shard}.jsonl"))
        Path(paths[-1]).write_text("".join(json.dumps(row) + "\n" for row in rows))
        first += num_rows
    return paths
