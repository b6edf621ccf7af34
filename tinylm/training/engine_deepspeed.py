"""DeepSpeed: ZeRO-2 cuts gradients and optimizer, ZeRO-3 the weights too. Its optimizer holds what is trained as flat
fp32 vectors, of which each rank has one part; `deepspeed.utils` finds a weight's place in them.

Choices:
- Weights are saved from these vectors, in fp32, also where the run computes in half: what is saved is what goes on.
- A step whose gradient is not finite is left out by DeepSpeed (from 0.19.8 on in every precision), and counted here.
- DeepSpeed's own checkpoints are not used: they are read as pickles, and by DeepSpeed alone.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn


class DeepSpeedShards:
    """As `engines.Shards`, over a `DeepSpeedEngine` with ZeRO-2 or ZeRO-3."""

    def __init__(self, engine: nn.Module) -> None:
        self._engine, self._zero = engine, engine.optimizer
        self._weights = dict(engine.module.named_parameters())
        self._is_cut = engine.zero_optimization_stage() == 3  # the weights too
        self.holds_all_weights = not self._is_cut

    def take_note_of_bad_step(self) -> bool:
        """Whether the last step was left out for another reason than the search for a loss scale; asked once.

        DeepSpeed would hold the learning rate back for it. It goes on here, as under the other engines.
        """
        was_left_out = bool(self._zero.overflow) and self._zero.loss_scale <= 1
        if was_left_out:
            self._zero.overflow = False
        return was_left_out

    def part(self, name: str) -> Tensor:
        weight = self._weights.get(name)
        if weight is None or not weight.requires_grad:
            whole = self.whole(name)
            return whole if dist.get_rank() == 0 else whole.new_empty(0)
        if not self._is_cut:
            place = weight._hp_mapping  # None: all of it lies on other ranks
            return weight.new_empty(0) if place is None else place.hp_fragment.detach()
        from deepspeed.utils import safe_get_local_fp32_param

        padded = safe_get_local_fp32_param(weight)
        return padded[: self._length_of_part(weight, len(padded))]

    def _length_of_part(self, weight: nn.Parameter, padded: int) -> int:
        """Under ZeRO-3 all parts are equally long, and the last ones are filled up with anything."""
        return max(0, min(padded, weight.ds_numel - padded * dist.get_rank()))

    def whole(self, name: str) -> Tensor:
        weight = self._weights.get(name)
        if weight is None:
            return self._engine.module.state_dict()[name]
        if weight.requires_grad:
            from deepspeed.utils import safe_get_full_fp32_param

            return safe_get_full_fp32_param(weight)
        if not self._is_cut:
            return weight.detach()
        from deepspeed.zero import GatheredParameters

        with GatheredParameters([weight]):
            return weight.detach().clone()

    @torch.no_grad()
    def put_weights(self, whole: Mapping[str, Tensor]) -> None:
        for name, value in whole.items():
            weight = self._weights.get(name)
            if weight is not None and weight.requires_grad:
                self._put(weight, value)
        if not self._is_cut:
            self._zero.update_lp_params()
            return
        for number in range(len(self._zero.fp16_groups)):
            self._zero._reassign_or_swap_out_partitioned_parameters(number)
        if self._zero.persistent_parameters:
            self._zero.persistent_parameters[0].all_gather(self._zero.persistent_parameters)

    def optimizer_state(self) -> dict[str, object]:
        self._find_states()
        groups, start, each = [], 0, {}
        for group, weights in zip(self._zero.optimizer.param_groups, self._groups(), strict=True):
            numbers = list(range(start, start + len(weights)))
            start += len(weights)
            groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": numbers})
            each |= {number: self._state_of(weight) for number, weight in zip(numbers, weights, strict=True)}
        return {"state": {number: one for number, one in each.items() if one}, "param_groups": groups}

    def _state_of(self, weight: nn.Parameter) -> dict[str, object]:
        from deepspeed.utils import safe_get_full_optimizer_state

        flat = self._flats()[0]
        return {
            key: safe_get_full_optimizer_state(weight, key).cpu() if _is_like(value, flat) else _copied(value)
            for key, value in self._zero.optimizer.state.get(flat, {}).items()
        }

    def put_optimizer_state(self, state: Mapping[str, object]) -> None:
        for group, saved in zip(self._zero.optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        weights = [weight for group in self._groups() for weight in group]
        if not state["state"]:
            return
        number, first = next(iter(state["state"].items()))  # a weight that never had a gradient has none
        for flat in self._flats():
            self._zero.optimizer.state[flat] = {
                key: torch.zeros_like(flat) if _is_like(value, weights[number]) else _copied(value)
                for key, value in first.items()
            }
        self._find_states()
        for number, weight in enumerate(weights):
            for key, value in state["state"].get(number, {}).items():
                if _is_like(value, weight):
                    self._put(weight, value, key)

    def _find_states(self) -> None:
        """Under ZeRO-2, notes where in the vectors each weight's state lies. DeepSpeed does so once, after the step of
        the first group, when the others have no state yet."""
        if not self._is_cut:
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    def _put(self, weight: nn.Parameter, value: Tensor, key: str | None = None) -> None:
        """Takes this rank's part of `value`, a whole weight or a whole state of it."""
        value = value.to(weight.device, torch.float32)
        if not self._is_cut:
            weight.set_full_hp_param(value, key)
            return
        length = weight.ds_tensor.numel()
        mine = value.flatten()[length * dist.get_rank() :][:length]
        padded = torch.nn.functional.pad(mine, (0, length - len(mine)))
        self._zero.set_local_hp_param(padded, weight, key)

    def _flats(self) -> list[Tensor]:
        return self._zero.fp32_partitioned_groups_flat if self._is_cut else self._zero.single_partition_of_fp32_groups

    def _groups(self) -> Iterator[list[nn.Parameter]]:
        """The weights of each group of the optimizer, in its order. ZeRO-3 cuts large groups into several."""
        if not self._is_cut:
            yield from self._zero.bit16_groups
            return
        for number in range(len(self._zero.optimizer.param_groups)):
            parts = (
                part
                for index, part in enumerate(self._zero.fp16_groups)
                if self._zero.sub_group_to_group_id[index] == number
            )
            yield [weight for part in parts for weight in part]


def _is_like(value: object, weight: Tensor) -> bool:
    shape = getattr(weight, "ds_shape", weight.shape)  # under ZeRO-3 a weight itself is empty
    return torch.is_tensor(value) and value.shape == shape


def _copied(value: object) -> object:
    """A count of steps that several weights shared would be raised by each of them."""
    return value.clone() if torch.is_tensor(value) else value
