"""What a run can be told, one dataclass a concern. `TrainingArguments` holds the rest; nothing here repeats it."""

import logging
import os
from dataclasses import dataclass, field

import torch
from transformers import TrainingArguments

from .deepspeed_environment import build_models_whole, use_cpu_in_deepspeed
from .parsing import parse_arguments
from .precision import check_against_launcher, resolve_precision
from .stopping import parse_duration

__all__ = [
    "DataArguments",
    "EvaluateArguments",
    "ModelArguments",
    "PrepareArguments",
    "RunArguments",
    "TokenizerArguments",
    "parse_arguments",
]

logger = logging.getLogger(__name__)


def _help(text: str) -> dict[str, str]:
    return {"help": text}


def _asked_precision(precision: str, *, bf16: bool, fp16: bool) -> str:
    """`precision`, or what the older spelling `bf16: true` / `fp16: true` asks for.

    Raises:
        ValueError: the two spellings contradict each other.
    """
    older = "bf16" if bf16 else "fp16" if fp16 else None
    if older and precision not in ("auto", older):
        raise ValueError(f"`{older}: true` and `precision: {precision}` contradict each other: keep `precision`.")
    return older or precision


@dataclass
class DataArguments:
    """Where documents come from and how they become batches."""

    dataset_name: str | None = field(
        default=None, metadata=_help("`sample` (the Wikipedia excerpt of the `sample` extra) or a dataset on the Hub.")
    )
    dataset_config_name: str | None = field(default=None, metadata=_help("Configuration, such as 20231101.en."))
    dataset_split: str = field(default="train", metadata=_help("Split of the Hub's dataset."))
    text_column: str = field(default="text", metadata=_help("The column that holds the documents."))
    data_files: list[str] | None = field(
        default=None, metadata=_help("Local files, globs, folders (txt, jsonl, parquet, csv) or MediaWiki dumps (xml).")
    )
    document_separator: str | None = field(
        default=None, metadata=_help(r"Splits a text file into documents, e.g. '\n\n\n'; one document a file if unset.")
    )
    prepared_corpus: str | None = field(
        default=None, metadata=_help("A folder written by prepare_corpus.py; takes the place of a source.")
    )
    max_documents: int | None = field(default=None, metadata=_help("Use the first this many documents."))
    max_tokens: int | None = field(default=None, metadata=_help("Training tokens in an epoch at most."))
    max_eval_tokens: int = field(default=500_000, metadata=_help("Validation tokens at most."))
    block_size: int | None = field(default=None, metadata=_help("Tokens in a block; the model's context if unset."))
    packing: bool = field(
        default=True,
        metadata=_help(
            "Cut blocks from the running text; false pads records of one document instead. Local text is then held in"
            " memory, so that records have ids and epochs an end; only a Hub dataset without max_documents is streamed."
        ),
    )
    split_long: bool = field(
        default=False, metadata=_help("Make records that are too long several examples; false cuts them off.")
    )
    document_mask: bool = field(
        default=False, metadata=_help("Documents that share a block do not attend to each other.")
    )
    shuffle_window: int = field(
        default=1000, metadata=_help("Blocks held back to shuffle a stream; prepared data is shuffled exactly.")
    )


@dataclass
class ModelArguments:
    """The architecture and its tokenizer."""

    config_name: str = field(
        default="recipes/configs/models/tlm-20m/config.json",
        metadata=_help("A config.json (or its folder, or a Hub id) of any causal language model."),
    )
    tokenizer_name_or_path: str | None = field(
        default=None,
        metadata=_help("A tokenizer, or bytes; unset: one is trained on the corpus, at the model's vocabulary."),
    )
    attn_implementation: str | None = field(default=None, metadata=_help("eager, sdpa, flex_attention, ..."))


@dataclass
class TokenizerArguments:
    """How a SentencePiece tokenizer is trained."""

    output_dir: str = field(metadata=_help("Folder for tokenizer.model and tokenizer.json."))
    vocab_size: int = field(default=4096, metadata=_help("Pieces, the four specials and 256 bytes included."))
    model_type: str = field(default="bpe", metadata=_help("bpe or unigram."))
    max_bytes: int = field(default=200_000_000, metadata=_help("Bytes of text to learn from at most."))
    overwrite_tokenizer: bool = field(default=False, metadata=_help("Replace a tokenizer that is there."))


@dataclass
class PrepareArguments:
    """How a corpus is written to disk as tokens."""

    output_dir: str = field(metadata=_help("Folder for the prepared corpus."))
    tokenizer_name_or_path: str = field(metadata=_help("The tokenizer (or bytes), which is copied into the folder."))
    num_proc: int | None = field(default=None, metadata=_help("Processes; all cores if unset."))
    num_shards: int | None = field(default=None, metadata=_help("Files of tokens a split; a fitting number if unset."))


