"""Trainings that go on after a loss: what a process runs, where it fails, and what must come of it."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.hosts.survival import Survival
from tests.failures.ddp_training import ALL_SPARSE, SIZES, SMALL_BUCKETS, Chain, digest, local_gradients, loss_of
from tests.failures.survival_log import add_changes

DEADLINE, DENSITY, RATE = 20.0, 0.05, 0.05
LONG = 60.0  # seconds, that a rank is absent
TOPK: dict[str, Any] = {"compressor": "topk", "density": DENSITY, **ALL_SPARSE}


def die() -> None:
    os._exit(9)


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def once(action: Callable[[], None], due: Callable[[], bool], then: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``then``, before which something is done the first time that it is due."""
    done: list[bool] = []

    def wrapped(*args: Any, **keywords: Any) -> Any:
        if not done and due():
            done.append(True)
            action()
        return then(*args, **keywords)

    return wrapped


def fail_at(stage: str, step: int, run: Run, action: Callable[[], None]) -> None:
    """Let something happen to this process at a stage of a step."""
    sync, reducer, calls = run.sync, run.sync._running(), Counter[int]()  # in each step

    def at_call(last: bool) -> bool:
        """Count a call, and return whether it is the step's first, or as the step before had it, its last."""
        calls[reducer.vote.current.number] += 1
        return reducer.vote.current.number == step and calls[step] == (calls[step - 1] if last else 1)

    channel, completion = reducer.channel, reducer.completion
    if stage == "forward":
        run.ddp.register_forward_pre_hook(once(action, lambda: sync.steps == step, lambda *_: None))
    elif stage == "backward":  # the last layers' gradients are on their way
        weight = run.model.get_parameter("layer1.weight")
        weight.register_hook(once(action, lambda: sync.steps == step, lambda _: None))  # type: ignore[no-untyped-call]
    elif stage == "first exchange":  # all messages are there
        channel.verify = once(action, lambda: at_call(False), channel.verify)  # type: ignore[method-assign]
    elif stage == "last exchange":
        channel.verify = once(action, lambda: at_call(True), channel.verify)  # type: ignore[method-assign]
    elif stage == "result":  # of the last exchange, which never gets written
        completion.finish = once(action, lambda: at_call(True), completion.finish)  # type: ignore[method-assign]
    elif stage == "optimizer":
        run.optimizer.register_step_pre_hook(once(action, lambda: sync.steps == step + 1, lambda *_: None))
    elif stage == "after":
        run.optimizer.register_step_post_hook(once(action, lambda: sync.steps == step + 1, lambda *_: None))
    elif stage == "skip":  # what the user does in place of the optimizer's step
        run.skip = once(action, lambda: sync.steps == step + 1, run.skip)  # type: ignore[method-assign]
    else:
        assert sync.survival is not None  # a stage of going on: when a second one is lost
        setattr(sync.survival, stage, once(action, lambda: True, getattr(sync.survival, stage)))


class Normed(Chain):
    """Layers, and buffers that are sent before every forward pass."""

    def __init__(self) -> None:
        super().__init__(SIZES)
        self.add_module("norm", nn.BatchNorm1d(SIZES[-1]))


