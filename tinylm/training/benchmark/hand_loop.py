"""The loop that one writes by hand in PyTorch, to measure the Trainer against. It trains nothing else.

It does what the Trainer is asked for (`RunArguments`: AdamW with its weight-decay groups, warm-up and cosine, clipping,
bf16 autocast, the same batches in the same order, the loss read at every step) and nothing more.
"""

import math
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel
from transformers.training_args import OptimizerNames

from tinylm.data.order import GlobalBatches

from ..arguments import RunArguments


class HandLoop:
    """Trains `model` on map-style data, one step a call; `losses` holds the nats a token of each step.

    Args:
        args: one rank, one micro-batch a step, fp32 or bf16; what else it says, the Trainer would do too.
        final_lr_ratio: where the cosine ends, as a share of the peak learning rate.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        dataset: Dataset,
        collate: Callable,
        args: RunArguments,
        *,
        final_lr_ratio: float = 0.0,
    ) -> None:
        self.model, self.device, self.max_grad_norm = model.to(args.device).train(), args.device, args.max_grad_norm
        self.autocast = torch.bfloat16 if args.bf16 else None
        weights = list(model.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [weight for weight in weights if weight.ndim > 1], "weight_decay": args.weight_decay},
                {"params": [weight for weight in weights if weight.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            fused=args.optim == OptimizerNames.ADAMW_TORCH_FUSED,
        )
        warmup, total = args.get_warmup_steps(args.max_steps), args.max_steps
        self.scheduler = LambdaLR(self.optimizer, lambda step: cosine(step, warmup, total, final_lr_ratio))
        self.batches = _endless_batches(dataset, collate, args)
        self.losses: list[float] = []

    def step(self) -> float:
        """Takes one optimizer step; the seconds that it took, data and reading of the loss included."""
        began = finished_at(self.device)
        batch = {name: column.to(self.device) for name, column in next(self.batches).items()}
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            loss = self.model(**batch).loss
        loss.backward()
        clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        return finished_at(self.device) - began


def cosine(step: int, warmup_steps: int, max_steps: int, final_ratio: float) -> float:
    """The learning rate of a step as a share of the peak: a straight rise, then half a cosine down to `final_ratio`.

    >>> [round(cosine(step, 2, 10, 0.1), 2) for step in (0, 1, 2, 6, 10)]
    [0.0, 0.5, 1.0, 0.55, 0.1]
    """
    if step < warmup_steps:
        return step / warmup_steps
    progress = (step - warmup_steps) / max(1, max_steps - warmup_steps)
    return final_ratio + (1 - final_ratio) * (1 + math.cos(math.pi * progress)) / 2


def finished_at(device: torch.device) -> float:
    """`time.perf_counter()` (seconds) once the device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _endless_batches(dataset: Dataset, collate: Callable, args: RunArguments) -> Iterator[dict[str, Tensor]]:
    batches = GlobalBatches(
        len(dataset),
        per_rank_batch_size=args.per_device_train_batch_size,
        seed=args.seed if args.data_seed is None else args.data_seed,
    )
    loader = DataLoader(dataset, batch_sampler=batches, collate_fn=collate, num_workers=args.dataloader_num_workers)
    epoch = 0
    while True:
        batches.set_epoch(epoch)
        yield from loader
        epoch += 1
