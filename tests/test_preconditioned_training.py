"""Preconditioned feedback under what trainings do with parameters and gradients: unused, frozen, empty, cut, kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.collectives import ReduceByParts
from sparsync.engine.checkpoint import load_state_dict
from sparsync.layout import Layout, Span
from sparsync.simulate import VirtualWorkers
from sparsync.sparse import SparseGrad
from sparsync.wire import Wire
from tests.failures.checked_training import assert_same_on_all_ranks
from tests.test_preconditioned import EXACT, attached, weights
from tests.world import World

TOPK = {"compressor": "topk", "density": 0.1, "scope": "global", "precondition": True}


class Layers(nn.Module):
    """Layers on top of each other, of which some can be left out."""

    def __init__(self, dtypes: tuple[torch.dtype, ...] = 4 * (torch.float32,)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(40, 40).to(dtype) for dtype in dtypes)
        self.leave_out: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number not in self.leave_out:
                x = x + layer(x.to(layer.weight.dtype)).tanh()
        return x


class Empty(Layers):
    """Has a parameter without entries."""

    def __init__(self) -> None:
        super().__init__((torch.float32, torch.float64))
        self.none = nn.Parameter(torch.zeros(0, 5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) + self.none.sum()
        return out


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    out = model(torch.randn(8, 40, generator=torch.Generator().manual_seed(1000 * step + rank)))
    return out.square().mean()


def adamw(model: nn.Module, *extra: Tensor, kind: str = "AdamW") -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = getattr(torch.optim, kind)([*model.parameters(), *extra], lr=1e-2, weight_decay=0.1)
    return made


Step = Callable[[Any, torch.optim.Optimizer, int, int], None]


def plain(ddp: Any, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    loss_of(ddp, rank, step).backward()
    optimizer.step()


def left_out(ddp: Any, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    ddp.module.leave_out = (2,)
    plain(ddp, optimizer, rank, step)


def now_and_then(ddp: Any, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    ddp.module.leave_out = (2,) if step % 3 == 1 else ()
    plain(ddp, optimizer, rank, step)


def frozen(ddp: Any, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    for parameter in ddp.module.layers[1].parameters():
        parameter.requires_grad_(not 2 <= step < 5)
    plain(ddp, optimizer, rank, step)


UNUSED = {"find_unused_parameters": True}
AS_DENSE: dict[str, tuple[Callable[[], nn.Module], Step, dict[str, Any]]] = {
    "never used": (Layers, left_out, UNUSED),
    "never used, static": (Layers, left_out, {"static_graph": True}),
    "sometimes unused": (Layers, now_and_then, UNUSED),
    "frozen and thawed": (Layers, frozen, UNUSED),
    "fp64": (lambda: Layers(4 * (torch.float64,)), plain, {}),
    "empty": (Empty, plain, {}),
}


def case_as_dense(rank: int, size: int, name: str, kind: str) -> float:
    make, step_of, ddp_options = AS_DENSE[name]
    expected = make()
    own = adamw(expected, kind=kind)
    dense = DistributedDataParallel(expected, **ddp_options)
    for step in range(8):
        step_of(dense, own, rank, step)
    del dense
    model = make()
    optimizer = adamw(model, kind=kind)
    with attached(model, optimizer, ddp=ddp_options, **EXACT) as (ddp, _):
        for step in range(8):
            step_of(ddp, optimizer, rank, step)
    return float((weights(model) - weights(expected)).abs().max())


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
@pytest.mark.parametrize("name", AS_DENSE)
def test_training_is_that_of_dense(worlds: dict[int, World], name: str, kind: str) -> None:
    assert max(worlds[2].run(case_as_dense, name=name, kind=kind)) < 1e-4


def case_rests(rank: int, size: int) -> None:
    """A layer that is left out now and then: what rounding left of its bias' gradient waits, and no step is counted."""
    model = Layers()
    optimizer = adamw(model)
    with attached(model, optimizer, ddp=UNUSED, **TOPK) as (ddp, handle):
        for step in range(7):
            before = handle.residual("layers.2.bias") if step else None
            before = None if before is None else before.clone()
            now_and_then(ddp, optimizer, rank, step)
            after = handle.residual("layers.2.bias")
            assert after is not None
            assert after.any()
            assert (before is not None and torch.equal(before, after)) == (step in (1, 4))
        steps = [float(optimizer.state_dict()["state"][index]["step"]) for index in range(8)]
        assert steps == [7, 7, 7, 7, 5, 5, 7, 7]


def test_a_tensor_that_rests_is_not_woken_by_what_is_left_of_it(worlds: dict[int, World]) -> None:
    worlds[2].run(case_rests)


