"""Launches with the same arguments go to the kernel that was compiled for them."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from sparsync.kernels.launcher import Launcher


class Kernel:
    """Stands for one of Triton's: notes what is launched, and whether it had to be looked for."""

    def __init__(self):
        names = ("a", "n", "number", "BLOCK")
        self.params = [SimpleNamespace(name=name, do_not_specialize=name == "number") for name in names]
        self.looked_for, self.launched = 0, []

    def __getitem__(self, grid):
        def run(a, n, number, *, BLOCK, num_warps):
            self.looked_for += 1
            return Compiled(self, num_warps)

        return run


class Compiled:
    def __init__(self, kernel, num_warps):
        self.kernel, self.num_warps = kernel, num_warps

    def __getitem__(self, grid):
        return lambda *args: self.kernel.launched.append((grid, *args, self.num_warps))


@pytest.fixture
def kernel():
    return Kernel()


def test_the_same_arguments_are_looked_for_once(kernel):
    launch, a = Launcher(), torch.zeros(3)
    for number in range(4):
        launch(kernel, (5, 2), a, 1000 + 1, number, BLOCK=8, num_warps=4)
    assert kernel.looked_for == 1
    assert kernel.launched == [((5, 2, 1), a, 1001, number, 8, 4) for number in (1, 2, 3)]


def test_units_take_turns(kernel):
    launch, tensors = Launcher(), [torch.zeros(3) for _ in range(5)]
    for _ in range(3):
        for a in tensors:
            launch(kernel, (1,), a, 7, 0, BLOCK=8, num_warps=4)
    assert kernel.looked_for == 5
    assert [args[1] is a for args, a in zip(kernel.launched, 2 * tensors, strict=True)] == [True] * 10


@pytest.mark.parametrize(
    "changed", [{"grid": (2,)}, {"n": 16}, {"n": 7.0}, {"BLOCK": 16}, {"num_warps": 8}, {"a": torch.zeros(3)}]
)
def test_other_arguments_are_looked_for_again(kernel, changed):
    launch, usual = Launcher(), {"grid": (1,), "a": torch.zeros(3), "n": 7, "BLOCK": 8, "num_warps": 4}
    for given in (usual, usual | changed):
        launch(kernel, given["grid"], given["a"], given["n"], 0, BLOCK=given["BLOCK"], num_warps=given["num_warps"])
    assert kernel.looked_for == 2
    assert not kernel.launched


def test_tensors_are_not_kept_alive(kernel):
    launch, a = Launcher(), torch.zeros(3)
    gone = weakref.ref(a)
    launch(kernel, (1,), a, 7, 0, BLOCK=8, num_warps=4)
    del a
    gc.collect()
    assert gone() is None
    for _ in range(3):
        launch(kernel, (1,), torch.zeros(3), 7, 0, BLOCK=8, num_warps=4)
    assert not kernel.launched
