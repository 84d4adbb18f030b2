"""A process group of our own, with a deadline: every exchange goes through here and is counted here.

Ranks that wait longer than a second write their name into the group's store and look there for an alarm. Whoever runs
into an error or the deadline raises the alarm, with the ranks that never wrote their name: so all survivors stop with
the same sentence, and an exchange that goes well costs nothing extra.
"""

from __future__ import annotations

import hashlib
import time
from datetime import timedelta
from itertools import zip_longest
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from sparsync.errors import Mismatch, PeerFailed, PeerLost
from sparsync.sparse import FAILED
from sparsync.wire import HEADER, MAGIC, VERSION, Header, Wire

PATIENCE = 1.0  # seconds of waiting after which a rank writes its name down
GRACE = 3.0  # seconds, or a quarter of the deadline, that whoever raises the alarm leaves the others to write theirs


# torch 2.13 gave the call its new name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Channel:
    """The ranks that train together.

    Args:
        peers: the process group of the model; ``None`` for a single worker without ``torch.distributed``.
        wire: the format of messages.
        deadline: seconds an exchange may take.
    """

    def __init__(self, peers: dist.ProcessGroup | None, wire: Wire, deadline: float = 300.0) -> None:
        if not deadline > 0:
            raise ValueError(f"deadline must be above 0 seconds, got {deadline!r}")
        self.wire, self.deadline, self.grace = wire, deadline, min(GRACE, deadline / 4)
        self.rank = 0 if peers is None else dist.get_rank(peers)
        self.size = 1 if peers is None else dist.get_world_size(peers)
        self._bytes = 0
        self.sequence = 0
        self.group: dist.ProcessGroup | None = None
        self.backend = "none"
        if self.size > 1:
            assert peers is not None
            # A group of our own: our exchanges can never be taken for the model's. Its own time limit is only a net
            # under ours, which names the missing ranks.
            limit = timedelta(seconds=deadline + GRACE)
            ranks = dist.get_process_group_ranks(peers)
            # Ranks outside a subgroup cannot take part in making ours; torch then names it after its ranks.
            self._local = len(ranks) < dist.get_world_size()
            self.group = dist.new_group(ranks, timeout=limit, use_local_synchronization=self._local)
            self.backend = str(dist.get_backend(self.group))
            self.store = self.group.get_group_store()

    def all_gather(self, message: Tensor) -> Tensor:
        """Every rank's ``message``, shape ``(ranks, *message.shape)``."""
        if self.group is None:
            return message.unsqueeze(0)
        out = message.new_empty(self.size * message.numel())
        self._bytes += message.nbytes
        self._wait(_all_gather(out, message.contiguous().view(-1), group=self.group, async_op=True))
        return out.view(self.size, *message.shape)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum of every rank's ``tensor``, in place: the backend's own."""
        if self.group is not None:
            self._bytes += tensor.nbytes
            self._wait(dist.all_reduce(tensor, group=self.group, async_op=True))
        return tensor

    def take_count(self) -> int:
        """Bytes of the tensors handed to ``torch.distributed`` since the last call."""
        count, self._bytes = self._bytes, 0
        return count

    def verify(self, rows: Tensor) -> list[Header]:
        """Headers of the messages ``rows``; raises, on every rank alike, if they disagree or a rank has failed."""
        headers = [Header(*words) for words in rows[:, :HEADER].tolist()]
        self.sequence += 1
        for rank, header in enumerate(headers):
            if header.flags & FAILED:
                raise PeerFailed(self._cause(rank))
        for field in ("version", "sequence", "unit", "digest"):
            said = [getattr(header, field) for header in headers]
            if len(set(said)) > 1:
                listing = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(said))
                raise Mismatch(f"the ranks are not at the same exchange, their {field} differs ({listing})")
        if headers[0].version != MAGIC << 16 | VERSION:
            raise Mismatch(f"this is not a message of format {VERSION}: header {headers[0]}")
        return headers

    def compare(self, what: str, text: str) -> None:
        """Raise on every rank, with the same sentence, if ``text`` is not the same on all."""
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
        said = self.all_gather(torch.tensor([digest])).flatten().tolist()
        odd = [rank for rank in range(self.size) if said[rank] != said[0]]
        if odd:
            self.store.set(f"{what}/{self.rank}", text)
            ours, theirs = (bytes(self.store.get(f"{what}/{rank}")).decode() for rank in (0, odd[0]))
            ranks = ", ".join(map(str, odd))
            raise Mismatch(f"{what} differs on rank {ranks}: {_difference(ours, theirs, odd[0])}")

    def tell(self, cause: str) -> None:
        """Leave word why this rank fails; its next message only carries the flag."""
        if self.group is not None:
            self.store.compare_set(f"cause/{self.rank}", "", cause)  # the first: peers may be reading it already
        else:
            self._own_cause = cause

    def raise_alarm(self, text: str) -> str:
        """Tell every rank that waits to stop with this text, or with that of whoever was first; returns it."""
        if self.group is None:
            return text
        return bytes(self.store.compare_set("alarm", "", text)).decode()

    def close(self) -> None:
        """Give the process group back."""
        # A group named after its ranks is left to the final destroy_process_group(): were it destroyed, the next one
        # would get its name, find its old keys in the store, and hang.
        if self.group is not None and dist.is_initialized() and not self._local:
            dist.destroy_process_group(self.group)
        self.group, self.size = None, 1

    def _cause(self, rank: int) -> str:
        if self.group is None:
            return self._own_cause
        return bytes(self.store.get(f"cause/{rank}")).decode()

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None
        if self.backend != "gloo":
            work.wait()  # NCCL: the stream waits, not we
            return
        until = time.monotonic() + self.deadline - self.grace
        while not self._done(work, min(self.deadline / 8, PATIENCE)):
            if time.monotonic() > until:
                self._alarm(f"no answer within {self.deadline:g} s")
            self._look_around()

    def _done(self, work: dist.Work, seconds: float) -> bool:
        """Wait at most ``seconds``; whether the exchange is over."""
        try:
            work.wait(timedelta(seconds=seconds))
            return True
        except RuntimeError:
            if not work.is_completed():
                return False
        try:
            work.wait()  # over, well or badly
            return True
        except RuntimeError as error:
            self._alarm(f"the connection to a rank broke ({str(error).splitlines()[0]})")

    def _look_around(self) -> None:
        """Write our name down, and stop if an alarm was raised."""
        try:
            self.store.set(f"here/{self.sequence}/{self.rank}", "")
            alarm = bytes(self.store.get("alarm")).decode() if self.store.check(["alarm"]) else ""
        except RuntimeError as error:
            raise PeerLost(f"exchange {self.sequence}: rank {self.rank} lost the store, so rank 0 is gone") from error
        if alarm:
            raise PeerLost(alarm)

    def _alarm(self, cause: str) -> NoReturn:
        """Find out who is missing, tell everybody, raise."""
        self._look_around()
        names = {rank: f"here/{self.sequence}/{rank}" for rank in range(self.size)}
        until = time.monotonic() + self.grace
        while names and time.monotonic() < until:
            names = {rank: name for rank, name in names.items() if not self.store.check([name])}
            time.sleep(0.05)
        ranks = ", ".join(map(str, names)) or "none"
        text = f"exchange {self.sequence}: {cause}; ranks not heard from: {ranks}"
        raise PeerLost(self.raise_alarm(text))


def _difference(ours: str, theirs: str, rank: int) -> str:
    """The first line in which two texts differ."""
    for mine, other in zip_longest(ours.splitlines(), theirs.splitlines(), fillvalue="nothing"):
        if mine != other:
            return f"rank 0 has {mine}, rank {rank} has {other}"
    return "same lines"
