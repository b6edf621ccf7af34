"""Score causal language models on documents: nats per token, perplexity and bits per byte.

python recipes/evaluate_lm.py --model_name_or_path runs/demo/tlm --dataset_name sample --eval_split validation
python recipes/evaluate_lm.py --model_name_or_path runs/demo/tlm runs/mine --corpora sample notes/
accelerate launch --config_file accelerate_configs/cpu_gloo.yaml recipes/evaluate_lm.py \
    --model_name_or_path runs/demo/tlm --data_files some.txt --output_file e.json
"""

from pathlib import Path

import torch
from accelerate import PartialState

from tinylm.data.sources import Source
from tinylm.evaluation.corpora import check_split, corpora_of, open_places
from tinylm.evaluation.score_table import check_output_file, print_scores, scores_as_json
from tinylm.evaluation.side_by_side import contestants, score_side_by_side
from tinylm.training.arguments import DataArguments, EvaluateArguments, parse_arguments
from tinylm.training.corpus import load_tokenizer, source_from
from tinylm.training.launch import run_recipe, start
from tinylm.training.precision import resolve_precision
from tinylm.training.run_record import write_atomically


def main() -> None:
    args, data = parse_arguments((EvaluateArguments, DataArguments))
    use_cpu = args.use_cpu or not torch.accelerator.is_available()
    device = PartialState(cpu=use_cpu).device
    launch = start(device, args.num_threads)
    precision = resolve_precision(args.precision, use_cpu=use_cpu)
    output_file = checked_output_file(args)

    named = args.tokenizer_name_or_path
    models = contestants(
        args.model_name_or_path,
        base_model=args.base_model,
        tokenizer=load_tokenizer(named) if named else None,
        block_size=data.block_size,
        stride=args.stride,
    )
    corpora = corpora_of(
        sources_from(args, data),
        split=args.eval_split,
        tokenizer=models[0].tokenizer,
        max_eval_tokens=data.max_eval_tokens,  # what training validates on
    )
    results = score_side_by_side(
        models,
        corpora,
        batch_size=args.per_device_eval_batch_size,
        stride=args.stride,
        device=device,
        rank=launch.rank,
        world_size=launch.world_size,
        autocast={"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision),
    )
    if launch.rank == 0:
        print_scores(results)
        write_atomically(output_file, scores_as_json(results))
        print(f"Written to {output_file}")


def sources_from(args: EvaluateArguments, data: DataArguments) -> dict[str, Source]:
    """Each of `--corpora` by itself, or all that the flags of a single source name as one corpus."""
    if not args.corpora:
        source = source_from(data)
        return {data.dataset_name or " ".join(data.data_files): source}
    if data.dataset_name or data.data_files:
        raise ValueError(
            f"`--corpora` names sources, and `--dataset_name` ({data.dataset_name}) and `--data_files` name one more."
            " Put all of them behind `--corpora`."
        )
    return open_places(
        args.corpora,
        text_column=data.text_column,
        dataset_split=data.dataset_split,
        document_separator=data.document_separator,
        max_documents=data.max_documents,
    )


def checked_output_file(args: EvaluateArguments) -> Path:
    """Where the scores go; refuses, before any work is done, what `args` cannot ask for."""
    check_split(args.eval_split)
    if args.per_device_eval_batch_size < 1:
        raise ValueError(
            f"A batch holds at least one window; `per_device_eval_batch_size` is {args.per_device_eval_batch_size}. "
            "Set `--per_device_eval_batch_size`."
        )
    names = args.model_name_or_path
    in_model = Path(names[0], "evaluation.json")
    default = in_model if len(names) == 1 and in_model.parent.is_dir() else Path(in_model.name)
    path = Path(args.output_file) if args.output_file else default
    check_output_file(path)
    return path


if __name__ == "__main__":
    run_recipe(main)
