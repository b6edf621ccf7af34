"""A few real steps of a run, in a process and a folder of their own: how long they take, and how much memory.

`python -m tinylm.inspection.measure --config run.yaml ...` is that process; it ends with one line of JSON.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch
import torch._dynamo  # 100 MB that the first step of any optimizer imports: they are the process', not the run's
import yaml
from transformers import AutoModelForCausalLM, TrainerCallback, set_seed

import tinylm.models  # noqa: F401  (registers the Auto classes)
from tinylm.models.loading import check_quantization, load_base_config, load_base_model
from tinylm.training.arguments import DataArguments, ModelArguments, RunArguments, parse_arguments
from tinylm.training.chat_corpus import ChatCorpus, load_chat_tokenizer, open_chat_corpus
from tinylm.training.corpus import Corpus, load_config, open_corpus
from tinylm.training.finetune_arguments import ChatArguments, FinetuneArguments, LoraArguments
from tinylm.training.launch import run_recipe, start
from tinylm.training.lora import base_dtype, trainable_model
from tinylm.training.trainer import LanguageModelTrainer

STEPS = 4
"""The first of them, which also makes the optimizer's state, is left out of the time."""


@dataclass(frozen=True)
class Measured:
    """Of one rank: seconds of a step (median), and the most bytes that training took over the process before it."""

    seconds_per_step: float
    peak_bytes: int


def is_finetuning(config: Path) -> bool:
    """Whether a run file is one of fine-tuning: it names a base model."""
    values = yaml.safe_load(config.read_text(encoding="utf-8")) if config.is_file() else {}
    return isinstance(values, dict) and "model_name_or_path" in values


def measure_run(config: Path, flags: Sequence[str] = ()) -> Measured:
    """Trains for `STEPS` steps; what they write is in a temporary folder, and gone afterwards.

    Raises:
        ValueError: the run does not start; with what it said.
    """
    with tempfile.TemporaryDirectory(prefix="tinylm-measure-") as folder:
        command = [sys.executable, "-m", "tinylm.inspection.measure", "--config", str(config), *flags]
        overrides = {"output_dir": f"{folder}/run", "max_steps": STEPS, "report_to": "none", "eval_strategy": "no"}
        overrides |= {
            "save_strategy": "no",
            "load_best_model_at_end": "false",
            "record_audit": "false",
            "push_to_hub": "false",
        }
        command += [f"--{name}={value}" for name, value in overrides.items()]
        environment = {**os.environ, "TQDM_DISABLE": "1", "HF_DATASETS_CACHE": f"{folder}/cache"}
        environment["TINYLM_MEASURE_FOLDER"] = folder
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("(`--traceback`")]
            raise ValueError(
                f"The run does not start, so it cannot be measured: {said[-1] if said else 'it was killed'}"
            )
        return Measured(**json.loads(done.stdout.splitlines()[-1]))


class _Clock(TrainerCallback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs: object) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs: object) -> None:
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        self.times.append(time.perf_counter() - self._began)


def _main(argv: Sequence[str]) -> None:
    folder = Path(os.environ["TINYLM_MEASURE_FOLDER"])
    if find_spec("deepspeed"):  # the Trainer imports it where it is installed: 30 MB of the process, not of the run
        import_module("deepspeed")
    if is_finetuning(Path(argv[argv.index("--config") + 1])):
        run, chat, lora = parse_arguments((FinetuneArguments, ChatArguments, LoraArguments), argv)
        start(run.device, run.num_threads)
        measured = _finetune(run, chat, lora)
    else:
        run, data, model = parse_arguments((RunArguments, DataArguments, ModelArguments), argv)
        start(run.device, run.num_threads)
        if data.prepared_corpus and not Path(data.prepared_corpus, "manifest.json").is_file():
            data = replace(data, prepared_corpus=str(folder / "corpus"))
        measured = _pretrain(run, data, model)
    print(json.dumps(vars(measured)))


def _pretrain(run: RunArguments, data: DataArguments, names: ModelArguments) -> Measured:
    config = load_config(names.config_name)
    corpus = open_corpus(data, run, config, names.tokenizer_name_or_path)
    before = _bytes_in_use()
    set_seed(run.seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=names.attn_implementation)
    return _train(model.train(), run, corpus, before)


def _finetune(run: FinetuneArguments, chat: ChatArguments, lora: LoraArguments) -> Measured:
    check_quantization(lora.model_name_or_path, lora.quantization)
    config = load_base_config(lora.model_name_or_path)
    corpus = open_chat_corpus(chat, run, config, load_chat_tokenizer(lora, chat, config))
    before = _bytes_in_use()
    base = load_base_model(
        lora.model_name_or_path,
        dtype=base_dtype(lora, run.precision),
        attn_implementation=lora.attn_implementation,
        quantization=lora.quantization,
    )
    return _train(trainable_model(base, lora), run, corpus, before)


def _train(model: torch.nn.Module, run: RunArguments, corpus: Corpus | ChatCorpus, before: int) -> Measured:
    clock = _Clock()
    trainer = LanguageModelTrainer(
        model=model,
        args=run,
        train_dataset=corpus.train_dataset,
        data_collator=corpus.collate,
        processing_class=corpus.tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    peak = torch.cuda.max_memory_allocated() if run.device.type == "cuda" else _peak_bytes() - before
    return Measured(statistics.median(clock.times[1:]), peak)


def _bytes_in_use() -> int:
    return psutil.Process().memory_info().rss


def _peak_bytes() -> int:
    """The most that this process has had. `ru_maxrss` would begin with what its parent had."""
    status = Path("/proc/self/status")
    if status.is_file():
        [line] = [line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS: bytes


if __name__ == "__main__":
    run_recipe(lambda: _main(sys.argv[1:]))
