"""Which network the ranks of several machines meet over.

Gloo takes the address that this machine's own name leads to. On many machines that is 127.0.0.1, where no other machine
finds anybody. The right one is known: that over which the main machine is reached.
"""

import os
import socket

import psutil

INTERFACE = "GLOO_SOCKET_IFNAME"


def choose_interface() -> None:
    """Sets GLOO_SOCKET_IFNAME where ranks are on several machines; one that is set already stays.

    Raises:
        ValueError: this machine has no interface of the name that is set.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) <= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return
    there = psutil.net_if_addrs()
    if INTERFACE in os.environ:
        wrong = [name for name in os.environ[INTERFACE].split(",") if name not in there]
        if wrong:
            raise ValueError(
                f"`{INTERFACE}` names the network interface that the machines reach each other over, and"
                f" {socket.gethostname()} has {', '.join(sorted(there))}, and not {', '.join(wrong)}. Leave it out: the"
                " interface that leads to the main machine is taken."
            )
        return
    name = interface_towards(os.environ["MASTER_ADDR"])
    if name is not None:
        os.environ[INTERFACE] = name


def interface_towards(host: str) -> str | None:
    """The interface from which this machine sends to `host`; None if there is no way. Nothing is sent."""
    try:
        family, kind, *_, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            own = probe.getsockname()[0]
    except OSError:
        return None
    names = [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(each.address.partition("%")[0] == own for each in addresses)
    ]
    return names[0] if names else None
