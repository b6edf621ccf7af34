"""The optimizer's state under DeepSpeed, put back into what stands in for its ZeRO-2 optimizer."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from tinylm.training.engine_deepspeed import DeepSpeedShards


def test_a_weight_that_never_had_a_gradient_has_no_state_and_the_others_have_theirs_put_back() -> None:
    weights = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(5))]
    trained = torch.optim.AdamW(weights)
    weights[1].grad = torch.ones(5)
    trained.step()
    saved = trained.state_dict()
    assert saved["state"].keys() == {1}

    put: dict[tuple[int, str], Tensor] = {}
    for number, weight in enumerate(weights):
        weight.set_full_hp_param = lambda value, key, number=number: put.update({(number, key): value})
    flat = torch.zeros(11)
    zero = SimpleNamespace(
        optimizer=SimpleNamespace(param_groups=[{"lr": 0.5, "params": [flat]}], state={}),
        bit16_groups=[weights],
        single_partition_of_fp32_groups=[flat],
        _lazy_init_hp_params_optimizer_state=lambda: None,
    )
    engine = SimpleNamespace(optimizer=zero, module=nn.Module(), zero_optimization_stage=lambda: 2)
    DeepSpeedShards(engine).put_optimizer_state(saved)
    assert {key: value.tolist() for key, value in put.items()} == {
        (1, name): saved["state"][1][name].tolist() for name in ("exp_avg", "exp_avg_sq")
    }
    [held] = zero.optimizer.state.values()
    assert held["exp_avg"].shape == flat.shape and held["step"] == 1
    assert zero.optimizer.param_groups[0]["lr"] == saved["param_groups"][0]["lr"]
