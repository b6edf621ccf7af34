"""A folder on the Hub: `push_folder` sends it, `push_finished` does so for a run that has just ended.

The choices:
- Everything is looked at before anything is sent: the files, the card, the token, the repository.
- One commit, which is made last: a push that breaks off leaves an empty repository or the old state, and is repeated
  with the same command. What was uploaded by then is not sent again. After it the repository holds what was sent and no
  other file.
- Where it went is noted in the folder (`pushed.json`), so that the next push may replace it.

Large files go through Git LFS or Xet, as huggingface_hub decides; the tests run the LFS way (`HF_HUB_DISABLE_XET=1`),
and the way over Xet, which needs the Hub itself, was not run.
"""

import json
import logging
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, get_token

from .contents import Contents, check_texts, contents_of
from .hub_calls import patiently
from .hub_card import card_for_hub
from .preflight import PUSHED_NAME, Destination, check_destination, check_name

logger = logging.getLogger(__name__)


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = True,
    token: str | None = None,
    base_model_id: str | None = None,
    data_license: str | None = None,
    overwrite: bool = False,
    endpoint: str | None = None,
) -> str:
    """Sends a model, an adapter, a tokenizer or a prepared corpus to the Hub; one line on where it went.

    Args:
        folder: a run's folder, or what `save_pretrained`, `tinylm merge` or `prepare_corpus.py` has written.
        repo_id: `name`, which is then the user's own, or `user/name`, `organisation/name`.
        token: by default what `HF_TOKEN` or `hf auth login` gives.
        base_model_id: what an adapter that only knows its base's folder is to call it.
        data_license: the Hub's name of the data's licence, for the card.
        overwrite: replace what another push or somebody else has put there.
        endpoint: the Hub's address; by default `HF_ENDPOINT`.

    Raises:
        FileNotFoundError, ValueError: nothing was sent: the folder, the card, the token or the place is not in order.
        ConnectionError: the Hub cannot be reached, or failed again and again.
    """
    folder = Path(folder)
    check_name(repo_id)
    contents = contents_of(folder, base_model_id)
    token = token or get_token()
    check_texts(contents, secrets=(token,) if token else ())
    there = check_destination(
        repo_id,
        private=private,
        token=token,
        repo_type="dataset" if contents.kind == "corpus" else "model",
        folder=folder,
        overwrite=overwrite,
        endpoint=endpoint,
    )
    card = card_for_hub(
        contents, folder.resolve().name, there.repo_id, base_model_id=base_model_id, data_license=data_license
    )
    contents.files["README.md"] = card.encode("utf-8")
    doing = f"The push to `{there.repo_id}`"
    commit = patiently(lambda: _send(contents, there, _message(folder)), doing, token=there.token)
    _note(folder, there.repo_id, commit.oid)
    kind = "private" if there.private else "public"
    return f"Pushed {len(contents.files)} files to {there.url} ({kind}, commit {commit.oid[:12]})"


def push_finished(folder: str | Path, there: Destination) -> None:
    """Sends the folder of a run that has ended and is saved; where that fails, says how to repeat it."""
    try:
        logger.info(
            "%s", push_folder(folder, there.repo_id, private=there.private, token=there.token, endpoint=there.endpoint)
        )
    except Exception as error:  # the run is done: nothing that happens now may make it a failure
        warn_of_no_push(folder, there.repo_id, private=there.private, error=error)


def warn_of_no_push(folder: str | Path, repo_id: str, *, private: bool, error: Exception) -> None:
    """Says why a finished run was not pushed, and how to do it."""
    logger.warning(
        "The run is finished and saved in %s, and was not pushed: %s Push it with: tinylm push %s --repo_id %s%s",
        *(folder, " ".join(str(error).split()), folder, repo_id, "" if private else " --public"),
    )


def _send(contents: Contents, there: Destination, message: str) -> CommitInfo:
    """Creates the repository where it is not there, uploads and commits. Can be called again after any failure."""
    api = HfApi(endpoint=there.endpoint, token=there.token)
    api.create_repo(there.repo_id, repo_type=there.repo_type, private=there.private, exist_ok=True)
    held = set(api.list_repo_files(there.repo_id, repo_type=there.repo_type)) - {".gitattributes"}
    operations = [CommitOperationAdd(name, source) for name, source in sorted(contents.files.items())]
    operations += [CommitOperationDelete(name, is_folder=False) for name in sorted(held - contents.files.keys())]
    return api.create_commit(there.repo_id, operations, commit_message=message, repo_type=there.repo_type)


def _message(folder: Path) -> str:
    """The commit's: by what it was made, and of a run, after which step."""
    state = folder / "trainer_state.json"
    step = f", step {json.loads(state.read_text(encoding='utf-8'))['global_step']:,}" if state.is_file() else ""
    return f"tinylm {version('tinylm')}{step}"


def _note(folder: Path, repo_id: str, commit: str) -> None:
    try:
        (folder / PUSHED_NAME).write_text(json.dumps({"repo_id": repo_id, "commit": commit}) + "\n", encoding="utf-8")
    except OSError as error:
        logger.warning("%s cannot be written (%s): the next push needs `--overwrite`.", folder / PUSHED_NAME, error)