@dataclass
class EvaluateArguments:
    """What to score and how."""

    model_name_or_path: list[str] = field(metadata=_help("One or more runs' folders, adapters, Hub ids or GGUF files."))
    base_model: str | None = field(
        default=None, metadata=_help("Where the base of the adapters lies, if not where they say.")
    )
    tokenizer_name_or_path: str | None = field(default=None, metadata=_help("Unset: each model's own."))
    corpora: list[str] | None = field(
        default=None,
        metadata=_help(
            "Corpora that are scored one by one: sample, files, folders, globs, or datasets of the Hub as"
            " name:configuration:split. Unset: one corpus, by --dataset_name or --data_files."
        ),
    )
    eval_split: str = field(default="all", metadata=_help("all documents, or the held-out tenth: validation."))
    stride: int | None = field(default=None, metadata=_help("Tokens from one window to the next; no overlap if unset."))
    per_device_eval_batch_size: int = field(default=8, metadata=_help("Windows at once."))
    precision: str = field(default="fp32", metadata=_help("auto, fp32, bf16 or fp16."))
    num_threads: int | None = field(default=None, metadata=_help("CPU threads of a rank; all cores / ranks if unset."))
    output_file: str | None = field(
        default=None, metadata=_help("JSON; unset: evaluation.json in the model's folder, or here for a Hub id.")
    )
    use_cpu: bool = field(default=False, metadata=_help("Leave the GPU alone."))


@dataclass
class RunArguments(TrainingArguments):
    """`TrainingArguments` plus what it lacks. Construction settles the device, the process group and the precision."""

    learning_rate: float = field(default=1e-3, metadata=_help("Peak learning rate of AdamW."))
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata=_help("Look for weights that a step did not use; costs a walk through the graph.")
    )
    precision: str = field(
        default="auto",
        metadata=_help("auto (bf16 where the hardware has it, else fp16 on a GPU, else fp32) or a name."),
    )
    num_threads: int | None = field(default=None, metadata=_help("CPU threads of a rank; all cores / ranks if unset."))
    max_bad_steps: int = field(
        default=5, metadata=_help("Steps in a row with a loss or gradient that is not finite before the run ends.")
    )
    max_time: str | None = field(
        default=None, metadata=_help("Save and stop after this time, such as 11h30m, counted from the launch.")
    )
    log_timing: bool = field(
        default=False,
        metadata=_help("With each line of progress, every rank's seconds a step in data, compute and exchange."),
    )
    record_audit: bool = field(
        default=False, metadata=_help("Note on every rank which records each step sees, for `tinylm audit`.")
    )
    sample_prompts: list[str] = field(
        default_factory=lambda: ["", "The history of", "In mathematics,"],
        metadata=_help("Prompts for the samples printed after training; an empty one starts a document."),
    )

    def __post_init__(self) -> None:
        if self.output_dir is None:
            raise ValueError("A run needs a folder of its own. Set `--output_dir`.")
        if not (torch.accelerator.is_available() and not self.use_cpu):
            self.use_cpu = True  # or two ranks of a CPU launch would not become one group
        if self.use_cpu:
            use_cpu_in_deepspeed()
        if self.max_time is not None:
            parse_duration(self.max_time)
        if not self.average_tokens_across_devices:
            raise ValueError(
                "The loss is divided by the targets of all ranks, and `average_tokens_across_devices: false` asks for"
                " each rank's own. Leave it out."
            )
        asked = _asked_precision(self.precision, bf16=self.bf16, fp16=self.fp16)
        check_against_launcher(asked, os.environ.get("ACCELERATE_MIXED_PRECISION"))
        self.precision = resolve_precision(asked, os.environ.get("ACCELERATE_MIXED_PRECISION"), use_cpu=self.use_cpu)
        self.bf16, self.fp16 = self.precision == "bf16", self.precision == "fp16"
        if self.tf32 and not torch.cuda.is_available():
            logger.warning("`tf32: true` asks for an NVIDIA GPU; there is none here, so it is left off.")
            self.tf32 = None
        self.disable_tqdm = True  # ProgressLine prints instead
        self.logging_nan_inf_filter = False  # a NaN is to be seen
        self.remove_unused_columns = False  # our datasets yield exactly what a model takes
        super().__post_init__()
        if not (self.fp16 or self.bf16):
            self.mixed_precision = "no"
        build_models_whole()
        self._n_gpu = min(self._n_gpu, 1)  # one process drives one GPU: no silent nn.DataParallel
