"""The card of a run: a README.md that the Hub understands, written from what the run recorded.

The choices:
- The licence of the data is in the metadata, because a model trained on it inherits it: that of the data which this
  kit's run files name is known, that of other data is for the user to tell (`tinylm push --data_license`).
- Files are called by their names, without their folders.
"""

import json
import re
from pathlib import Path

from huggingface_hub import ModelCardData

from .contents import is_hub_id, without_folders

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
{settings}
| licence of the data | {license} |

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
| tokens read in training, trained on | {num_tokens_read:,}, {num_tokens_trained:,} |
{settings}
| licence of the data | {license} |

![loss](loss.png)

```python
{code}
```

`tinylm chat {name}` talks to it.
"""

_SETTINGS = """| learning rate, schedule | {learning_rate:g}, {lr_scheduler_type} |
| steps, rows a step | {steps:,}, {global_batch_size} |
| precision, engine, ranks | {precision}, {engine}, {world_size} |
| hardware | {hardware} |
| commit | {commit} |"""

_USE_ADAPTER = """from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained("{name}")"""

_USE_MODEL = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")"""

_LICENSES_OF_DATA = {
    "`sample`": "cc-by-sa-3.0",
    "`wikimedia/wikipedia,": "cc-by-sa-3.0",
    "`HuggingFaceTB/smol-smoltalk,": "apache-2.0",
}
LICENSE_UNKNOWN = "not recorded"


def write_card(folder: str | Path, *, data_license: str | None = None) -> None:
    """`README.md` of a run's folder, from its `run.json`, `all_results.json`, `config.json` or `adapter_config.json`.

    Args:
        data_license: the Hub's name of the data's licence, such as cc-by-sa-3.0; unset: as known of the run's data.
    """
    folder = Path(folder)
    run, results, state = (
        json.loads((folder / name).read_text(encoding="utf-8"))
        for name in ("run.json", "all_results.json", "trainer_state.json")
    )
    metadata = {
        "license": data_license or license_of(run["data_source"]),
        "datasets": _hub_datasets(run["data_source"]),
        "pipeline_tag": "text-generation",
    }
    facts = {
        **{**run, **run["training"], **results},
        "name": folder.resolve().name,
        "steps": state["global_step"],
        "data_source": without_folders(run["data_source"]),
        "license": metadata["license"] or LICENSE_UNKNOWN,
    }
    facts["settings"] = _SETTINGS.format(**facts)
    card = _finetuned_card if "base_model" in run else _pretrained_card
    (folder / "README.md").write_text(card(folder, facts, metadata), encoding="utf-8")


def license_of(data_source: str) -> str | None:
    """The Hub's name of the licence of data by its description; None where it is not known."""
    return next((license for name, license in _LICENSES_OF_DATA.items() if name in data_source), None)


def _hub_datasets(data_source: str) -> list[str] | None:
    """Names of the Hub in a description of data, which has them with their split."""
    return re.findall(r"`([\w.-]+/[\w.-]+)(?:, [^`]*)?, split [^`]*`", data_source) or None


def _pretrained_card(folder: Path, facts: dict, metadata: dict) -> str:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return _CARD.format(
        **facts,
        metadata=ModelCardData(library_name="transformers", tags=["tinylm"], **metadata).to_yaml(),
        parameters_total=facts["parameters"]["total"],
        num_tokens=facts["num_tokens_read"],
        trust=", trust_remote_code=True" if "auto_map" in config else "",
    )


def _finetuned_card(folder: Path, facts: dict, metadata: dict) -> str:
    base = facts["base_model_id"]
    path = folder / "adapter_config.json"
    adapter = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    metadata = {
        **metadata,
        "base_model": base if is_hub_id(base) else None,
        "library_name": "peft" if adapter else "transformers",
        "tags": ["tinylm", "lora"] if adapter else ["tinylm"],
    }
    before = facts.get("before_eval_loss")
    return _FINETUNED_CARD.format(
        **facts,
        metadata=ModelCardData(**metadata).to_yaml(),
        what="An adapter" if adapter else "A version",
        base=f"`{base}`" if is_hub_id(base) else local_base(base),
        before="not measured" if before is None else f"{before:.4f}",
        trained=facts["parameters"]["trainable"],
        total=facts["parameters"]["total"],
        adapter=_adapter_in_words(adapter) if adapter else "none, all weights",
        code=(_USE_ADAPTER if adapter else _USE_MODEL).format(**facts),
    )


def local_base(base: str) -> str:
    """How a card calls a base model that has no name on the Hub."""
    return f"the local model `{Path(base).name}`"


def _adapter_in_words(adapter: dict) -> str:
    kind = "DoRA" if adapter["use_dora"] else "LoRA"
    targets = ", ".join(sorted(adapter["target_modules"]))
    return (
        f"{kind}, rank {adapter['r']}, alpha {adapter['lora_alpha']}, dropout {adapter['lora_dropout']}, on {targets}"
    )
