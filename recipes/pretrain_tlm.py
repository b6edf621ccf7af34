"""Pretrain a causal language model from nothing: any architecture that a config.json names, on any text.

accelerate launch recipes/pretrain_tlm.py                                  # full Wikipedia, streamed from the Hub
accelerate launch recipes/pretrain_tlm.py --config recipes/configs/pretrain_tlm/demo.yaml
"""

from pathlib import Path

from transformers import AutoModelForCausalLM, set_seed

import tinylm.models  # noqa: F401  (registers the Auto classes)
from tinylm.generation import generate_text
from tinylm.inspection.finished import complete_finished
from tinylm.inspection.report import add_course_to_card
from tinylm.publish.cards import write_card
from tinylm.publish.preflight import destination_of_run
from tinylm.publish.push import push_finished
from tinylm.training.arguments import DataArguments, ModelArguments, RunArguments, parse_arguments
from tinylm.training.checkpoints import check_space, checkpoint_to_resume, is_done
from tinylm.training.corpus import load_config, open_corpus
from tinylm.training.isolation import check_examples_are_kept_apart
from tinylm.training.launch import rank_zero_first, run_recipe, start
from tinylm.training.run_folder import begin_run, finish_run
from tinylm.training.trackers import send_results
from tinylm.training.trainer import LanguageModelTrainer

DEFAULT_RUN = Path(__file__).parent / "configs" / "pretrain_tlm" / "wikipedia.yaml"


def main() -> None:
    run, data, model_args = parse_arguments((RunArguments, DataArguments, ModelArguments), default_config=DEFAULT_RUN)
    launch = start(run.device, run.num_threads)
    checkpoint = checkpoint_to_resume(run.output_dir, run.resume_from_checkpoint)
    if is_done(checkpoint, run):
        print(f"The run in {run.output_dir} is finished. `--max_steps` or `--num_train_epochs` would take it further.")
        complete_finished(run, launch.rank)
        return
    destination = destination_of_run(run, launch.rank)
    config = load_config(model_args.config_name)
    check_space(run, config)
    corpus = open_corpus(data, run, config, model_args.tokenizer_name_or_path)

    set_seed(run.seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=model_args.attn_implementation)
    if data.document_mask:
        check_examples_are_kept_apart(model, "Leave `--document_mask` out, or choose another architecture.")
    model.train()
    trainer = LanguageModelTrainer(
        model=model,
        args=run,
        train_dataset=corpus.train_dataset,
        eval_dataset=corpus.eval_rows,
        data_collator=corpus.collate,
        processing_class=corpus.tokenizer,
    )
    begin_run(trainer, launch, corpus.description, checkpoint)
    result = trainer.train(resume_from_checkpoint=checkpoint)
    finish_run(trainer, result.metrics)
    texts = []
    if trainer.runs_samples:
        settings = {
            "max_new_tokens": min(60, config.max_position_embeddings // 2),
            "temperature": 0.8,
            "top_k": 50,
            "seed": run.seed,
        }
        texts = generate_text(trainer.model, corpus.tokenizer, run.sample_prompts, **settings)
    if trainer.is_world_process_zero():
        write_card(run.output_dir)
        add_course_to_card(Path(run.output_dir))
        for text in texts:
            print(f"--- sample\n{text}")
        samples = [{"prompt": prompt, "text": text} for prompt, text in zip(run.sample_prompts, texts, strict=True)]
        send_results(run.report_to, run.output_dir, samples)
    with rank_zero_first("push"):
        if destination is not None:
            push_finished(run.output_dir, destination)


if __name__ == "__main__":
    run_recipe(main)
