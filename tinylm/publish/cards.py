"""The card of a run: a README.md that the Hub understands, written from what the run recorded."""

import json
import re
from pathlib import Path

from huggingface_hub import ModelCardData

_CARD = """---
{metadata}
---

# {name}

{parameters_total:,} parameters, trained with tinylm on: {data_source}.

| | |
|---|---|
| validation, nats per token | {eval_nats_per_token:.4f} |
| validation, bits per byte | {eval_bits_per_byte:.4f} |
| validation, perplexity | {eval_perplexity:.2f} |
| scored | {eval_num_documents:,} documents, {eval_num_tokens:,} tokens, {eval_num_bytes:,} bytes |
| tokens read in training | {num_tokens:,} |
| precision, engine, ranks | {precision}, {engine}, {world_size} |
| hardware | {hardware} |
| commit | {commit} |

![loss](loss.png)

```python
from transformers import pipeline

generator = pipeline("text-generation", "{name}"{trust})
print(generator("The history of", max_new_tokens=60, do_sample=True, top_k=50)[0]["generated_text"])
```

The text was not filtered, and the model is small: what it writes is not to be relied on.
"""


_FINETUNED_CARD = """---
{metadata}
---

# {name}

{what} of {base}, fine-tuned with tinylm on: {data_source}.

| | |
|---|---|
| held out, nats per target, before | {before} |
| held out, nats per target, after | {eval_loss:.4f} |
| held out, targets | {eval_num_tokens:,} |
| trained | {trained:,} of {total:,} parameters |
| adapter | {adapter} |
| learning rate, schedule | {learning_rate:g}, {lr_scheduler_type} |
| steps, rows a step | {steps:,}, {global_batch_size} |
| tokens read in training, trained on | {num_tokens_read:,}, {num_tokens_trained:,} |
| precision, engine, ranks | {precision}, {engine}, {world_size} |
| hardware | {hardware} |
| commit | {commit} |

![loss](loss.png)

`tinylm chat {name}` talks to it.
"""


def write_card(folder: str | Path, *, data_license: str | None = None) -> None:
    """`README.md` of a run's folder, from its `run.json`, `all_results.json`, `config.json` or `adapter_config.json`.

    Args:
        data_license: the Hub's name of the data's licence, which a model trained on it inherits, such as cc-by-sa-3.0.
    """
    folder = Path(folder)
    run, results = (
        json.loads((folder / name).read_text(encoding="utf-8")) for name in ("run.json", "all_results.json")
    )
    run["data_source"] = re.sub(r"`[^`]*/([^`/]+)`", r"`\1`", run["data_source"])  # no folder of this machine
    card = _finetuned_card if "base_model" in run else _pretrained_card
    (folder / "README.md").write_text(card(folder, run, results, data_license), encoding="utf-8")


def _pretrained_card(folder: Path, run: dict, results: dict, data_license: str | None) -> str:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    metadata = ModelCardData(
        license=data_license, library_name="transformers", pipeline_tag="text-generation", tags=["tinylm"]
    )
    return _CARD.format(
        **{**run, **results},
        metadata=metadata.to_yaml(),
        name=folder.resolve().name,
        parameters_total=run["parameters"]["total"],
        num_tokens=results["num_tokens_read"],
        trust=", trust_remote_code=True" if "auto_map" in config else "",
    )


def _finetuned_card(folder: Path, run: dict, results: dict, data_license: str | None) -> str:
    base = run["base_model_id"]
    is_on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", base) is not None and not Path(base).exists()
    path = folder / "adapter_config.json"
    adapter = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    metadata = ModelCardData(
        license=data_license,
        base_model=base if is_on_hub else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["tinylm", "lora"] if adapter else ["tinylm"],
    )
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    before = results.get("before_eval_loss")
    return _FINETUNED_CARD.format(
        **{**run, **results, **run["training"]},
        metadata=metadata.to_yaml(),
        name=folder.resolve().name,
        what="An adapter" if adapter else "A version",
        base=f"`{base}`" if is_on_hub else f"the local model `{Path(base).name}`",
        before="not measured" if before is None else f"{before:.4f}",
        trained=run["parameters"]["trainable"],
        total=run["parameters"]["total"],
        adapter=_adapter_in_words(adapter) if adapter else "none, all weights",
        steps=state["global_step"],
    )


def _adapter_in_words(adapter: dict) -> str:
    kind = "DoRA" if adapter["use_dora"] else "LoRA"
    targets = ", ".join(sorted(adapter["target_modules"]))
    return (
        f"{kind}, rank {adapter['r']}, alpha {adapter['lora_alpha']}, dropout {adapter['lora_dropout']}, on {targets}"
    )
