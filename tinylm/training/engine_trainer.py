"""A Trainer that writes and reads the same files under every engine and number of ranks: those of one process.

What differs from the stock Trainer, and why:
- weights and optimizer are gathered before they are written, and compared with the ranks' parts and with what one
  process would write (stock: each engine has files of its own, which no other engine or number of ranks can read);
- when a run goes on, the model is loaded whole and then cut, and every rank takes its part of the optimizer;
- FSDP2 runs on CPUs too (`engines.sharding_on_cpus`);
- under ZeRO-3 models are built whole (`deepspeed_environment.py`).
"""

import json
import math
import warnings
from pathlib import Path

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from .deepspeed_environment import build_models_whole, compile_nothing_in_deepspeed
from .engine_deepspeed import DeepSpeedShards
from .engine_fsdp2 import Fsdp2Shards, of_its_own_class
from .engines import Shards, check_written, gather, names_of_weights, read_weights, sharding_on_cpus
from .together import failing_together

_ENGINES = {DistributedType.NO: "none", DistributedType.FSDP: "fsdp2", DistributedType.DEEPSPEED: "deepspeed"}


class EngineTrainer(Trainer):
    """`Trainer` whose checkpoints do not depend on the engine that trains."""

    def __init__(self, **kwargs) -> None:
        self._shards: Shards | None = None  # from the first training on, where the engine cuts anything
        super().__init__(**kwargs)
        state = self.model.state_dict()
        self._shapes = {name: state[name].shape for name in names_of_weights(self.model)}

    def create_accelerator_and_postprocess(self) -> None:
        with sharding_on_cpus():
            super().create_accelerator_and_postprocess()
        build_models_whole()
        compile_nothing_in_deepspeed()

    @property
    def engine(self) -> str:
        """What really exchanges gradients: none, ddp, fsdp2 or deepspeed."""
        return _ENGINES.get(self.accelerator.distributed_type, "ddp")

    @property
    def is_cut(self) -> bool:
        """Whether ranks hold parts of the optimizer or of the weights; from the first training on."""
        return self._shards is not None

    @property
    def runs_samples(self) -> bool:
        """Whether this rank has to run the model when samples are drawn: rank 0, and all where the weights are cut."""
        return self.is_world_process_zero() or not (self._shards is None or self._shards.holds_all_weights)

    def create_optimizer(self, *args, **kwargs) -> Optimizer:
        """Without groups that hold no weight: DeepSpeed takes them out, and a checkpoint's groups are those of all."""
        optimizer = super().create_optimizer(*args, **kwargs)
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        return optimizer

    # Going on.

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, DataLoader]:
        if self.engine in ("none", "ddp"):
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        weights = self._weights_in(resume_from_checkpoint) if resume_from_checkpoint else {}
        state = self.model.state_dict()
        for name, value in weights.items():
            state[name].copy_(value)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        if self.engine == "fsdp2":
            self._shards = Fsdp2Shards(self.model, self.optimizer.optimizer)
        else:
            self._shards = DeepSpeedShards(self.model_wrapped)
        if resume_from_checkpoint:
            self._shards.put_weights(weights)  # DeepSpeed has its fp32 from the model, which is in half by then
            self._go_on_with_optimizer(Path(resume_from_checkpoint))
        return prepared

    def _go_on_with_optimizer(self, checkpoint: Path) -> None:
        state = torch.load(checkpoint / OPTIMIZER_NAME, map_location="cpu", weights_only=True, mmap=True)
        self._shards.put_optimizer_state(state)
        self.lr_scheduler.load_state_dict(torch.load(checkpoint / SCHEDULER_NAME, weights_only=True))
        self._load_scaler(str(checkpoint))

    def _load_best_model(self) -> None:
        if self._shards is None:
            super()._load_best_model()
        else:
            self._shards.put_weights(self._weights_in(self.state.best_model_checkpoint))

    def _weights_in(self, checkpoint: str) -> dict[str, Tensor]:
        return read_weights(self.model, Path(checkpoint), self._shapes)

    # Saving.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in the Trainer. Every rank has to call it.

        Raises:
            RuntimeError: what was gathered or written is not what the ranks hold.
        """
        if self._shards is None:
            super().save_model(output_dir, _internal_call)
            return
        whole = gather(self._shards, self._shapes, keep=self.args.should_save)
        folder = Path(output_dir or self.args.output_dir)
        with failing_together():
            if self.args.should_save:
                with of_its_own_class(self.model):
                    self._save(str(folder), state_dict=dict(whole))
                _say_that_weights_are_fp32(folder)
                check_written(self.model, folder, whole)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._shards is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = self._shards.optimizer_state()
        with failing_together(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's reminder to save the optimizer as well
            if self.args.should_save:
                torch.save(state, Path(output_dir, OPTIMIZER_NAME))
                torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    # Steps.

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | float | None = None) -> Tensor | float:
        """A number of this rank's own; NaN after a step that DeepSpeed has left out."""
        norm = super()._get_grad_norm(model, grad_norm)
        if isinstance(self._shards, DeepSpeedShards) and self._shards.take_note_of_bad_step():
            return math.nan
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _say_that_weights_are_fp32(folder: Path) -> None:
    """The config takes the number format from the model, which DeepSpeed may hold in half."""
    path = folder / "config.json"
    if path.is_file():
        config = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**config, "dtype": "float32"}, indent=2, sort_keys=True) + "\n", encoding="utf-8")
