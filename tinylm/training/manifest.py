"""The list of a folder's files with sizes and hashes: written last, so that a folder which has one is whole.

    manifest.json    {"step": 100, "files": {"model.safetensors": {"bytes": 79327000, "sha256": "..."}, ...}}

`sha256sum` computes the same hashes. Sizes are looked at whenever a checkpoint is chosen; contents when a run goes on
from it, because reading a large checkpoint takes time.
"""

import hashlib
import json
import os
from pathlib import Path

MANIFEST_NAME = "manifest.json"


def write_manifest(folder: Path, step: int) -> None:
    """Lists all files under `folder` and makes sure that they, and the list after them, are on the disk."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): _describe(path) for path in paths}
    beside = folder / f".{MANIFEST_NAME}"
    beside.write_text(json.dumps({"step": step, "files": files}, indent=1) + "\n", encoding="utf-8")
    flush(beside)
    os.replace(beside, folder / MANIFEST_NAME)
    for directory in [path for path in folder.rglob("*") if path.is_dir()] + [folder]:
        flush(directory)


def read_manifest(folder: Path) -> dict[str, dict[str, object]]:
    """The listed files: `{name: {"bytes": size, "sha256": hash}}`.

    Raises:
        ValueError: there is no list, or it is damaged.
    """
    try:
        files = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))["files"]
        return {
            str(name): {"bytes": int(entry["bytes"]), "sha256": str(entry["sha256"])} for name, entry in files.items()
        }
    except FileNotFoundError as error:
        raise ValueError(f"`{MANIFEST_NAME}` is missing, so it was not completed") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"`{MANIFEST_NAME}` is damaged") from error


def find_difference(folder: Path, *, read_contents: bool) -> str | None:
    """The first way in which `folder` is not what its manifest lists; None if it is.

    Args:
        read_contents: compare hashes too, and not sizes alone.
    """
    try:
        files = read_manifest(folder)
    except ValueError as error:
        return str(error)
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            return f"`{name}` is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"`{name}` has {path.stat().st_size:,} bytes and not {entry['bytes']:,}"
    for name, entry in files.items() if read_contents else ():
        if _sha256(folder / name) != entry["sha256"]:
            return f"`{name}` is damaged: its sha256 is another"
    return None


def flush(path: Path) -> None:
    """Waits until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _describe(path: Path) -> dict[str, object]:
    flush(path)
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
