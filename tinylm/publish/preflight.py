"""Before a run that will push, and before each push: who am I, may I write there, is the place free (case E7).

The choices:
- Nothing is created and nothing is sent: two questions to the Hub. `tinylm doctor` can ask them too.
- A place is free if there is no such repository, or only an empty one, or what is there was pushed from this very
  folder (`pushed.json`) and nobody has changed it since. All else needs `--overwrite`.
- A private push never goes into a public repository: `private` would do nothing there.
"""

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import DatasetInfo, HfApi, ModelInfo, constants, get_token
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status, validate_repo_id
from transformers import TrainingArguments

from .contents import is_hub_id
from .hub_calls import LOG_IN, patiently

logger = logging.getLogger(__name__)

PUSHED_NAME = "pushed.json"
SECONDS_TO_ANSWER = 10
_WAITS = (1, 4)
_WRITING_ROLES = ("admin", "write", "contributor")


@dataclass(frozen=True)
class Destination:
    """A repository that may be written to; `user` is who the token stands for."""

    repo_id: str
    repo_type: str
    private: bool
    user: str
    token: str = field(repr=False)
    endpoint: str

    @property
    def url(self) -> str:
        return f"{self.endpoint}/{'datasets/' if self.repo_type == 'dataset' else ''}{self.repo_id}"


def check_destination(
    repo_id: str,
    *,
    private: bool = True,
    token: str | None = None,
    repo_type: str = "model",
    folder: Path | None = None,
    overwrite: bool = False,
    endpoint: str | None = None,
) -> Destination:
    """Where a push would go, if it may go there.

    Args:
        repo_id: `name`, which is then the user's own, or `user/name`, `organisation/name`.
        token: by default what `HF_TOKEN` or `hf auth login` gives.
        folder: what is to be pushed, which may have been pushed there before.
        endpoint: the Hub's address; by default `HF_ENDPOINT`.

    Raises:
        ValueError: an impossible name, no token, a read-only one, somebody else's name or a place that is taken.
        ConnectionError: the Hub cannot be reached.
    """
    check_name(repo_id)
    if constants.is_offline_mode():
        raise ValueError("A push needs the Hub, and `HF_HUB_OFFLINE` is set. Unset it, or push later: `tinylm push`.")
    token = token or get_token()
    if not token:
        raise ValueError(f"A push needs a token of the Hub, and there is none here. {LOG_IN}")
    endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
    who = patiently(lambda: _who_am_i(endpoint, token), f"A push to `{endpoint}`", token=token, waits=_WAITS)
    user = str(who["name"])
    repo_id = repo_id if "/" in repo_id else f"{user}/{repo_id}"
    _check_scope(who, repo_id)
    there = Destination(repo_id, repo_type, private, user, token, endpoint)
    info = patiently(lambda: _repository(there), f"A push to `{repo_id}`", token=token, waits=_WAITS)
    if info is None:
        return there
    held = {file.rfilename for file in info.siblings or []} - {".gitattributes"}
    if private and not info.private:
        raise ValueError(
            f"The repository `{repo_id}` is public, and a push is private unless it is told otherwise. Add `--public`"
            " (of a run: `--hub_private_repo false`), make the repository private, or take another name."
        )
    if held and not overwrite and _pushed_before(folder, repo_id) != info.sha:
        raise ValueError(
            f"The repository `{repo_id}` is taken: it holds {len(held)} files, such as `{min(held)}`, that were not"
            " pushed from here, or were changed since. Take another name; `tinylm push --overwrite` replaces"
            " what is there (it stays in the repository's history)."
        )
    return Destination(repo_id, repo_type, bool(info.private), user, token, endpoint)


