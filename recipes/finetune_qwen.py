"""Fine-tune a causal language model on conversations: LoRA on Qwen2.5-0.5B-Instruct, or all of any base model.

accelerate launch recipes/finetune_qwen.py                                 # from the Hub
accelerate launch recipes/finetune_qwen.py --config recipes/configs/finetune_qwen/smollm2_demo.yaml
"""

from pathlib import Path

from transformers import set_seed

from tinylm.evaluation.model_and_tokenizer import check_weights
from tinylm.inspection.before_after import BeforeAfter
from tinylm.inspection.finished import complete_finished
from tinylm.inspection.preview import preview_examples
from tinylm.inspection.report import add_course_to_card
from tinylm.models.loading import check_quantization, load_base_config, load_base_model
from tinylm.publish.cards import write_card
from tinylm.publish.preflight import destination_of_run
from tinylm.publish.push import push_finished
from tinylm.training.arguments import parse_arguments
from tinylm.training.chat_corpus import load_chat_tokenizer, open_chat_corpus
from tinylm.training.checkpoints import check_room, checkpoint_to_resume, is_done
from tinylm.training.end_tokens import align_end_tokens, mend_generation_config
from tinylm.training.finetune_arguments import ChatArguments, FinetuneArguments, LoraArguments
from tinylm.training.isolation import check_examples_are_kept_apart
from tinylm.training.launch import rank_zero_first, run_recipe, start
from tinylm.training.lora import base_dtype, base_name, base_place, plan_training, trainable_model, warn_of_local_base
from tinylm.training.run_folder import begin_run, finish_run
from tinylm.training.trackers import send_results
from tinylm.training.trainer import LanguageModelTrainer

DEFAULT_RUN = Path(__file__).parent / "configs" / "finetune_qwen" / "qwen.yaml"


def main() -> None:
    run, chat, lora = parse_arguments((FinetuneArguments, ChatArguments, LoraArguments), default_config=DEFAULT_RUN)
    launch = start(run.device, run.num_threads)
    checkpoint = checkpoint_to_resume(run.output_dir, run.resume_from_checkpoint)
    if is_done(checkpoint, run):
        print(f"The run in {run.output_dir} is finished. `--max_steps` or `--num_train_epochs` would take it further.")
        complete_finished(run, launch.rank, adapted_model=None if lora.full else base_name(lora))
        return
    destination = destination_of_run(run, launch.rank, adapted_model=None if lora.full else base_name(lora))
    check_quantization(lora.model_name_or_path, lora.quantization)
    config = load_base_config(lora.model_name_or_path)
    check_weights(lora.model_name_or_path)
    check_room(run, plan_training(config, lora))
    corpus = open_chat_corpus(chat, run, config, load_chat_tokenizer(lora, chat, config))
    if launch.rank == 0:
        warn_of_local_base(lora)
        print(preview_examples(corpus.tokenizer, corpus.previewed))

    set_seed(run.seed)
    base = load_base_model(
        lora.model_name_or_path,
        dtype=base_dtype(lora, run.precision),
        attn_implementation=lora.attn_implementation,
        quantization=lora.quantization,
    )
    mend_generation_config(base)
    align_end_tokens(base, corpus.tokenizer, corpus.end_of_turn)
    if chat.packing:
        check_examples_are_kept_apart(base, "Set `--packing false`.")
    run.eval_on_start = checkpoint is None
    trainer = LanguageModelTrainer(
        model=trainable_model(base, lora),
        args=run,
        train_dataset=corpus.train_dataset,
        eval_dataset=corpus.eval_rows,
        data_collator=corpus.collate,
        processing_class=corpus.tokenizer,
    )
    named = {"base_model": base_place(lora), "base_model_id": base_name(lora)}
    begin_run(trainer, launch, corpus.description, checkpoint, named)
    answers = BeforeAfter(trainer, corpus.prompts or run.sample_prompts, go_on=checkpoint is not None)
    result = trainer.train(resume_from_checkpoint=checkpoint)
    metrics = finish_run(trainer, result.metrics)
    compared = answers.compared(metrics) if trainer.runs_samples else ""
    if trainer.is_world_process_zero():
        write_card(run.output_dir)
        add_course_to_card(Path(run.output_dir))
        print(compared)
        send_results(run.report_to, run.output_dir, answers.samples)
    with rank_zero_first("push"):
        if destination is not None:
            push_finished(run.output_dir, destination)


if __name__ == "__main__":
    run_recipe(main)
