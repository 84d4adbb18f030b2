"""What a user sets as torch's default dtype or device changes nothing here."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._device import _device_constructors

import sparsync

SOURCE = Path(sparsync.__file__).parent
# By themselves they go by torch's defaults.
FACTORIES = {function.__name__ for function in _device_constructors()} | {"Tensor", "FloatTensor", "randint_like"}
METHODS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"precondition": True}),
    (torch.optim.SGD, {"recipe": "balanced"}),
    (torch.optim.SGD, {"recipe": "dgc"}),
    (torch.optim.SGD, {"compressor": "gaussian", "values": "levels", "follow_lr": True}),
    (torch.optim.SGD, {"compressor": "topk", "collective": "gtopk", "values": "bf16"}),
    (torch.optim.SGD, {"compressor": "random", "scope": "layer", "clip": 1.0}),
    (torch.optim.SGD, {"compressor": "block", "transactional": True}),
    (torch.optim.SGD, {"compressor": "auto"}),
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"recipe": "balanced", "clip": 1.0}),
]


def calls_of_factories(path: Path) -> Iterator[tuple[int, str, set[str | None]]]:
    """Return where torch's factories are called, or bound by ``partial``: line, name, and the arguments by name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        named = {keyword.arg for keyword in node.keywords}
        for function in (node.func, *node.args[:1]):
            whole = ast.unparse(function)
            if whole.startswith("torch.") and whole.removeprefix("torch.") in FACTORIES:
                yield node.lineno, whole, named


def test_every_factory_call_names_its_dtype_and_device():
    calls = [(path, *call) for path in sorted(SOURCE.rglob("*.py")) for call in calls_of_factories(path)]
    assert len(calls) > 200, "the source was not found"
    bare = [
        f"{path.relative_to(SOURCE)}:{line}: {name} without {', '.join(sorted({'dtype', 'device'} - named))}="
        for path, line, name, named in calls
        if not named >= {"dtype", "device"}
    ]
    assert not bare, "\n".join(bare)


@contextmanager
def default(dtype: torch.dtype, device: str) -> Iterator[None]:
    """Set torch's defaults for a while."""
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def case_train(rank: int, size: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Train by each method, from 65,536 entries on: where there is numba, it takes these."""
    torch.manual_seed(rank)
    batch, trained = torch.randn(8, 64), []
    for optimizer_of, options in METHODS:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 1100), nn.ReLU(), nn.Linear(1100, 4))
        rate = 0.001 if optimizer_of is torch.optim.AdamW else 0.05
        ddp, optimizer = DistributedDataParallel(model), optimizer_of(model.parameters(), lr=rate)
        if optimizer_of is torch.optim.SGD:
            optimizer.param_groups[0]["momentum"] = 0.9
        with default(dtype, device):
            handle = sparsync.attach(ddp, optimizer=optimizer, deadline=20, **options)
            for _ in range(3):
                optimizer.zero_grad()
                ddp(batch).square().mean().backward()
                optimizer.step()
            state = handle.state_dict()
            handle.load_state_dict(state)
            handle.detach()
        trained.append(nn.utils.parameters_to_vector(model.parameters()).detach())
        del ddp
        gc.collect()
    return trained


@pytest.fixture(scope="module")
def plain(worlds) -> list[list[Tensor]]:
    return worlds[2].run(case_train, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(
    ("dtype", "device"), [(torch.float64, "cpu"), (torch.bfloat16, "cpu"), (torch.float32, "meta")], ids=str
)
def test_training_is_the_same_with_other_defaults(worlds, plain, dtype, device):
    for own, usual in zip(worlds[2].run(case_train, dtype=dtype, device=device), plain, strict=True):
        for (_, options), weights, expected in zip(METHODS, own, usual, strict=True):
            assert torch.equal(weights, expected), options
