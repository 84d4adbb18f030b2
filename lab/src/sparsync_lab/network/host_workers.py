"""Worker processes, each on a host of its own."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from sparsync_lab.network.star import INTERFACE, Star
from sparsync_lab.training.local_workers import LocalWorkers, Worker, join_gloo

PORT = 29500  # of the store; nobody else is on these hosts


@contextmanager
def host_workers(network: Star) -> Iterator[LocalWorkers]:
    """Yield a worker process on every host of a network, all in one Gloo group; rank 0 hosts its store."""
    # Nobody in a namespace knows a name for its addresses, and every process would warn of that.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with LocalWorkers(len(network.hosts), store_on_rank_0=True) as workers:
        workers.run(_join, network)
        yield workers


def _join(worker: Worker, network: Star) -> None:
    network.hosts[worker.rank].namespace.enter()
    address = network.hosts[0].address
    os.environ.update(GLOO_SOCKET_IFNAME=INTERFACE, MASTER_ADDR=address, MASTER_PORT=str(PORT))
    # What momentum becomes, or that it should not be kept, is no news here.
    logging.getLogger("sparsync").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", UserWarning)
    join_gloo(worker)
