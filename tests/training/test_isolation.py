"""Packed examples must not see each other, and not every model goes by `position_ids`."""

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from tests.models.architectures import having
from tests.models.gguf_files import tiny_base
from tinylm.training.isolation import check_examples_are_kept_apart


def tiny_gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=12, n_layer=2, n_head=2, n_positions=64))


@pytest.mark.parametrize("build", [tiny_base, tiny_gpt2, having("attention")[0].build])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_go_by_position_ids_are_taken(build, dtype):
    model = build().to(dtype).train()
    check_examples_are_kept_apart(model, "")
    assert model.training


def test_a_model_that_swallows_position_ids_is_refused_with_the_remedy():
    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=16, n_layer=2, n_head=2))
    with pytest.raises(ValueError, match=r"in a BloomForCausalLM they do: .* Set `--packing false`\."):
        check_examples_are_kept_apart(model, "Set `--packing false`.")
