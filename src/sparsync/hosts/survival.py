"""Going on without a rank that was lost, and with one that has come: ``attach(..., on_loss="continue")``.

Every step can be undone, so that a step that failed leaves no trace. When a rank is lost, the survivors agree on the
newest weights that any of them has (``membership.py``). Whoever has not got these was about to make the same step: what
it had sent is in them, so its residual goes on as if the step had been completed, and weights and optimizer come from
one that has completed it. On all others the step under way is undone. Then the process group is made anew, and DDP's
buckets with it: one that was on its way cannot be used again, and who has just joined could not know how the others
have rebuilt theirs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistError, PrefixStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from sparsync.collectives.comm.membership import Generation, Membership
from sparsync.engine import checkpoint
from sparsync.engine.reducer import Reducer
from sparsync.errors import PeerLost, Regroup, name_ranks
from sparsync.hosts.handle import Handle
from sparsync.hosts.shared_buffers import share_buffers
from sparsync.hosts.states.peer import PeerState, broadcast, digest_of
from sparsync.version import __version__

log = logging.getLogger("sparsync")

LOOK = 1.0  # seconds between two looks for ranks that wait to join
_attached: WeakSet[Handle] = WeakSet()  # of this process


@dataclass(frozen=True)
class Change:
    """What a user's ``on_change`` is told, on every rank, when others train together than before.

    Args:
        rank, workers: from now on.
        old_rank, old_workers: before; ``None`` on a rank that has just joined.
        lost: old ranks whose share of the work is to be done by the others; nobody knows of them on one that has just
            joined.
        joined: new ranks that have come; on one that has just joined, all.
        steps: that all have made.
        lost_steps: of each rank that was lost, from how many steps the gradients may be that it had kept back, at most:
            those since it began with nothing kept, which a rank that joins does, or the training did.
        lost_norm: about the norm of what each of them had kept back: the mean of what those who were left kept then.
    """

    rank: int
    workers: int
    old_rank: int | None
    old_workers: int | None
    lost: tuple[int, ...]
    joined: tuple[int, ...]
    steps: int
    lost_steps: tuple[int, ...] = ()
    lost_norm: float = 0.0


@dataclass(frozen=True)
class Keeper:
    """What a rank tells the others of what it keeps, whenever they change.

    Args:
        since: the step at which it kept nothing.
        norm: of its residual, before the change; ``None`` where it has just come.
    """

    since: int
    norm: float | None = None


def check_states(on_loss: str, on_change: object, states: Sequence[Any]) -> None:
    """Refuse what ranks that go on could not use, or would never be asked for."""
    if on_loss != "continue" and (on_change is not None or states):
        name = "states" if on_change is None else "on_change"
        raise ValueError(f"{name}= needs on_loss='continue': it is for a training that goes on without a rank")
    if on_change is not None and not callable(on_change):
        raise ValueError(f"on_change must be callable, with a Change, got {on_change!r}")
    for state in states:
        if not (callable(getattr(state, "state_dict", None)) and callable(getattr(state, "load_state_dict", None))):
            raise ValueError(f"states must have state_dict() and load_state_dict(), got {state!r}")


class Survival:
    """Lets a training go on when ranks are lost, and when others come.

    Args:
        handle: of the training, not started yet.
        ddp: its model.
        states: of which a rank that is behind takes what another one has: a scheduler, ...
        on_change: is told of every change, once all can go on.
    """

    def __init__(
        self,
        handle: Handle,
        ddp: DistributedDataParallel,
        states: Sequence[Any] = (),
        on_change: Callable[[Change], None] | None = None,
    ) -> None:
        if not dist.is_initialized() or ddp.process_group is not dist.group.WORLD:
            raise ValueError("on_loss='continue' needs a model of the default process group, which is made anew")
        if any(not other.detached for other in _attached):  # whose group would be made anew, too
            raise ValueError("on_loss='continue' is for one model of a process at a time: detach() the other one first")
        assert handle.plan.optimizer is not None
        self.handle, self.ddp = handle, ddp
        self.optimizer, self._on_change = handle.plan.optimizer, on_change
        self._peer_state = PeerState(handle.module, self.optimizer, states)
        store = _root(ddp.process_group.get_group_store())
        self.members = Membership(store, handle.plan.deadline, _fingerprint(handle))
        _attached.add(handle)
        self._steps, self._undone, self._looked = 0, False, 0.0
        self._former: tuple[int, ...] = ()  # whom this rank has trained with, last
        self._since, self._keepers = 0, dict[int, Keeper]()  # by number; of others, from step 0 on
        self._said = self._keepers  # when a group was made
        self._ended: list[Any] = []  # process groups
        self._limit = timedelta(seconds=handle.plan.deadline)
        handle.on_detach(share_buffers(ddp, handle))
        handle.on_detach(self.members.close)
        handle.on_detach(self.optimizer.register_step_post_hook(lambda *_: self._note_steps()).remove)

    def begin(self) -> None:
        """Start a training with the ranks of the process group; a process in a group of its own joins one that is
        under way."""
        try:
            if dist.get_world_size() == 1 and self.members.find_training():
                self.members.join()
                self._go_on_with(self.members.now, None)
                return
            channel = self.handle.start().channel
            if channel.backend == "nccl":
                raise ValueError(
                    "on_loss='continue' works over Gloo alone: NCCL's groups do not end without a lost rank"
                )
            numbers = [int(number) for number in channel.share(str(self.members.number))]
            text = self.members.begin(numbers) if channel.rank == 0 else ""
            self.members.enter(channel.share(text)[0])
            self._former = self.members.now.members
            _set_pg_timeout(self._limit)  # of exchanges that are not ours, as in the groups that follow
        except BaseException:
            self.handle.abandon()
            raise

    @contextmanager
    def step(self) -> Iterator[None]:
        """Guard a step: see ``Handle.surviving``."""
        self._note_steps()
        if self._somebody_waits():
            self.handle.fail(Regroup("a rank waits to join"))
            self._recover()
        try:
            yield
        except Exception as error:
            if not self._is_loss(error):
                raise
            self._recover()

    def finish(self) -> None:
        """See ``Handle.finish``."""
        self._note_steps()
        while not self.members.finish():
            self._recover()

    def forget_ages(self) -> None:
        """Take what all ranks keep for as old as the training: they have loaded a checkpoint."""
        self._since, self._keepers = 0, {}

    def _note_steps(self) -> None:
        """Note how many steps the weights have made: the last one is over, applied or left out."""
        reducer = self.handle._running()
        if reducer.error is None:
            self._steps, self._undone = reducer.step, reducer.completion.bad

    def _somebody_waits(self) -> bool:
        """Return whether the ranks have to stop here, which the first of them decides."""
        if self.handle._running().channel.rank or time.monotonic() - self._looked < LOOK:
            return False
        self._looked = time.monotonic()
        return self.members.somebody_waits()

    def _is_loss(self, error: Exception) -> bool:
        """Return whether a step failed because a rank was lost, or waits to join."""
        reducer = self.handle._running()
        if reducer.error is None and _is_backend_error(error):
            # An exchange of the user's own; the other ranks may wait in ours.
            self.handle.fail(PeerLost(str(error).splitlines()[0]))
        return isinstance(reducer.error, PeerLost | Regroup)

    def _recover(self) -> None:
        """Agree with the other ranks, and go on with them."""
        old = self.handle._running()
        if isinstance(old.error, PeerLost):
            log.warning("%s", old.error)
        self._go_on_with(self.members.agree(self._steps, self._undone), old)

    def _go_on_with(self, generation: Generation, old: Reducer | None) -> None:
        """Train with a generation from now on, or with a later one, however many more are lost meanwhile.

        Args:
            old: has what this rank keeps; ``None`` on one that has just come.
        """
        while True:
            try:
                reducer = self._build(generation, old)
                break
            except RuntimeError as error:
                if not isinstance(error, PeerLost) and not _is_backend_error(error):
                    raise
                log.warning("another rank was lost meanwhile: %s", str(error).splitlines()[0])
            generation = self.members.agree(None if old is None else self._steps, self._undone)
        self._tell(generation, reducer, old)

    def _build(self, generation: Generation, old: Reducer | None) -> Reducer:
        """Return the reducer of a generation: with its process group, newest weights, and what this rank keeps."""
        handle, number = self.handle, self.members.number
        rank, workers = generation.members.index(number), len(generation.members)
        behind, newest = number in generation.behind, dict[str, Any]()
        if old is not None and not behind:
            _settle(old, generation.steps, old.completion.bad)
        handle._stop()
        self._make_group(generation, rank, workers)
        if generation.behind:
            if number == generation.source:
                newest = self._peer_state.collect(self._kept(old, generation.steps))
            newest = broadcast(newest, generation.members.index(generation.source), behind)
        if behind:
            self._peer_state.load(newest)
            self._steps, self._undone = generation.steps, generation.undone
            if old is not None:
                _settle(old, generation.steps, generation.undone)
                if old.worker.preconditioner is not None:  # some of it is learned when the optimizer steps
                    old.worker.preconditioner.load_state_dict(newest["sync"]["moments"])
        self._build_buckets()
        reducer = handle.start()
        own = [] if old is None else [self._kept(old, generation.steps)]
        self._since = self._since if own else generation.steps
        state = checkpoint.share_of(own, own[0] if own else newest["sync"], rank, workers)
        # Some may have been in a generation that others have missed: what it has decided is of no account.
        handle._load({**state, "options": checkpoint.digest_of(reducer.plan)})
        reducer.origin.training = state["training"]
        reducer.channel.assert_consistent("model after a change of ranks", digest_of(handle.module))
        keeper = Keeper(self._since, _norm_of(own[0]["residuals"]) if own else None)
        said = reducer.channel.share(json.dumps(asdict(keeper)))
        self._said = {m: Keeper(**json.loads(text)) for m, text in zip(generation.members, said, strict=True)}
        return reducer

    def _kept(self, old: Reducer | None, steps: int) -> dict[str, Any]:
        """Return what this rank keeps after so many steps."""
        assert old is not None
        return checkpoint.state_dict(old.worker, len(self._former), steps, old.origin.training)

    def _make_group(self, generation: Generation, rank: int, workers: int) -> None:
        """Make the default process group anew."""
        self._ended.append(self.ddp.process_group)
        if dist.is_initialized():
            dist.destroy_process_group()
        store = PrefixStore(f"sparsync generation {generation.number}", self.members.root)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=workers, timeout=self._limit)

    def _build_buckets(self) -> None:
        """Let DDP begin anew in the new group, as when it was made, or loaded from a file."""
        ddp, hooks = self.ddp, self.ddp._comm_hooks
        ddp.process_group, ddp._comm_hooks, self.handle.group = dist.group.WORLD, [], None  # type: ignore[assignment]
        ddp.__setstate__(ddp.__getstate__())  # type: ignore[no-untyped-call]
        for hook, state in hooks:
            ddp.register_comm_hook(state, hook)
        # Nobody else holds the old group by now. An exchange of DDP's that was left in it may wait for the others, and
        # the group's end for that.
        ended, self._ended = self._ended, []
        threading.Thread(target=ended.clear, name="sparsync group", daemon=True).start()
        self.optimizer.zero_grad()

    def _tell(self, generation: Generation, reducer: Reducer, old: Reducer | None) -> None:
        """Count who was lost, and tell the user."""
        former, members, rank = self._former, generation.members, reducer.channel.rank
        self._former = members
        lost = tuple(rank for rank, number in enumerate(former) if number not in members)
        joined = tuple(rank for rank, number in enumerate(members) if number not in former)
        ages = tuple(generation.steps - self._keepers.get(former[rank], Keeper(0)).since for rank in lost)
        norms = [keeper.norm for keeper in self._said.values() if keeper.norm is not None]
        norm = sum(norms) / len(norms) if lost else 0.0
        self._keepers = self._said
        if old is not None:
            reducer.stats.total = total = old.stats.total
            total.lost_ranks += len(lost)
            total.joined_ranks += len(joined)
            total.lost_steps, total.lost_norm = max(total.lost_steps, *ages, 0), total.lost_norm + len(lost) * norm
        if rank == 0 and lost:
            log.warning(
                "lost: %s of %d, and what was kept back there, of %d steps at most, with a norm of about %.2g each",
                name_ranks(lost), len(former), max(ages), norm,
            )  # fmt: skip
        if rank == 0:
            others = f"{len(members)} rank{'s' * (len(members) > 1)}"
            log.warning("training goes on after step %d with %s", generation.steps, others)
        if self._on_change is not None:
            old_rank = None if old is None else former.index(self.members.number)
            change = Change(
                rank, len(members), old_rank, len(former) or None, lost, joined, generation.steps, ages, norm
            )
            self._on_change(change)


def _norm_of(kept: Mapping[str, Tensor]) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(own, dtype=torch.float64)) for own in kept.values()))


def _settle(reducer: Reducer, steps: int, bad: bool) -> None:
    """Let the last step that a rank began count if it is among the steps that do, unless it was not finite."""
    reducer.settle_as_agreed(reducer.vote.current.number < steps and not bad)


def _is_backend_error(error: Exception) -> bool:
    """Return whether an exchange failed, or the making of a process group."""
    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def _fingerprint(handle: Handle) -> str:
    """Return a text that differs when options, model or version do."""
    parts = [__version__, handle.plan.configuration(frozenset()), *map(str, handle.parameters)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _root(store: Any) -> Any:
    """Return the store that a process group's keys are in."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