class Run:
    """A training of one process.

    Args:
        buffers: what its buffers hold at first, if not what they do in a new model.
        cut: what the user clips gradients at.
        skipped: steps that do not count: ``"rolled back"`` by the user, or ``"not finite"`` on the first rank.
    """

    def __init__(
        self,
        adam: bool = False,
        normed: bool = False,
        buffers: float = 0.0,
        cut: float = 0.0,
        skipped: Mapping[int, str] | None = None,
        **options: Any,
    ) -> None:
        self.cut, self.skipped = cut, skipped or {}
        self.model = Normed() if normed else Chain(SIZES)
        for buffer in self.model.buffers() if buffers else ():
            buffer.fill_(buffers)
        self.ddp = DistributedDataParallel(self.model, find_unused_parameters=adam, **SMALL_BUCKETS)
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, 1e-3) if adam else torch.optim.SGD(parameters, RATE)
        self.changes: list[Any] = []
        self.weights: list[list[Tensor]] = []  # at the beginning of every step
        given = {**TOPK, "deadline": DEADLINE, **options}
        self.sync = sparsync.attach(
            self.ddp, optimizer=self.optimizer, on_loss="continue", on_change=self.changes.append, **given
        )

    def step(self, remember: bool = True) -> None:
        """Make a step; it counts, or it does not."""
        with self.sync.surviving():
            if remember:
                del self.weights[self.sync.steps :]
                self.weights.append([p.detach().clone() for p in self.model.parameters()])
            why, rank = self.skipped.get(self.sync.steps), dist.get_rank()
            self.optimizer.zero_grad()
            loss = loss_of(self.ddp, rank, self.sync.steps)
            (loss * float("nan") if why == "not finite" and rank == 0 else loss).backward()
            if self.cut:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.cut)
            if why is None:
                self.optimizer.step()
            else:
                self.skip(why)

    def skip(self, why: str) -> None:
        """Leave a step out."""
        if why == "rolled back":
            self.sync.rollback()
        else:
            assert not all(p.grad.isfinite().all() for p in self.model.parameters() if p.grad is not None)

    def end(self) -> dict[str, Any]:
        """Finish, and return what there is to compare."""
        self.sync.finish()
        found = self.found()
        self.sync.detach()
        del self.ddp
        gc.collect()
        dist.destroy_process_group()
        return found

    def found(self) -> dict[str, Any]:
        state = self.sync.state_dict()
        return {
            "weights": [p.detach().clone().numpy() for p in self.model.parameters()],
            "residuals": {name: kept.numpy() for name, kept in state["residuals"].items()},
            "number": self.sync.survival.members.number if self.sync.survival else 0,
            "trajectory": [[p.numpy() for p in step] for step in self.weights],
            "buffers": [buffer.numpy() for buffer in self.model.buffers()],
            "steps": self.sync.steps,
            "rank": dist.get_rank(),
            "workers": dist.get_world_size(),
            "changes": self.changes,
            "lost": self.sync.stats().total.lost_ranks,
            "lost_steps": self.sync.stats().total.lost_steps,
            "lost_norm": self.sync.stats().total.lost_norm,
            "joined": self.sync.stats().total.joined_ranks,
            "threads": len(os.listdir("/proc/self/task")),
            "files": len(os.listdir("/proc/self/fd")),
        }


def case_training(
    store: Any,
    steps: int,
    faults: dict[int, list[tuple[str, int, str]]] | None = None,
    pause: float = 0.0,
    **options: Any,
) -> dict[str, Any]:
    """Train; ``faults``: by rank, what happens at which stage of which step."""
    run = Run(**options)
    rank = dist.get_rank()

    def lose_result() -> None:  # as if the connection had broken after the last message of ours was sent
        channel = run.sync._running().channel
        channel.monitor.fail("the connection to a rank broke", channel.place)

    def fail() -> None:
        raise MemoryError("no room")

    actions = {"die": die, "freeze": freeze, "lose": lose_result, "raise": fail}
    for stage, step, action in (faults or {}).get(rank, []):
        fail_at(stage, step, run, actions[action])
    try:
        while run.sync.steps < steps:
            run.step()
            store.set(f"steps of {rank}", str(run.sync.steps))
            time.sleep(pause)
    except sparsync.Excluded as error:
        run.sync._running()._unsettled = False  # what it keeps is that of the step before
        return {"excluded": str(error), **run.found()}
    return run.end()


def case_never_finishes(store: Any, absent: int, deadline: float) -> tuple[str, float]:
    """Train for two steps; one rank lives on, and never says that it has finished. Return what the others hear, and
    after how long."""
    run = Run(deadline=deadline)
    for _ in range(2):
        run.step()
    if dist.get_rank() == absent:
        time.sleep(LONG)
    began = time.monotonic()
    try:
        run.sync.finish()
    except sparsync.PeerLost as error:
        return str(error), time.monotonic() - began
    finally:
        run.sync.abandon()
    raise AssertionError("it has finished")


def case_held(store: Any, dies: bool, deadline: float) -> dict[str, Any]:
    """Train for two steps, then look who waits to join until the test says so, and go on; ``dies``: as it lets some
    in."""
    run = Run(deadline=deadline)
    if dies:
        fail_at("_make_group", 0, run, die)
    for _ in range(2):
        run.step()
    store.set(f"{dist.get_rank()} is held", "")
    waits = False
    while not store.check(["go on"]) or (dies and not waits):
        waits = run.sync.survival.members.somebody_waits()
        time.sleep(0.05)
    for _ in range(2):
        run.step()
    return run.end()