def test_another_number_of_workers_keeps_what_rounding_left() -> None:
    def team(workers: int) -> VirtualWorkers:
        model = Layers()
        loss = lambda model, data, carried: (loss_of(model, *map(int, data[0])), ())  # noqa: E731
        return VirtualWorkers(model, loss, adamw(model), workers, **TOPK)

    old, new = team(2), team(3)
    for step in range(3):
        old.advance([(torch.tensor([rank, step]),) for rank in range(2)])
    for worker in new._exchange.workers:
        load_state_dict(worker, 3, old.state_dict()["ranks"])
    for name in ("layers.0.bias", "layers.3.bias"):
        kept, came = ([team.residual(rank, name) for rank in range(team.workers)] for team in (old, new))
        mean = sum(residual for residual in kept if residual is not None) / 2
        assert mean.any()
        torch.testing.assert_close(sum(r for r in came if r is not None) / 3, mean)


def case_extra(rank: int, size: int) -> Tensor:
    model, extra = Layers(), nn.Parameter(torch.zeros(3))
    optimizer = adamw(model, extra)
    with attached(model, optimizer, **TOPK) as (ddp, _):
        for step in range(4):
            optimizer.zero_grad()
            (loss_of(ddp, rank, step) + (extra - 1).square().sum()).backward()
            optimizer.step()
        assert "exp_avg" in optimizer.state_dict()["state"][8]
    return extra.detach()


def test_other_parameters_of_the_optimizer_keep_its_rule(worlds: dict[int, World]) -> None:
    extra = nn.Parameter(torch.zeros(3))
    own = torch.optim.AdamW([extra], lr=1e-2, weight_decay=0.1)
    for _ in range(4):
        own.zero_grad()
        (extra - 1).square().sum().backward()
        own.step()
    torch.testing.assert_close(worlds[2].run(case_extra)[1], extra.detach())


def case_none(rank: int, size: int) -> None:
    """Who takes a layer's gradient away leaves the others' update alone, and that is not taken for clipping."""
    results = []
    for taken in (False, True):
        model = Layers()
        optimizer = adamw(model)
        with attached(model, optimizer, **TOPK) as (ddp, handle):
            loss_of(ddp, rank, 0).backward()
            if taken:
                model.layers[1].weight.grad = model.layers[1].bias.grad = None
            optimizer.step()
            preconditioner = handle._running().worker.preconditioner
            assert preconditioner is not None
            assert preconditioner.moment.max_norm.isinf()
        results.append(torch.cat([weights(model.layers[number]) for number in (0, 2, 3)]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-8)


def test_a_gradient_that_is_taken_away(worlds: dict[int, World]) -> None:
    worlds[2].run(case_none)


def case_skipped(rank: int, size: int) -> None:
    """A step that is left out, with gradients zeroed before the forward pass or after it: the same training."""
    results = []
    for early in (True, False):
        model = Layers()
        optimizer = adamw(model)
        with attached(model, optimizer, **TOPK) as (ddp, _):
            for step in range(5):
                if early:
                    optimizer.zero_grad()
                loss = loss_of(ddp, rank, step)
                if not early:
                    optimizer.zero_grad()
                loss.backward()
                if step != 2:
                    optimizer.step()
        results.append(weights(model))
    assert torch.equal(results[0], results[1])


def test_gradients_may_be_zeroed_after_the_forward_pass(worlds: dict[int, World]) -> None:
    worlds[2].run(case_skipped)


def case_left_out_then_accumulated(rank: int, size: int) -> None:
    """What is accumulated after a step that was left out is gradients, however those of that step were zeroed."""
    results = []
    for zeroed in ("to none", "in place", "after forward"):
        model = Layers()
        optimizer = adamw(model)
        with attached(model, optimizer, **TOPK) as (ddp, _):
            for step in range(4):
                for part in range(3):
                    with ddp.no_sync() if part < 2 else nullcontext():
                        if part == 0 and zeroed != "after forward":
                            optimizer.zero_grad(set_to_none=zeroed == "to none")
                        loss = loss_of(ddp, rank, 10 * step + part)
                        if part == 0 and zeroed == "after forward":
                            optimizer.zero_grad()
                        loss.backward()
                if step != 1:
                    optimizer.step()
        results.append(weights(model))
        assert_same_on_all_ranks([results[-1]])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_accumulation_after_a_step_that_is_left_out(worlds: dict[int, World]) -> None:
    worlds[2].run(case_left_out_then_accumulated)


def case_accumulated(rank: int, size: int) -> None:
    """Gradients that are added up without an exchange, between two exchanges of one step, are gradients."""
    results = []
    for at_once in (True, False):
        model = Layers()
        optimizer = adamw(model)
        with attached(model, optimizer, **EXACT) as (ddp, _):
            plain(ddp, optimizer, rank, 0)
            optimizer.zero_grad()
            loss_of(ddp, rank, 1).backward()
            if at_once:
                (loss_of(ddp, rank, 2) + loss_of(model, rank, 3)).backward()
            else:
                with ddp.no_sync():
                    loss_of(ddp, rank, 2).backward()
                loss_of(ddp, rank, 3).backward()
            optimizer.step()
        results.append(weights(model))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-6)


def test_accumulation_between_two_exchanges(worlds: dict[int, World]) -> None:
    worlds[2].run(case_accumulated)


