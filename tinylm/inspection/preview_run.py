"""`tinylm preview`: what the run of a run file would train on. Nothing is written, and no model is loaded."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import yaml

from tinylm.data.chat import encode_examples
from tinylm.data.chat_encoder import ChatEncoder
from tinylm.data.conversations import open_rows
from tinylm.data.sources import Source
from tinylm.inspection.preview import preview_examples, rows_in_words
from tinylm.models.loading import load_base_config
from tinylm.training.arguments import DataArguments, ModelArguments, RunArguments, parse_arguments
from tinylm.training.chat_corpus import load_chat_tokenizer, max_length_for
from tinylm.training.corpus import load_config, open_corpus, source_from
from tinylm.training.finetune_arguments import ChatArguments, FinetuneArguments, LoraArguments

_ROWS_READ = 1000
_SHOWN = 2
_CHARACTERS_SHOWN = 1000


def preview_run(config: Path, flags: Sequence[str] = ()) -> str:
    """Decoded examples of a fine-tuning run, or blocks of a pretraining run, with counts.

    Args:
        flags: more flags of the recipe (`--max_length 512`), which win over the run file.

    Raises:
        ValueError, FileNotFoundError: what the recipe would raise for the same flags and data.
    """
    argv = ["--config", str(config), *flags]
    values = yaml.safe_load(config.read_text(encoding="utf-8")) if config.is_file() else {}
    is_finetuning = isinstance(values, dict) and "model_name_or_path" in values
    return _preview_finetuning(argv) if is_finetuning else _preview_pretraining(argv)


def _preview_finetuning(argv: Sequence[str]) -> str:
    """The rows are read as a stream, which leaves nothing in the cache of `datasets`."""
    run, chat, lora = parse_arguments((FinetuneArguments, ChatArguments, LoraArguments), argv)
    config = load_base_config(lora.model_name_or_path)
    tokenizer = load_chat_tokenizer(lora, chat, config)
    encoder = ChatEncoder(tokenizer, train_on=chat.train_on, max_length=max_length_for(chat, config))
    rows = open_rows(
        dataset_name=chat.dataset_name,
        dataset_config_name=chat.dataset_config_name,
        dataset_split=chat.dataset_split,
        data_files=chat.data_files,
        shape=chat.data_shape,
        streaming=True,
        max_examples=min(chat.max_examples or _ROWS_READ, _ROWS_READ),
    )
    examples = encode_examples(rows, encoder, skip_bad_rows=chat.skip_bad_rows)
    seed = run.seed if run.data_seed is None else run.data_seed
    row_tokens = (chat.row_tokens or encoder.max_length) if chat.packing else None
    in_rows = rows_in_words(
        examples.lengths, row_tokens=row_tokens, batch_size=run.per_device_train_batch_size, seed=seed
    )
    return (
        f"{preview_examples(tokenizer, examples, _SHOWN, in_full=True)}\n--- {in_rows}\n"
        f"--- {rows.description}, the first {_ROWS_READ:,} rows at most"
    )


def _preview_pretraining(argv: Sequence[str]) -> str:
    run, data, model = parse_arguments((RunArguments, DataArguments, ModelArguments), argv)
    trained = Path(run.output_dir, "tokenizer")
    name = model.tokenizer_name_or_path or (str(trained) if (trained / "tokenizer.json").is_file() else None)
    is_prepared = data.prepared_corpus and Path(data.prepared_corpus, "manifest.json").is_file()
    if not is_prepared and (data.prepared_corpus or name is None):
        return _documents(source_from(data))
    if is_prepared:
        data = replace(data, dataset_name=None, data_files=None)
    corpus = open_corpus(replace(data, max_eval_tokens=1), run, load_config(model.config_name), name)
    shown = []
    for number, example in enumerate(islice(corpus.train_dataset, _SHOWN), start=1):
        input_ids = example["input_ids"]
        text = corpus.tokenizer.decode(input_ids, clean_up_tokenization_spaces=False)
        shown.append(f"--- {'block' if data.packing else 'record'} {number}: {len(input_ids):,} tokens\n{text}")
    return "\n".join([*shown, f"--- {corpus.description}; every token is trained"])


def _documents(source: Source) -> str:
    """The beginnings of documents, where nothing is tokenised before the run begins."""
    shown = [
        f"--- document {number}, {len(text):,} characters\n{text[:_CHARACTERS_SHOWN]}"
        for number, text in enumerate(islice(source.documents(), _SHOWN), start=1)
    ]
    return "\n".join([*shown, f"--- {source.description}; the run will train or apply its tokenizer when it begins"])
