"""Loss scaling and steps that are undone: training goes on as if they had never been."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sparsync import SparsyncError, ThresholdK, TopK
from tests.failures.ddp_training import (
    ALL_SPARSE,
    RATE,
    SIZES,
    SMALL_BUCKETS,
    Chain,
    assert_same_tensors,
    bad_gradient,
    digest,
    loss_of,
    training,
)


def case_overflow(rank: int, size: int, name: str, compressor: Any, bad_steps: tuple[int, ...]) -> dict[str, Any]:
    """Train with a scaler; in ``bad_steps`` the gradient overflows. Its results must be as if they had not been."""
    model, scaler = Chain(SIZES), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with training(model, compressor, SMALL_BUCKETS, scaler=scaler) as run:
        for step in range(7):
            before, weights, scale = run.handle.state_dict(), digest(model.parameters()), scaler.get_scale()
            with bad_gradient(model, name, math.inf, step in bad_steps):
                run.step(lambda m, step=step: loss_of(m, rank, step), scaler)
            if step not in bad_steps:
                assert digest(model.parameters()) != weights
                continue
            assert scaler.get_scale() == scale / 2
            assert digest(model.parameters()) == weights
            after = run.handle.state_dict()
            follow = scale / before["loss_scale"]  # what is kept is in the units of the last loss
            assert_same_tensors(after["residuals"], {n: r * follow for n, r in before["residuals"].items()})
            for segment, bag in before["compressor"].items():
                floors = [b["floor"].int().view(torch.float32) for b in (after["compressor"][segment], bag)]
                assert torch.equal(floors[0], floors[1] * follow)
        assert run.handle.stats().total.skipped == len(bad_steps)
        residuals = {n: r / run.handle.state_dict()["loss_scale"] for n, r in run.residuals().items()}
        assert all(torch.isfinite(r).all() and r.any() for r in residuals.values())
    return {"weights": digest(model.parameters()), "residuals": digest(residuals.values())}


def case_without_bad_steps(
    rank: int, size: int, compressor: Any, bad_steps: tuple[int, ...], **options: Any
) -> dict[str, Any]:
    """The same training without a scaler that never sees the batches of ``bad_steps``."""
    model = Chain(SIZES)
    with training(model, compressor, SMALL_BUCKETS, **options) as run:
        for step in range(7):
            if step not in bad_steps:
                run.step(lambda m, step=step: loss_of(m, rank, step))
        residuals = run.residuals()
    return {"weights": digest(model.parameters()), "residuals": digest(residuals.values())}


@pytest.mark.parametrize("name", ["layer0.weight", "layer3.weight", "layer2.bias"])
def test_an_overflow_rolls_the_whole_step_back(worlds: Any, name: str) -> None:
    """Wherever it happens, in the first bucket, the last one, or a tensor that travels dense.

    Scales are powers of two, so training goes on with the very bits of one that never saw those batches.
    """
    arguments = {"compressor": TopK(0.05), "bad_steps": (3, 4)}
    assert worlds[2].run(case_overflow, name=name, **arguments) == worlds[2].run(case_without_bad_steps, **arguments)


def test_an_overflow_rolls_thresholds_back(worlds: Any) -> None:
    worlds[2].run(case_overflow, name="layer1.weight", compressor=ThresholdK(0.05), bad_steps=(3, 4))


def case_growing_scale(rank: int, size: int, compressor: Any, **options: Any) -> dict[str, Any]:
    model, scaler = Chain(SIZES), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    with training(model, compressor, SMALL_BUCKETS, scaler=scaler, **options) as run:
        for step in range(7):
            run.step(lambda m, step=step: loss_of(m, rank, step), scaler)
        assert scaler.get_scale() == 8.0 * 2**7
        residuals = {name: residual / (scaler.get_scale() / 2) for name, residual in run.residuals().items()}
    return {"weights": digest(model.parameters()), "residuals": digest(residuals.values())}


@pytest.mark.parametrize("compressor", [TopK(0.05), ThresholdK(0.05)], ids=["topk", "threshold"])
@pytest.mark.parametrize("momentum", ["keep", "correct"])
def test_the_residual_follows_the_loss_scale(worlds: Any, compressor: Any, momentum: str) -> None:
    """A scale that doubles every step changes no bit of the training; with momentum correction velocities follow."""
    options = {"compressor": compressor, "momentum": momentum}
    scaled = worlds[2].run(case_growing_scale, **options)
    assert scaled == worlds[2].run(case_without_bad_steps, bad_steps=(), **options)


def case_user_skips(rank: int, size: int) -> dict[str, Any]:
    model = Chain(SIZES)
    with training(model, TopK(0.05), SMALL_BUCKETS, transactional=True) as run:
        for step in range(7):
            if step not in (0, 3):
                run.step(lambda m, step=step: loss_of(m, rank, step))
                continue
            run.optimizer.zero_grad()
            loss_of(run.ddp, rank, step).backward()
            run.handle.rollback()
        run.handle.commit()
        residuals = run.residuals()
        with pytest.raises(SparsyncError, match="no step to undo"):
            run.handle.rollback()  # too late: the step is kept
        assert_same_tensors(run.residuals(), residuals)
    with training(Chain(SIZES), TopK(0.05)) as run:
        run.step(lambda m: loss_of(m, rank, 0))
        with pytest.raises(SparsyncError, match="transactional=True"):
            run.handle.rollback()
    return {"weights": digest(model.parameters()), "residuals": digest(residuals.values())}


def test_a_step_that_the_user_skips_leaves_no_trace(worlds: Any) -> None:
    """Skipping steps, even the one before DDP regroups its buckets, leaves no trace."""
    skipped = worlds[2].run(case_user_skips)
    assert skipped == worlds[2].run(case_without_bad_steps, compressor=TopK(0.05), bad_steps=(0, 3))


def two_optimizers(model: Chain, kinds: tuple[str, str]) -> list[torch.optim.Optimizer]:
    """Return an optimizer for the first two layers and one for the others."""
    halves = [[*model.layer0.parameters(), *model.layer1.parameters()]]
    halves.append([*model.layer2.parameters(), *model.layer3.parameters()])
    return [getattr(torch.optim, kind)(half, lr=RATE) for kind, half in zip(kinds, halves, strict=True)]


def case_two_optimizers(
    rank: int, size: int, kinds: tuple[str, str], name: str, bad_steps: tuple[int, ...], scaled: bool, **options: Any
) -> dict[str, Any]:
    """Train with two optimizers under one scaler, whose gradient overflows on the last rank in ``bad_steps``; or, not
    ``scaled``, without one, leaving those steps out."""
    model = Chain(SIZES)
    optimizers = two_optimizers(model, kinds)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if scaled else None
    with training(model, TopK(0.05), SMALL_BUCKETS, scaler=scaler, **ALL_SPARSE, **options) as run:
        for step in range(7):
            if scaler is None and step in bad_steps:
                continue
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = loss_of(run.ddp, rank, step)
            if scaler is None:
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
                continue
            weights = digest(model.parameters())
            with bad_gradient(model, name, math.inf, step in bad_steps and rank == size - 1):
                scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            assert (digest(model.parameters()) == weights) == (step in bad_steps)
        state = run.handle.state_dict()
        scale = state["loss_scale"] or 1.0
        assert run.handle.stats().total.skipped == (len(bad_steps) if scaled else 0)
    residuals = [residual / scale for residual in state["residuals"].values()]
    return {"weights": digest(model.parameters()), "residuals": digest(residuals)}


@pytest.mark.each_pair
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kinds", [("SGD", "SGD"), ("SGD", "AdamW")], ids="-".join)
@pytest.mark.parametrize("name", ["layer0.weight", "layer3.weight", "layer2.bias"])
def test_an_overflow_of_one_optimizer_is_one_of_all(worlds: Any, name: str, kinds: tuple[str, str], size: int) -> None:
    """Buckets that were exchanged before the overflow came show it as well, so that nobody applies what is undone."""
    arguments = {"kinds": kinds, "name": name, "bad_steps": (1, 3, 4)}
    scaled = worlds[size].run(case_two_optimizers, scaled=True, **arguments)
    assert scaled == worlds[size].run(case_two_optimizers, scaled=False, **arguments)


@pytest.mark.parametrize("scope", ["bucket", "global"])
def test_an_overflow_of_one_optimizer_is_one_of_all_in_other_scopes(worlds: Any, scope: str) -> None:
    arguments = {"kinds": ("SGD", "SGD"), "name": "layer0.weight", "bad_steps": (1, 3, 4), "scope": scope}
    scaled = worlds[2].run(case_two_optimizers, scaled=True, **arguments)
    assert scaled == worlds[2].run(case_two_optimizers, scaled=False, **arguments)
