"""`tinylm doctor --config`: would this run start here, and last? Looked at before hours are spent; nothing is written.

Each check is what the recipe itself does before its first step; what it would refuse is a problem, with the remedy.
"""

import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch
from transformers import PreTrainedConfig

from tinylm.data.chat import Examples, encode_examples
from tinylm.data.chat_encoder import ChatEncoder
from tinylm.data.conversations import open_rows
from tinylm.data.encoding import check_tokenizer_matches
from tinylm.data.token_store import TokenStore
from tinylm.evaluation.model_and_tokenizer import check_weights
from tinylm.inspection.checked import Checked
from tinylm.inspection.doctor import Finding
from tinylm.inspection.machine_checks import (
    check_devices,
    check_launch,
    check_threads,
    check_versions,
)
from tinylm.inspection.measure import is_finetuning
from tinylm.inspection.memory import MemoryEstimate
from tinylm.inspection.run_size import finetuning_memory, pretraining_memory
from tinylm.models.loading import check_quantization, load_base_config
from tinylm.publish.preflight import destination_of_run
from tinylm.training.arguments import DataArguments, ModelArguments, RunArguments, parse_arguments
from tinylm.training.chat_corpus import load_chat_tokenizer, max_length_for
from tinylm.training.checkpoints import check_room, find_checkpoint
from tinylm.training.corpus import checked_block_size, load_config, load_tokenizer, source_from
from tinylm.training.finetune_arguments import ChatArguments, FinetuneArguments, LoraArguments
from tinylm.training.launch_files import ranks_here, read_launch_file
from tinylm.training.lora import base_name, plan_training
from tinylm.training.trackers import has_wandb_key

_ROWS_READ = 200


def examine_plan(config: Path | None, launch_config: Path | None = None, flags: Sequence[str] = ()) -> list[Finding]:
    """What is right and wrong with this machine, and with a run that is to be started on it.

    Args:
        config: a run file of pretraining or fine-tuning; None: the machine alone.
        launch_config: a launch file of accelerate.
        flags: more flags of the recipe, which win over the run file.
    """
    findings = [*check_versions(), check_devices()]
    arguments = None
    if config is not None:
        finetunes = is_finetuning(config)
        parts = (
            (FinetuneArguments, ChatArguments, LoraArguments)
            if finetunes
            else (RunArguments, DataArguments, ModelArguments)
        )
        parsed = Checked("run file", lambda: parse_arguments(parts, ["--config", str(config), *flags]))
        findings += parsed.unless_ok(f"`{config}`, {'fine-tuning' if finetunes else 'pretraining'}")
        arguments = parsed.value
    ranks = 1
    if launch_config is not None:
        launch = Checked("launch file", lambda: read_launch_file(launch_config))
        if launch.value is None:
            findings += launch.unless_ok("")
        else:
            findings += check_launch(launch.value)
            ranks = ranks_here(launch.value)
    run = arguments[0] if arguments else None
    findings.append(check_threads(run.num_threads if run else None, ranks))
    if arguments:
        findings.append(_precision(run, parsed.said))
        findings += _folder(run)
        findings += (_finetuning if finetunes else _pretraining)(*arguments, ranks)
        findings += _trackers(run)
    return findings


def _folder(run: RunArguments) -> Iterator[Finding]:
    folder = Path(run.output_dir).absolute()
    there = next(path for path in [folder, *folder.parents] if path.exists())
    if not _may_write(there):
        yield Finding("problem", "output folder", f"`{there}` may not be written: set `--output_dir`, or its rights")
        return
    resumed = Checked("output folder", lambda: find_checkpoint(Path(run.output_dir), run.resume_from_checkpoint))
    begins = f"the run goes on from `{resumed.value}`" if resumed.value else "the run begins anew"
    yield from resumed.unless_ok(f"`{run.output_dir}`: {begins}")


def _precision(run: RunArguments, warnings: Sequence[str]) -> Finding:
    """With what the run file asks for and the hardware does not have."""
    said = [f"{run.precision} on {run.device.type}", *warnings]
    return Finding("warning" if warnings else "ok", "precision", "; ".join(said))


