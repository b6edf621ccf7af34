"""A folder against its list of files."""

import json
import os

import pytest

from tinylm.training import manifest
from tinylm.training.manifest import MANIFEST_NAME, find_difference, write_manifest


@pytest.fixture
def folder(tmp_path):
    """Three files, one of them in a folder, and their manifest."""
    (tmp_path / "shards").mkdir()
    for name in ("a.bin", "b.bin", "shards/c.bin"):
        (tmp_path / name).write_bytes(name.encode() * 13)
    write_manifest(tmp_path, step=7)
    return tmp_path


def test_a_folder_that_was_not_touched_has_no_difference(folder):
    assert find_difference(folder, read_contents=True) is None
    listed = json.loads((folder / MANIFEST_NAME).read_text())
    assert listed["step"] == 7
    assert list(listed["files"]) == ["a.bin", "b.bin", "shards/c.bin"]
    assert not list(folder.glob(".*"))


def test_a_changed_byte_in_any_file_is_found_and_the_file_is_named(folder):
    for name in ("a.bin", "b.bin", "shards/c.bin"):
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(b"?" + before[1:])
        assert find_difference(folder, read_contents=False) is None, "sizes alone cannot tell"
        assert find_difference(folder, read_contents=True) == f"`{name}` is damaged: its sha256 is another"
        (folder / name).write_bytes(before)


def test_a_missing_or_shorter_file_is_found_without_reading(folder):
    (folder / "b.bin").write_bytes(b"b" * 64)
    assert find_difference(folder, read_contents=False) == "`b.bin` has 64 bytes and not 65"
    (folder / "a.bin").unlink()
    assert find_difference(folder, read_contents=False) == "`a.bin` is missing"


def test_a_changed_byte_of_the_manifest_is_found_or_harmless(folder):
    path = folder / MANIFEST_NAME
    content = path.read_bytes()
    found = 0
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        found += find_difference(folder, read_contents=True) is not None
    assert found > len(content) / 2, "white space and the step do no harm"


def test_a_folder_without_a_manifest_was_not_completed(tmp_path):
    assert find_difference(tmp_path, read_contents=False) == "`manifest.json` is missing, so it was not completed"


def test_everything_is_on_the_disk_before_the_manifest_has_its_name(tmp_path, monkeypatch):
    flushed = []

    def flush(path):
        assert not (tmp_path / MANIFEST_NAME).exists() or path.is_dir()
        flushed.append(path.name)

    monkeypatch.setattr(manifest, "flush", flush)
    (tmp_path / "a.bin").write_bytes(b"a")
    write_manifest(tmp_path, step=1)
    assert flushed == ["a.bin", f".{MANIFEST_NAME}", tmp_path.name]
    assert sorted(os.listdir(tmp_path)) == ["a.bin", MANIFEST_NAME]
