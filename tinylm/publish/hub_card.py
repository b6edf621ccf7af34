"""The card as it is sent: under the repository's name, and with metadata that the Hub accepts.

The Hub refuses a card with wrong metadata, and with it the push: its rules are looked at here first, without it.
Source: https://github.com/huggingface/hub-docs/blob/main/modelcard.md, and the Hub's page on licences.
"""

import json
import re

import yaml
from huggingface_hub import DatasetCard, DatasetCardData, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from .cards import LICENSE_UNKNOWN, license_of
from .contents import Contents

_LICENSES = """
apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m afl-3.0
artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5 cc-by-3.0
cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0
cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0 cdla-permissive-2.0 wtfpl ecl-2.0
epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 lgpl lgpl-2.1 lgpl-3.0 isc h-research
intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl openmdw-1.0 openrail++ osl-3.0 postgresql
ofl-1.1 ncsa unlicense zlib pddl lgpl-lr deepfloyd-if-license fair-noncommercial-research-license llama2 llama3 llama3.1
llama3.2 llama3.3 llama4 grok2-community gemma unknown other
"""


def card_for_hub(
    contents: Contents, name: str, repo_id: str, *, base_model_id: str | None = None, data_license: str | None = None
) -> str:
    """The folder's own card, or a short one where it has none.

    Args:
        name: of the folder, which a card of its own may call otherwise: it is known by its heading.
        base_model_id: the base's name where the run only knew a folder.
        data_license: the Hub's name of a licence.

    Raises:
        ValueError: metadata that the Hub would refuse.
    """
    text = contents.text("README.md") if "README.md" in contents.files else _short_card(contents, name)
    heading = re.search(r"^# (.+)$", text, re.MULTILINE)
    name = heading[1] if heading else name
    text = text.replace(f'"{name}"', f'"{repo_id}"').replace(f"`tinylm chat {name}`", f"`tinylm chat {repo_id}`")
    try:
        card = (DatasetCard if contents.kind == "corpus" else ModelCard)(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"The head of `README.md` is no YAML that the Hub reads: {error}. Mend it.") from error
    if data_license is not None:
        card.data.license = data_license
        card.text = card.text.replace(f"of the data | {LICENSE_UNKNOWN} |", f"of the data | {data_license} |")
    if base_model_id is not None:
        card.data.base_model = base_model_id
        card.text = re.sub(r"the local model `[^`]*`", f"`{base_model_id}`", card.text)
    check_metadata(card.data.to_dict())
    return card.content


def check_metadata(metadata: dict[str, object]) -> None:
    """Raises ValueError for a card's metadata that the Hub would refuse: licence, names of models and data, tags."""
    licenses = metadata.get("license")
    for each in licenses if isinstance(licenses, list) else [licenses]:
        if each is not None and each not in _LICENSES.split():
            raise ValueError(
                f"The Hub knows no licence `{each}`; it has names such as `cc-by-sa-4.0`, `apache-2.0` and `other`. Set"
                " `--data_license`, or mend `license` in `README.md`."
            )
    for field in ("base_model", "datasets"):
        names = metadata.get(field) or []
        for each in [names] if isinstance(names, str) else names:
            try:
                validate_repo_id(each)
            except HFValidationError as error:
                raise ValueError(f"`{field}` in `README.md` is for names of the Hub: {error}") from error
    for field, kinds in (("tags", list), ("library_name", str), ("pipeline_tag", str)):
        value = metadata.get(field)
        parts = value if isinstance(value, list) else []
        if value is not None and not (isinstance(value, kinds) and all(isinstance(part, str) for part in parts)):
            wanted = "a list of words" if kinds is list else "one word"
            raise ValueError(f"`{field}` in `README.md` is {wanted}, and not `{value}`. Mend it.")


def _short_card(contents: Contents, name: str) -> str:
    kind, metadata = contents.kind, ModelCardData(tags=["tinylm"])
    if kind == "corpus":
        manifest = json.loads(contents.text("manifest.json"))
        source = manifest["source"]["description"]
        metadata = DatasetCardData(license=license_of(source), tags=["tinylm"])
        what = f"A corpus as tokens, prepared with tinylm from: {source}. `--prepared_corpus` takes its folder.\n\n"
        what += "| split | documents | tokens | bytes of text |\n|---|---|---|---|"
        for split, counts in manifest["splits"].items():
            what += f"\n| {split} | {counts['documents']:,} | {counts['tokens']:,} | {counts['bytes']:,} |"
    elif kind == "adapter":
        metadata.base_model = json.loads(contents.text("adapter_config.json"))["base_model_name_or_path"]
        metadata.library_name, metadata.pipeline_tag = "peft", "text-generation"
        what = f"An adapter of `{metadata.base_model}`."
    elif kind == "model":
        config = json.loads(contents.text("config.json"))
        metadata.library_name, metadata.pipeline_tag = "transformers", "text-generation"
        what = f"A causal language model of the kind `{config.get('model_type')}`."
    else:
        metadata.library_name = "transformers"
        what = "A tokenizer."
    return f"---\n{metadata.to_yaml()}\n---\n\n# {name}\n\n{what}\n"
