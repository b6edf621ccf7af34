"""Measure training: the Trainer beside a hand-written loop, data, launches, two ranks, saving and going on, the demo
beside a plain loop, fine-tuning beside TRL.

    python recipes/bench_training.py
    python recipes/bench_training.py --parts overhead ranks
    python recipes/bench_training.py --parts finetuning

Nothing else should run on the machine meanwhile. Results go to `recipes/results/bench_training.json` and `.md`, those
of `finetuning` to `bench_finetuning.json` and `.md`; parts that are not measured this time stay as they were.
"""

import logging
import tempfile
from pathlib import Path

import torch
from accelerate import PartialState

import tinylm.models  # noqa: F401  (registers the Auto classes)
from tinylm.training.arguments import parse_arguments
from tinylm.training.benchmark.baseline import measure_baseline, read_demo
from tinylm.training.benchmark.finetuning import check_trl, measure_finetuning
from tinylm.training.benchmark.launches import measure_launch, measure_ranks
from tinylm.training.benchmark.overhead import measure_overhead
from tinylm.training.benchmark.pipeline import measure_pipeline
from tinylm.training.benchmark.report import write_results
from tinylm.training.benchmark.resuming import measure_resuming
from tinylm.training.benchmark.saving import measure_saving
from tinylm.training.benchmark.setting import PARTS, BenchmarkArguments
from tinylm.training.launch import run_recipe, start

RECIPE = Path(__file__).with_name("pretrain_tlm.py")

logger = logging.getLogger("tinylm.bench_training")


def main() -> None:
    (args,) = parse_arguments((BenchmarkArguments,))
    launch = start(PartialState(cpu=not torch.accelerator.is_available()).device, args.num_threads)
    if "baseline" in args.parts:
        read_demo(args.demo_dir)  # a missing demo shows now, not after the other parts
    if "finetuning" in args.parts:
        check_trl()
    config, tables = args.run_config, {}
    for part in (part for part in PARTS if part in args.parts):
        logger.info("--- %s", part)
        with tempfile.TemporaryDirectory() as scratch:
            match part:
                case "overhead":
                    measurements = measure_overhead(config, scratch, num_rounds=args.num_rounds)
                case "pipeline":
                    measurements = measure_pipeline(config, scratch)
                case "launch":
                    measurements = measure_launch(RECIPE, config, scratch)
                case "ranks":
                    measurements = measure_ranks(RECIPE, config, scratch)
                case "resuming":
                    measurements = measure_saving(config, scratch, num_rounds=args.num_rounds)
                    measurements += measure_resuming(RECIPE, config, scratch)
                case "baseline":
                    measurements = measure_baseline(config, scratch, args.demo_dir, num_steps=args.baseline_steps)
                case "finetuning":
                    model, rounds = args.finetuning_model, args.finetuning_rounds
                    measurements = measure_finetuning(model, scratch, num_rounds=rounds)
        tables[part == "finetuning"] = write_results(args.output_dir, part, measurements, launch)
    print("", *tables.values(), sep="\n")


if __name__ == "__main__":
    run_recipe(main)
