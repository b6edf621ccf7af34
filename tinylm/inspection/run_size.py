"""How much a run will be: steps, tokens and memory of one rank, from its flags."""

import math

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

import tinylm.models  # noqa: F401  (registers the Auto classes)
from tinylm.data.chat import Examples
from tinylm.data.order import GlobalBatches
from tinylm.inspection.memory import MemoryEstimate, estimate_memory
from tinylm.training.arguments import DataArguments, ModelArguments, RunArguments
from tinylm.training.chat_corpus import max_length_for
from tinylm.training.corpus import checked_block_size
from tinylm.training.finetune_arguments import ChatArguments, FinetuneArguments, LoraArguments
from tinylm.training.lora import base_dtype, untrained_model


def num_steps(run: RunArguments, num_rows: int | None) -> int | None:
    """Optimizer steps of a run on one rank over `num_rows` examples, blocks or packed rows.

    None: the number of rows is not known, and the run ends with an epoch.
    """
    if run.max_steps > 0:
        return run.max_steps
    if num_rows is None:
        return None
    batches = GlobalBatches(
        num_rows,
        per_rank_batch_size=run.per_device_train_batch_size,
        accumulation_steps=run.gradient_accumulation_steps,
    )
    return math.ceil(run.num_train_epochs * batches.steps_per_epoch)


def size_in_words(
    run: RunArguments, steps: int | None, row_tokens: int, memory: MemoryEstimate, *, is_about: bool = False
) -> str:
    """Steps, tokens, parameters and memory, a line each; `row_tokens` are those of the fullest row."""
    rows = run.per_device_train_batch_size * run.gradient_accumulation_steps
    each = f"each of up to {rows} x {row_tokens:,} tokens on a rank"
    known = "" if steps is None else f"Steps: {'about ' if is_about else ''}{steps:,}"
    together = "" if steps is None else f", up to {steps * rows * row_tokens:,} together"
    lines = [
        f"{known or 'Steps: not known before all rows are there'}, {each}{together}",
        f"Parameters: {memory.num_parameters:,}, trained: {memory.num_trainable:,}",
        memory.in_words(),
    ]
    return "\n".join(f"--- {line}" for line in lines)


def pretraining_memory(
    run: RunArguments, data: DataArguments, names: ModelArguments, config: PreTrainedConfig
) -> MemoryEstimate:
    """Of a step on full blocks.

    Raises:
        ValueError: a block that does not fit the context.
    """
    return estimate_memory(
        lambda: AutoModelForCausalLM.from_config(config, attn_implementation=names.attn_implementation),
        run,
        num_tokens=checked_block_size(data.block_size, config),
    )


def finetuning_memory(
    run: FinetuneArguments, chat: ChatArguments, lora: LoraArguments, config: PreTrainedConfig, examples: Examples
) -> MemoryEstimate:
    """Of a step on the fullest rows, with as large a part of targets as all `examples` have together.

    A base that is quantised is counted as if it were not.

    Raises:
        ValueError, FileNotFoundError: as `plan_training`.
    """
    num_tokens = row_tokens(chat, config, examples)
    targets = math.ceil(num_tokens * examples.counts.num_targets / examples.counts.num_tokens)
    dtype: torch.dtype = base_dtype(lora, run.precision)
    return estimate_memory(
        lambda: untrained_model(config, lora, dtype), run, num_tokens=num_tokens, num_targets=targets
    )


def row_tokens(chat: ChatArguments, config: PreTrainedConfig, examples: Examples) -> int:
    """Tokens of the longest row that is expected."""
    longest = int(examples.lengths.max())
    if not chat.packing:
        return longest
    return max(longest, min(chat.row_tokens or max_length_for(chat, config), int(examples.lengths.sum())))
