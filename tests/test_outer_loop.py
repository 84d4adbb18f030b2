"""The outer loop on real processes: nothing is lost over rounds, shared weights are equal bit for bit, no hang."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from copy import deepcopy
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from sparsync import Mismatch, OuterLoop, PeerLost, SparsyncError, TopK
from sparsync.local_steps.round_plan import cut, round_plan
from sparsync_lab.virtual.outer_workers import OuterWorkers
from tests.world import World, run_forked

EXAMPLE = Path(__file__).parents[1] / "examples/outer_loop/train.py"

STEPS = 13
Tensors = dict[str, Tensor]


def make_model(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 40), nn.Tanh(), nn.Linear(40, 3)).to(dtype)


class Training:
    """Local AdamW steps on data of this rank's own, with an account of the pseudo-gradients that went in."""

    def __init__(
        self,
        rank: int,
        dtype: torch.dtype = torch.float32,
        moments: bool = False,
        autocast: bool = False,
        parts: int = 1,
        schedule: bool = False,
        compiled: bool = False,
        frozen: tuple[str, ...] = (),
        device: str = "cpu",
        backend: str | None = None,
        **options: Any,
    ) -> None:
        self.model, self.autocast, self.parts = make_model(rank, dtype).to(device), autocast, parts
        self.device = torch.device(device)
        if backend is not None:
            options["process_group"] = dist.new_group(backend=backend)
        for name, p in self.model.named_parameters():
            p.requires_grad_(name not in frozen)
        self.optimizer = torch.optim.AdamW((p for p in self.model.parameters() if p.requires_grad), 0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.after_step = scheduler.step if schedule else lambda: None
        if moments:
            options["optimizer"] = self.optimizer
        self.forward = torch.compile(self.model, backend="eager") if compiled else self.model
        self.outer = OuterLoop(self.forward, **options)
        self.random = torch.Generator().manual_seed(100 + rank)
        self.came = {name: torch.zeros_like(p) for name, p in self.outer.shared().items()}
        self.first = self.shared()

    def shared(self) -> Tensors:
        return {name: p.clone() for name, p in self.outer.shared().items()}

    def own(self) -> Tensors:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def residuals(self) -> Tensors:
        kept = {name: self.outer.residual(name) for name in self.came}
        return {name: kept[name] if kept[name] is not None else torch.zeros_like(p) for name, p in self.came.items()}

    def step(self, miss: bool = False) -> None:
        for _ in range(self.parts):
            x = torch.randn(5, 7, generator=self.random).to(self.device, next(self.model.parameters()).dtype)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
                loss = self.forward(x).float().square().mean() / self.parts
            loss.backward()
        self.optimizer.step()
        self.after_step()
        self.optimizer.zero_grad()
        own = self.own()
        for part in self.outer.fragments:
            if (self.outer.steps + 1) % self.outer.every == part.offset and not miss:
                for name, shared in part.shared.by_name.items():
                    self.came[name] += shared.detach().to(own[name].dtype).float() - own[name].float()
        self.outer.step(miss)

    def result(self) -> dict[str, Tensors]:
        found = {"first": self.first, "own": self.own(), "residuals": self.residuals()}
        self.outer.detach()  # which applies what is on its way
        found |= {"came": self.came, "shared": self.shared(), "left": self.own()}
        return {kind: {name: p.cpu() for name, p in tensors.items()} for kind, tensors in found.items()}


def case_train(rank: int, size: int, misses: tuple[int, ...] = (), **options: Any) -> dict[str, Tensors]:
    training = Training(rank, **options)
    for step in range(STEPS):
        training.step(miss=rank == 1 and step + 1 in misses)
    return training.result()


def case_average(rank: int, size: int) -> tuple[Tensors, Tensors, Tensors]:
    training = Training(rank, compressor="none", every=4)
    for _ in range(3):
        training.step()
    mine = {name: p.clone() for name, p in training.own().items()}  # one local step before the round
    training.optimizer.param_groups[0]["lr"] = 0.0
    training.optimizer.param_groups[0]["weight_decay"] = 0.0
    training.step()
    return mine, training.own(), training.result()["shared"]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_density_1_and_rate_1_are_parameter_averaging(worlds: dict[int, World], size: int) -> None:
    answers = worlds[size].run(case_average)
    for name in answers[0][0]:
        mean = torch.stack([mine[name] for mine, _, _ in answers]).mean(0)
        for _, own, shared in answers:
            torch.testing.assert_close(own[name], mean, rtol=1e-5, atol=1e-6)
            assert torch.equal(own[name], answers[0][1][name])
            assert torch.equal(own[name], shared[name])


SPARSE = {"compressor": TopK(0.1), "scope": "global"}
WAYS = {
    "whole": {"every": 4, **SPARSE},
    "sign": {"every": 4, "compressor": "topk", "density": 0.2, "values": "sign", "indices": "ef", "dense_1d": False},
    "levels": {"every": 3, "compressor": "threshold", "density": 0.2, "values": "levels", "dense_below": 0},
    "budget": {"every": 4, "budget": 0.05, "dense_below": 0, "dense_1d": False},
    "balanced": {"every": 4, "collective": "balanced", **SPARSE},
    "streams": {"every": 6, "fragments": 3, "overlap": 2, **SPARSE},
    "moments": {"every": 4, "moments": True, **SPARSE},
    "streamed moments": {"every": 6, "fragments": 3, "overlap": 2, "moments": True, "misses": (6,), **SPARSE},
    "bf16": {"every": 4, "dtype": torch.bfloat16, **SPARSE},
    "each step": {"every": 1, **SPARSE},
    "autocast": {"every": 4, "autocast": True, "schedule": True, **SPARSE},
    "bf16 autocast": {"every": 4, "dtype": torch.bfloat16, "autocast": True, "parts": 2, "moments": True, **SPARSE},
    "compiled": {"every": 4, "compiled": True, "parts": 2, "fragments": 2, **SPARSE},
    "frozen": {"every": 4, "frozen": ("0.weight", "2.bias"), "moments": True, **SPARSE},
    "missed": {"every": 4, "misses": (4, 8), **SPARSE},
    "missed streams": {"every": 6, "fragments": 2, "overlap": 1, "misses": (3, 6, 12), **SPARSE},
}


@pytest.mark.parametrize(("size", "way"), [(2, way) for way in WAYS] + [(3, "streams"), (3, "missed"), (5, "whole")])
def test_nothing_is_lost_and_shared_weights_are_equal(worlds: dict[int, World], size: int, way: str) -> None:
    assert_laws(worlds[size].run(case_train, **WAYS[way]), way)


def assert_laws(answers: list[dict[str, Tensors]], way: str) -> None:
    """Nothing is lost, and what is shared is the same on all ranks."""
    whole = "fragments" not in WAYS[way] or len(answers) == 1
    sparse = 0.0
    for name, first in answers[0]["first"].items():
        given = torch.stack([one["came"][name] - one["residuals"][name] for one in answers]).double().mean(0)
        torch.testing.assert_close((first - answers[0]["shared"][name]).double(), given, rtol=1e-4, atol=2e-6)
        assert not torch.equal(first, answers[0]["shared"][name])
        for one in answers:
            assert torch.equal(one["first"][name], first)
            assert torch.equal(one["shared"][name], answers[0]["shared"][name])
            assert torch.equal(one["left"][name], answers[0]["left"][name])
        sparse += sum(float(one["residuals"][name].abs().sum()) for one in answers)
    assert sparse > 0
    assert whole or not torch.equal(answers[0]["own"]["2.weight"], answers[1]["own"]["2.weight"])
    for name in WAYS[way].get("frozen", ()):
        assert name not in answers[0]["first"]
        assert all(torch.equal(one["own"][name], make_model(0).state_dict()[name]) for one in answers)


def case_misses(rank: int, size: int) -> tuple[Tensors, Tensors, Tensors, Tensors]:
    training = Training(rank, every=2, **SPARSE)
    training.step()
    for group in training.optimizer.param_groups:
        group.update(lr=0.0, weight_decay=0.0)  # the next step changes no weights by itself
    own, shared = training.own(), training.shared()
    training.step(miss=rank == 1)
    return own, shared, training.own(), training.result()["shared"]


def test_who_misses_a_round_is_given_what_the_others_did(worlds: dict[int, World]) -> None:
    answers = worlds[3].run(case_misses)
    own, shared, own_after, shared_after = answers[1]
    for name in own:
        assert not torch.equal(shared_after[name], shared[name])
        went = shared_after[name] - shared[name]
        torch.testing.assert_close(own_after[name] - own[name], went, rtol=1e-4, atol=1e-6)
        assert torch.equal(answers[0][2][name], shared_after[name])


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def case_resume(rank: int, size: int, saved_on: str = "", **options: Any) -> tuple[Tensors, ...]:
    whole, part = Training(rank, **options), Training(rank, **options)
    for _ in range(7):
        part.step()
    state, optimizer = part.outer.state_dict(), part.optimizer.state_dict()
    resumed = Training(rank + 50, **options)
    if saved_on:  # as a file is read by torch.load
        torch.save(state, file := BytesIO())
        state = torch.load(BytesIO(file.getvalue()), map_location=saved_on, weights_only=True)
    resumed.outer.load_state_dict(state)
    resumed.optimizer.load_state_dict(optimizer)
    resumed.random = part.random
    for _ in range(7):
        whole.step()
    for _ in range(STEPS - 7):
        whole.step()
        resumed.step()
    found = whole.own(), resumed.own(), whole.shared(), resumed.shared()
    for training in (whole, part, resumed):
        training.outer.detach()
    return tuple({name: p.cpu() for name, p in tensors.items()} for tensors in found)


@pytest.mark.parametrize("way", ["sign", "streams", "streamed moments", "missed"])
def test_a_resumed_training_repeats_the_bits(worlds: dict[int, World], way: str) -> None:
    options = {name: value for name, value in WAYS[way].items() if name != "misses"} | {"outer_momentum": 0.5}
    for own, resumed, shared, again in worlds[3].run(case_resume, **options):
        for name in own:
            assert torch.equal(own[name], resumed[name])
            assert torch.equal(shared[name], again[name])


def case_save(rank: int, size: int, **options: Any) -> tuple[dict[str, Any], Tensors, Tensors]:
    training = Training(rank, **options)
    for _ in range(7):
        training.step()
    state = training.outer.state_dict()
    return state, training.residuals(), training.result()["shared"]


def case_load(rank: int, size: int, states: list[dict[str, Any]], **options: Any) -> tuple[Tensors, Tensors, Tensors]:
    training = Training(rank, **options)
    if size != len(states):
        with pytest.raises(ValueError, match="pass the states of all old ranks as a list"):
            training.outer.load_state_dict(states[0])
    training.outer.load_state_dict(states)
    own, residuals = training.own(), training.residuals()
    return own, residuals, training.result()["shared"]


@pytest.mark.parametrize(("old", "new"), [(2, 3), (5, 2)])
@pytest.mark.parametrize("way", ["whole", "streams"])
def test_another_number_of_workers_keeps_the_means(worlds: dict[int, World], old: int, new: int, way: str) -> None:
    saved = worlds[old].run(case_save, **WAYS[way])
    loaded = worlds[new].run(case_load, states=[state for state, _, _ in saved], **WAYS[way])
    for part in saved[0][0]["fragments"]:
        for name in part["shared"]:
            before = [one for state, _, _ in saved for one in state["fragments"] if name in one["own"]]
            learned = torch.stack([one["own"][name] - one.get("sent", one["shared"])[name] for one in before]).mean(0)
            kept = torch.stack([residuals[name] for _, residuals, _ in saved]).mean(0)
            for _, _, shared in loaded:
                assert torch.equal(shared[name], saved[0][2][name])
            now = torch.stack([own[name] - shared[name] for own, _, shared in loaded]).mean(0)
            torch.testing.assert_close(now, learned, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(torch.stack([kept_by[name] for _, kept_by, _ in loaded]).mean(0), kept)


def learn(model: nn.Module, outer: OuterLoop, steps: int) -> None:
    """Let a single worker go somewhere."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(outer.steps, outer.steps + steps):
        x = torch.randn(5, 7, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        outer.step()


def test_a_state_holds_all_that_a_training_goes_on_from() -> None:
    model = nn.Sequential(nn.Linear(7, 33), nn.BatchNorm1d(33), nn.Linear(33, 40))
    outer = OuterLoop(model, every=4, outer_momentum=0.9, **SPARSE)
    learn(model, outer, 3)  # there is no momentum yet
    state, after = outer.state_dict(), list[Tensors]()
    for _ in range(2):
        outer.load_state_dict(state)
        learn(model, outer, 6)
        after.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    outer.detach()
    for name, tensor in after[0].items():
        assert torch.equal(tensor, after[1][name]), name


def test_a_round_on_its_way_is_applied_with_another_every() -> None:
    outer = OuterLoop(model := make_model(0), "none", every=10, overlap=8)
    learn(model, outer, 11)
    state, own = outer.state_dict(), model[0].weight.detach().clone()
    assert not torch.equal(own, outer.shared()["0.weight"])
    outer = OuterLoop(model := make_model(1), "none", every=4)
    outer.load_state_dict(state)
    outer.step()  # of the twelfth step, before what was on its way is due
    torch.testing.assert_close(model[0].weight.detach(), own)
    torch.testing.assert_close(outer.shared()["0.weight"], own)
    outer.detach()


def case_load_in_flight(rank: int, size: int) -> list[tuple[Tensor, Tensor]]:
    def there() -> tuple[Tensor, Tensor]:
        moment = training.optimizer.state[training.model[0].weight]["exp_avg_sq"]
        return training.shared()["0.weight"], moment.clone()

    training = Training(rank, every=3, overlap=2, moments=True, **SPARSE)
    for _ in range(3):
        training.step()
    state = training.outer.state_dict()
    for _ in range(2):
        training.step()
    found = [there()]
    time.sleep(0.3 * rank)  # so that the other's next round is on its way when it loads
    training.step()
    time.sleep(0.3 * rank)
    training.outer.load_state_dict(state)
    time.sleep(0.6 - 0.6 * rank)
    for _ in range(2):
        training.step()
    found.append(there())
    training.outer.detach()
    return found


def test_a_round_on_its_way_does_not_write_over_what_is_loaded(worlds: dict[int, World]) -> None:
    for first, again in worlds[2].run(case_load_in_flight):
        assert all(torch.equal(then, now) for then, now in zip(first, again, strict=True))


def test_more_workers_begin_from_bf16_weights_as_one_had_them(worlds: dict[int, World]) -> None:
    outer = OuterLoop(model := make_model(0, torch.bfloat16), "none", every=2, overlap=1, outer_lr=0.7)
    learn(model, outer, 3)
    (idle,) = (state := outer.state_dict())["fragments"]
    idle["own"] = {name: p.bfloat16() for name, p in idle["shared"].items()}  # which has learned nothing since
    learn(model, outer, 1)
    (bad,) = (moving := outer.state_dict())["fragments"]
    bad["mean"]["0.weight"][0, 0] = torch.nan
    outer.detach()
    options = {"dtype": torch.bfloat16, "compressor": "none", "every": 2, "overlap": 1}
    for own, _, shared in worlds[2].run(case_load, states=[state], **options):
        for name in own:
            assert torch.equal(own[name], shared[name].bfloat16())
    for _, _, shared in worlds[2].run(case_load, states=[moving], **options):
        assert all(bool(p.isfinite().all()) for p in shared.values())  # a mean that is not is not applied


BAD = torch.full((5,), torch.nan)
DAMAGES: list[tuple[str, Any]] = [
    ("schema 1", lambda state: state.update(schema=7)),
    ("not whole: it lacks", lambda state: state.pop("steps")),
    ("another fragments=", lambda state: state["fragments"].pop()),
    ("fragment 1 lacks something", lambda state: state["fragments"][1].pop("exchange")),
    ("of another model: 'shared' of fragment 1", lambda state: state["fragments"][1]["shared"].popitem()),
    ("'momentum' of fragment 1", lambda state: state["fragments"][1]["momentum"].update(odd=BAD)),
    ("'own' of fragment 1", lambda state: state["fragments"][1]["own"].update({"5.bias": "none"})),
    (
        "'shared' of fragment 1 is not finite",
        lambda state: state["fragments"][1]["shared"]["5.weight"].fill_(torch.inf),
    ),
    ("'due' or 'moments' of fragment 1", lambda state: state["fragments"][1].update(due=None)),
    ("moments are of another size", lambda state: state["fragments"][1].update(moments=BAD)),
    ("residuals: 2.bias is missing", lambda state: state["fragments"][1]["exchange"]["residuals"].clear()),
    ("buffers are of other shapes", lambda state: state["buffers"].update({"4.running_mean": BAD})),
]


def bits_of(state: Any) -> Any:
    """Return a state as something to compare."""
    if isinstance(state, Tensor):
        return state.tolist()
    if isinstance(state, dict):
        return {name: bits_of(value) for name, value in state.items()}
    return [bits_of(value) for value in state] if isinstance(state, list) else state


def test_a_state_that_is_refused_changes_nothing() -> None:
    tanh = nn.Tanh()
    model = nn.Sequential(nn.Linear(7, 33), tanh, nn.Linear(33, 40), tanh, nn.BatchNorm1d(40), nn.Linear(40, 9))
    adam = torch.optim.Adam(model.parameters())
    options = {"every": 4, "fragments": 2, "overlap": 1, "outer_momentum": 0.5, "dense_below": 0, "dense_1d": False}
    outer = OuterLoop(model, TopK(0.1), optimizer=adam, **options)
    learn(model, outer, 8)
    saved = outer.state_dict()
    learn(model, outer, 5)
    now = bits_of(outer.state_dict())
    for says, damage in DAMAGES:
        damage(bad := deepcopy(saved))
        with pytest.raises(ValueError, match=says):
            outer.load_state_dict(bad)
        assert bits_of(outer.state_dict()) == now, says
    for given, says in (([], "list is empty"), (7, "not int"), ([3], "schema 1: it says 'int'")):
        with pytest.raises(ValueError, match=says):
            outer.load_state_dict(given)  # type: ignore[arg-type]
    outer.load_state_dict(saved)
    assert bits_of(outer.state_dict()) == bits_of(saved)
    outer.detach()


def case_other_steps(rank: int, size: int) -> tuple[str, str]:
    training = Training(rank, every=4, deadline=20.0, **SPARSE)
    states = []
    for _ in range(3):
        training.step()
        states.append(training.outer.state_dict())
    training.outer.load_state_dict(states[1 + (rank == 1)])
    with pytest.raises(ValueError, match="different steps") as together:
        training.outer.load_state_dict([states[1], *states[:1] * (size - 1)])
    while training.outer.steps < 3:
        training.step()
    with pytest.raises(Mismatch) as raised:
        training.step()
    training.outer.detach()
    return str(together.value), str(raised.value)


def test_ranks_that_go_on_from_different_local_steps_are_told(worlds: dict[int, World]) -> None:
    for together, said in worlds[3].run(case_other_steps):
        assert "rank 0: 2, rank 1: 1, rank 2: 1" in together
        assert "local steps 3" in said


# ---- failures -------------------------------------------------------------------------------------------------------


def case_killed(rank: int, size: int, overlap: int, inside: bool, device: str = "cpu") -> tuple[str, str]:
    def end(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    training = Training(rank, every=3, overlap=overlap, moments=inside, device=device, deadline=20.0, **SPARSE)
    for _ in range(4):
        training.step()
    if rank == 1:
        if inside:  # of a round, between its two exchanges
            training.outer.fragments[0].channel.all_reduce = end  # type: ignore[method-assign]
        else:
            end()
    try:
        for _ in range(2 * STEPS):
            training.step()
    except SparsyncError as error:
        training.outer.detach()
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(("overlap", "inside"), [(0, False), (1, True), pytest.param(1, False, marks=pytest.mark.slow)])
def test_a_killed_rank_is_named_by_the_others(overlap: int, inside: bool) -> None:
    assert_named(World.once(3, case_killed, overlap=overlap, inside=inside))


def assert_named(outcomes: list[tuple[bool, Any]]) -> None:
    """All but rank 1 have said that it is lost."""
    assert not outcomes[1][0]
    for rank in (0, 2):
        kind, said = outcomes[rank][1]
        assert kind == PeerLost.__name__, outcomes
        assert said.endswith("ranks not heard from: 1")


def case_raises(rank: int, size: int) -> str:
    training = Training(rank, every=2, deadline=20.0, **SPARSE)
    training.step()
    if rank == 1:
        training.outer.fragments[0].grads[0] = torch.zeros(1)  # whatever goes wrong on a rank before it sends
    with pytest.raises((SparsyncError, RuntimeError)) as raised:
        training.step()
    training.outer.detach()
    return str(raised.value)


def test_all_hear_of_an_error_on_one_rank(worlds: dict[int, World]) -> None:
    said = worlds[3].run(case_raises)
    assert all("rank 1" in said[rank] for rank in (0, 2)), said


def case_late(rank: int, size: int, kind: str) -> str:
    training = Training(rank, every=2, deadline=20.0, frozen=("2.weight",), **SPARSE)
    training.step()
    if rank == 1:
        if kind == "unfrozen":
            training.model[2].weight.requires_grad_(True)
        elif kind == "added":
            training.model.append(nn.Linear(3, 3))
        else:
            training.model[4].bias = nn.Parameter(torch.zeros(3))
    with pytest.raises(SparsyncError) as raised:
        training.step()
    training.outer.detach()
    return str(raised.value)


@pytest.mark.parametrize(("kind", "name"), [("unfrozen", "2.weight"), ("added", "5.weight"), ("replaced", "4.bias")])
def test_a_parameter_that_is_trained_later_is_named(worlds: dict[int, World], kind: str, name: str) -> None:
    for said in worlds[2].run(case_late, kind=kind):
        assert f"{name!r} is trained, and was not when OuterLoop was made" in said


def case_not_finite(rank: int, size: int) -> tuple[Tensors, Tensors, bool, Tensors]:
    training = Training(rank, every=3, moments=True, **SPARSE)
    training.step()
    training.step()
    if rank == 1:
        with torch.no_grad():
            training.model[0].weight[0, 0] = torch.nan
    training.step()
    own = training.own()
    for _ in range(3):
        training.step()
    finite = all(bool(p.isfinite().all()) for p in training.own().values())
    return own, training.result()["shared"], finite, training.first


def test_weights_that_are_not_finite_miss_the_round(worlds: dict[int, World]) -> None:
    answers = worlds[3].run(case_not_finite)
    for own, shared, finite, first in answers:
        assert finite
        for name in own:
            assert not torch.equal(own[name], first[name])  # the round counts
            assert torch.equal(own[name], answers[0][0][name])
            assert torch.equal(shared[name], answers[0][1][name])


def case_bad_moment(rank: int, size: int) -> tuple[bool, bool]:
    training = Training(rank, every=2, moments=True, **SPARSE)
    training.step()
    if rank == 1:  # a gradient whose square is too large: no weight is changed by it
        training.optimizer.state[training.model[0].weight]["exp_avg_sq"][0, 0] = torch.inf
    training.step()
    moments = [state["exp_avg_sq"] for state in training.optimizer.state.values()]
    kept = [bool((moment.isfinite() & (moment > 0)).all()) for moment in moments]
    same = torch.equal(training.own()["0.weight"], training.shared()["0.weight"])
    training.outer.detach()
    return all(kept), same


def test_moments_that_are_not_finite_are_not_shared(worlds: dict[int, World]) -> None:
    assert worlds[2].run(case_bad_moment) == [(True, True)] * 2


def test_a_single_worker_goes_on_after_weights_that_were_not_finite() -> None:
    training = Training(0, every=2, moments=True, **SPARSE)
    training.step()
    training.model(torch.full((5, 7), torch.nan)).sum().backward()
    for _ in range(4):
        training.step()
    assert all(bool(p.isfinite().all()) for p in training.own().values())
    training.outer.detach()


def test_detach_ends_all_fragments_whatever_is_on_its_way(caplog: pytest.LogCaptureFixture) -> None:
    outer = OuterLoop(model := make_model(0), every=4, fragments=2, overlap=1, **SPARSE)
    failed: Future[Tensor] = Future()
    failed.set_exception(RuntimeError("no room"))  # type: ignore[arg-type]
    outer.fragments[0].future = failed
    outer.detach()
    assert "what was on its way is not applied: no room" in caplog.text
    assert not any(part.handle.is_attached() for part in outer.fragments)
    with pytest.raises(SparsyncError, match="detach"):
        learn(model, outer, 4)


def case_some(rank: int, size: int) -> str:
    group = dist.new_group([0, 1])
    with pytest.raises(ValueError, match="takes the plain model"):
        OuterLoop(DistributedDataParallel(make_model(0)), every=2)
    if rank == 2:
        with pytest.raises(ValueError, match="not in process_group") as raised:
            OuterLoop(make_model(rank), every=2, process_group=group)
        return str(raised.value)
    outer = OuterLoop(make_model(rank), every=2, process_group=group)
    outer.detach()
    return ""


def test_a_rank_outside_of_the_group_is_told(worlds: dict[int, World]) -> None:
    assert [bool(said) for said in worlds[3].run(case_some)] == [False, False, True]


def case_differs(rank: int, size: int) -> tuple[str, int]:
    before = {*threading.enumerate()}
    with pytest.raises(Mismatch) as raised:
        Training(rank, every=4 + rank, fragments=2, **SPARSE)
    return str(raised.value), len({*threading.enumerate()} - before)


def test_other_arguments_on_a_rank_are_refused_on_all(worlds: dict[int, World]) -> None:
    for said, threads in worlds[3].run(case_differs):
        assert "outer loop" in said
        assert "every=" in said
        assert not threads


# ---- what is refused, and what is told ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"every": 0}, "every must be"),
        ({"every": 4, "fragments": 5}, "fragments must be from 1 to 4"),
        (
            {"every": 10, "fragments": 7},
            "fragments must be from 1 to 6, as many as a round has steps and the model ten",
        ),
        ({"every": 4, "overlap": 4}, "overlap must be from 0 to 3"),
        ({"outer_lr": 0.0}, "outer_lr must be above 0"),
        ({"outer_momentum": 1.0}, "outer_momentum must be"),
        ({"outer_lr": float("inf")}, "outer_lr must be above 0, and finite"),
        ({"budget": 2.0}, "budget must be a share"),
        ({"on_loss": "continue"}, "on_loss= is of gradients"),
        ({"momentum": "correct"}, "momentum= is of gradients"),
        ({"recipe": "auto"}, "'auto'"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)}, "torch's Adam or AdamW, got SGD"),
        ({"optimizer": torch.optim.Adam([nn.Parameter(torch.zeros(1))])}, "optimizer must be of this model"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        OuterLoop(make_model(0), **options)


def test_models_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="fp32, bf16 or fp16"):
        OuterLoop(make_model(0, torch.float64))
    with pytest.raises(ValueError, match="nothing to exchange"):
        OuterLoop(make_model(0).requires_grad_(False))
    with pytest.raises(ValueError, match="all parameters must be on one device"):
        OuterLoop(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta")))
    model = make_model(0)
    with pytest.raises(ValueError, match="without amsgrad"):
        OuterLoop(model, optimizer=torch.optim.Adam(model.parameters(), amsgrad=True))
    with pytest.raises(ValueError, match=r"budget must be above .*, what second moments take, got 1e-06"):
        OuterLoop(model, optimizer=torch.optim.Adam(model.parameters()), budget=1e-6)
    outer = OuterLoop(model, every=2, **SPARSE)
    with pytest.raises(ValueError, match="no parameter of this name is trained: 'none'"):
        outer.residual("none")
    outer.detach()


def test_shared_weights_are_fp32_whatever_torch_makes_by_default() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = make_model(0)
        outer = OuterLoop(model, optimizer=torch.optim.Adam(model.parameters()), every=2, **SPARSE)
        learn(model, outer, 4)
        kept = [*outer.shared().values(), outer.fragments[0].moments.flat]  # type: ignore[union-attr]
        outer.detach()
    finally:
        torch.set_default_dtype(torch.float32)
    assert {tensor.dtype for tensor in kept} == {torch.float32}


def test_empty_tensors_have_no_moments_to_share() -> None:
    model = make_model(0)
    model.register_parameter("nothing", nn.Parameter(torch.zeros(0, 4)))
    outer = OuterLoop(model, optimizer=torch.optim.Adam(model.parameters()), every=2, **SPARSE)
    learn(model, outer, 4)
    outer.detach()


def case_told(rank: int, size: int) -> tuple[str, float, float, int]:
    training = Training(rank, every=4, fragments=2, moments=True, **SPARSE)
    for _ in range(8):
        training.step()
    stats, text = training.outer.stats(), training.outer.describe()
    training.outer.detach()
    return text, stats.total.traffic, stats.total.density, stats.total.steps


def test_it_says_what_it_does(worlds: dict[int, World]) -> None:
    for text, traffic, density, steps in worlds[2].run(case_told):
        assert text.startswith(
            "Outer loop: a round every 4 local steps, 2 fragments, applied at once, by SGD of rate 1, "
        )
        assert "with Adam's second moments shared. In each round" in text
        assert text.count("TopK (scope global, density 0.1 now") == 2
        assert steps == 2
        assert 0.1 < density < 0.4  # small tensors travel dense
        numel = sum(p.numel() for p in make_model(0).parameters())
        assert 0 < traffic < 0.6 * steps * 4 * numel  # of which dense would take all


def test_one_worker_goes_on_from_what_it_has() -> None:
    model = make_model(0)
    outer = OuterLoop(model, "none", every=2)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    now = model[0].weight.detach().clone()
    outer.step()
    outer.step()
    torch.testing.assert_close(model[0].weight, now)
    assert torch.equal(model[0].weight, outer.shared()["0.weight"])
    outer.detach()


def test_fragments_are_of_about_the_same_size() -> None:
    tensors = {str(i): torch.empty(size) for i, size in enumerate([100, 1, 1, 50, 50, 90, 10])}
    plan = round_plan("none", None, None, 4, {})
    parts = [[*map(int, part)] for part, _ in cut(tensors, 3, plan, 2)]
    assert parts == [[0, 1], [2, 3, 4], [5, 6]]
    assert [len(part) for part, _ in cut(tensors, 7, plan, 2)] == [1] * 7


def case_machines(rank: int, size: int) -> tuple[Tensors, float]:
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    model = make_model(rank // 2)
    ddp = DistributedDataParallel(model, process_group=inside)
    optimizer = torch.optim.AdamW(ddp.parameters(), 0.01)
    outer = OuterLoop(ddp.module, every=3, process_group=between, **SPARSE)
    for step in range(STEPS):
        x = torch.randn(5, 7, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
        outer.step()
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    density = outer.stats().total.density
    outer.detach()
    del ddp
    gc.collect()
    return own, density


def test_machines_sum_inside_and_make_local_steps_between(worlds: dict[int, World]) -> None:
    answers = worlds[4].run(case_machines)
    for name, p in answers[0][0].items():
        assert torch.equal(p, answers[1][0][name])
        assert torch.equal(answers[2][0][name], answers[3][0][name])
    assert not torch.equal(answers[0][0]["0.weight"], answers[2][0]["0.weight"])  # one step after the last round
    assert all(0 < density < 1 for _, density in answers)


# ---- virtual workers ------------------------------------------------------------------------------------------------


def mean_square(model: nn.Module, batch: tuple[Tensor, ...], carried: tuple[Tensor, ...]) -> Any:
    return model(batch[0]).square().mean(), carried


@pytest.mark.parametrize("way", ["sign", "moments", "streams"])
def test_virtual_workers_train_as_processes_do(worlds: dict[int, World], way: str) -> None:
    options = dict(WAYS[way])
    own = {name: options.pop(name) for name in ("compressor", "every", "fragments", "overlap") if name in options}
    moments = options.pop("moments", False)
    model = make_model(0)
    virtual = OuterWorkers(
        model, mean_square, 3, rate=0.01, weight_decay=0.01, share_moments=moments, options=options, **own
    )
    drawn = [torch.Generator().manual_seed(100 + rank) for rank in range(3)]
    for _ in range(12):
        virtual.backward([(torch.randn(5, 7, generator=one),) for one in drawn])
        virtual.optimizer.step()
    shared, traffic = worlds[3].run(case_shared, **WAYS[way])[0]
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), shared[name], rtol=1e-4, atol=1e-6)
    assert virtual.tally.bytes == pytest.approx(traffic, abs=200)  # each adds the headers of dense sums in its own way


def case_shared(rank: int, size: int, **options: Any) -> tuple[Tensors, float]:
    training = Training(rank, **options)
    for _ in range(12):
        training.step()
    training.outer.state_dict()  # waits for what is on its way
    found = training.shared(), training.outer.stats().total.traffic
    training.outer.detach()
    return found


# ---- the example ----------------------------------------------------------------------------------------------------


def run_example(folder: Path, workers: int, *options: str) -> str:
    arguments = ["train.py", "--folder", str(folder), *options]
    said, *others = run_forked(f"import sys\nsys.argv = {arguments}\n{EXAMPLE.read_text()}", workers)
    assert not any(others)
    return said


def test_the_example_learns_and_goes_on_with_fewer_workers(tmp_path: Path) -> None:
    said = [run_example(tmp_path, 3, "--steps=60", "--every=10")]
    said.append(run_example(tmp_path, 2, "--steps=90", "--every=10", "--resume"))
    found = [re.search(r"(\d) workers, (\d+) steps: loss (\d\.\d+), 1/(\d+) of dense's bytes", text) for text in said]
    assert all(found), said
    rows = [[float(number) for number in match.groups()] for match in found if match]
    assert [row[:2] for row in rows] == [[3, 60], [2, 90]]
    assert rows[1][2] < rows[0][2] < 4.0  # guessing has 4.16
    assert all(50 < row[3] < 250 for row in rows)  # of the steps that each has made itself
    assert len(list(tmp_path.rglob("rank-*.pt"))) == 2  # of those who go on alone
