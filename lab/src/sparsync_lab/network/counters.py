"""What a host's interface has sent, by the kernel's counters, and how fast a link is."""

from __future__ import annotations

import socket
import time

import torch.distributed as dist

from sparsync_lab.bench.loopback import InterfaceCount, sent
from sparsync_lab.network.shaping import Rate
from sparsync_lab.network.star import INTERFACE, Star
from sparsync_lab.training.local_workers import Worker

HEADER = 66  # bytes of Ethernet, IP and TCP (with time stamps) around the payload of a packet
BARRIERS = 5
PORT, CHUNK = 29600, 2**20
SECONDS, TRANSFERS = 0.1, 3  # that a transfer should take which measures a link, and how many there are


def sent_by_host() -> InterfaceCount:
    """Return what this process's host has sent so far."""
    return sent(INTERFACE)


def payload(count: InterfaceCount) -> int:
    """Return the bytes that were counted without the headers of packets; an acknowledgement alone has none."""
    return count.bytes - HEADER * count.packets


def barrier_payload() -> int:
    """Return the payload of a barrier, the smallest of a few: none is counted while another is on its way."""
    seen = []
    for _ in range(BARRIERS):
        dist.barrier()
        before = sent_by_host()
        dist.barrier()
        seen.append(payload(sent_by_host().since(before)))
    return min(seen)


def measure_link(worker: Worker, network: Star, rate: Rate) -> float:
    """Return the bits a second, without headers, that the fastest of a few transfers from host 0 to host 1 reaches; on
    other ranks nothing of use."""
    return max(_transfer(worker, network.hosts[1].address, round(SECONDS * rate.bits / 8)) for _ in range(TRANSFERS))


def _transfer(worker: Worker, address: str, size: int) -> float:
    seconds = 0.0
    if worker.rank == 1:
        with socket.create_server((address, PORT)) as server:
            dist.barrier()
            with server.accept()[0] as source:
                left = size
                while left:
                    left -= len(source.recv(min(left, CHUNK)))
                source.sendall(b".")
    else:
        dist.barrier()
    if worker.rank == 0:
        chunk = bytes(CHUNK)
        with socket.create_connection((address, PORT)) as sink:
            begun = time.perf_counter()
            for start in range(0, size, CHUNK):
                sink.sendall(chunk[: size - start])
            sink.recv(1)
            seconds = time.perf_counter() - begun
    dist.barrier()
    return 8 * size / seconds if seconds else 0.0
