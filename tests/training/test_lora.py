"""Adapters: what is refused before anything is loaded, what is trained and in which precision, what is saved."""

import json

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from torch import nn
from transformers import GPT2Config, PreTrainedConfig, PreTrainedModel

from tests.distributed import run_on_ranks
from tests.models.architectures import ARCHITECTURES
from tests.models.gguf_files import save_base, tiny_base
from tests.training.tiny import UnevenRows, run_arguments, trainer_for
from tinylm.training.checkpoints import check_saving
from tinylm.training.finetune_arguments import LoraArguments
from tinylm.training.lora import Adapter, base_dtype, linear_layers, plan_training, trainable_model, warn_of_local_base

IDS = torch.arange(3, 40)[None]
TLM, TINY_TRANSFORMER = (architecture.config for architecture in ARCHITECTURES)
ROWS = UnevenRows(vocab_size=262)


def settings(**changes: object) -> LoraArguments:
    return LoraArguments(**{"model_name_or_path": "our/base", **changes})


def trained_adapter(folder, base: PreTrainedModel | None = None, steps: int = 2, **changes: object) -> Adapter:
    """An adapter after some steps; its folder is a run's."""
    model = trainable_model(base or tiny_base(), settings(**changes))
    trainer = trainer_for(model, ROWS, run_arguments(folder, max_steps=steps, learning_rate=1e-2))
    trainer.train()
    trainer.save_model()
    return model


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (
            TLM,
            {"target_modules": ["wq"]},
            r"end in `wq`; in a TLMForCausalLM there is none\. Its.*: down_proj, .*q_proj",
        ),
        (TLM, {"target_modules": ["q_proj", "embed_tokens"]}, r"`model\.embed_tokens` is a Embedding"),
        (TLM, {"target_modules": ["self_attn"]}, r"self_attn` is a TLMAttention"),
        (
            TINY_TRANSFORMER,
            {},
            r"there is none\. Its linear layers: linear1, linear2, lm_head\. Set `--target_modules`",
        ),
        (TINY_TRANSFORMER, {"target_modules": ["out_proj"]}, r"out_proj` is a NonDynamicallyQuantizableLinear"),
        (GPT2Config(n_layer=1), {}, r"Its linear layers: c_attn, c_fc, c_proj, lm_head"),
        (TLM, {"lora_rank": 0}, r"at least 1; `lora_rank` is 0"),
        (TLM, {"lora_rank": -3}, r"at least 1; `lora_rank` is -3"),
        (TLM, {"lora_dropout": 1.0}, r"`lora_dropout` is 1\.0"),
        (TLM, {"lora_alpha": 0}, r"`lora_alpha` is 0"),
        (TLM, {"modules_to_save": ["head"]}, r"end in `head`; a TLMForCausalLM has none.*lm_head"),
        (TLM, {"full": True, "quantization": "4bit"}, r"`--quantization 4bit` leaves frozen"),
        (TLM, {"full": True, "adapter_name_or_path": "a"}, r"`--adapter_name_or_path a` leaves frozen"),
        (TLM, {"adapter_name_or_path": "./none"}, r"no folder or file `\./none`"),
    ],
)
def test_what_makes_no_adapter_is_refused_before_weights_are_loaded(
    config: PreTrainedConfig, changes: dict[str, object], message: str
) -> None:
    """Case D13."""
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        plan_training(config, settings(**changes))


def test_the_plan_counts_what_is_trained() -> None:
    base = tiny_base()
    for changes in ({}, {"full": True}, {"target_modules": ["all-linear"], "modules_to_save": ["lm_head"]}):
        planned = plan_training(base.config, settings(**changes))
        model = trainable_model(tiny_base(), settings(**changes))
        assert planned == sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert all(name.endswith(("_proj", "lm_head")) for name in linear_layers(base))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_trainable_weights_are_fp32_on_a_base_in_half_precision(dtype: torch.dtype) -> None:
    """Case E5: gradients in fp16 cannot be unscaled."""
    base = tiny_base().to(dtype)
    model = trainable_model(base, settings(use_dora=True, modules_to_save=["lm_head"]))
    assert {weight.dtype for weight in model.parameters() if weight.requires_grad} == {torch.float32}
    assert {weight.dtype for weight in model.parameters() if not weight.requires_grad} == {dtype}
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    scaler = torch.amp.GradScaler("cpu")
    optimizers = [torch.optim.SGD(trained) for _ in range(2)]  # known to the scaler by their id: both have to live
    with torch.autocast("cpu", torch.bfloat16):
        scaler.scale(model(input_ids=IDS, labels=IDS).loss).backward()
    scaler.unscale_(optimizers[0])
    for weight in trained:
        weight.grad, weight.data = None, weight.data.half()
    with torch.autocast("cpu", torch.bfloat16):
        scaler.scale(model(input_ids=IDS, labels=IDS).loss).backward()
    with pytest.raises(ValueError, match="unscale FP16"):
        scaler.unscale_(optimizers[1])


