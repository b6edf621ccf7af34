"""The one training loop: the Trainer, with a loss, a data order and a validation that mean the same on any machine.

What differs from the stock Trainer, and why:
- the logged loss is the sum of nats over real targets / their number, over all ranks and micro-batches since the last
  log (stock: a mean of step means);
- a loss or gradient that is not finite is shown, its step skipped and counted; several in a row end the run;
- every rank reads its own shards of a stream, and all ranks stop together (stock: rank 0 reads for everybody);
- validation is scored by targets, not by batches (stock: a mean of batch means);
- tokens are counted over all ranks: read, not padding, trained on;
- the head runs on targets only (`targets.py`).
"""

import logging
import time
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import MethodType

import torch
from accelerate.utils.operations import ConvertOutputsToFp32
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import PrinterCallback
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import TrainOutput, seed_worker

from tinylm.data.order import GlobalBatches
from tinylm.data.records import CollateNumbered, HasFingerprint, HoldsRecords, NumberedExamples
from tinylm.data.stream import ResumableStream
from tinylm.data.stream_files import load_stream_state
from tinylm.evaluation.scoring import pad_rows, score

from .arguments import RunArguments
from .callbacks import AuditFiles, ProgressLine, StatusFile
from .launch import RunStopped, lists_of_ranks
from .loss_meter import LossMeter
from .record_audit import RecordAudit
from .resumable import PassedOver, ResumableTrainer
from .stream_loader import StreamBroken, StreamLoader
from .targets import TargetsOnly
from .timing import TimingFile
from .trackers import prepare_trackers

logger = logging.getLogger(__name__)


