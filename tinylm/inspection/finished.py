"""A command that is given again when its run is finished: what a kill after the last save has left undone.

`STATUS` says finished as soon as the model is saved. The card and the push come after it, and would never come if the
run was ended there.
"""

import logging
from pathlib import Path

from transformers import TrainingArguments

from tinylm.publish.cards import write_card
from tinylm.publish.preflight import PUSHED_NAME, destination_of_run
from tinylm.publish.push import push_finished, warn_of_no_push
from tinylm.training.launch import rank_zero_first

from .report import add_course_to_card

logger = logging.getLogger(__name__)


def complete_finished(run: TrainingArguments, rank: int, *, adapted_model: str | None = None) -> None:
    """Writes the card of a finished run if there is none, and pushes the run if that was asked for and not done.

    Every rank has to call it; rank 0 writes and pushes. What goes wrong with the push is a warning, since the run is
    done; a card that is there stays as it is.

    Args:
        adapted_model: what an adapter calls its base.
    """
    with rank_zero_first("finished"):
        if rank != 0:
            return
        folder = Path(run.output_dir)
        if not (folder / "README.md").is_file():
            write_card(folder)
            add_course_to_card(folder)
            logger.info("%s was missing, and is written.", folder / "README.md")
        if run.push_to_hub and not _is_pushed(folder):
            try:
                destination = destination_of_run(run, 0, adapted_model=adapted_model)
            except (ValueError, OSError) as error:
                name = run.hub_model_id or folder.resolve().name
                warn_of_no_push(folder, name, private=run.hub_private_repo is not False, error=error)
            else:
                push_finished(folder, destination)


def _is_pushed(folder: Path) -> bool:
    """Whether the last push came after the run's end; one that came before was of fewer steps."""
    note = folder / PUSHED_NAME
    return note.is_file() and note.stat().st_mtime_ns >= (folder / "STATUS").stat().st_mtime_ns
