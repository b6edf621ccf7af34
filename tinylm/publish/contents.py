"""What of a folder is sent to the Hub: a list of what may go, by what the folder is, and a look into each file.

The choices:
- Listed is what may go, never what may not: optimizer, logs, records of the run and whatever else lies there stay.
- Code goes only as far as `auto_map` names it, with what it imports from beside it.
- A path of this machine, or anything that looks like a token, is refused and not removed: nobody but its owner knows
  what else was meant to be there. Vocabularies are not searched for paths: `/home` is a word in many of them.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open
from transformers.dynamic_module_utils import get_relative_import_files

from tinylm.data.token_store import is_store

Kind = Literal["model", "adapter", "tokenizer", "corpus"]

_TOKENIZER = r"tokenizer(_config)?\.json|tokenizer\.model|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)"
_TOKENIZER += r"|merges\.txt|chat_template\.jinja"
_ABOUT = r"README\.md|LICENSE|loss\.png|all_results\.json"
_MAY_GO: dict[Kind, str] = {
    "model": rf"config\.json|generation_config\.json|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
    rf"|{_TOKENIZER}|{_ABOUT}",
    "adapter": rf"adapter_config\.json|adapter_model\.safetensors|generation_config\.json|{_TOKENIZER}|{_ABOUT}",
    "tokenizer": rf"{_TOKENIZER}|{_ABOUT}",
    "corpus": rf"manifest\.json|tokenizer/({_TOKENIZER})|part-\d+/((train|validation)\.(tokens|npy)|counts\.json)"
    rf"|{_ABOUT}",
}
_VOCABULARIES = {"tokenizer.json", "vocab.json", "vocab.txt", "merges.txt"}
_TEXT = {".json", ".md", ".py", ".jinja", ".txt", ""}

_SECRET = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bapi_org_[A-Za-z0-9]{16,}|\bgh[pousr]_\w{16,}|\bgithub_pat_\w{16,}|\bAKIA[0-9A-Z]{16}\b"
    r"|\bsk-[\w-]{20,}|\bwandb_v\d_\w{16,}|(?i:wandb|api[_-]?key)\W.{0,30}\b[0-9a-f]{40}\b"
)
_PATH = re.compile(r"(?<![\w.:/<\\~-])/([\w.-]+)/[\w.-]+[^\s\"'`<>)]*|\b[A-Za-z]:\\+\w[^\s\"'`]*|\bfile://\S+")
_HOME = re.compile(r"(?<![\w./~-])~/[\w.-]+[^\s\"'`<>)]*")
_ROOTS = {"home", "root", "Users", "tmp", "mnt", "media", "opt", "srv", "scratch", "workspace", "content", "Volumes"}


@dataclass(frozen=True)
class Contents:
    """What is sent: the local file, or other bytes in its place, by the name in the repository."""

    kind: Kind
    files: dict[str, Path | bytes]

    def text(self, name: str) -> str:
        source = self.files[name]
        return (source if isinstance(source, bytes) else source.read_bytes()).decode("utf-8")


def contents_of(folder: Path, base_model_id: str | None = None) -> Contents:
    """The files of a folder that may go to the Hub; nothing is changed in it.

    Args:
        base_model_id: what an adapter is to call its base, which it may know by a path only.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: nothing to push is in it, its weights are pickled or cut off, or an adapter's base is a path.
    """
    kind = kind_of(folder)
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files: dict[str, Path | bytes] = {name: folder / name for name in names if re.fullmatch(_MAY_GO[kind], name)}
    files |= {path.name: path for path in _code(folder)}
    if base_model_id is not None and kind != "adapter":
        raise ValueError(f"`--base_model_id` names the base of an adapter, and `{folder}` is a {kind}. Leave it out.")
    if kind == "adapter":
        files["adapter_config.json"] = _adapter_config(folder, base_model_id)
    if kind == "corpus":
        files["manifest.json"] = _manifest(folder)
    _check_weights(folder, kind, list(files))
    return Contents(kind, files)


def kind_of(folder: Path) -> Kind:
    """What a folder holds.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: nothing that can be pushed.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder `{folder}`. Name a run's, a model's, a tokenizer's or a corpus'.")
    if is_store(folder):
        if not (folder / "manifest.json").is_file():
            raise ValueError(f"The corpus in `{folder}` is not finished. Run `prepare_corpus.py` again; it goes on.")
        return "corpus"
    marks: list[tuple[str, Kind]] = [("adapter_config.json", "adapter"), ("config.json", "model")]
    for name, kind in [*marks, ("tokenizer.json", "tokenizer"), ("tokenizer_config.json", "tokenizer")]:
        if (folder / name).is_file():
            return kind
    held = sorted(path.name for path in folder.iterdir())[:20]
    raise ValueError(
        f"A model (`config.json`), an adapter (`adapter_config.json`), a tokenizer (`tokenizer.json`) or a prepared"
        f" corpus (`manifest.json`) can be pushed; `{folder}` holds {held or 'nothing'}."
    )


