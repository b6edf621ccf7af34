"""A run's folder, before the first step and after the last: records, model, tokenizer, results and their chart."""

import json
import logging
import secrets
import shutil
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from .checkpoints import check_saving
from .curves import draw_loss_curves
from .launch import Launch, RunStopped, check_engine, decided_by_rank_zero, sum_over_ranks
from .run_lock import hold
from .run_record import HOW_TO_GO_ON, write_atomically, write_run_json, write_status
from .trainer import LanguageModelTrainer
from .watched import ValidationStopped

logger = logging.getLogger(__name__)


def begin_run(
    trainer: LanguageModelTrainer,
    launch: Launch,
    data_source: str,
    checkpoint: str | None,
    base_model: dict[str, str] | None = None,
) -> None:
    """Says how the run is made, and tries what only shows after hours otherwise: the engine, and saving.

    Every rank has to call it; rank 0 writes.

    Args:
        base_model: of fine-tuning: where it lies, `base_model`, and what it is called, `base_model_id`.

    Raises:
        RunStopped: another engine came up, another process trains in the folder, or a rank does not see it.
        ValueError: the run would not go on with the data it began with, or saving would change the model.
    """
    check_engine(launch.engine, trainer.engine)
    if checkpoint:
        trainer.go_on_from(checkpoint)  # a refusal leaves the run's records as they are
    check_folder_is_shared(Path(trainer.args.output_dir), trainer.is_world_process_zero())
    counts = {
        "total": sum(weight.numel() for weight in trainer.model.parameters()),
        "trainable": sum(weight.numel() for weight in trainer.model.parameters() if weight.requires_grad),
    }
    logger.info("Run: %s, %s; %s parameters", launch.describe(), trainer.args.precision, f"{counts['total']:,}")
    if trainer.is_world_process_zero():
        check_saving(trainer.model, trainer.args.output_dir)
        write_status(trainer.args.output_dir, "running", trainer.steps_done, HOW_TO_GO_ON)
        write_run_json(
            trainer.args.output_dir,
            launch,
            precision=trainer.args.precision,
            seed=trainer.args.seed,
            data_source=data_source,
            parameters=counts,
            training=_settings(trainer),
            base_model=base_model,
        )


def check_folder_is_shared(folder: Path, is_rank_zero: bool) -> None:
    """Rank 0 takes the folder's lock and puts a file into it that every rank has to see; it is gone afterwards. Each
    rank saves its own part of a checkpoint, so that without this one would count as complete and lack parts.

    Every rank has to call it.

    Raises:
        RunStopped: a rank does not see the file, or another process trains in the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)  # NFS may still believe that there is none; a folder it makes it looks up
    token = None
    if is_rank_zero:
        hold(folder)
        token = f".seen-{secrets.token_hex(8)}"
        (folder / token).touch()
    token = decided_by_rank_zero(token)
    sees = (folder / token).is_file()
    num_blind = int(sum_over_ranks([not sees])[0])
    if is_rank_zero:
        (folder / token).unlink()
    if num_blind:
        raise RunStopped(
            f"Every rank writes its part of a checkpoint into `{folder}`, and {num_blind} rank(s)"
            f"{'' if sees else ', this one among them,'} do not see there what rank 0 writes. Set `--output_dir` to a"
            " folder that all machines share."
        )


def _settings(trainer: LanguageModelTrainer) -> dict[str, float | int | str]:
    args = trainer.args
    return {
        "learning_rate": args.learning_rate,
        "lr_scheduler_type": str(args.lr_scheduler_type.value),
        "weight_decay": args.weight_decay,
        "global_batch_size": trainer.get_total_train_batch_size(args),
        "max_steps": args.max_steps,
        "num_train_epochs": args.num_train_epochs,
    }


def finish_run(trainer: LanguageModelTrainer, train_metrics: dict[str, float]) -> dict[str, float]:
    """Validates, then saves model, tokenizer, `all_results.json`, `trainer_state.json`, `loss.png`; gives the results.

    Of a run that was validated before its first step (`eval_on_start`), that loss is `before_eval_loss`. Every rank
    has to call it; rank 0 writes.

    Raises:
        RunInterrupted: the run was stopped on purpose in the validation; going on with it does that again.
    """
    with trainer.watched():
        trainer.phases.enter("validation", trainer.state.global_step)
        try:
            last = _last_validation(trainer)
        except ValidationStopped:
            trainer.interrupt_after_training()
        metrics = {**train_metrics, **trainer.meter.total, **last, **_first_validation(trainer)}
        trainer.phases.enter("save", trainer.state.global_step)
        trainer.save_model()
        if trainer.is_world_process_zero():
            folder = Path(trainer.args.output_dir)
            save_tokenizer(trainer.processing_class, folder)
            trainer.state.save_to_json(str(folder / "trainer_state.json"))
            write_atomically(folder / "all_results.json", json.dumps(metrics, indent=2, sort_keys=True) + "\n")
            draw_loss_curves(trainer.state.log_history, folder / "loss.png")
            write_status(trainer.args.output_dir, "finished", trainer.state.global_step)
        trainer.wishes_are_fulfilled(stopped=True)  # one that came too late would stop the next run in this folder
    return metrics


def _last_validation(trainer: LanguageModelTrainer) -> dict[str, float]:
    """The scores of the model that is saved: those of its last step if it was validated there, else taken now."""
    for entry in [] if trainer.args.load_best_model_at_end else trainer.state.log_history[::-1]:
        if entry.get("step") == trainer.state.global_step and "eval_loss" in entry:
            return {name: value for name, value in entry.items() if name.startswith("eval_")}
    return trainer.evaluate()


def _first_validation(trainer: LanguageModelTrainer) -> dict[str, float]:
    for entry in trainer.state.log_history:
        if entry["step"] == 0 and "eval_loss" in entry:
            return {"before_eval_loss": entry["eval_loss"]}
    return {}


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Saves a tokenizer, with the SentencePiece model that it was converted from where there is one."""
    tokenizer.save_pretrained(folder)
    model = Path(tokenizer.name_or_path, "tokenizer.model")
    if model.is_file() and model.resolve() != (folder / "tokenizer.model").resolve():
        shutil.copyfile(model, folder / "tokenizer.model")
