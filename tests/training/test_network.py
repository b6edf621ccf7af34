"""The interface that ranks on several machines meet over; between real machines in tests/recipes/test_multinode."""

import os

import psutil
import pytest

from tinylm.training.network import INTERFACE, choose_interface, interface_towards


@pytest.fixture
def ranks(monkeypatch):
    """Sets the environment of a rank: how many in all, how many here, where the main machine is."""

    def set_environment(world: int, here: int, address: str = "127.0.0.1") -> None:
        monkeypatch.setenv("WORLD_SIZE", str(world))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
        monkeypatch.setenv("MASTER_ADDR", address)

    monkeypatch.setenv(INTERFACE, "")  # so that it is put back as it was
    monkeypatch.delenv(INTERFACE)
    return set_environment


def loopback() -> str:
    return next(name for name, found in psutil.net_if_addrs().items() if any(e.address == "127.0.0.1" for e in found))


def test_ranks_on_several_machines_take_the_interface_that_leads_to_the_main_one(ranks):
    ranks(2, 1)
    choose_interface()
    assert os.environ[INTERFACE] == loopback() == interface_towards("127.0.0.1")


def test_ranks_of_one_machine_are_left_alone(ranks):
    ranks(2, 2)
    choose_interface()
    assert INTERFACE not in os.environ


def test_a_main_machine_without_a_way_to_it_is_left_to_the_launcher(ranks):
    ranks(2, 1, "no.such.host.invalid")
    choose_interface()
    assert INTERFACE not in os.environ


def test_an_interface_that_is_set_stays_if_it_is_there_and_is_refused_if_not(ranks, monkeypatch):
    ranks(2, 1)
    monkeypatch.setenv(INTERFACE, loopback())
    choose_interface()
    assert os.environ[INTERFACE] == loopback()
    monkeypatch.setenv(INTERFACE, "ib7")
    with pytest.raises(ValueError, match=r"`GLOO_SOCKET_IFNAME` names .* and not ib7\. Leave it out"):
        choose_interface()