def test_the_frozen_base_is_held_in_the_runs_precision_and_a_trained_one_in_fp32() -> None:
    assert [base_dtype(settings(), precision) for precision in ("bf16", "fp16", "fp32")] == [
        torch.bfloat16,
        torch.float16,
        torch.float32,
    ]
    assert base_dtype(settings(full=True), "bf16") == torch.float32
    model = trainable_model(tiny_base().to(torch.float16), settings(full=True))
    assert {(weight.dtype, weight.requires_grad) for weight in model.parameters()} == {(torch.float32, True)}


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_dropout": 0.0},
        {"use_dora": True},
        {"use_rslora": True, "lora_rank": 3},
        {"target_modules": ["all-linear"], "modules_to_save": ["lm_head"]},
        {"full": True},
    ],
    ids=str,
)
def test_every_trainable_weight_moves_and_no_frozen_one_does(changes: dict[str, object], tmp_path) -> None:
    run = run_arguments(tmp_path, max_steps=3, learning_rate=1e-2, precision="bf16")
    dtype = base_dtype(settings(**changes), run.precision)  # fp32 on hardware that does not compute in bf16
    model = trainable_model(tiny_base().to(dtype), settings(**changes))
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    trainer_for(model, ROWS, run).train()
    for name, weight in model.named_parameters():
        assert torch.equal(before[name], weight) != weight.requires_grad, name


def test_the_tiny_transformers_adapter_works_in_evaluation_too(tmp_path) -> None:
    """Its encoder layer has a fast path that would pass the adapter over."""
    architecture = ARCHITECTURES[1]
    model = trainable_model(architecture.build(), settings(target_modules=["all-linear"], lora_dropout=0.0))
    ids = architecture.tokens(2, 7)
    torch.testing.assert_close(model.eval()(ids).logits, architecture.build()(ids).logits)
    nn.init.normal_(model.get_submodule("base_model.model.model.encoder.linear2").lora_B["default"].weight)
    model.eval()
    with torch.no_grad():
        changed = model(ids).logits
    assert not torch.allclose(changed, architecture.build()(ids).logits)
    torch.testing.assert_close(changed, model.train()(ids).logits)


