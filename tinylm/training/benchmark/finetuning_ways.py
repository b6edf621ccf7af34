"""One way of fine-tuning, in a process of its own that takes a step whenever it is told to.

All ways: the same weights, held in bf16 where the hardware computes in it, the same adapter (LoRA on q_proj and v_proj
without dropout), optimizer, learning rate and gradient checkpointing (on, as TRL has it by default), and in each step
the same examples.
"""

import logging
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainerControl, TrainerState, set_seed

import tinylm.models  # noqa: F401  (registers the Auto classes)
from tinylm.data.order import GlobalBatches
from tinylm.data.rows import PadExamples, join_rows, joined_examples
from tinylm.models.loading import load_base_model, load_base_tokenizer

from ..arguments import RunArguments
from ..trainer import LanguageModelTrainer

Example = dict[str, list[int]]  # `input_ids` and `labels`
RANK, LEARNING_RATE, SEED = 8, 2e-4, 42


@dataclass(frozen=True)
class Way:
    """TRL's SFTTrainer or the kit's; its examples in one row or padded; and what is taken from the kit's way."""

    by_trl: bool = False
    packed: bool = True
    all_logits: bool = False
    masked_attention: bool = False


OURS, TRL, TRL_PACKED = "tinylm", "TRL", "TRL, packing"
WAYS = {
    TRL: Way(by_trl=True, packed=False),
    TRL_PACKED: Way(by_trl=True),
    OURS: Way(),
    "tinylm, padded": Way(packed=False),
    "tinylm, all logits": Way(all_logits=True),
    "tinylm, one mask a row": Way(masked_attention=True),
}


@dataclass(frozen=True)
class Lesson:
    """What all ways do: the base model's folder, `steps` of examples, where they may write, and how they compute."""

    base: Path
    steps: Sequence[Sequence[Example]]
    scratch: Path
    precision: str
    num_threads: int


@dataclass(frozen=True)
class Step:
    """Seconds of an optimizer step, and the most memory (bytes, resident) that the process has had until its end."""

    seconds: float
    peak_memory: int


def take_steps(connection: Connection, name: str, lesson: Lesson) -> None:
    """The child process: says True once it is ready, takes a step for each thing received, at last sends all losses."""
    logging.disable(logging.INFO)
    torch.set_num_threads(lesson.num_threads)
    set_seed(SEED)
    base = load_base_model(str(lesson.base), dtype=torch.bfloat16 if lesson.precision == "bf16" else torch.float32)
    adapter = LoraConfig(r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
    build = trl_trainer if WAYS[name].by_trl else our_trainer
    trainer = build(WAYS[name], get_peft_model(base, adapter), load_base_tokenizer(str(lesson.base)), lesson)
    trainer.add_callback(StepsWhenTold(connection))
    trainer.train()
    connection.send([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


class StepsWhenTold(TrainerCallback):
    """Stops between steps until something comes; a step's clock runs from then to its end, data and logging in it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def on_train_begin(self, args: RunArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self.connection.send(True)
        self._wait()

    def on_step_end(self, args: RunArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self.connection.send(Step(perf_counter() - self._began, peak_memory()))
        if state.global_step < state.max_steps:
            self._wait()

    def _wait(self) -> None:
        self.connection.recv()
        self._began = perf_counter()


def settings_of(lesson: Lesson) -> dict[str, object]:
    """The `TrainingArguments` of every way."""
    return {
        "output_dir": str(lesson.scratch),
        "max_steps": len(lesson.steps),
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": SEED,
        "use_cpu": True,
    }


def our_trainer(way: Way, model: PeftModel, tokenizer: PreTrainedTokenizerBase, lesson: Lesson) -> Trainer:
    """The kit's Trainer, whose rows are the steps."""
    pad = PadExamples.for_tokenizer(tokenizer)

    def collate(steps: Sequence[Sequence[Example]]) -> dict[str, Tensor]:
        examples = [{name: torch.tensor(column) for name, column in example.items()} for example in steps[0]]
        return join_rows([joined_examples(examples)]) if way.packed else pad(examples)

    args = RunArguments(**settings_of(lesson), precision=lesson.precision, per_device_train_batch_size=1)
    trainer = LanguageModelTrainer(model=model, args=args, train_dataset=lesson.steps, data_collator=collate)
    trainer.targets_only.keeps_targets &= not way.all_logits
    trainer.targets_only.by_example &= not way.masked_attention
    return trainer


def trl_trainer(way: Way, model: PeftModel, tokenizer: PreTrainedTokenizerBase, lesson: Lesson) -> Trainer:
    """TRL's SFTTrainer over the same steps in the kit's order; packed ones are rows as its own packing makes them."""
    from datasets import Dataset  # what only this way needs, or its imports would be memory of all
    from trl import SFTConfig, SFTTrainer

    rows = [row for index in order_of_steps(len(lesson.steps)) for row in rows_for_trl(lesson.steps[index], way)]
    args = SFTConfig(
        **settings_of(lesson),
        bf16=lesson.precision == "bf16",
        packing=way.packed,
        per_device_train_batch_size=1 if way.packed else len(lesson.steps[0]),
        train_sampling_strategy="sequential",
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    return SFTTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)


def order_of_steps(num_steps: int) -> list[int]:
    """The order in which the kit's Trainer takes them."""
    return [index for [index] in GlobalBatches(num_steps, per_rank_batch_size=1, seed=SEED)]


def rows_for_trl(examples: Sequence[Example], way: Way) -> list[dict[str, list[int]]]:
    """A step as what TRL's preparation would have left of it: rows with `seq_lengths` if packed."""
    if not way.packed:
        return list(examples)
    joined = {name: [token for example in examples for token in example[name]] for name in ("input_ids", "labels")}
    return [{**joined, "seq_lengths": [len(example["input_ids"]) for example in examples]}]


def peak_memory() -> int:
    """The most resident memory (bytes) that this process has had."""
    status = Path("/proc/self/status")  # `getrusage` on Linux goes on from the process that started this one
    if status.exists():
        [line] = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