def check_texts(contents: Contents, secrets: tuple[str, ...] = ()) -> None:
    """Looks for what is nobody else's business.

    Args:
        secrets: values that must not be sent, whatever they look like.

    Raises:
        ValueError: a token or a path of this machine; the file and line are named, and a token is not repeated.
    """
    for name in sorted(contents.files):
        if Path(name).suffix not in _TEXT:
            continue
        for number, line in enumerate(contents.text(name).splitlines(), start=1):
            if _SECRET.search(line) or any(secret in line for secret in secrets):
                raise ValueError(
                    f"`{name}` holds in line {number} what looks like a token or key, and would be published. Nothing"
                    " was sent. Take it out; if it was one, and others have seen it, revoke it too."
                )
            # Code has routes and patterns; the base in a card's head is replaced, or refused with a remedy.
            any_deep_one = Path(name).suffix != ".py" and not line.startswith("base_model:")
            if path := None if Path(name).name in _VOCABULARIES else _local_path(line, any_deep_one):
                raise ValueError(
                    f"`{name}` holds in line {number} a path of this machine, `{path}`, and would be published. Nothing"
                    " was sent. Put a name of the Hub or a relative path there."
                )


def _local_path(line: str, any_deep_one: bool) -> str | None:
    """A path that one machine knows. With `any_deep_one` all of three parts or more are: it may be another machine's,
    where the run was trained."""
    if home := _HOME.search(line):
        return home[0]
    for match in _PATH.finditer(line):
        deep = any_deep_one and match[0].count("/") > 2
        if deep or match[1] is None or match[1] in _ROOTS or Path("/", match[1]).is_dir():
            return match[0]
    return None


def _code(folder: Path) -> Iterator[Path]:
    """The modules that `auto_map` names, and those that they import from beside them."""
    for name in ("config.json", "tokenizer_config.json"):
        path = folder / name
        mapped = json.loads(path.read_text(encoding="utf-8")).get("auto_map", {}) if path.is_file() else {}
        for value in mapped.values():
            for reference in value if isinstance(value, list) else [value]:
                module = folder / f"{str(reference).partition('.')[0]}.py"
                if module.is_file():
                    yield module
                    yield from map(Path, get_relative_import_files(module))


def _adapter_config(folder: Path, base_model_id: str | None) -> bytes:
    """With the base's id; refused where that is a path (case E3)."""
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    base = config["base_model_name_or_path"] = base_model_id or config.get("base_model_name_or_path")
    if base is None or not is_hub_id(base):
        raise ValueError(
            f"The adapter `{folder}` calls its base model `{base}`, which means nothing on another machine. Give the"
            " base's name on the Hub: `--base_model_id Qwen/Qwen2.5-0.5B-Instruct`, for instance."
        )
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


def is_hub_id(name: str) -> bool:
    """Whether a name can be that of a repository, and is no file or folder of this machine."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()


def _manifest(folder: Path) -> bytes:
    """With the source's files by their names, without their folders."""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    manifest["source"]["description"] = without_folders(manifest["source"]["description"])
    for part in manifest["parts"]:
        if Path(part["shard_name"]).is_absolute():
            part["shard_name"] = Path(part["shard_name"]).name
    return (json.dumps(manifest, indent=1) + "\n").encode()


def without_folders(description: str) -> str:
    """A description of data with its files by their names alone.

    >>> without_folders("prepared corpus `/home/me/corpus`, from `wikimedia/wikipedia, 20231101.en, split train`")
    'prepared corpus `corpus`, from `wikimedia/wikipedia, 20231101.en, split train`'
    """
    return re.sub(r"`[^`,]*/([^`,/]+)`", r"`\1`", description)


def _check_weights(folder: Path, kind: Kind, names: list[str]) -> None:
    """Raises ValueError where weights are missing, pickled or cut off; reads only where each tensor lies."""
    if kind not in ("model", "adapter"):
        return
    weights = [name for name in names if name.endswith(".safetensors")]
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"))
    if not weights and pickles:
        raise ValueError(
            f"`{folder}` holds its weights as a pickle (`{pickles[0]}`), which can run any code when it is read, so it"
            " is not pushed. Save them with safetensors, as `save_pretrained` does."
        )
    index = folder / "model.safetensors.index.json"
    parts = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) if index.is_file() else set()
    if not weights or parts - set(weights):
        lacks = ", ".join(sorted(parts - set(weights))) or f"the weights (`*.safetensors`) of the {kind}"
        raise ValueError(
            f"`{folder}` lacks {lacks}. If its run was stopped, let it finish, or push a checkpoint of it."
        )
    for name in weights:
        try:
            with safe_open(folder / name, framework="pt") as file:
                file.keys()
        except SafetensorError as error:
            raise ValueError(f"`{folder / name}` is cut off or damaged ({error}). Copy or train it again.") from error
