"""Experiment trackers (`--report_to wandb|tensorboard|trackio`): checked before a run, never a prompt in the middle.

The library's callbacks send the settings and what is logged. What there is at the end of a run, `run.json`, samples and
the card, is sent here, to W&B and TensorBoard.
"""

import json
import logging
import netrc
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from .run_record import write_atomically

logger = logging.getLogger(__name__)

_RUN_VARIABLES = ("WANDB_RUN_ID", "WANDB_RESUME")
_folders_set_here: dict[str, str] = {}  # environment variables, of the last run in this process


def prepare_trackers(report_to: Sequence[str], output_dir: str) -> None:
    """Makes sure that each tracker can start without asking; W&B without a key logs offline into `output_dir`.

    Raises:
        ImportError: a tracker's package is not installed.
    """
    for name in report_to:
        if name in ("wandb", "tensorboard", "trackio") and find_spec(name) is None:
            raise ImportError(f"`--report_to {name}` needs a package that is not installed: pip install {name}")
    if "wandb" in report_to:
        _log_into("WANDB_DIR", output_dir)
        os.environ.setdefault("WANDB_SILENT", "true")
        if not os.environ.get("WANDB_MODE") and not has_wandb_key():
            logger.info("W&B has no API key here, so it logs offline; `wandb sync` uploads the run later.")
            os.environ["WANDB_MODE"] = "offline"
    if "tensorboard" in report_to:
        _log_into("TENSORBOARD_LOGGING_DIR", os.path.join(output_dir, "tensorboard"))


def _log_into(variable: str, folder: str) -> None:
    """Sets the variable, unless the user has."""
    if os.environ.get(variable) in (None, _folders_set_here.get(variable)):
        os.environ[variable] = _folders_set_here[variable] = folder


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


def send_results(report_to: Sequence[str], output_dir: str, samples: Sequence[Mapping[str, str]]) -> None:
    """How a finished run was made, what its model says and its card, to the trackers that were asked for; by rank 0.

    A tracker that fails is warned of: the run is done.

    Args:
        samples: rows of a table, with the same columns.
    """
    folder = Path(output_dir)
    for name, send in (("wandb", _send_to_wandb), ("tensorboard", _send_to_tensorboard)):
        if name in report_to:
            try:
                send(folder, samples)
            except Exception as error:
                logger.warning("Samples and card did not reach %s: %s", name, error)


def _send_to_wandb(folder: Path, samples: Sequence[Mapping[str, str]]) -> None:
    import wandb

    run = wandb.run
    if run is None:
        raise RuntimeError("its run has been closed already")
    run.config.update({"run": json.loads((folder / "run.json").read_text(encoding="utf-8"))}, allow_val_change=True)
    if samples:
        rows = [list(sample.values()) for sample in samples]
        run.log({"samples": wandb.Table(columns=list(samples[0]), data=rows)})
    card = Path(run.dir, "README.md")  # a copy: W&B would link to a file that may be moved before `wandb sync`
    card.write_text((folder / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
    run.save(str(card), base_path=run.dir, policy="now", glob=False)


def _send_to_tensorboard(folder: Path, samples: Sequence[Mapping[str, str]]) -> None:
    from torch.utils.tensorboard import SummaryWriter

    step = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["global_step"]
    record = (folder / "run.json").read_text(encoding="utf-8")
    with SummaryWriter(os.environ["TENSORBOARD_LOGGING_DIR"]) as writer:
        writer.add_text("run", f"```json\n{record}\n```", step)
        for number, sample in enumerate(samples, start=1):
            parts = [f"**{column}**\n\n{_quoted(text)}" for column, text in sample.items()]
            writer.add_text(f"samples/{number}", "\n\n".join(parts), step)
        writer.add_text("card", (folder / "README.md").read_text(encoding="utf-8"), step)


def _quoted(text: str) -> str:
    """As a block that Markdown leaves as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines()) or "    (empty)"
