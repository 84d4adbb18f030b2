"""How long an exchange takes on a network: latency and bandwidth of its links, flat or in two levels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sparsync.collectives.base import PAIRS, RING, TREE, Traffic, Transfer
from sparsync.number_checks import is_whole

PAYLOAD = 1448 / 1514  # of what Ethernet carries: the rest is headers of full packets
LATENCY = 50e-6  # seconds, where it is not given


@dataclass(frozen=True)
class Link:
    """A connection: a message of n bytes takes ``latency + n * seconds_per_byte``.

    Args:
        latency: seconds of a message, whatever its size.
        seconds_per_byte: of payload.
    """

    latency: float
    seconds_per_byte: float

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.seconds_per_byte >= 0):
            raise ValueError(f"a link's times must be 0 or more, got {self}")

    @classmethod
    def at(cls, bits: float, latency: float = LATENCY) -> Link:
        """Return a link by its line rate in bits a second, of which packet headers take their part."""
        return cls(latency, 8 / (PAYLOAD * bits))

    @property
    def bandwidth(self) -> float:
        """Line rate in bits a second."""
        return 8 / (PAYLOAD * self.seconds_per_byte) if self.seconds_per_byte else float("inf")


INSIDE = "inside"  # the pattern of what a machine's workers send each other, all machines at once
LOCAL = Link.at(100e9, 5e-6)  # inside a machine, where nothing is given


@dataclass(frozen=True)
class Network:
    """P workers, each with a link of its own; or several in every machine, which has one.

    Collectives are flat: ranks count through the machines one after another, so that of a ring, one rank of every
    machine sends to the next machine, and each round waits for that. Of messages to everybody, those of all ranks of a
    machine go through its link. The lower rounds of a tree stay inside.

    Args:
        link: of a machine.
        per_node: workers in each machine.
        local: between the workers of a machine.
        trees: what is a ring of P - 1 rounds takes log2 P of them, with the same bytes: NCCL does so for dense sums,
            and its later versions for all-gather, where latency would take longer than bytes. Gloo has rings alone.
    """

    link: Link
    per_node: int = 1
    local: Link = LOCAL
    trees: bool = False

    def __post_init__(self) -> None:
        if not (is_whole(self.per_node) and self.per_node >= 1):
            raise ValueError(f"per_node must be a whole number, 1 or more, got {self.per_node!r}")

    def seconds(self, traffic: Traffic, workers: int) -> float:
        """Return how long an exchange of P workers takes."""
        return sum(self.transfer_seconds(transfer, workers) for transfer in traffic.transfers)

    def transfer_seconds(self, transfer: Transfer, workers: int) -> float:
        """Return how long one part of an exchange takes."""
        if transfer.pattern == INSIDE:
            return transfer.rounds * self.local.latency + transfer.bytes * self.local.seconds_per_byte
        if workers <= 1 or not transfer.rounds:
            return 0.0
        link, inside = self.link, min(self.per_node, workers)
        if inside == workers:  # one machine
            link, inside = self.local if self.per_node > 1 else self.link, 1
        each = transfer.bytes * link.seconds_per_byte
        if transfer.pattern == PAIRS:  # all at once: one latency, and a machine's link carries what leaves it
            leaving = inside * (workers - inside) / (workers - 1)
            return link.latency + leaving * each
        if transfer.pattern == TREE and inside > 1:
            lower, all_rounds = (inside - 1).bit_length(), (workers - 1).bit_length()
            part = min(1.0, lower / all_rounds)
            below = transfer.rounds * self.local.latency + transfer.bytes * self.local.seconds_per_byte
            return part * below + (1 - part) * (transfer.rounds * link.latency + each)
        rounds: float = transfer.rounds
        if transfer.pattern == RING and self.trees:
            rounds *= (workers - 1).bit_length() / (workers - 1)
        return rounds * link.latency + each

    def with_bandwidth(self, bits: float) -> Network:
        """Return the same network with machines' links of another line rate."""
        return replace(self, link=Link.at(bits, self.link.latency))


def fit_link(transfers: Sequence[Transfer], seconds: Sequence[float]) -> Link:
    """Return the link that explains measured times best, by least squares of relative errors.

    Args:
        transfers: rings, of several sizes.
        seconds: that each took.
    """
    features = np.array([[transfer.rounds, transfer.bytes] for transfer in transfers], dtype=float)
    latency, per_byte = fit_times(features, np.array(seconds, dtype=float))
    return Link(latency, per_byte)


def fit_times(features: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Return coefficients, none below 0, with which the columns of ``features`` add up to times: least squares of
    relative errors, over every choice of columns."""
    weighted, ones = features / seconds[:, None], np.ones(len(seconds))
    best, least = [0.0] * features.shape[1], np.inf
    for chosen in range(1, 2 ** features.shape[1]):
        columns = [i for i in range(features.shape[1]) if chosen >> i & 1]
        scale = np.abs(weighted[:, columns]).max(0)
        if not scale.all():
            continue
        found = np.linalg.lstsq(weighted[:, columns] / scale, ones, rcond=None)[0] / scale
        error = float(((weighted[:, columns] @ found - ones) ** 2).sum())
        if (found >= 0).all() and error < least - 1e-12:
            best, least = [0.0] * features.shape[1], error
            for column, value in zip(columns, found, strict=True):
                best[column] = float(value)
    return best
