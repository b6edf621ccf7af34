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


def write_card(folder: str | Path, *, data_license: str | None = None) -> None:
    """`README.md` of a run's folder, from its `run.json`, `all_results.json` and `config.json`.

    Args:
        data_license: the Hub's name of the data's licence, which a model trained on it inherits, such as cc-by-sa-3.0.
    """
    folder = Path(folder)
    run, results, config = (
        json.loads((folder / name).read_text(encoding="utf-8"))
        for name in ("run.json", "all_results.json", "config.json")
    )
    metadata = ModelCardData(
        license=data_license, library_name="transformers", pipeline_tag="text-generation", tags=["tinylm"]
    )
    source = re.sub(r"`[^`]*/([^`/]+)`", r"`\1`", run["data_source"])  # no folder of this machine
    card = _CARD.format(
        **{**run, **results, "data_source": source},
        metadata=metadata.to_yaml(),
        name=folder.resolve().name,
        parameters_total=run["parameters"]["total"],
        num_tokens=results["num_tokens_read"],
        trust=", trust_remote_code=True" if "auto_map" in config else "",
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
