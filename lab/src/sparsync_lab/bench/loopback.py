"""The loopback interface: one of our own where that is allowed, its counters, and what it counts beside payload."""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct
import sys
from pathlib import Path
from typing import NamedTuple

CLONE_NEWNET = 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
REQUEST = "16sh22x"  # struct ifreq: the interface's name, its flags
PROTOCOLS = Path("/proc/thread-self/net/snmp")
SETTLED = 0.1  # seconds after which what was sent has arrived; an acknowledgement after that is all header


class InterfaceCount(NamedTuple):
    """What an interface has sent: payload and headers, in how many packets, and how many TCP sent once more.

    TCP sends a packet again when its acknowledgement is late, be it lost or not: on a busy machine some are.
    """

    bytes: int
    packets: int
    resent: int

    def since(self, before: InterfaceCount) -> InterfaceCount:
        return InterfaceCount(*(now - then for now, then in zip(self, before, strict=True)))


def isolate() -> bool:
    """Move this process, for good, to a network namespace of its own and return whether that was allowed.

    Nothing but what it starts from now on uses the loopback interface there. Usually allowed to root alone.
    """
    if not sys.platform.startswith("linux"):
        return False
    if ctypes.CDLL(None).unshare(CLONE_NEWNET) != 0:  # os.unshare needs Python 3.12
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:  # the interface is down at first
        flags = struct.unpack(REQUEST, fcntl.ioctl(any_socket, SIOCGIFFLAGS, struct.pack(REQUEST, b"lo", 0)))[1]
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack(REQUEST, b"lo", flags | IFF_UP))
    return True


def sent(interface: str = "lo") -> InterfaceCount:
    """Return what an interface of this process's network has sent so far."""
    import psutil

    if not PROTOCOLS.exists():
        raise ValueError(f"what TCP sends again is counted by {PROTOCOLS}, which only Linux has")
    counted = psutil.net_io_counters(pernic=True, nowrap=False)[interface]
    names, numbers = (line.split() for line in PROTOCOLS.read_text().splitlines() if line.startswith("Tcp:"))
    resent = dict(zip(names, numbers, strict=True))["RetransSegs"]
    return InterfaceCount(counted.bytes_sent, counted.packets_sent, int(resent))


def header_bytes(payload: int = 1000, times: int = 50) -> int:
    """Return the bytes that the interface counts for every packet beside its payload, measured by transfers whose
    payload is known.

    The smallest of many short ones, since whoever else uses the interface adds to it.
    """
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as source,
        server.accept()[0] as sink,
    ):
        seen = []
        for _ in range(times):
            before = sent()
            source.sendall(bytes(payload))
            sink.recv(payload, socket.MSG_WAITALL)
            count = sent().since(before)
            seen.append((count.bytes - payload) / count.packets)
    return round(min(seen))
