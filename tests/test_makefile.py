"""What the Makefile's targets decide by themselves, with commands that only note how they were called."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.distributed import ROOT

_TINYLM = """#!/bin/sh
echo "tinylm $*" >> called
mkdir "$3" && touch "$3/model.safetensors"
"""


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder of commands; `tinylm merge` refuses a folder that is there, as the real one does."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, script in (("accelerate", "#!/bin/sh\nexit 0\n"), ("tinylm", _TINYLM)):
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    return folder


def test_the_demo_is_merged_again_where_its_adapter_is_newer(commands: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "runs" / "finetune" / "demo" / "adapter_model.safetensors"
    adapter.parent.mkdir(parents=True)
    adapter.touch()
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "smollm2").touch()
    make = ["make", "-f", ROOT / "Makefile", "-o", ".venv/smollm2", f"BIN={commands}", "demo-finetune"]

    def times_merged() -> int:
        subprocess.run([*map(str, make)], cwd=tmp_path, check=True, capture_output=True)
        return (tmp_path / "called").read_text().count("tinylm merge runs/finetune/demo runs/finetune/demo-merged\n")

    os.utime(adapter, (1, 1))
    assert times_merged() == 1
    assert times_merged() == 1, "nothing was trained since"
    os.utime(adapter, (2**32, 2**32))
    assert times_merged() == 2