def _may_write(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _pretraining(run: RunArguments, data: DataArguments, names: ModelArguments, ranks: int) -> Iterator[Finding]:
    config = Checked("model", lambda: load_config(names.config_name))
    if config.fault:
        yield from config.unless_ok("")
        return
    yield from _data(data, config.value)
    name = names.tokenizer_name_or_path
    if name is not None:
        tokenizer = Checked("tokenizer", lambda: check_tokenizer_matches(config.value.vocab_size, load_tokenizer(name)))
        yield from tokenizer.unless_ok(f"`{name}` fits the model's vocabulary of {config.value.vocab_size:,}")
    elif not data.prepared_corpus or not Path(data.prepared_corpus, "manifest.json").is_file():
        yield Finding("ok", "tokenizer", f"one of {config.value.vocab_size:,} tokens will be trained on the corpus")
    memory = Checked("model", lambda: pretraining_memory(run, data, names, config.value))
    yield from memory.unless_ok(f"{config.value.model_type}, {_parameters(memory.value)}")
    if memory.value:
        yield from _room(run, memory.value, ranks)
    yield from _hub(run, None)


def _data(data: DataArguments, config: PreTrainedConfig) -> Iterator[Finding]:
    yield from Checked("block", lambda: checked_block_size(data.block_size, config)).unless_ok(
        f"{data.block_size or getattr(config, 'max_position_embeddings', 0)} tokens, within the model's context"
    )
    folder = data.prepared_corpus
    if folder and Path(folder, "manifest.json").is_file():
        store = Checked("data", lambda: TokenStore.open(Path(folder)))
        yield from store.unless_ok(store.value.description if store.value else "")
        if store.value:
            fits = Checked("tokenizer", lambda: store.value.check_vocabulary(config.vocab_size))
            yield from fits.unless_ok(f"that of the corpus fits the model's vocabulary of {config.vocab_size:,}")
        return
    if folder and not (data.dataset_name or data.data_files):
        remedy = "write it with recipes/prepare_corpus.py, or name a source too (`--dataset_name`, `--data_files`)"
        yield Finding("problem", "data", f"there is no prepared corpus in `{folder}`: {remedy}")
        return
    source = Checked("data", lambda: source_from(data))
    if source.value is None:
        yield from source.unless_ok("")
        return
    first = Checked("data", lambda: next(iter(source.value.documents())))
    yield from first.unless_ok(f"{source.value.description}; the first document can be read")


def _finetuning(run: FinetuneArguments, chat: ChatArguments, lora: LoraArguments, ranks: int) -> Iterator[Finding]:
    def base() -> PreTrainedConfig:
        check_quantization(lora.model_name_or_path, lora.quantization)
        check_weights(lora.model_name_or_path)
        return load_base_config(lora.model_name_or_path)

    config = Checked("model", base)
    if config.fault:
        yield from config.unless_ok("")
        return
    yield Finding("ok", "model", f"`{lora.model_name_or_path}`, {config.value.model_type}")
    trained = Checked("trained layers", lambda: plan_training(config.value, lora))
    layers = "all weights" if lora.full else f"an adapter on {', '.join(lora.target_modules)}"
    yield from trained.unless_ok(f"{layers}, {trained.value or 0:,} parameters")
    tokenizer = Checked("tokenizer", lambda: load_chat_tokenizer(lora, chat, config.value))
    yield from tokenizer.unless_ok(f"fits the model's vocabulary of {config.value.vocab_size:,}")
    if tokenizer.value is None:
        return

    def some() -> Examples:
        encoder = ChatEncoder(tokenizer.value, train_on=chat.train_on, max_length=max_length_for(chat, config.value))
        rows = open_rows(
            dataset_name=chat.dataset_name,
            dataset_config_name=chat.dataset_config_name,
            dataset_split=chat.dataset_split,
            data_files=chat.data_files,
            shape=chat.data_shape,
            streaming=True,
            max_examples=min(chat.max_examples or _ROWS_READ, _ROWS_READ),
        )
        return encode_examples(rows, encoder, skip_bad_rows=chat.skip_bad_rows)

    examples = Checked("data", some)
    if examples.value is None:
        yield from examples.unless_ok("")
        return
    counts = examples.value.counts
    has_lost = counts.num_without_target or counts.num_bad
    remedy = "; raise `--max_length`, or mend the rows" if has_lost else ""
    yield Finding(
        "warning" if has_lost else "ok", "data", f"of the first {_ROWS_READ} rows: {counts.in_words()}{remedy}"
    )
    if trained.value:
        memory = Checked("memory", lambda: finetuning_memory(run, chat, lora, config.value, examples.value))
        yield from _room(run, memory.value, ranks) if memory.value else memory.unless_ok("")
    yield from _hub(run, None if lora.full else base_name(lora))


def _parameters(memory: MemoryEstimate | None) -> str:
    return f"{memory.num_parameters:,} parameters" if memory else ""


def _room(run: RunArguments, memory: MemoryEstimate, ranks: int) -> Iterator[Finding]:
    """Memory and disk. The ranks of a machine share the memory of its CPUs; a GPU is a rank's own."""
    if run.device.type == "cuda":
        free, where, needed = torch.cuda.mem_get_info(run.device)[0], "of the GPU", memory.peak
    else:
        free, where, needed = psutil.virtual_memory().available, "of the machine", memory.peak * ranks
    by = f" by {ranks} ranks" if ranks > 1 else ""
    said = f"about {needed / 1e6:,.0f} MB needed{by}, {free / 1e6:,.0f} MB {where} free"
    remedy = "lower `--per_device_train_batch_size` (and raise `--gradient_accumulation_steps`), or `--block_size`"
    if needed > free:
        yield Finding("problem", "memory", f"{said}: {remedy}, or set `--activation_checkpointing true`")
    elif needed > 0.8 * free:
        yield Finding("warning", "memory", f"{said}, which is close: {remedy}")
    else:
        yield Finding("ok", "memory", said)
    room = Checked("disk", lambda: check_room(run, memory.num_trainable))
    yield from room.unless_ok(f"room for {room.value}")


def _trackers(run: RunArguments) -> Iterator[Finding]:
    for name in run.report_to:
        if name in ("wandb", "tensorboard", "trackio") and find_spec(name) is None:
            yield Finding("problem", "tracker", f"{name} is not installed: pip install {name}")
        elif name == "wandb" and not has_wandb_key():
            yield Finding("warning", "tracker", "W&B has no key here, so it logs offline: `wandb login`")
        else:
            yield Finding("ok", "tracker", name)


def _hub(run: RunArguments, adapted_model: str | None) -> Iterator[Finding]:
    if run.push_to_hub:
        place = Checked("Hub", lambda: destination_of_run(run, 0, adapted_model=adapted_model))
        there = place.value
        yield from place.unless_ok(f"{there.url} may be written by {there.user}" if there else "")
