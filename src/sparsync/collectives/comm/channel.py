"""A process group of our own: every exchange goes through here, is counted here and has a deadline."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from sparsync.collectives.comm.comm_thread import CommThread
from sparsync.collectives.comm.device_status import Report
from sparsync.collectives.comm.header_checks import SAME, HeaderChecks, HostChecks, check_intact, disagreement
from sparsync.collectives.comm.recording import Recording
from sparsync.collectives.comm.store_monitor import GRACE, StoreMonitor
from sparsync.kernels.device import usable_on
from sparsync.layout import Layout
from sparsync.number_checks import is_number
from sparsync.sparse import SparseGrad
from sparsync.version import __version__
from sparsync.wire import HEADER, VERSION, Header, Wire, read_headers
from sparsync.workspace import Workspace

# torch 2.13 gave the call its new name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

LONGEST = 365 * 24 * 3600  # seconds: what lies far beyond, no clock of the backends can hold


class Channel:
    """The ranks that train together.

    ``may_defer``: the device can decide what an exchange comes to, so that nothing waits for the host. ``checks``: who
    looks at headers; the host, unless the engine chooses otherwise when it starts. ``ranks``: the numbers by which the
    monitor, and error messages, know the ranks that exchange here. ``divisor``: what makes a sum over them the mean
    over all workers: their number, unless what each of them sends is a sum itself. ``recording``: what the next
    exchange is recorded in, if anything. ``left_out``: what a collective has rejected here before its last round, in
    which others may complete an exchange that fails here.

    Args:
        peers: the process group of the model; ``None`` for a single worker without ``torch.distributed``.
        wire: the format of messages.
        deadline: seconds an exchange may take.
        device: where the tensors to exchange are; the CPU by default.
    """

    def __init__(
        self, peers: dist.ProcessGroup | None, wire: Wire, deadline: float = 300.0, device: torch.device | None = None
    ) -> None:
        check_deadline(deadline)
        self.wire = wire
        self.rank = 0 if peers is None else dist.get_rank(peers)
        self.size = self.divisor = 1 if peers is None else dist.get_world_size(peers)
        self.ranks: Sequence[int] = range(self.size)
        self.sequence = 0
        self.unit = "attach"  # what is being exchanged, for messages
        self.group: dist.ProcessGroup | None = None
        self.backend = "none"
        self._bytes = 0
        self.recording: Recording | None = None
        self.left_out: SparseGrad | None = None
        self._messages: CommThread | None = None  # waits for messages between two ranks
        self._release: Callable[[], object] = lambda: None
        device = device or torch.device("cpu")
        # A single worker sends nothing; but NCCL, which is asked on the device, is asked all the same.
        if peers is None or (self.size == 1 and _backend(peers, device) != "nccl"):
            self.monitor = StoreMonitor(HashStore(), self.rank, self.size, deadline)
            self.checks: HeaderChecks = HostChecks(self.monitor)
            self.may_defer = usable_on(device)
            return
        # The store of the model's group is there before any exchange. Each rank counts how often it came here: the
        # same number on all of them.
        store = PrefixStore("sparsync", peers.get_group_store())
        self.monitor = StoreMonitor(store, self.rank, self.size, deadline)
        self.monitor.store.enter(str(self.monitor.ask(lambda store: store.add(f"rank {self.rank}", 1), self.place)))
        self.checks = HostChecks(self.monitor)
        self.assert_consistent("version", f"sparsync {__version__}, format {VERSION}")  # and so all ranks are here
        # A group of our own: our exchanges can never be taken for the model's. Its own time limit is only a net under
        # ours, which names the missing ranks.
        self._limit = timedelta(seconds=deadline + GRACE)
        self._peers = dist.get_process_group_ranks(peers)
        # Ranks outside a subgroup cannot take part in making ours; torch then names it after its ranks.
        self._local = len(self._peers) < dist.get_world_size()
        usual = str(dist.get_backend_config(peers)) == str(dist.get_backend_config())
        self._asked = None if usual else dist.get_backend(peers)  # as the peers have, which may not be the default
        group = self.new_group(self.ranks)
        self._hold(group)
        self.backend = _backend(group, device)
        self.may_defer = self.backend == "nccl" and usable_on(device)

    @property
    def _polled(self) -> bool:
        """Whether calls only begin, and are waited for with a deadline; NCCL's go to the stream that is current."""
        return self.backend != "nccl"

    @property
    def place(self) -> str:
        """Where in the order of exchanges this rank is."""
        return f"exchange {self.sequence}, {self.unit}"

    def new_group(self, ranks: Sequence[int]) -> Any:
        """Return a process group of some of our ranks; all of ours call this, in the same order."""
        if self._local and self.rank not in ranks:
            return None
        make = partial(
            dist.new_group, [self._peers[rank] for rank in ranks], self._limit, self._asked,
            use_local_synchronization=self._local,
        )  # fmt: skip
        return self.monitor.ask(lambda _: make(), self.place)  # torch asks the store, without a time limit

    def _hold(self, group: Any) -> None:
        """Exchange in this group, until this channel is closed or nobody has it any more."""
        self.group, release = group, weakref.finalize(self, give_back, [group], self._local, self.monitor)
        release.atexit, self._release = False, release

    def room_for(self, message: Tensor) -> Tensor:
        """Return room in which ``all_gather`` can leave every rank's ``message``, time and again."""
        return message.unsqueeze(0) if self.group is None else message.new_empty(self.size, *message.shape)

    def all_gather(self, message: Tensor, room: Tensor | None = None) -> Tensor:
        """Return every rank's ``message``, shape ``(ranks, *message.shape)``; in its ``room``, if that is given."""
        out = self.room_for(message) if room is None else room
        if self.group is not None:
            flat = out.view(-1), message.contiguous().view(-1)
            self._carry(message, lambda: _all_gather(*flat, group=self.group, async_op=self._polled))
        return out

    def all_to_all(self, messages: Tensor, room: Tensor | None = None) -> Tensor:
        """Row r of ``messages`` goes to rank r; row r of what comes back is from rank r; in its ``room``, if given."""
        if self.group is None:
            return messages
        out = torch.empty_like(messages) if room is None else room
        messages = messages.contiguous()
        self._carry(messages, lambda: dist.all_to_all_single(out, messages, group=self.group, async_op=self._polled))
        return out

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum of every rank's ``tensor``, in place: the backend's own."""
        if self.group is not None:
            self._carry(tensor, lambda: dist.all_reduce(tensor, group=self.group, async_op=self._polled))
        return tensor

    def sum_at_first(self, tensor: Tensor) -> None:
        """Make the first rank's ``tensor`` the sum of every rank's, by the backend; elsewhere it is spoilt."""
        if self.group is not None:
            self._bytes += tensor.nbytes
            self._wait(dist.reduce(tensor, group=self.group, group_dst=0, async_op=True))

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Make every rank's ``tensor`` that of the rank ``source``."""
        if self.group is not None:
            self._bytes += tensor.nbytes
            self._wait(dist.broadcast(tensor, group=self.group, group_src=source, async_op=True))

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to sum as ``all_reduce`` does, several at a time; returns what waits for the sum."""
        work = None if self.group is None else dist.all_reduce(tensor, group=self.group, async_op=True)

        def finish() -> Tensor:
            if work is not None:
                self._bytes += tensor.nbytes
                self._wait(work)
            return tensor

        return finish

    def _carry(self, message: Tensor, start: Callable[[], Any]) -> None:
        """Let the backend carry a message, and wait for it; in a recording, whenever that is played."""

        def act() -> None:
            self._bytes += message.nbytes
            work = start()
            if work is not None:
                self._wait(work)

        if self.recording is None:
            act()
        else:
            self.recording.add(act)

    def send(self, message: Tensor, to: int) -> None:
        """Give ``message`` to rank ``to``."""
        self._bytes += message.nbytes
        held = message if self.backend == "nccl" else message.cpu()  # Gloo sends a single tensor from the host alone
        self._pair(lambda: dist.isend(held, group=self.group, group_dst=to))

    def receive(self, out: Tensor, source: int) -> Tensor:
        """Return what rank ``source`` sends, of the form of ``out``; that may be where it is."""
        held = out if self.backend == "nccl" else out.cpu()
        self._pair(lambda: dist.irecv(held, group=self.group, group_src=source))
        return held.to(out.device)

    def number(self, device: torch.device) -> Tensor:
        """Return the number of the exchange under way, where kernels look it up."""
        return self.checks.number(device, self.sequence)

    def gather_headers(self, sent: SparseGrad, layout: Layout, workspace: Workspace) -> Tensor:
        """Return every rank's header alone."""
        own = self.checks.header(self.wire, sent, self.sequence, layout, workspace)
        return self.all_gather(own, self.checks.room(workspace, lambda: self.room_for(own)))

    def take_count(self) -> int:
        """Return bytes of the tensors handed to ``torch.distributed`` since the last call."""
        count, self._bytes = self._bytes, 0
        return count

    def verify(self, rows: Tensor, again: bool = False) -> list[Header]:
        """Return the headers of the messages ``rows``, or of headers that travel alone; raises, on every rank alike, if
        they disagree, a rank failed or a message was damaged.

        Where the device checks them there are none yet: the host hears of them with the step. It hears of one round of
        each exchange; of a further one (``again``) only if something is wrong there.
        """
        self.sequence += 1
        return self.checks.check(rows, self.sequence, again)

    def await_report(self, report: Report) -> None:
        """Wait until ``report`` can be read; raises before the deadline if a rank is gone and it never comes."""
        if not report.there(0):
            self.monitor.wait(report.there, self.place)

    def verify_pair(self, ours: Tensor, theirs: Tensor, source: int) -> Header:
        """Return the header of a message from rank ``source``: it must be whole, and at the same exchange as ours."""
        mine, (other,) = Header(*ours[:HEADER].tolist()), read_headers(theirs.unsqueeze(0))
        check_intact([other], [self.ranks[source]], self.monitor)
        for field in SAME:
            said = getattr(mine, field), getattr(other, field)
            if said[0] != said[1]:
                error = disagreement(field, (self.ranks[self.rank], self.ranks[source]), said)
                raise self.monitor.broadcast_error(error)  # the others only see us gone
        return other

    def share(self, text: str) -> list[str]:
        """Return every rank's ``text``."""
        return self.monitor.share(text, self.place)

    def assert_consistent(self, what: str, text: str) -> None:
        """Raise on every rank, with the same sentence, if ``text`` is not the same on all."""
        self.monitor.assert_consistent(what, text, self.place)

    def close(self) -> None:
        """Give the process group back."""
        self._abandon_messages()
        self.monitor.close()
        self.size, self.group = 1, None
        self._release()

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None
        if self.backend == "gloo":
            self.monitor.wait(lambda seconds: self._done(work, seconds), self.place)
        else:
            work.wait()  # NCCL: the stream waits, not we

    def _pair(self, start: Callable[[], dist.Work | None]) -> None:
        """Wait for a message between two ranks. With Gloo on a thread of its own, which is given all the time there is:
        a wait for such a message that runs out closes the connection. One thread for all of them: each that has called
        the backend leaves some of its memory behind when it ends."""
        if self.backend != "gloo":
            self._wait(start())
            return
        limit, over, broken = timedelta(seconds=self.monitor.deadline + GRACE), threading.Event(), []

        def finish() -> None:
            try:
                work = start()
                assert work is not None
                work.wait(limit)
            except RuntimeError as error:
                broken.append(str(error).splitlines()[0])
            over.set()

        self._messages = self._messages or CommThread(threaded=True, name="sparsync message")
        self._messages.submit(finish)
        try:
            self.monitor.wait(over.wait, self.place)
        except BaseException:  # it may wait for a message that never comes
            self._abandon_messages()
            raise
        if broken:
            self.monitor.fail(f"the connection to a rank broke ({broken[0]})", self.place)

    def _abandon_messages(self) -> None:
        if self._messages is not None:
            self._messages.abandon()
            self._messages = None

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
            self.monitor.fail(f"the connection to a rank broke ({str(error).splitlines()[0]})", self.place)


def give_back(last: list[Any], named: bool, monitor: StoreMonitor) -> None:
    """Let a process group go.

    Args:
        last: holds it; nothing else of ours does.
        named: it is named after its ranks, and left to the final ``destroy_process_group()``: were it destroyed, the
            next one would get its name, find its old keys in the store, and hang.
    """
    if dist.is_initialized() and not named:
        with suppress(ValueError):  # it was destroyed with all others, and a new default group was made
            dist.destroy_process_group(last[0])
    if monitor.alarmed:  # an exchange that the others left waits for them, and the group's end for that
        threading.Thread(target=last.clear, name="sparsync group", daemon=True).start()


def check_deadline(deadline: float) -> None:
    """Refuse what is no time that anything could wait for."""
    if not (is_number(deadline) and 0 < deadline <= LONGEST):
        raise ValueError(f"deadline must be above 0 seconds and at most a year ({LONGEST:,} s), got {deadline!r}")


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return what carries tensors of ``device``."""
    return dict(part.split(":") for part in dist.get_backend_config(group).split(",")).get(device.type, "none")
