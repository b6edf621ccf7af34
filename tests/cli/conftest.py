"""`tinylm WORDS...` in this process."""

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers.integrations.integration_utils  # noqa: F401  (it prints something where W&B is offline)
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as library

from tinylm import cli

RunCLI = Callable[..., tuple[int, str, str]]


@pytest.fixture
def tinylm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCLI:
    """Runs `tinylm WORDS...` with a standard input: exit code, standard output, standard error."""

    def run(*words: object, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tinylm", *map(str, words)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        for module in (cli.models, cli.runs):
            monkeypatch.setattr(module, "quieten", lambda: None)  # what it does stays done in this process
        library.disable_progress_bar()
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
            sys.exit(0)
        library.enable_progress_bar()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


def save(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