class LanguageModelTrainer(ResumableTrainer):
    """The Trainer for causal language models; takes `RunArguments` and the datasets of `tinylm.data`."""

    args: RunArguments

    def __init__(self, *, args: RunArguments, **kwargs) -> None:
        prepare_trackers(args.report_to, args.output_dir)
        self._use_cache = getattr(kwargs["model"].config, "use_cache", None)  # the Trainer turns it off for training
        self.meter = LossMeter(args.device)
        super().__init__(args=args, **kwargs)
        self.remove_callback(PrinterCallback)
        self.add_callback(ProgressLine(lambda: self.meter.total, self.time_in_words))
        self.add_callback(StatusFile)
        self.add_callback(TimingFile(lambda: self.time_table))
        self._loss_shifts_labels = True  # causal models do, also those whose class says nothing of its loss
        self.record_audit: RecordAudit | None = None
        self.record_ids_of_step: list[int] = []
        self.stream_loader: StreamLoader | None = None
        self.resumed_from: str | None = None
        self.targets_only = TargetsOnly(self.model, args, has_whole_weights=self.engine in ("none", "ddp"))

    # Data: our own order and sharding, so accelerate must not shard again.

    def get_train_dataloader(self) -> DataLoader | StreamLoader:
        if self.train_dataset is None:
            raise ValueError("Training needs a `train_dataset`.")
        args = self.args
        settings = {
            "collate_fn": self.data_collator,
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory and args.device.type == "cuda",
            "worker_init_fn": partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index),
        }
        if isinstance(self.train_dataset, IterableDataset):
            return self._loader_of_stream(settings)
        batches = GlobalBatches(
            len(self.train_dataset),
            start_step=self.steps_done,
            per_rank_batch_size=self._train_batch_size,
            accumulation_steps=args.gradient_accumulation_steps,
            rank=args.process_index,
            world_size=args.world_size,
            seed=args.seed if args.data_seed is None else args.data_seed,
        )
        dataset = self.train_dataset
        if args.record_audit:
            dataset = self._audited(dataset, batches)
            settings["collate_fn"] = CollateNumbered(self.data_collator)
        return OrderedLoader(dataset, batch_sampler=PassedOver(batches) if self.steps_done else batches, **settings)

    def _loader_of_stream(self, settings: dict[str, object]) -> StreamLoader:
        args = self.args
        args.ignore_data_skip = True  # the stream finds its place itself
        settings["generator"] = torch.Generator()  # DataLoaders draw from it, and must not from that of the model
        if isinstance(self.train_dataset, ResumableStream):
            settings["num_workers"] = 0  # it starts its own
        loader = DataLoader(self.train_dataset, batch_size=self._train_batch_size, **settings)
        self.stream_loader = StreamLoader(
            loader,
            args.gradient_accumulation_steps,
            windows_done=lambda: self.state.global_step,
            before_agreeing=lambda: self.phases.enter("exchange", self.state.global_step + 1),
        )
        if self.resumed_from is not None:
            self.stream_loader.go_on_from(Path(self.resumed_from), args.process_index, args.world_size)
        return self.stream_loader

    def _audited(self, dataset: Dataset, batches: GlobalBatches) -> Dataset:
        """The dataset with numbers for its examples, and the audit that notes them and their records."""
        contents = dataset.contents() if isinstance(dataset, HoldsRecords) else None
        self.record_audit = RecordAudit(self.args.output_dir, batches, contents)
        self.remove_callback(AuditFiles)  # of an earlier `train`
        self.add_callback(AuditFiles(self.record_audit))
        return NumberedExamples(dataset)

    def train(self, resume_from_checkpoint: str | None = None, **kwargs) -> TrainOutput:
        self.resumed_from = resume_from_checkpoint
        with self.targets_only.while_training():
            return super().train(resume_from_checkpoint, **kwargs)

    def _prepare_for_training(self, *args, **kwargs) -> tuple[nn.Module, DataLoader | StreamLoader]:
        prepared = super()._prepare_for_training(*args, **kwargs)
        leave_logits_in_half(self.model)
        return prepared

    def _run_epoch(self, **kwargs) -> None:
        try:
            super()._run_epoch(**kwargs)
        except StreamBroken:
            if self.state.global_step > self.steps_done:
                self._save_checkpoint(self.model, trial=None)
            raise

    def _maybe_log_save_evaluate(self, *args, **kwargs) -> None:
        if self.stream_loader is not None:  # the Trainer counts the epochs of a stream from where a run goes on
            epoch, num_steps = self.stream_loader.place
            self.state.epoch = epoch + num_steps / self.state.max_steps
        super()._maybe_log_save_evaluate(*args, **kwargs)

    # Loss: counted, and never silently not a number.

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Tensor | None = None):
        record_ids, example_ids = inputs.pop("record_ids", None), inputs.pop("example_ids", None)
        if record_ids is not None:
            self.record_ids_of_step += record_ids.tolist()
        if self.record_audit is not None:
            self.record_audit.add(self.state.global_step + 1, record_ids.tolist(), example_ids.tolist())
        loss = super().training_step(model, inputs, num_items_in_batch)
        # `compute_loss` multiplies by the ranks, because DDP divides the gradients by them.
        self.meter.add(loss * num_items_in_batch / self.accelerator.num_processes, inputs)
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ):
        with self.targets_only.batch(inputs) as inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | float | None = None):
        """Called once a step, after the gradients are the same on all ranks: all ranks judge them alike."""
        norm = super()._get_grad_norm(model, grad_norm)
        scaler = self.accelerator.scaler
        record_ids, self.record_ids_of_step = self.record_ids_of_step, []
        # An overflow under a large fp16 scale is how the scale is found.
        gradient_is_well = torch.isfinite(torch.as_tensor(norm)) or (scaler is not None and scaler.get_scale() >= 1)
        if self.loss_is_finite and gradient_is_well:
            self.bad_steps_in_a_row = 0
            return norm
        self.num_bad_steps += 1
        self.bad_steps_in_a_row += 1
        step = self.state.global_step + 1
        logger.warning("Step %d: loss or gradient is not finite; the weights stay as they are.", step)
        if scaler is None:
            self.optimizer.zero_grad(set_to_none=True)  # AdamW leaves weights without a gradient alone
        if self.bad_steps_in_a_row >= self.args.max_bad_steps:
            ids = ", ".join(map(str, sorted(lists_of_ranks(record_ids))))
            raise RunStopped(
                f"Loss or gradient were not finite in {self.bad_steps_in_a_row} steps in a row, the last one step"
                f" {step}{f' (records {ids})' if ids else ''}. No weight was changed by them. Lower `--learning_rate`,"
                " or look at the data of these steps; the last checkpoint is still good."
            )
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs = {**logs, **self.meter.reduce()}
            if self.num_bad_steps:
                logs["num_bad_steps"] = self.num_bad_steps
        if "train_loss" in logs:
            self.meter.reduce()
            logs["train_loss"] = self.meter.mean
        super().log(logs, start_time)

    def order_of_data(self) -> dict[str, int | str | None]:
        """What decides which examples a step sees. Streams are read by ranks x workers, each in batches of its own."""
        args, dataset = self.args, self.train_dataset
        is_stream = isinstance(dataset, IterableDataset)
        is_read_again = is_stream and not isinstance(dataset, ResumableStream)  # which looks after its readers itself
        return {
            "global_batch_size": self.get_total_train_batch_size(args),
            "seed": args.seed if args.data_seed is None else args.data_seed,
            "examples": None if is_stream else len(dataset),
            "fingerprint_of_data": self._fingerprint_of_data,
            "readers": args.world_size * max(1, args.dataloader_num_workers) if is_read_again else None,
            "accumulation_steps": args.gradient_accumulation_steps if is_read_again else None,
        }

    @cached_property
    def _fingerprint_of_data(self) -> str | None:
        return self.train_dataset.fingerprint() if isinstance(self.train_dataset, HasFingerprint) else None

    def go_on_from(self, checkpoint: str) -> None:
        if isinstance(self.train_dataset, ResumableStream):
            state = load_stream_state(Path(checkpoint), self.args.process_index, self.args.world_size)
            self.train_dataset.check(state)
        super().go_on_from(checkpoint)

    def save_rank_state(self, folder: Path) -> None:
        if self.stream_loader is not None:
            self.stream_loader.save(folder, self.args.process_index)
        if self.record_audit is not None:
            self.record_audit.close_part()  # no checkpoint is there before all parts of its steps are

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """As in the Trainer, with `use_cache` as the model came, or generation from the saved model would be slow, and
        without the pickle of all arguments, which would hold a token if one was given."""
        config = self.accelerator.unwrap_model(self.model).config
        config.use_cache, while_training = self._use_cache, config.use_cache
        super()._save(output_dir, state_dict)
        config.use_cache = while_training
        if self.args.should_save:
            Path(output_dir or self.args.output_dir, TRAINING_ARGS_NAME).unlink()

    # Validation: scores, not means of batches.

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """`{prefix}_loss` (nats a target over all rows and ranks), `{prefix}_perplexity`, counts, bits per byte."""
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        model = self._wrap_model(self.model, training=False)
        if not self.is_in_train and not self.is_cut:
            model = self.accelerator.prepare_model(model, evaluation_mode=True)
        began = time.perf_counter()
        scores = score(
            model,
            rows,
            batch_size=self.args.per_device_eval_batch_size,
            rank=self.args.process_index,
            world_size=self.args.world_size,
            device=self.args.device,
            collate=self._collate_unless_stopped,
        )
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in scores.items()}
        metrics[f"{metric_key_prefix}_loss"] = scores["nats_per_token"]
        metrics[f"{metric_key_prefix}_runtime"] = time.perf_counter() - began
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _collate_unless_stopped(self, rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """A batch of validation rows; every rank makes equally many."""
        self.stop_validation_if_asked()
        return pad_rows(rows)


def leave_logits_in_half(model: nn.Module) -> None:
    """Takes off accelerate's copy of all outputs to fp32 after each forward; autocast stays.

    The loss is in fp32 by itself, and nothing else reads the logits in training: 67 MB a step for 8 x 512 x 4096.
    """
    function = getattr(model.__dict__.get("forward"), "__func__", None)
    conversion = getattr(function, "__wrapped__", None)
    if isinstance(conversion, ConvertOutputsToFp32):
        model.forward = MethodType(conversion.model_forward, model)


class OrderedLoader(DataLoader):
    """A DataLoader whose batch sampler knows the epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)
