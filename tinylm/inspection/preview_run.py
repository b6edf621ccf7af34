"""`tinylm preview`: what the run of a run file would train on, and what it would take.

Nothing is written, and no weights are loaded unless steps are measured, in another process and a temporary folder.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
from torch.utils.data import IterableDataset
from transformers import PreTrainedConfig

from tinylm.data.chat import encode_examples
from tinylm.data.chat_encoder import ChatEncoder
from tinylm.data.conversations import open_rows
from tinylm.data.rows import best_fit_decreasing
from tinylm.data.sources import Source
from tinylm.inspection.measure import STEPS, Measured, is_finetuning, measure_run
from tinylm.inspection.preview import preview_examples, rows_in_words
from tinylm.inspection.run_log import duration
from tinylm.inspection.run_size import finetuning_memory, num_steps, pretraining_memory, size_in_words
from tinylm.inspection.run_size import row_tokens as longest_row
from tinylm.models.loading import load_base_config
from tinylm.training.arguments import DataArguments, ModelArguments, RunArguments, parse_arguments
from tinylm.training.chat_corpus import load_chat_tokenizer, max_length_for
from tinylm.training.corpus import checked_block_size, load_config, open_corpus, source_from
from tinylm.training.finetune_arguments import ChatArguments, FinetuneArguments, LoraArguments

_ROWS_READ = 1000
_SHOWN = 2
_CHARACTERS_SHOWN = 1000


def preview_run(
    config: Path, flags: Sequence[str] = (), *, measure: bool = False, in_colour: bool | None = None
) -> str:
    """Decoded examples of a fine-tuning run, or blocks of a pretraining run, with counts, steps and memory.

    Args:
        flags: more flags of the recipe (`--max_length 512`), which win over the run file.
        measure: take a few real steps, and give their time and memory.
        in_colour: mark what is trained by colour, else by brackets; None: if standard output is a terminal.

    Raises:
        ValueError, FileNotFoundError: what the recipe would raise for the same flags and data.
    """
    argv = ["--config", str(config), *flags]
    text, steps = _preview_finetuning(argv, in_colour) if is_finetuning(config) else _preview_pretraining(argv)
    return f"{text}\n--- {measured_in_words(measure_run(config, flags), steps)}" if measure else text


def measured_in_words(measured: Measured, steps: int | None) -> str:
    """One line; `steps` are those of the whole run, if they are known."""
    whole = "" if steps is None else f", {duration(measured.seconds_per_step * steps)} for {steps:,} steps"
    peak = f"{measured.peak_bytes / 1e6:,.0f} MB at the peak"
    return f"Measured in {STEPS} steps: {measured.seconds_per_step:.2f} s a step{whole} without validation; {peak}"


def _preview_finetuning(argv: Sequence[str], in_colour: bool | None) -> tuple[str, int | None]:
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
    is_whole = examples.counts.num_rows < _ROWS_READ and not chat.streaming
    steps = num_steps(run, _num_training_rows(examples.lengths, chat, row_tokens) if is_whole else None)
    memory = finetuning_memory(run, chat, lora, config, examples)
    is_about = not (chat.eval_data_files or run.max_steps > 0)  # one in ten is held out
    size = size_in_words(run, steps, longest_row(chat, config, examples), memory, is_about=is_about)
    text = (
        f"{preview_examples(tokenizer, examples, _SHOWN, in_full=True, in_colour=in_colour)}\n--- {in_rows}\n"
        f"--- {rows.description}, the first {_ROWS_READ:,} rows at most\n{size}"
    )
    return text, steps


def _num_training_rows(lengths: np.ndarray, chat: ChatArguments, row_tokens: int | None) -> int:
    """Examples, or packed rows, that are not held out."""
    num_rows = len(lengths) if row_tokens is None else len(best_fit_decreasing(lengths, row_tokens))
    return num_rows if chat.eval_data_files else max(1, round(0.9 * num_rows))


def _preview_pretraining(argv: Sequence[str]) -> tuple[str, int | None]:
    run, data, model = parse_arguments((RunArguments, DataArguments, ModelArguments), argv)
    config = load_config(model.config_name)
    shown, num_rows = _shown_of_corpus(run, data, model, config)
    steps = num_steps(run, num_rows)
    block_size = checked_block_size(data.block_size, config)
    return f"{shown}\n{size_in_words(run, steps, block_size, pretraining_memory(run, data, model, config))}", steps


def _shown_of_corpus(
    run: RunArguments, data: DataArguments, model: ModelArguments, config: PreTrainedConfig
) -> tuple[str, int | None]:
    """The first blocks, records or documents, and how many there are of the former, if that is known."""
    trained = Path(run.output_dir, "tokenizer")
    name = model.tokenizer_name_or_path or (str(trained) if (trained / "tokenizer.json").is_file() else None)
    is_prepared = data.prepared_corpus and Path(data.prepared_corpus, "manifest.json").is_file()
    if not is_prepared and (data.prepared_corpus or name is None):
        return _documents(source_from(data)), None
    if is_prepared:
        data = replace(data, dataset_name=None, data_files=None)
    corpus = open_corpus(replace(data, max_eval_tokens=1), run, config, name)
    shown = []
    for number, example in enumerate(islice(corpus.train_dataset, _SHOWN), start=1):
        input_ids = example["input_ids"]
        text = corpus.tokenizer.decode(input_ids, clean_up_tokenization_spaces=False)
        shown.append(f"--- {'block' if data.packing else 'record'} {number}: {len(input_ids):,} tokens\n{text}")
    text = "\n".join([*shown, f"--- {corpus.description}; every token is trained"])
    dataset = corpus.train_dataset
    return text, None if isinstance(dataset, IterableDataset) else len(dataset)


def _documents(source: Source) -> str:
    """The beginnings of documents, where nothing is tokenised before the run begins."""
    shown = [
        f"--- document {number}, {len(text):,} characters\n{text[:_CHARACTERS_SHOWN]}"
        for number, text in enumerate(islice(source.documents(), _SHOWN), start=1)
    ]
    return "\n".join([*shown, f"--- {source.description}; the run will train or apply its tokenizer when it begins"])
