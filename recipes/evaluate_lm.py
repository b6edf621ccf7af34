"""Score a causal language model on documents: nats per token, perplexity and bits per byte.

python recipes/evaluate_lm.py --model_name_or_path runs/demo/tlm --dataset_name sample --eval_split validation
accelerate launch --config_file accelerate_configs/cpu_gloo.yaml recipes/evaluate_lm.py \
    --model_name_or_path runs/demo/tlm --data_files some.txt --output_file e.json
"""

import json
from pathlib import Path

import torch
from accelerate import PartialState

from tinylm.data.encoding import check_tokenizer_matches
from tinylm.data.splits import validation_part
from tinylm.evaluation.pretrained import load_pretrained, pretrained_config
from tinylm.evaluation.scoring import encode_documents, score, scoring_rows, scoring_start_id
from tinylm.training.arguments import DataArguments, EvaluateArguments, parse_arguments
from tinylm.training.corpus import checked_block_size, first_documents, load_tokenizer, source_from
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

    config = pretrained_config(args.model_name_or_path)
    context = checked_block_size(data.block_size, config)
    tokenizer = load_tokenizer(args.tokenizer_name_or_path or args.model_name_or_path)
    check_tokenizer_matches(config.vocab_size, tokenizer)
    source = source_from(data)
    held_out = args.eval_split == "validation"
    documents = encode_documents(tokenizer, (validation_part(source) if held_out else source).documents())
    if held_out:
        documents = first_documents(documents, data.max_eval_tokens)  # what training validates on
    rows = scoring_rows(documents, context=context, start_id=scoring_start_id(tokenizer), stride=args.stride)

    result = score(
        load_pretrained(args.model_name_or_path).to(device),
        rows,
        batch_size=args.per_device_eval_batch_size,
        device=device,
        rank=launch.rank,
        world_size=launch.world_size,
        autocast={"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision),
    )
    if launch.rank == 0:
        for name, value in result.items():
            print(f"{name:<16}{value:>14,.4f}" if isinstance(value, float) else f"{name:<16}{value:>14,}")
        write_atomically(output_file, json.dumps(result, indent=2) + "\n")
        print(f"Written to {output_file}")


def checked_output_file(args: EvaluateArguments) -> Path:
    """Where the scores go; refuses, before any work is done, what `args` cannot ask for."""
    if args.eval_split not in ("all", "validation"):
        raise ValueError(f"`eval_split` is `all` or `validation`, not `{args.eval_split}`. Set `--eval_split`.")
    if args.per_device_eval_batch_size < 1:
        raise ValueError(
            f"A batch holds at least one window; `per_device_eval_batch_size` is {args.per_device_eval_batch_size}. "
            "Set `--per_device_eval_batch_size`."
        )
    in_model = Path(args.model_name_or_path, "evaluation.json")
    path = Path(args.output_file) if args.output_file else in_model if in_model.parent.is_dir() else Path(in_model.name)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise FileNotFoundError(
            f"Scores are written to a file in a folder that exists; `{path}` is not that. Set `--output_file`."
        )
    return path


if __name__ == "__main__":
    run_recipe(main)
