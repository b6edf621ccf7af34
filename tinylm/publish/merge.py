"""A LoRA adapter merged into its base model: one folder that needs neither the adapter nor PEFT.

The choices:
- Merged and compared in fp32 on a probe text: merging in bf16 moves the logits by 0.4 to 1.3 (and peft #2777 names
  merges that gave another model altogether). More than 1e-4 of difference is an error, and nothing is written.
- Where logits are larger than 10, the rounding of two forward passes in fp32 comes to more by itself (SmolLM2-135M's
  reach 38, with 1.6e-4 for rank 32 on all linear layers): there the forward passes compared are in fp64. The weights
  are merged in fp32 all the same.
- Only then cast, and what the cast costs is measured on the same text.
- A head that shares the embedding's weights shares them no longer where the adapter has changed one of the two.
- Written beside and read again before it gets its name: the folder is whole and holds these weights, or is not there.

Shapes: T tokens of the probe, V vocabulary.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from tinylm.evaluation.model_and_tokenizer import load_with_tokenizer
from tinylm.evaluation.pretrained import base_of
from tinylm.models.loading import load_base_config, load_base_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LARGEST_DIFFERENCE = 1e-4
_LARGE_LOGITS = 10

_PROBE = """The lighthouse was built in 1858 and rises 31 metres above the sea. "Who goes there?" he asked.
def area(radius: float) -> float:
    return 3.14159 * radius**2
Il était une fois un gardien; es war einmal ein Wärter; 昔々、灯台に番人がいました。 1 + 1 = 2, 17 * 3 = 51.
1. Rinse the rice. 2. Boil it in two cups of water. 3. Leave the lid on, and wait for twelve minutes."""


@dataclass(frozen=True)
class Merge:
    """What a merge has shown: largest differences of logits, and the share of positions with the same likeliest token.

    `merged_difference` is between adapter and merged model in fp32; the other two between that and its cast to `dtype`.
    """

    merged_difference: float
    cast_difference: float
    top1_agreement: float
    num_probe_tokens: int
    dtype: str

    def lines(self) -> list[str]:
        """The facts, one a line."""
        return [
            f"Merged in fp32: largest logit difference {self.merged_difference:.1e} on {self.num_probe_tokens} tokens",
            f"Cast to {self.dtype}: largest logit difference {self.cast_difference:.1e}, the same likeliest token at "
            f"{self.top1_agreement:.1%} of the positions",
        ]


def merge_adapter(adapter: Path, out: Path, *, base_model: str | None = None, dtype: str | None = None) -> Merge:
    """Writes the merged model, with tokenizer, chat template and generation config, as the folder `out`.

    Args:
        adapter: the folder of a LoRA adapter (also DoRA, rsLoRA, with modules trained whole).
        base_model: where the base lies, if neither the run nor the adapter names a place that exists.
        dtype: `float32`, `bfloat16` or `float16`; None for that in which the base is stored.

    Raises:
        ValueError, FileNotFoundError: one of them cannot be read or does not fit the other, `out` exists, or the merged
            model is not the adapter's.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"The merged model needs a folder of its own, and `{out}` exists. Name another one.")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"`dtype` is one of {', '.join(DTYPES)}, not `{dtype}`. Set `--dtype`.")
    if not (adapter / "adapter_config.json").is_file():
        held = sorted(path.name for path in adapter.iterdir()) if adapter.is_dir() else "no such folder"
        raise ValueError(f"An adapter is a folder with `adapter_config.json`; `{adapter}`: {held or 'empty'}.")
    base = base_of(str(adapter), base_model)
    cast_to = load_base_config(base).dtype if dtype is None else DTYPES[dtype]
    adapted, tokenizer = load_with_tokenizer(str(adapter), base)
    if (kind := adapted.active_peft_config.peft_type) != "LORA":
        raise ValueError(f"LoRA adapters can be merged, and `{adapter}` is of the kind {kind.value}. Use it as it is.")
    input_ids = _probe_ids(adapted, tokenizer)
    model, merged_difference = merge_and_compare(adapted, input_ids)
    model.generation_config = _generation_config(adapter, model)

    exact = _logits(model, input_ids)
    written = _write(model.to(cast_to or torch.float32), tokenizer, out)  # a GGUF file names no dtype
    cast = _logits(written, input_ids)
    return Merge(
        merged_difference=merged_difference,
        cast_difference=(exact - cast).abs().max().item(),
        top1_agreement=(exact.argmax(-1) == cast.argmax(-1)).float().mean().item(),
        num_probe_tokens=input_ids.shape[1],
        dtype=str(written.dtype).removeprefix("torch."),
    )


def merge_and_compare(adapted: PeftModel, input_ids: Tensor) -> tuple[PreTrainedModel, float]:
    """The merged model in place of the adapted one, and their largest logit difference on `input_ids` `[1, T]`.

    Raises:
        ValueError: they are not the same model.
    """
    before = _logits(adapted, input_ids)
    is_large = before.abs().max().item() > _LARGE_LOGITS
    if is_large:
        before = _logits(adapted.double(), input_ids)
        adapted.float()  # the same weights again
    _untie(adapted.get_base_model())
    model = adapted.merge_and_unload()
    after = _logits(model.double() if is_large else model, input_ids)
    model.float()
    difference = (before - after).abs().max().item()
    if not difference < LARGEST_DIFFERENCE:  # NaN is not less either
        raise ValueError(
            f"The merged model is not the adapter's: the logits differ by up to {difference:.1e}, where rounding stays "
            f"under {LARGEST_DIFFERENCE:.1e}. Nothing was written; the adapter itself can be used as it is."
        )
    return model, difference


def _untie(model: PreTrainedModel) -> None:
    """Gives the head its own weights where it shares the embedding's and a LoRA layer would change both at once."""
    modules = model.get_input_embeddings(), model.get_output_embeddings()
    embedding, head = (m.get_base_layer() if isinstance(m, BaseTunerLayer) else m for m in modules)
    if embedding.weight is head.weight and any(isinstance(module, BaseTunerLayer) for module in modules):
        head.weight = nn.Parameter(head.weight.detach().clone())


def _probe_ids(model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """The probe `[1, T]`, as much of it as the context holds."""
    input_ids = tokenizer(_PROBE, add_special_tokens=False, return_tensors="pt", verbose=False)["input_ids"]
    return input_ids[:, : getattr(model.config, "max_position_embeddings", None)]


def _logits(model: PreTrainedModel | PeftModel, input_ids: Tensor) -> Tensor:
    """Of every position, `[T, V]` in fp32, or in fp64 of a model in fp64."""
    with torch.no_grad():
        logits = model(input_ids=input_ids, use_cache=False).logits[0]
    return logits if logits.dtype == torch.float64 else logits.float()


def _generation_config(adapter: Path, model: PreTrainedModel) -> GenerationConfig:
    """The adapter's, whose end tokens are those that were trained, else the base's."""
    if (adapter / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(adapter)
    return model.generation_config


def _write(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path) -> PreTrainedModel:
    """Writes beside `out`, reads that again, and renames it if it holds the very weights. What was read comes back."""
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        again = load_base_model(str(beside), dtype=model.dtype)
        read = again.state_dict()
        if changed := [name for name, weight in model.state_dict().items() if not torch.equal(weight, read[name])]:
            raise ValueError(
                f"The written model is not the merged one: `{changed[0]}` and {len(changed) - 1} other weights come "
                "back changed. Nothing was kept; the adapter itself can be used as it is."
            )
        beside.replace(out)  # takes the place of an empty folder
        return again
    finally:
        shutil.rmtree(beside, ignore_errors=True)
