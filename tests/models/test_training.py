"""Gradients, the stock Trainer, checkpointing, compiling and adapters."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

from .architectures import ARCHITECTURES, Architecture, having
from .test_forward import shifted_cross_entropy

everywhere = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
with_q_proj = pytest.mark.parametrize("architecture", having("q_proj"), ids=str)


def uneven_rows(architecture: Architecture) -> tuple[Tensor, Tensor]:
    """Four rows of 13 tokens with 2 and 11 targets in turn."""
    tokens = architecture.tokens(4, 13)
    labels = tokens.clone()
    labels[:, :2] = -100
    labels[::2, :11] = -100
    return tokens, labels


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def assert_equal_gradients(first: nn.Module, second: nn.Module, tolerance: float) -> None:
    ours, theirs = gradients(first), gradients(second)
    assert ours and ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], atol=tolerance, rtol=tolerance, msg=name)


@everywhere
def test_four_micro_batches_give_the_gradients_of_one_batch(architecture: Architecture) -> None:
    """Case L2, in float64."""
    tokens, labels = uneven_rows(architecture)
    num_targets = labels[:, 1:].ne(-100).sum()
    whole, pieces, means = (architecture.build().double().train() for _ in range(3))
    whole(tokens, labels=labels).loss.backward()
    for row in range(4):
        inputs = {"input_ids": tokens[row : row + 1], "labels": labels[row : row + 1]}
        pieces(**inputs, num_items_in_batch=num_targets).loss.backward()
        (means(**inputs).loss / 4).backward()
    assert_equal_gradients(whole, pieces, 1e-12)
    with pytest.raises(AssertionError):  # a mean of means is another gradient
        assert_equal_gradients(whole, means, 1e-3)


def stock_trainer(model: PreTrainedModel, folder: Path, rows: list[dict], **arguments: object) -> Trainer:
    settings = {"max_steps": 1, "logging_steps": 1, "save_strategy": "no", "learning_rate": 1.0, "optim": "sgd"}
    settings |= {"report_to": "none", "use_cpu": True, "max_grad_norm": 1e9, "disable_tqdm": True}
    return Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(folder), **{**settings, **arguments}),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=lambda items: {name: torch.stack([item[name] for item in items]) for name in items[0]},
    )


@everywhere
def test_the_stock_trainer_logs_the_same_loss_and_gradient_norm_however_the_batch_is_cut(
    architecture: Architecture, tmp_path: Path
) -> None:
    """Cases L2 and L3: a quarter of the gradient, or a loss short by (T - 1) / T, would show here."""
    tokens, labels = uneven_rows(architecture)
    rows = [{"input_ids": tokens[row], "labels": labels[row]} for row in range(4)]
    total, count = shifted_cross_entropy(architecture.build()(tokens).logits, labels)
    expected, logs = (total / count).item(), []
    for batch_size, accumulation in ((4, 1), (1, 4)):
        trainer = stock_trainer(
            architecture.build(),
            tmp_path,
            rows,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            per_device_eval_batch_size=4,
        )
        evaluated = trainer.evaluate()["eval_loss"]
        assert evaluated == pytest.approx(expected, abs=1e-5)
        trainer.train()
        logs.append(next(entry for entry in trainer.state.log_history if "grad_norm" in entry))
    assert logs[0]["loss"] == pytest.approx(expected, abs=1e-5)
    assert logs[1]["loss"] == pytest.approx(logs[0]["loss"], abs=1e-5)
    assert logs[1]["grad_norm"] == pytest.approx(logs[0]["grad_norm"], rel=1e-5)


@everywhere
def test_every_weight_moves_in_one_step(architecture: Architecture) -> None:
    model = architecture.build().train()
    tokens = torch.arange(architecture.config.vocab_size).repeat(2)  # every id
    tokens = nn.functional.pad(tokens, (0, -len(tokens) % architecture.config.max_position_embeddings))
    tokens = tokens.view(-1, architecture.config.max_position_embeddings)  # and every position
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    still = [name for name, weight in model.named_parameters() if torch.equal(weight, before[name])]
    assert still == []
    moved = {
        name: (weight != before[name]).flatten(1).any(-1)
        for name, weight in model.named_parameters()
        if weight.ndim == 2
    }
    assert moved.pop("model.embed_positions.weight")[:-1].all()  # the last position has no next token to learn from
    assert all(rows.all() for name, rows in moved.items() if "embed" in name), "a row stood still"


@everywhere
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_recomputes_the_layers_and_gives_the_same_gradients(
    architecture: Architecture, use_reentrant: bool
) -> None:
    tokens, labels = uneven_rows(architecture)
    plain, checkpointed = architecture.build().train(), architecture.build().train()
    checkpointed.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        checkpointed.enable_input_require_grads()
    calls = count_calls(checkpointed)
    for model in (plain, checkpointed):
        model(tokens, labels=labels).loss.backward()
    assert calls() == 2 * architecture.config.num_hidden_layers, "nothing was recomputed"
    assert_equal_gradients(plain, checkpointed, 1e-6)


def count_calls(model: PreTrainedModel) -> Callable[[], int]:
    """How often the layers' first submodules ran."""
    calls: list[int] = []
    layers = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    for layer in layers:
        next(layer.children()).register_forward_hook(lambda *_: calls.append(1))
    return lambda: len(calls)


