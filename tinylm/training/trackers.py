"""Experiment trackers (`--report_to wandb|tensorboard|trackio`): checked before a run, never a prompt in the middle."""

import logging
import netrc
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from .run_record import write_atomically

logger = logging.getLogger(__name__)

_RUN_VARIABLES = ("WANDB_RUN_ID", "WANDB_RESUME")


def prepare_trackers(report_to: Sequence[str], output_dir: str) -> None:
    """Makes sure that each tracker can start without asking; W&B without a key logs offline into `output_dir`.

    Raises:
        ImportError: a tracker's package is not installed.
    """
    for name in report_to:
        if name in ("wandb", "tensorboard", "trackio") and find_spec(name) is None:
            raise ImportError(f"`--report_to {name}` needs a package that is not installed: pip install {name}")
    if "wandb" in report_to:
        os.environ.setdefault("WANDB_DIR", output_dir)
        os.environ.setdefault("WANDB_SILENT", "true")
        if not os.environ.get("WANDB_MODE") and not has_wandb_key():
            logger.info("W&B has no API key here, so it logs offline; `wandb sync` uploads the run later.")
            os.environ["WANDB_MODE"] = "offline"
    if "tensorboard" in report_to:
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", os.path.join(output_dir, "tensorboard"))


@contextmanager
def one_wandb_run(output_dir: str, *, goes_on: bool) -> Iterator[None]:
    """While training: W&B's run is the one that `wandb_run_id` in the run's folder names, if the run goes on; a new one
    is written down there. Where the user names one (`WANDB_RUN_ID`), it is that."""
    path, before = Path(output_dir, "wandb_run_id"), {name: os.environ.get(name) for name in _RUN_VARIABLES}
    if goes_on and path.is_file():
        run_id = path.read_text(encoding="utf-8").strip()
    else:
        run_id = os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, run_id + "\n")
    os.environ.update(zip(_RUN_VARIABLES, (run_id, "allow"), strict=True))
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            os.environ.update({} if value is None else {name: value})


def has_wandb_key() -> bool:
    """Whether W&B can log in without asking."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").removeprefix("https://").rstrip("/")
    try:
        return netrc.netrc().authenticators(host) is not None
    except (FileNotFoundError, netrc.NetrcParseError):
        return False
