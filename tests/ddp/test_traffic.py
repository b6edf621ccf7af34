"""The kernel's count of what a rank sends, where the network makes TCP send it twice."""

import ctypes
import socket
import struct
import sys
from contextlib import suppress

import pytest

from tinylm.ddp.traffic import BYTES_SENT, _payload_sent

ATTACH_FILTER, DETACH_FILTER, RETURN = 26, 27, 6  # of asm/socket.h and linux/bpf_common.h


class Instruction(ctypes.Structure):
    """One of `struct sock_filter` of linux/filter.h."""

    _fields_ = [
        ("code", ctypes.c_ushort),
        ("if_true", ctypes.c_ubyte),
        ("if_false", ctypes.c_ubyte),
        ("k", ctypes.c_uint),
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the bytes of a TCP connection")
def test_bytes_that_were_sent_again_are_counted_once() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
        server.accept()[0] as receiver,
    ):
        if _payload_sent(sender) is None:
            pytest.skip("this kernel does not count the bytes that TCP sends again")
        sender.sendall(bytes(500))
        receiver.recv(500, socket.MSG_WAITALL)
        drop_all = Instruction(RETURN, 0, 0, 0)
        receiver.setsockopt(socket.SOL_SOCKET, ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(drop_all)))
        sender.sendall(bytes(1000))
        receiver.settimeout(0.05)
        for _ in range(600):  # TCP waits a fifth of a second for an answer
            with suppress(TimeoutError):
                receiver.recv(1)
            if sent_again(sender):
                break
        receiver.settimeout(30)
        receiver.setsockopt(socket.SOL_SOCKET, DETACH_FILTER, 0)
        assert len(receiver.recv(1000, socket.MSG_WAITALL)) == 1000
        assert sent_again(sender) >= 1000 and _payload_sent(sender) == 1500


def sent_again(connection: socket.socket) -> int:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return struct.unpack_from("Q", info, BYTES_SENT + 8)[0]