@pytest.mark.slow
@everywhere
def test_one_graph_holds_the_whole_training_step(architecture: Architecture) -> None:
    tokens, labels = uneven_rows(architecture)
    plain, compiled = architecture.build().train(), architecture.build().train()
    plain(tokens, labels=labels, num_items_in_batch=torch.tensor(24)).loss.backward()
    whole_graph = torch.compile(compiled, fullgraph=True)
    whole_graph(tokens, labels=labels, num_items_in_batch=torch.tensor(24)).loss.backward()
    assert_equal_gradients(plain, compiled, 1e-5)


@pytest.mark.slow
@everywhere
@torch.no_grad()
def test_one_graph_holds_a_padded_forward(architecture: Architecture) -> None:
    model, tokens = architecture.build(), architecture.tokens(2, 13)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    compiled = torch.compile(model, fullgraph=True)(tokens, attention_mask=mask).logits
    plain = model(tokens, attention_mask=mask).logits
    torch.testing.assert_close(compiled[mask.bool()], plain[mask.bool()], atol=1e-5, rtol=0)


@with_q_proj
def test_an_adapter_trains_alone_is_saved_alone_and_comes_back(architecture: Architecture, tmp_path: Path) -> None:
    tokens, labels = uneven_rows(architecture)
    config = LoraConfig(r=3, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(architecture.build(), config)
    before = {name: weight.detach().clone() for name, weight in adapted.named_parameters()}
    optimizer = torch.optim.SGD([weight for weight in adapted.parameters() if weight.requires_grad], lr=1.0)
    for _ in range(2):  # lora_A has no gradient until lora_B has moved
        optimizer.zero_grad()
        adapted(input_ids=tokens, labels=labels).loss.backward()
        optimizer.step()
    for name, weight in adapted.named_parameters():
        assert torch.equal(weight, before[name]) == ("lora_" not in name), name
    adapted.save_pretrained(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    reloaded = PeftModel.from_pretrained(architecture.build(), tmp_path)
    expected = adapted.eval()(tokens).logits
    torch.testing.assert_close(reloaded.eval()(tokens).logits, expected)
    assert (architecture.build()(tokens).logits - expected).abs().max() > 1e-3
    torch.testing.assert_close(reloaded.merge_and_unload()(tokens).logits, expected, atol=1e-4, rtol=0)


@everywhere
def test_a_few_steps_learn_a_row_by_heart_and_write_it(architecture: Architecture) -> None:
    model, tokens = architecture.build(initializer_range=0.02).train(), architecture.tokens(1, 11)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(60):
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
    written = model.eval().generate(tokens[:, :2], max_length=11, do_sample=False)
    assert written.tolist() == tokens.tolist()
