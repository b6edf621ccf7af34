"""Measure training: the Trainer beside a hand-written loop, data, launches, two ranks, the demo beside a plain loop.

    python recipes/bench_training.py
    python recipes/bench_training.py --parts overhead ranks

Nothing else should run on the machine meanwhile. Results go to `recipes/results/bench_training.json` and `.md`; parts
that are not measured this time stay as they were.
"""

import logging
import tempfile
from pathlib import Path

import torch
from accelerate import PartialState

import tinylm.models  # noqa: F401  (registers the Auto classes)
from tinylm.training.arguments import parse_arguments
from tinylm.training.benchmark.baseline import measure_baseline, read_demo
from tinylm.training.benchmark.launches import measure_launch, measure_ranks
from tinylm.training.benchmark.overhead import measure_overhead
from tinylm.training.benchmark.pipeline import measure_pipeline
from tinylm.training.benchmark.report import write_results
from tinylm.training.benchmark.setting import PARTS, BenchmarkArguments
from tinylm.training.launch import run_recipe, start

RECIPE = Path(__file__).with_name("pretrain_tlm.py")

logger = logging.getLogger("tinylm.bench_training")


def main() -> None:
    (args,) = parse_arguments((BenchmarkArguments,))
    launch = start(PartialState(cpu=not torch.accelerator.is_available()).device, args.num_threads)
    if "baseline" in args.parts:
        read_demo(args.demo_dir)  # a missing demo shows now, not after the other parts
    config = args.run_config
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
                case "baseline":
                    measurements = measure_baseline(config, scratch, args.demo_dir, num_steps=args.baseline_steps)
        table = write_results(args.output_dir, part, measurements, launch)
    print(f"\n{table}")


if __name__ == "__main__":
    run_recipe(main)
