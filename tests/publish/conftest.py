"""A Hub on this machine for every test that asks for `hub`."""

from collections.abc import Iterator

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from .hub_server import HubServer, user

TOKEN = "hf_" + "n0taR3alT0ken" * 2


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the code under test, and huggingface_hub in it, would have slept."""
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    return slept


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> Iterator[HubServer]:
    """The only Hub that this process knows; `me` is logged in, and writes to `team` too."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with HubServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        server.users[TOKEN] = user("me", team="write", readers="read")
        close_session()
        yield server
        close_session()
