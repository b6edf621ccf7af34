"""Trains under the engine of the launcher that starts this file, and writes down what the ranks saw, as JSON.

    accelerate launch --config_file accelerate_configs/fsdp2.yaml tests/training/sharded_run.py FOLDER

Starting ranks costs seconds, so one launch looks at several things.
"""

import json
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.training.tiny import UnevenRows, run_arguments, stack, tiny_model
from tinylm.training import engine_trainer
from tinylm.training.engines import gather
from tinylm.training.launch import RunStopped, start, sum_over_ranks
from tinylm.training.trainer import LanguageModelTrainer


class BadAtStep(LanguageModelTrainer):
    """Its loss is not a number in one step, on the last rank."""

    bad_step: int | None = None

    def compute_loss(self, *args, **kwargs) -> Tensor:
        loss = super().compute_loss(*args, **kwargs)
        is_bad = self.state.global_step + 1 == self.bad_step and self.args.process_index == self.args.world_size - 1
        return loss * float("nan") if is_bad else loss


def trainer_in(folder: Path, **settings: object) -> BadAtStep:
    batches = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    args = run_arguments(folder, **{**batches, "max_steps": 2, **settings})
    launch = start(args.device)
    assert launch.world_size == 2
    trainer = BadAtStep(model=tiny_model(), args=args, train_dataset=UnevenRows(), data_collator=stack)
    assert trainer.engine == launch.engine
    return trainer


def weights_of(trainer: LanguageModelTrainer) -> dict[str, Tensor]:
    return gather(trainer._shards, trainer._shapes, keep=True)


def what_is_cut(folder: Path) -> dict[str, object]:
    """How many numbers this rank holds, of how many; and that a save which loses one of them is refused."""
    trainer = trainer_in(folder)
    trainer.train()
    own = sum(trainer._shards.part(name).numel() for name in trainer._shapes)
    facts = {
        "engine": trainer.engine,
        "are_dtensors": all(isinstance(weight, DTensor) for weight in trainer.model.parameters()),
        "own": own,
        "of_all_ranks": int(sum_over_ranks([own])[0]),
        "all": sum(shape.numel() for shape in trainer._shapes.values()),
        "refusals": [refusal_of(trainer, folder, fault) for fault in (lose_a_number, write_another)],
        "saved": [path.name for path in folder.glob("*checkpoint*")],
    }
    trainer._save_checkpoint(trainer.model, trial=None)
    return facts


def lose_a_number(trainer: LanguageModelTrainer) -> None:
    """One that is not the largest, in one weight."""
    whole = trainer._shards.whole
    trainer._shards.whole = lambda name: with_one_off(whole(name)) if "norm" in name else whole(name)


def write_another(trainer: LanguageModelTrainer) -> None:
    del trainer._shards.whole
    save = trainer._save

    def save_another(folder: str, state_dict: dict[str, Tensor]) -> None:
        name = next(iter(state_dict))
        save(folder, {**state_dict, name: with_one_off(state_dict[name])})

    trainer._save = save_another


def with_one_off(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed.view(-1)[3] += 1e-3
    return changed


def refusal_of(trainer: LanguageModelTrainer, folder: Path, make_fault: object) -> str:
    make_fault(trainer)
    try:
        trainer._save_checkpoint(trainer.model, trial=None)
    except RunStopped as stopped:
        return str(stopped)
    finally:
        trainer.__dict__.pop("_save", None)
    return ""


def bad_step(folder: Path) -> dict[str, object]:
    """The weights after one step, and after a second one whose loss is not a number; then the logs."""
    good = trainer_in(folder / "one", max_steps=1, lr_scheduler_type="constant")
    good.train()
    before = weights_of(good)
    bad = trainer_in(folder / "bad", lr_scheduler_type="constant")
    bad.bad_step = 2
    bad.train()
    after = weights_of(bad)
    last = [entry for entry in bad.state.log_history if "loss" in entry][-1]
    return {
        "differ": max((after[name] - before[name]).abs().max().item() for name in before),
        "num_bad_steps": last["num_bad_steps"],
        "norms": [entry["grad_norm"] for entry in bad.state.log_history if "loss" in entry],
    }


def main() -> None:
    folder = Path(sys.argv[1])
    facts = {"cut": what_is_cut(folder / "cut"), "bad": bad_step(folder)}
    rank = torch.distributed.get_rank()
    (folder / f"facts-{rank}.json").write_text(json.dumps(facts))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    assert engine_trainer.EngineTrainer in LanguageModelTrainer.__mro__
    main()
