"""Data parallelism, proven, then measured: all-reduces by hand, with hooks and without, in buckets; native DDP beside.

torchrun --nproc_per_node=2 recipes/bench_ddp.py --algorithm ring --no_hooks       # one way to exchange gradients
torchrun --nproc_per_node=2 recipes/bench_ddp.py --native --static_graph --gradient_as_bucket_view
torchrun --nproc_per_node=2 recipes/bench_ddp.py --matrix                          # all of them, in turns
torchrun --nproc_per_node=2 recipes/bench_ddp.py --cost_model --latency_us 5 --gbit 400

Nothing else should run on the machine meanwhile. Rows are added to `recipes/results/ddp/<hardware>.csv`, charts are
drawn beside it; `tinylm/ddp/README.md` is the lesson that explains them.
"""

from datetime import UTC, datetime
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, set_seed

import tinylm.models  # noqa: F401  (registers the Auto classes)
from tinylm.ddp.arguments import BenchmarkArguments
from tinylm.ddp.benchmark import Task, measure_steps
from tinylm.ddp.collectives import ALGORITHMS
from tinylm.ddp.configurations import configurations
from tinylm.ddp.group import join_group
from tinylm.ddp.message_sizes import measure_sizes
from tinylm.ddp.report import report_sizes, report_steps
from tinylm.ddp.table import WRONG, Circumstances, SizeRow, StepRow, check_can_append, file_name
from tinylm.training.corpus import load_config
from tinylm.training.launch import RunStopped, run_recipe, start
from tinylm.training.parsing import parse_arguments
from tinylm.training.precision import resolve_precision
from tinylm.training.run_record import current_commit, describe_hardware

RESULTS = Path(__file__).parent / "results" / "ddp"


def main() -> None:
    (args,) = parse_arguments((BenchmarkArguments,))
    config = load_config(args.config_name)
    check_context(args.sequence_length, config)
    precision = resolve_precision(args.precision, use_cpu=args.use_cpu or not torch.cuda.is_available())
    device = join_group(use_cpu=args.use_cpu)
    launch = start(device, args.num_threads)
    made = Circumstances(
        run=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        commit=current_commit() or "unknown",
        hardware=describe_hardware(launch.device),
        world_size=launch.world_size,
        backend=launch.backend,
        threads=launch.threads,
    )
    path = Path(args.output_file or RESULTS / f"{file_name(made.hardware)}.csv")
    path = path.with_stem(f"{path.stem}-sizes") if args.cost_model else path
    check_can_append(path, SizeRow if args.cost_model else StepRow)

    set_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(device, torch.float32)
    model.eval()  # dropout would differ from rank to rank
    if args.cost_model:
        rows = measure_sizes(list(ALGORITHMS), made, device, rounds=args.rounds)
        if rows and launch.rank == 0:
            num_bytes = sum(weight.nbytes for weight in model.parameters())
            print(report_sizes(rows, path, latency_us=args.latency_us, gbit=args.gbit, num_bytes=num_bytes))
        return
    task = Task(
        model=model,
        name=Path(args.config_name).parent.name if args.config_name.endswith(".json") else args.config_name,
        batch_size=args.batch_size,
        sequence_length=args.sequence_length,
        device=device,
        autocast=precision == "bf16",
        steps=args.steps,
        warmup_steps=args.warmup_steps,
        rounds=args.rounds,
    )
    compared = configurations(args, launch.world_size)
    rows = measure_steps(task, compared, made)
    if launch.rank == 0:
        print(report_steps(rows, path, args.matrix or str(compared[-1])))
    wrong = [f"`{row.algorithm}, {row.mode}`" for row in rows if row.proven == WRONG]
    if wrong:
        raise RunStopped(f"Wrong, and therefore not timed: {'; '.join(wrong)}. The lines `WRONG` above say in what.")


def check_context(sequence_length: int, config: PreTrainedConfig) -> None:
    context = getattr(config, "max_position_embeddings", sequence_length)
    if sequence_length > context:
        raise ValueError(
            f"The model's context is {context} tokens; `sequence_length` is {sequence_length}. Set it lower."
        )


if __name__ == "__main__":
    run_recipe(main)
