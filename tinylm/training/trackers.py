"""Experiment trackers (`--report_to wandb|tensorboard|trackio`): checked before a run, never a prompt in the middle."""

import logging
import netrc
import os
from collections.abc import Sequence
from importlib.util import find_spec

logger = logging.getLogger(__name__)


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
        if not os.environ.get("WANDB_MODE") and not _has_wandb_key():
            logger.info("W&B has no API key here, so it logs offline; `wandb sync` uploads the run later.")
            os.environ["WANDB_MODE"] = "offline"
    if "tensorboard" in report_to:
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", os.path.join(output_dir, "tensorboard"))


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").removeprefix("https://").rstrip("/")
    try:
        return netrc.netrc().authenticators(host) is not None
    except (FileNotFoundError, netrc.NetrcParseError):
        return False
