"""What was done to all gradients, recognised by kernels, against the specification."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sparsync.kernels.learn_clip import Clipping, ProbedPart, find_undo, note_norms_of, reference
from sparsync.kernels.learn_clip.launch import ProbeBuffers
from sparsync.workspace import Workspace
from tests.pairs import DEVICE, MARKS

pytestmark = MARKS
SIZES, NUMBERS = (1, 700, 3000, 64), (3, 0, 2, 5)
CASES: dict[str, tuple[float, float, float, bool]] = {  # factor, scale, expected factor, whether something is learned
    "untouched": (1.0, 1.0, 1.0, False),
    "clipped": (0.3, 1.0, 0.3, True),
    "clipped to a power of 2": (0.25, 1.0, 0.25, False),
    "unscaled": (1 / 1024, 1024.0, 1 / 1024, False),
    "unscaled and clipped": (0.7 / 1024, 1024.0, 0.7 / 1024, True),
    "grown": (1.7, 1.0, 1.7, False),
    "zeroed": (0.0, 1.0, 1.0, False),
    "not finite": (math.nan, 8.0, 1 / 8, False),
}


def grads_of(seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """Gradients as they were written, and their norms among those of all tensors."""
    rng = torch.Generator().manual_seed(seed)
    grads = [torch.randn(size, generator=rng) * (i + 1) for i, size in enumerate(SIZES)]
    norms = torch.full((6,), math.nan)
    norms[list(NUMBERS)] = torch.stack([grad.norm() for grad in grads])
    return grads, norms


def both(
    grads: list[Tensor], norms: Tensor, scale: float, workspace: Workspace, good: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """What undoes it, the norm at which gradients are clipped, and whether they were cut apart: by kernels, and the
    same of the specification."""
    results = []
    for device in (DEVICE, "cpu"):
        summary = torch.tensor([2.0, 1.0, good], device=device)
        apart = torch.zeros((), device=device)
        clipping = Clipping(norms.to(device), summary, torch.tensor(math.inf, device=device), apart, scale)
        here = [grad.to(device) for grad in grads]
        if len(results) == 0:
            undo = find_undo(here, NUMBERS[: len(grads)], clipping, workspace)
            assert workspace.find(ProbeBuffers) is not None, "no kernel was launched"
        else:
            undo = reference.find_undo(here, NUMBERS[: len(grads)], clipping)
        results.append((undo.cpu(), clipping.max_norm.cpu(), apart.cpu()))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0.0)
    return results[0]


@pytest.mark.parametrize("name", CASES)
def test_what_was_done_to_all(name: str) -> None:
    factor, scale, expected, learned = CASES[name]
    workspace = Workspace()
    for seed in range(2):
        grads, norms = grads_of(seed)
        undo, max_norm, apart = both([grad * factor for grad in grads], norms, scale, workspace)
        assert not apart
        torch.testing.assert_close(undo, torch.tensor(1 / expected), rtol=1e-4, atol=0.0)
        if factor * scale == 1:  # norms are rounded, and what nobody touched is not to be changed by that
            assert undo == scale
        wanted = factor * scale * 2.0 if learned else math.inf
        torch.testing.assert_close(max_norm, torch.tensor(wanted), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("which", range(len(SIZES)))
def test_what_is_cut_in_part_stays_as_it_was_cut(which: int) -> None:
    grads, norms = grads_of()
    grads[which] = grads[which] * 0.5
    undo, max_norm, apart = both(grads, norms, 4.0, Workspace())
    assert undo == 4
    assert max_norm == math.inf
    assert apart


@pytest.mark.parametrize("which", range(len(SIZES)))
def test_a_gradient_that_is_zeroed_says_nothing(which: int) -> None:
    grads, norms = grads_of()
    grads = [grad * 0.3 * (i != which) for i, grad in enumerate(grads)]
    undo, max_norm, apart = both(grads, norms, 1.0, Workspace())
    torch.testing.assert_close(torch.stack([1 / undo, max_norm / 2]), torch.full((2,), 0.3), rtol=1e-4, atol=0.0)
    assert not apart


def test_a_gradient_where_none_was_written_is_noted() -> None:
    grads, norms = grads_of()
    norms[NUMBERS[1]] = 0.0
    undo, max_norm, apart = both(grads, norms, 1.0, Workspace())
    assert (undo, max_norm, apart) == (1, math.inf, 1)


def test_a_bad_step_teaches_nothing() -> None:
    grads, norms = grads_of()
    for factors in ([0.3] * 4, [0.3, 0.3, 0.3, 1.0]):
        cut = [grad * factor for grad, factor in zip(grads, factors, strict=True)]
        _, max_norm, apart = both(cut, norms, 1.0, Workspace(), good=0.0)
        assert (max_norm, apart) == (math.inf, 0)
    cut[0] = cut[0] * math.nan
    assert both(cut, norms, 1.0, Workspace())[2] == 0


@pytest.mark.parametrize("scale", [1.0, 16.0])
def test_where_nothing_was_written_nothing_but_the_scale_is_undone(scale: float) -> None:
    grads, norms = grads_of()
    assert both([torch.zeros_like(grad) for grad in grads], norms * 0, scale, Workspace())[0] == scale
    assert both([], norms, scale, Workspace())[0] == scale


def test_norms_are_noted_where_their_tensors_are():
    grads, expected = grads_of()
    starts = [sum(SIZES[:i]) for i in range(len(SIZES))]
    parts = tuple(map(ProbedPart, starts, SIZES, NUMBERS))
    flat, workspace = torch.cat(grads).to(DEVICE), Workspace()
    for dtype, near in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        norms = torch.full((6,), math.nan, device=DEVICE)
        note_norms_of(flat.to(dtype), parts, norms, workspace)
        torch.testing.assert_close(norms.cpu(), expected, rtol=near, atol=0.0, equal_nan=True)