def test_an_adapter_is_saved_without_the_hub_and_names_its_base(tmp_path, monkeypatch, caplog) -> None:
    """Cases E3, E4: no card of PEFT's with a path, no look at the Hub for the base, no pickle."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the Hub was asked")

    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", refuse)
    base = save_base(tmp_path / "base")
    named = {"model_name_or_path": str(base), "base_model_id": "our/base"}
    trained_adapter(tmp_path / "run", **named)
    names = {"adapter_config.json", "adapter_model.safetensors", "generation_config.json"}
    assert {path.name for path in (tmp_path / "run").iterdir()} - {"STATUS", "run.json", "timing.jsonl"} == names
    assert json.loads((tmp_path / "run" / "adapter_config.json").read_text())["base_model_name_or_path"] == "our/base"
    assert str(tmp_path) not in (tmp_path / "run" / "adapter_config.json").read_text()
    warn_of_local_base(settings(**named))
    assert not caplog.records
    warn_of_local_base(settings(model_name_or_path=str(base)))
    assert "cannot be published like that. Set `--base_model_id`" in caplog.text


def test_a_saved_adapter_loads_with_peft_and_gives_the_same_logits(tmp_path) -> None:
    base = save_base(tmp_path / "base")
    model = trained_adapter(tmp_path / "run", model_name_or_path=str(base), modules_to_save=["lm_head"]).eval()
    again = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run", dtype=torch.float32).eval()
    torch.testing.assert_close(again(IDS).logits, model(IDS).logits)
    assert not torch.allclose(again(IDS).logits, tiny_base()(IDS).logits)


def test_training_goes_on_with_an_adapter(tmp_path) -> None:
    first = trained_adapter(tmp_path / "run", lora_rank=3, use_rslora=True).eval()
    lora = settings(adapter_name_or_path=str(tmp_path / "run"))
    assert plan_training(tiny_base().config, lora) == sum(weight.numel() for weight in first.own_weights().values())
    second = trainable_model(tiny_base(), lora)
    assert second.training and second.peft_config["default"].r == 3
    torch.testing.assert_close(second.eval()(IDS).logits, first(IDS).logits)
    trainer_for(second, ROWS, run_arguments(tmp_path / "more", max_steps=1, learning_rate=1e-2)).train()
    before = load_file(tmp_path / "run" / "adapter_model.safetensors")
    assert all(not torch.equal(before[name], weight) for name, weight in second.own_weights().items())


def test_an_adapter_of_another_base_is_refused(tmp_path) -> None:
    trained_adapter(tmp_path / "run", model_name_or_path="our/first", steps=1)
    (tmp_path / "run.json").write_text("{}")  # of a pretraining run, which has no base
    other = {"adapter_name_or_path": str(tmp_path / "run"), "model_name_or_path": "our/second"}
    with pytest.raises(
        ValueError, match=r"trained on `our/first`, and the base model is `our/second`.*--base_model_id"
    ):
        plan_training(tiny_base().config, settings(**other))
    plan_training(tiny_base().config, settings(**other, base_model_id="our/first"))
    larger = tiny_base(hidden_size=24).config
    with pytest.raises(ValueError, match=r"of another shape: `.*` is \[8, 16\] in it and \[8, 24\] on `our/second`"):
        plan_training(larger, settings(**other, base_model_id="our/first"))
    with pytest.raises(ValueError, match=r"The adapter `.*run` is for linear layers that end in `q_proj`"):
        plan_training(TINY_TRANSFORMER, settings(**other, base_model_id="our/first"))


def test_an_adapter_whose_weights_are_cut_off_or_pickled_is_refused_and_not_read(tmp_path) -> None:
    trained_adapter(tmp_path / "run", steps=1)
    lora = settings(adapter_name_or_path=str(tmp_path / "run"))
    file = tmp_path / "run" / "adapter_model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"The weights in `.*/run` are cut off or damaged"):
        plan_training(tiny_base().config, lora)
    file.write_bytes(whole)
    torch.save(load_file(file), tmp_path / "run" / "adapter_model.bin")
    file.unlink()
    with pytest.raises(ValueError, match=r"holds its weights as a pickle \(`adapter_model\.bin`\)"):
        plan_training(tiny_base().config, lora)


def test_saving_an_adapter_is_tried_before_the_first_step(tmp_path, monkeypatch) -> None:
    """Case E1."""
    model = trainable_model(tiny_base(), settings())
    check_saving(model, str(tmp_path))
    monkeypatch.setattr("tinylm.training.checkpoints.load_peft_weights", lambda folder, device: {})
    with pytest.raises(ValueError, match=r"lora_A\.weight` and 7 more differ"):
        check_saving(model, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def one_step_on_each_rank(rank: int, world_size: int, payload: dict[str, str]) -> list[float]:
    """The largest value of each `lora_B` after one step with gradient checkpointing."""
    assert world_size == 2
    model = trainable_model(tiny_base(), settings())
    args = run_arguments(f"{payload['folder']}/{rank}", max_steps=1, learning_rate=1e-2, gradient_checkpointing=True)
    trainer = trainer_for(model, ROWS, args)
    trainer.train()
    assert trainer.engine == "ddp" and model.get_base_model().model.layers[0].gradient_checkpointing
    return [weight.abs().max().item() for name, weight in model.named_parameters() if "lora_B" in name]


def test_two_ranks_train_every_adapter_with_gradient_checkpointing(tmp_path) -> None:
    """Case D6."""
    first, second = run_on_ranks(
        "tests.training.test_lora", "one_step_on_each_rank", world_size=2, payload={"folder": str(tmp_path)}
    )
    assert len(first) == 4 and min(first) > 0
    assert first == second
