"""Case E7: what would make a push fail is found before a run's first step, in one paragraph that holds no token."""

import json
import socket
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.training.tiny import run_arguments
from tinylm.publish import preflight
from tinylm.publish.preflight import check_destination, destination_of_run

from .conftest import TOKEN
from .hub_server import HubServer, Repository, user


def test_a_free_name_is_the_users_own_and_nothing_is_created(hub: HubServer) -> None:
    there = check_destination("tlm")
    assert (there.repo_id, there.user, there.private) == ("me/tlm", "me", True)
    assert there.url == f"{hub.url}/me/tlm" and TOKEN not in repr(there)
    assert check_destination("team/tlm").repo_id == "team/tlm"
    assert {method for method, _ in hub.requests} == {"GET"} and not hub.repositories


def refusal(repo_id: str, **settings: object) -> str:
    with pytest.raises((ValueError, ConnectionError)) as refused:
        check_destination(repo_id, **settings)
    assert TOKEN not in str(refused.value)
    return str(refused.value)


def test_no_token_or_one_that_may_not_write_is_refused(
    hub: HubServer, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.users["hf_read"] = user("me", role="read")
    hub.users["hf_fine"] = user("me", role="fineGrained", writes_to=("team", "me/other"), team="write")
    assert "may only read" in refusal("tlm", token="hf_read")
    assert "may write to me/other, team, and not to `me/tlm`" in refusal("me/tlm", token="hf_fine")
    assert check_destination("team/tlm", token="hf_fine") and check_destination("me/other", token="hf_fine")
    assert "invalid or expired" in refusal("tlm", token="hf_gone")
    monkeypatch.setattr(preflight, "get_token", lambda: None)
    assert "there is none here" in refusal("tlm") and "`hf auth login`" in refusal("tlm")
    assert waits == []


def test_somebody_elses_name_is_refused(hub: HubServer) -> None:
    assert "`you/tlm` belongs to `you`, and `me` may write to: me, team" in refusal("you/tlm")
    assert "belongs to `readers`" in refusal("readers/tlm")


@pytest.mark.parametrize("name", ["a/b/c", "-tlm", "tl m", "tlm.git", "me/t--lm", "x" * 97, ""])
def test_a_name_that_the_hub_would_refuse_is_refused_without_asking_it(name: str, hub: HubServer) -> None:
    assert f"`{name}` is no name for a repository" in refusal(name) and hub.requests == []


def test_a_repository_with_other_files_is_taken_and_an_empty_one_is_not(hub: HubServer, tmp_path: Path) -> None:
    other = hub.repositories["model", "me/tlm"] = Repository(private=True, files={".gitattributes": b""})
    assert check_destination("tlm", folder=tmp_path)
    other.files["model.safetensors"] = b"weights"
    said = refusal("tlm", folder=tmp_path)
    assert "is taken: it holds 1 files, such as `model.safetensors`" in said and "`tinylm push --overwrite`" in said
    assert check_destination("tlm", folder=tmp_path, overwrite=True)
    record = {"repo_id": "me/tlm", "commit": other.sha}
    (tmp_path / "pushed.json").write_text(json.dumps(record))
    assert check_destination("tlm", folder=tmp_path)
    other.commits.append("somebody's hand")
    assert "were changed since" in refusal("tlm", folder=tmp_path)


def test_a_private_push_does_not_become_public(hub: HubServer) -> None:
    hub.repositories["model", "me/tlm"] = Repository(private=False)
    assert "is public, and a push is private" in refusal("tlm")
    assert check_destination("tlm", private=False).private is False


def test_a_dead_host_and_offline_mode_are_said(
    hub: HubServer, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case E8: offline, nothing is asked."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert f"A push to `{dead}` failed: no answer" in refusal("tlm", endpoint=dead)
    assert waits == [1, 4]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "`HF_HUB_OFFLINE` is set" in refusal("tlm") and hub.requests == []


def test_what_passes_is_waited_for(hub: HubServer, waits: list[float], caplog: pytest.LogCaptureFixture) -> None:
    hub.fail("GET", "whoami", status=429, Retry_After="33", message=f"slow down, {TOKEN}")
    hub.fail("GET", "/api/models/", status=503)
    assert check_destination("tlm")
    assert waits == [33, 1]
    assert "the Hub answers 429 (slow down, ***)" in caplog.text and TOKEN not in caplog.text
    hub.fail("GET", "whoami", status=429, Retry_After="3600")
    assert "Try again in 3600 s" in refusal("tlm") and len(waits) == 2


def test_a_run_asks_on_rank_0_and_the_trainer_never_pushes(hub: HubServer, tmp_path: Path) -> None:
    quiet = run_arguments(tmp_path / "quiet")
    assert destination_of_run(quiet, rank=0) is None and hub.requests == []
    other_rank = run_arguments(tmp_path / "tlm", push_to_hub=True)
    assert destination_of_run(other_rank, rank=1) is None and hub.requests == []
    first = run_arguments(tmp_path / "tlm", push_to_hub=True)
    there = destination_of_run(first, rank=0)
    assert there is not None and there.repo_id == "me/tlm" and there.private
    assert not first.push_to_hub and not other_rank.push_to_hub
    named = run_arguments(tmp_path / "x", push_to_hub=True, hub_model_id="team/y", hub_private_repo=False)
    there = destination_of_run(named, rank=0)
    assert there is not None and there.repo_id == "team/y" and not there.private


def test_a_run_is_not_told_that_its_checkpoints_were_pushed(hub: HubServer, tmp_path: Path) -> None:
    args = run_arguments(tmp_path, push_to_hub=True, hub_strategy="checkpoint")
    with pytest.raises(ValueError, match="`hub_strategy` is `checkpoint`"):
        destination_of_run(args, rank=0)