def case_waits_to_join(store: Any, deadline: float) -> tuple[str, float]:
    """Return what a process hears that is not let in, and after how long."""
    began = time.monotonic()
    try:
        Run(deadline=deadline)
    except sparsync.PeerLost as error:
        return str(error), time.monotonic() - began
    raise AssertionError("it has joined")


def case_among_kills(store: Any, steps: int, name: int, log: Path | None = None, **options: Any) -> dict[str, Any]:
    """Train, and write down with how many others this process had trained before each change; slowly, once more steps
    are made than the test asked for."""
    if log:
        add_changes(log)
    tell = Survival._tell

    def told(self: Survival, generation: Any, reducer: Any, old: Any) -> None:
        before = len(self._former) if old is not None else 0
        store.set(f"{generation.number}/went on/{self.members.number}", str(before))
        tell(self, generation, reducer, old)

    Survival._tell = told  # type: ignore[method-assign]
    try:
        run = Run(**options)
        store.set(f"{name} is in", "")
        while run.sync.steps < steps:
            run.step(remember=False)
            store.set("steps", str(run.sync.steps))
            store.set(
                f"{run.sync.survival.members.now.number}/weights/{run.sync.steps}", digest(run.model.parameters())
            )
            if run.sync.steps > int(store.get("asked for")):
                time.sleep(0.2)
        return run.end()
    except (sparsync.Excluded, sparsync.PeerLost) as error:
        if any(text in str(error) for text in ("went on without this one", "is over", "nobody left to join")):
            return {"out": str(error)}
        raise


class Reference:
    """What must come of it: plain error feedback with top-k in every parameter, by all workers, in this process.

    Args:
        members: who begins, in rank order.
        skipped: steps that do not count.
        normed: with buffers, which gradients do not depend on.
    """

    def __init__(self, members: Sequence[int], skipped: Sequence[int] = (), normed: bool = False) -> None:
        self.model, self.made, self.skipped = Normed() if normed else Chain(SIZES), 0, skipped
        self.members = list(members)
        self.kept = {member: self._zeros() for member in members}

    def _zeros(self) -> dict[str, Tensor]:
        return {name: torch.zeros_like(p) for name, p in self.model.named_parameters()}

    def until(self, steps: int, compare: Callable[[int, str], None] = lambda steps, weights: None) -> None:
        """Train until so many steps are made; ``compare``: is given the weights' digest after each."""
        for number in range(self.made, steps):
            if number not in self.skipped:
                self._step(number)
            compare(number + 1, digest(self.model.parameters()))
        self.made = steps

    def _step(self, number: int) -> None:
        means = self._zeros()
        for rank, member in enumerate(self.members):
            kept = self.kept[member]
            for name, grad in local_gradients(self.model, lambda m, rank=rank: loss_of(m, rank, number)).items():  # type: ignore[misc]
                total = kept[name] + grad
                order = total.abs().flatten().sort(descending=True, stable=True).indices  # of equals, the lower one
                top = order[: max(1, round(DENSITY * total.numel()))]
                means[name].view(-1)[top] += total.view(-1)[top]
                kept[name] = total.clone()
                kept[name].view(-1)[top] = 0
        for name, p in self.model.named_parameters():
            p.data.add_(means[name] / len(self.members), alpha=-RATE)

    def go_on(self, members: Sequence[int], before: Mapping[int, int]) -> None:
        """Go on with these; ``before``: with how many each has trained before, 0 for who has just come."""
        self.members = list(members)
        for member, workers in before.items():
            if not workers:
                self.kept[member] = self._zeros()
            elif workers != len(members):
                kept = self.kept[member]
                self.kept[member] = {name: r * (len(members) / workers) for name, r in kept.items()}

    def follow(self, changes: Sequence[Any]) -> None:
        """Go through the changes that a survivor was told of; members are numbered anew."""
        for change in changes:
            self.until(change.steps)
            stay = [member for rank, member in enumerate(self.members) if rank not in change.lost]
            fresh = [max(self.kept) + 1 + i for i in range(len(change.joined))]
            self.go_on([*stay, *fresh], {m: len(self.members) for m in stay} | dict.fromkeys(fresh, 0))

    def assert_same(self, found: dict[str, Any]) -> None:
        """Compare weights and residuals bit for bit."""
        self.until(found["steps"])
        for (name, p), own in zip(self.model.named_parameters(), found["weights"], strict=True):
            assert torch.equal(p, torch.from_numpy(own)), name
        for name, own in found["residuals"].items():
            assert torch.equal(self.kept[self.members[found["rank"]]][name], torch.from_numpy(own)), name
