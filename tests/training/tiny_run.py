"""A pretraining run small enough to launch in a test: an architecture, a prepared corpus and a run file."""

import json
import random
from pathlib import Path

import yaml
from transformers import AutoTokenizer

from tests.distributed import ROOT
from tinylm.data.prepare import write_store
from tinylm.data.sources import open_source
from tinylm.tokenizers.sentencepiece_bpe import train_sentencepiece

VOCAB, CONTEXT = 300, 96
_WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "then",
    "another",
    "dog",
    "ran",
    "after",
    "it",
    "while",
    "birds",
]
_SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8, "intermediate_size": 24}


def write_tiny_run(folder: Path) -> Path:
    """The run file, written into `folder` beside all that it names. Blocks are half as long as the context."""
    config = json.loads((ROOT / "recipes" / "configs" / "models" / "tlm-20m" / "config.json").read_text())
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(
        json.dumps({**config, **_SIZES, "max_position_embeddings": CONTEXT, "vocab_size": VOCAB})
    )
    draw = random.Random(5)
    documents = [" ".join(draw.choices(_WORDS, k=200)) for _ in range(60)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    train_sentencepiece(documents, folder / "tokenizer", vocab_size=VOCAB)
    source = open_source(data_files=[str(folder / "text.jsonl")])
    write_store(source, AutoTokenizer.from_pretrained(folder / "tokenizer"), folder / "corpus")
    run = {
        "config_name": str(folder / "model"),
        "data_files": [str(folder / "text.jsonl")],
        "prepared_corpus": str(folder / "corpus"),
        "tokenizer_name_or_path": str(folder / "tokenizer"),
        "output_dir": str(folder / "run"),
        "block_size": CONTEXT // 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "adam_beta2": 0.95,
        "weight_decay": 0.1,
        "warmup_steps": 3,
        "max_steps": 5,
        "shuffle_window": 10,
        "use_cpu": True,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return folder / "run.yaml"
