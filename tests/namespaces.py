"""Two machines on one: network namespaces with a host name and an address each, on a bridge that nobody else sees.

    with two_machines() as (main, other):
        main.start(["accelerate", "launch", ...])

The bridge lies in a third namespace, so nothing is added to this machine's own network and any number of tests may do
this at once. What is left of a test process that was killed goes when the next one begins.
"""

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.distributed import ROOT

_PREFIX = "tinylm"
_WITH_HOST_NAME = 'hostname "$1"; shift; exec "$@"'


class Machine:
    """A namespace: `address` is its own, `name` its host name."""

    def __init__(self, namespace: str, name: str, address: str) -> None:
        self.namespace, self.name, self.address = namespace, name, address

    def start(self, command: list[object], environment: dict[str, str], log: Path) -> subprocess.Popen:
        """Starts `command` here, with all that it says in the file `log`."""
        inside = ["unshare", "--uts", "sh", "-c", _WITH_HOST_NAME, "sh", self.name, *map(str, command)]
        with log.open("w") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *inside],
                env=environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def processes(self) -> list[psutil.Process]:
        """All that run here."""
        found = []
        for pid in _run("ip", "netns", "pids", self.namespace).split():
            try:
                found.append(psutil.Process(int(pid)))
            except psutil.NoSuchProcess:
                continue
        return found

    def kill(self) -> None:
        """Everything that runs here gets SIGKILL, as if the power had gone."""
        for process in self.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

    def unplug(self) -> None:
        """The cable is drawn: packets are lost, and no connection is told."""
        _run("ip", "-n", self.namespace, "link", "set", "eth0", "down")

    def plug_in(self) -> None:
        _run("ip", "-n", self.namespace, "link", "set", "eth0", "up")

    def is_listening(self, port: int) -> bool:
        """Whether somebody takes connections here."""
        state = f":{port:04X}"
        sockets = _run("ip", "netns", "exec", self.namespace, "cat", "/proc/net/tcp", "/proc/net/tcp6")
        rows = [line.split() for line in sockets.splitlines()]
        return any(row[1].endswith(state) and row[3] == "0A" for row in rows if len(row) > 3)

    def has_called(self) -> bool:
        """Whether anybody here has tried to open a connection."""
        counts = _run("ip", "netns", "exec", self.namespace, "cat", "/proc/net/snmp")
        names, numbers = [line.split() for line in counts.splitlines() if line.startswith("Tcp:")]
        return int(numbers[names.index("ActiveOpens")]) > 0


def why_impossible() -> str | None:
    """Why this machine can not make two of itself; None if it can."""
    missing = [name for name in ("ip", "unshare") if shutil.which(name) is None]
    if missing:
        return f"two machines need {' and '.join(missing)}"
    if os.geteuid() != 0:
        return "two machines on one need root, for network namespaces"
    try:
        with two_machines():
            return None
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """`node-a` and `node-b`; all that runs in them is killed at the end."""
    _remove_left_over()
    name = f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(3)}"
    switch = f"{name}-switch"
    machines = tuple(
        Machine(f"{name}-{letter}", f"node-{letter}", f"10.77.0.{at}") for at, letter in enumerate("ab", 1)
    )
    namespaces = [switch, *(machine.namespace for machine in machines)]
    try:
        for namespace in namespaces:
            _run("ip", "netns", "add", namespace)
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for machine in machines:
            cable = f"to-{machine.name}"
            ends = ["type", "veth", "peer", "name", "eth0", "netns", machine.namespace]
            _run("ip", "-n", switch, "link", "add", cable, *ends)
            _run("ip", "-n", switch, "link", "set", cable, "master", "bridge", "up")
            _run("ip", "-n", machine.namespace, "address", "add", f"{machine.address}/24", "dev", "eth0")
            _run("ip", "-n", machine.namespace, "link", "set", "eth0", "up")
        yield machines
    finally:
        for namespace in namespaces:
            _remove(namespace)


def _remove_left_over() -> None:
    for namespace in _all():
        owner = namespace.split("-")[1]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            _remove(namespace)


def _remove(namespace: str) -> None:
    """With what runs in it, or it would live on without a name."""
    if namespace in _all():
        Machine(namespace, "", "").kill()
        subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)


def _all() -> list[str]:
    """The namespaces that this module has made, in whatever process."""
    lines = _run("ip", "netns", "list").splitlines()
    return [line.split()[0] for line in lines if line.startswith(f"{_PREFIX}-")]


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