def case_first_clip(rank: int, size: int) -> None:
    """The first gradient came in before clipping was known, and does not stay in the moments as it was."""
    moments = []
    for ours in (False, True):
        model = Layers()
        optimizer = adamw(model)
        with (
            attached(model, optimizer, **EXACT) if ours else nullcontext((DistributedDataParallel(model), None)) as (
                ddp,
                _,
            )
        ):
            for step in range(3):
                optimizer.zero_grad()
                loss_of(ddp, rank, step).backward()
                assert nn.utils.clip_grad_norm_(model.parameters(), 0.01) > 0.1
                optimizer.step()
            moments.append(optimizer.state_dict()["state"])
    for number, own in moments[0].items():
        squares = moments[1][number]["exp_avg_sq"]
        torch.testing.assert_close(squares, own["exp_avg_sq"], rtol=1e-2, atol=1e-2 * float(squares.mean()))


def test_clipping_is_right_from_the_first_step(worlds: dict[int, World]) -> None:
    worlds[2].run(case_first_clip)


def case_clip_some(rank: int, size: int) -> None:
    """Who cuts a single layer's gradient changes nothing of the others' update."""
    results = []
    for max_norm in (1e9, 1e-3):
        model = Layers()
        optimizer = adamw(model)
        with attached(model, optimizer, **TOPK) as (ddp, _):
            loss_of(ddp, rank, 0).backward()
            nn.utils.clip_grad_norm_(model.layers[1].parameters(), max_norm)
            optimizer.step()
        results.append(torch.cat([weights(model.layers[number]) for number in (0, 2, 3)]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-8)


def test_a_cut_of_some_gradients_is_no_cut_of_the_others(worlds: dict[int, World]) -> None:
    worlds[2].run(case_clip_some)


def case_two_optimizers(rank: int, size: int) -> None:
    model = Layers()
    optimizer = torch.optim.AdamW(model.layers[0].parameters())
    ddp = DistributedDataParallel(model)
    with pytest.raises(ValueError, match=r"does not hold 'layers.1.weight' \(6 of 8"):
        sparsync.attach(ddp, optimizer=optimizer, **TOPK)
    sparsync.attach(ddp, optimizer=optimizer, density=0.1, precondition=False).detach()


def test_parameters_of_another_optimizer_are_refused(worlds: dict[int, World]) -> None:
    worlds[2].run(case_two_optimizers)


def case_unfinished(rank: int, size: int) -> float:
    """Backward raises on one rank, which detaches: all others hear of it at once."""
    model = Layers()
    optimizer = adamw(model)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    handle = sparsync.attach(ddp, optimizer=optimizer, deadline=60.0, **TOPK)
    plain(ddp, optimizer, rank, 0)

    def fail(grad: Tensor) -> None:
        raise KeyError("of the user")

    if rank == 0:
        model.layers[0].weight.register_hook(fail)
    start = time.monotonic()
    with pytest.raises(KeyError if rank == 0 else RuntimeError):
        plain(ddp, optimizer, rank, 1)
    handle.detach()
    assert "exp_avg" in optimizer.state[model.layers[0].weight]
    return time.monotonic() - start


def test_a_backward_that_did_not_end_keeps_nobody_waiting() -> None:
    outcome = World.once(3, case_unfinished)
    assert all(finished for finished, _ in outcome), outcome
    assert max(seconds for _, seconds in outcome) < 30


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
def test_virtual_sums_of_dense_tensors_are_real_ones(dtype: torch.dtype) -> None:
    """Values of any dtype are summed in fp32, as they travel."""
    rows = torch.randn(5, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    layout = Layout.cut([Span("p", 0, 33)], numel=33, scope="global", density=1.0)
    none = torch.zeros((), dtype=torch.int32)
    sents = [SparseGrad(None, row, torch.tensor(33), 33, none, none) for row in rows]
    out = torch.empty(33)
    ReduceByParts().reduce_local(sents, layout, Wire())[0].mean.write(out)
    total = rows[0].float()
    for row in rows[1:]:
        total = total + row.float()
    assert torch.equal(out, total / 5)


def test_complex_parameters_are_refused() -> None:
    model = nn.Linear(40, 40, dtype=torch.complex64)
    with pytest.raises(ValueError, match="complex"):
        VirtualWorkers(model, lambda *_: (torch.zeros(()), ()), adamw(model), 2, **TOPK)


@pytest.mark.parametrize(("before", "after", "expected"), [(None, 0.5, 0.5), (1.0, 0.5, 0.5), (1.0, None, 1.0)])
def test_a_clip_that_is_given_goes_before_that_of_a_checkpoint(
    before: float | None, after: float | None, expected: float
) -> None:
    made = []
    for clip in (before, after):
        model = Layers()
        made.append(VirtualWorkers(model, lambda *_: (torch.zeros(()), ()), adamw(model), 2, clip=clip, **TOPK))
    made[1].load_state_dict(made[0].state_dict())
    preconditioner = made[1]._exchange.preconditioner
    assert preconditioner is not None
    assert float(preconditioner.moment.max_norm) == expected
