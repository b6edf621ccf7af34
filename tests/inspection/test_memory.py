"""Memory estimated from the configuration, and measured (case E10)."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from tests.data.chats import answer, chat_tokenizer, question
from tests.training.tiny_run import write_tiny_run
from tinylm.inspection import memory, preview_run
from tinylm.inspection.measure import Measured, measure_run
from tinylm.inspection.memory import estimate_memory
from tinylm.inspection.preview_run import measured_in_words
from tinylm.inspection.run_size import num_steps
from tinylm.models import TLMConfig, TLMForCausalLM
from tinylm.training.arguments import RunArguments
from tinylm.training.chunked_head import MOST_LOGITS
from tinylm.training.finetune_arguments import LoraArguments
from tinylm.training.lora import untrained_model

VOCAB = 997
SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 16, "intermediate_size": 61}


def build(**changes: object) -> Callable[[], PreTrainedModel]:
    return lambda: TLMForCausalLM(TLMConfig(**{**SIZES, "vocab_size": VOCAB, "max_position_embeddings": 64, **changes}))


def run_arguments(tmp_path: Path, **settings: object) -> RunArguments:
    settings = {"precision": "fp32", "use_cpu": True, "per_device_train_batch_size": 2, **settings}
    return RunArguments(output_dir=str(tmp_path / "run"), **settings)


def test_weights_gradients_and_optimizer_are_counted_to_the_byte(tmp_path: Path) -> None:
    estimate = estimate_memory(build(), run_arguments(tmp_path), num_tokens=64)
    count = sum(weight.numel() for weight in build()().parameters())
    assert estimate.num_parameters == estimate.num_trainable == count
    assert estimate.parts["weights"] == pytest.approx(4 * count, rel=0.01), "and buffers"
    assert estimate.parts["gradients"] == 4 * count
    assert estimate.parts["optimizer"] == pytest.approx(2 * 4 * count, rel=0.001)
    one = 2 * 64 * VOCAB * 4
    assert 3 * one <= estimate.parts["logits"] <= 4 * one, "the logits, their logarithms of probability, their gradient"
    assert max(estimate.parts.values()) < estimate.peak - memory._KERNELS < sum(estimate.parts.values())
    assert not (tmp_path / "run").exists()


def test_what_takes_more_or_less_memory_does_so_in_the_estimate(tmp_path: Path) -> None:
    def estimate(num_tokens: int = 64, **settings: object):
        return estimate_memory(build(), run_arguments(tmp_path, **settings), num_tokens=num_tokens)

    plain, half, sgd = estimate(), estimate(num_tokens=32), estimate(optim="sgd")
    recomputed, accumulated = estimate(activation_checkpointing=True), estimate(gradient_accumulation_steps=2)
    assert half.parts["activations"] < 0.6 * plain.parts["activations"]
    assert sgd.parts["optimizer"] == 0 and sgd.parts["gradients"] == plain.parts["gradients"]
    assert recomputed.parts["activations"] < 0.7 * plain.parts["activations"]
    assert accumulated.peak > plain.peak, "gradients are there while the second batch is computed"


def test_an_adapter_has_gradients_and_a_large_head_no_logits_but_those_of_a_chunk(tmp_path: Path) -> None:
    vocab = 151_936
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    lora = LoraArguments(model_name_or_path="base", base_model_id="our/base", lora_rank=3)
    estimate = estimate_memory(
        lambda: untrained_model(config, lora, torch.bfloat16),
        run_arguments(tmp_path, per_device_train_batch_size=1),
        num_tokens=1000,
        num_targets=700,
    )
    assert estimate.num_trainable == 2 * 2 * 3 * (32 + 32)
    assert estimate.parts["gradients"] == 4 * estimate.num_trainable
    frozen = estimate.num_parameters - estimate.num_trainable
    assert estimate.parts["weights"] == pytest.approx(2 * frozen + 4 * estimate.num_trainable, rel=0.01)
    assert 2 * MOST_LOGITS < estimate.parts["logits"] <= 3 * 4 * MOST_LOGITS < 700 * vocab * 4


def test_steps_are_counted_as_the_trainer_counts_them(tmp_path: Path) -> None:
    accumulating = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    assert num_steps(run_arguments(tmp_path, max_steps=7), None) == 7
    assert num_steps(run_arguments(tmp_path, num_train_epochs=2, **accumulating), 13) == 2 * 3
    assert num_steps(run_arguments(tmp_path, num_train_epochs=0.5, **accumulating), 13) == 2
    assert num_steps(run_arguments(tmp_path), None) is None


def test_what_was_measured_is_told_for_the_whole_run() -> None:
    assert measured_in_words(Measured(0.5, 250_000_000), 240) == (
        "Measured in 4 steps: 0.50 s a step, 2 min 00 s for 240 steps without validation; 250 MB at the peak"
    )


def pretraining(folder: Path, *, batch_size: int, precision: str, **changes: object) -> Path:
    run_file = write_tiny_run(folder)
    config = json.loads((folder / "model" / "config.json").read_text())
    sizes = {"vocab_size": 4096, "max_position_embeddings": 512, **changes}
    (folder / "model" / "config.json").write_text(json.dumps({**config, **sizes}))
    run = yaml.safe_load(run_file.read_text())
    run |= {"block_size": 512, "per_device_train_batch_size": batch_size, "precision": precision}
    run_file.write_text(yaml.safe_dump(run))
    return run_file


def wide(folder: Path) -> Path:
    """Weights outweigh the rest: 27 M."""
    sizes = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "head_dim": 64}
    return pretraining(folder, batch_size=1, precision="fp32", intermediate_size=2048, **sizes)


def long(folder: Path) -> Path:
    """Activations and logits outweigh the rest, in bf16 where the hardware has it."""
    sizes = {"hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 4, "head_dim": 48}
    return pretraining(folder, batch_size=8, precision="auto", intermediate_size=768, **sizes)


def adapter(folder: Path) -> Path:
    """LoRA on 46 M frozen weights with a large vocabulary."""
    config = LlamaConfig(
        vocab_size=64_000,
        hidden_size=320,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=5,
        max_position_embeddings=512,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    chat_tokenizer().save_pretrained(folder / "base")
    chats = [[question("Tell me. " * 10), answer(f"So it is. {n} " * 12)] for n in range(60)]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    run = {"model_name_or_path": str(folder / "base"), "data_files": str(folder / "chats.jsonl"), "use_cpu": True}
    run |= {"max_length": 512, "per_device_train_batch_size": 4, "precision": "fp32", "output_dir": str(folder / "run")}
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return folder / "run.yaml"


@pytest.mark.slow
@pytest.mark.parametrize("write", [wide, long, adapter])
def test_the_estimate_is_within_a_fifth_of_the_measured_peak(
    write: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case E10."""
    run_file = write(tmp_path)
    estimates = []

    def noted(*args: object, **kwargs: object):
        estimates.append(estimate_memory(*args, **kwargs))
        return estimates[-1]

    monkeypatch.setattr("tinylm.inspection.run_size.estimate_memory", noted)
    preview_run.preview_run(run_file)
    before = sorted(tmp_path.rglob("*"))
    measured = measure_run(run_file)
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written"
    [estimate] = estimates
    print(f"\n{write.__name__}: estimated {estimate.peak / 1e6:.0f} MB, measured {measured.peak_bytes / 1e6:.0f} MB")
    assert estimate.peak == pytest.approx(measured.peak_bytes, rel=0.2)
    assert measured.seconds_per_step > 0


@pytest.mark.slow
def test_a_run_that_does_not_start_says_why_instead_of_a_measure(tmp_path: Path) -> None:
    run_file = write_tiny_run(tmp_path)
    with pytest.raises(ValueError, match=r"cannot be measured: .*at most the model's context of 96"):
        measure_run(run_file, ["--block_size", "97"])
