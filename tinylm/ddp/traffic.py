"""What ranks really send each other, seen from outside the code that sends: calls by the profiler, bytes by the kernel.

The profiler sees every operation of `torch.distributed` where it enters C++, whoever called it: our collectives and
hooks, and the reducer inside DDP, which is C++ itself. The kernel counts the bytes of every TCP connection of this
process, so whatever Gloo makes of a collective is in them, with its headers. What TCP had to send again, as it does on
a busy machine, is no part of them.
"""

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch.autograd import profiler

BYTES_SENT = 200  # where `struct tcp_info` of linux/tcp.h has `tcpi_bytes_sent` and `tcpi_bytes_retrans`, 8 bytes each


@dataclass
class Traffic:
    """What this rank did in a while.

    Args:
        collectives: operations that all ranks take part in.
        messages: sends from this rank to another that were asked for one by one; what a collective sends inside
            is not among them.
        bytes: sent by this rank over TCP; None where that cannot be seen: any backend but Gloo, any system but Linux.
    """

    collectives: int = 0
    messages: int = 0
    bytes: int | None = None


@contextmanager
def observed_traffic() -> Iterator[Traffic]:
    """The traffic of what is done inside, complete after the end. All ranks must observe at the same time."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes to the user's screen that it starts
    traffic = Traffic()
    dist.barrier()
    before = _bytes_sent()
    with profiler.profile(use_kineto=False) as profile:
        yield traffic
    dist.barrier()  # what a rank has received, another has sent
    after = _bytes_sent()
    calls = [event.name for event in profile.function_events if event.name.startswith("c10d::")]
    traffic.messages = calls.count("c10d::send")
    traffic.collectives = len(calls) - traffic.messages - calls.count("c10d::recv_")
    if before is not None and after is not None:
        traffic.bytes = sum(count - before.get(connection, 0) for connection, count in after.items())


def _bytes_sent() -> dict[str, int] | None:
    """Bytes sent so far over each TCP connection of this process, by the kernel's name of its socket."""
    if dist.get_backend() != "gloo" or not os.path.isdir("/proc/self/fd"):
        return None
    sent = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{number}")
            if not name.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as connection:
                count = _payload_sent(connection)
        except OSError:  # closed meanwhile, or no TCP
            continue
        if count is None:
            return None
        sent[name] = count
    return sent


def _payload_sent(connection: socket.socket) -> int | None:
    """Bytes sent over a TCP connection, each counted once; None before Linux 4.19.

    Raises:
        OSError: no TCP connection.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(info) < BYTES_SENT + 16:
        return None
    sent, sent_again = struct.unpack_from("QQ", info, BYTES_SENT)
    return sent - sent_again