def destination_of_run(args: TrainingArguments, rank: int, *, adapted_model: str | None = None) -> Destination | None:
    """Where a run's result is to be pushed, checked by rank 0; None on other ranks, and where no push is asked for.

    The Trainer's own push is switched off: it would send the whole folder with every log and checkpoint, publicly.

    Args:
        adapted_model: what an adapter is going to call its base.

    Raises:
        ValueError, ConnectionError: as `check_destination`; or checkpoints are to be pushed, or an adapter whose base
            has no name on the Hub (case E3).
    """
    if not args.push_to_hub:
        return None
    args.push_to_hub = False
    if args.hub_strategy in ("checkpoint", "all_checkpoints") or args.hub_revision:
        raise ValueError(
            "A run pushes its result once, at its end, to the main branch; `hub_strategy` is"
            f" `{args.hub_strategy.value}` and `hub_revision` {args.hub_revision}. Leave both out."
        )
    if adapted_model is not None and not is_hub_id(adapted_model):
        raise ValueError(
            f"The adapter would call its base model `{adapted_model}`, which means nothing on another machine, and"
            " could not be pushed. Set `--base_model_id` to the base's name on the Hub."
        )
    if rank != 0:
        return None
    folder = Path(args.output_dir)
    destination = check_destination(
        args.hub_model_id or folder.resolve().name,
        private=args.hub_private_repo is not False,
        token=args.hub_token,
        folder=folder,
    )
    kind = "private" if destination.private else "public"
    logger.info("The result will be pushed to %s (%s), as %s", destination.url, kind, destination.user)
    return destination


def check_name(repo_id: str) -> None:
    """Raises ValueError for a name that the Hub would refuse."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"`{repo_id}` is no name for a repository: {error} Set `--repo_id` (of a run:"
                         " `--hub_model_id`) to something like `me/my-model`.") from error  # fmt: skip


def _who_am_i(endpoint: str, token: str) -> dict:
    """What `/api/whoami-v2` says of the token; huggingface_hub's own call would wait for ever."""
    headers = build_hf_headers(token=token)
    response = get_session().get(f"{endpoint}/api/whoami-v2", headers=headers, timeout=SECONDS_TO_ANSWER)
    hf_raise_for_status(response)
    try:
        return {**response.json()}
    except (ValueError, TypeError) as error:
        raise ValueError(f"`{endpoint}` does not answer as the Hub does. Look at `HF_ENDPOINT`.") from error


def _check_scope(who: dict, repo_id: str) -> None:
    """Raises ValueError where the token, or the user, may not write to the repository."""
    user, owner = str(who["name"]), repo_id.partition("/")[0]
    access = who.get("auth", {}).get("accessToken", {})
    if access.get("role") == "read":
        raise ValueError(f"The token of `{user}` may only read, and a push writes. {LOG_IN}")
    if owner != user:
        roles = {str(each["name"]): each.get("roleInOrg", "write") for each in who.get("orgs", [])}
        if roles.get(owner) not in _WRITING_ROLES:
            may = [name for name, role in sorted(roles.items()) if role in _WRITING_ROLES]
            raise ValueError(
                f"`{repo_id}` belongs to `{owner}`, and `{user}` may write to: {', '.join([user, *may])}. Take one of"
                f" these before the `/`, or ask `{owner}` for the right to write."
            )
    if access.get("role") == "fineGrained":
        scopes = access.get("fineGrained", {}).get("scoped", [])
        places = {str(scope["entity"]["name"]) for scope in scopes if "repo.write" in scope["permissions"]}
        if not places & {owner, repo_id}:
            raise ValueError(
                f"The fine-grained token of `{user}` may write to {', '.join(sorted(places)) or 'nothing'}, and not to"
                f" `{repo_id}`. Give it the right to write to the repositories of `{owner}`. {LOG_IN}"
            )


def _repository(there: Destination) -> ModelInfo | DatasetInfo | None:
    api = HfApi(endpoint=there.endpoint, token=there.token)
    try:
        return api.repo_info(there.repo_id, repo_type=there.repo_type, timeout=SECONDS_TO_ANSWER)
    except RepositoryNotFoundError:
        return None


def _pushed_before(folder: Path | None, repo_id: str) -> str | None:
    """The commit that this folder's last push made there."""
    path = None if folder is None else folder / PUSHED_NAME
    record = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.is_file() else {}
    return record.get("commit") if record.get("repo_id") == repo_id else None
