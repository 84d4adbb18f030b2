"""Hugging Face Accelerate on real processes: sparse by one line, learns, and goes on from ``save_state``."""

from __future__ import annotations

import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import sparsync
from tests.failures.ddp_training import digest, logged
from tests.failures.reducers import error_of
from tests.world import World

pytest.importorskip("accelerate")
EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate" / "train.py"
MARGIN = 0.02  # of the loss, over dense


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Two ranks that have imported Accelerate."""
    started = World(2)
    yield started
    started.close()


def accelerator(**options: Any) -> Any:
    """Return a new one, with options of its own: its state is the process's, and stays otherwise."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


def prepared(made: Any, optimizer: str = "AdamW", **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    return made.prepare(model, getattr(torch.optim, optimizer)(model.parameters(), lr=0.01, **options))


def train(made: Any, model: Any, optimizer: Any, rank: int, first: int, last: int) -> None:
    """Make steps of two backwards each, clipped as Accelerate does it."""
    for number in range(2 * first, 2 * last):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * number + rank))
        with made.accumulate(model):
            made.backward(10 * model(x).square().mean())
            if made.sync_gradients:
                made.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


# ---- the example ----------------------------------------------------------------------------------------------------


def case_example(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Train sparsely, once more from its second checkpoint, and dense."""
    main = runpy.run_path(str(EXAMPLE))["main"]
    found: dict[str, Any] = {}
    for name, more in {"whole": [], "resumed": ["--resume", "--epochs", "4"], "dense": ["--dense"]}.items():
        if name == "resumed" and rank == 0:
            shutil.copytree(f"{folder}/whole/1", f"{folder}/resumed/1")
        torch.distributed.barrier()
        model, found[f"{name} loss"] = main(["--folder", f"{folder}/{name}", "--epochs", "4", *more])
        found[f"{name} weights"] = digest(model.parameters())
    return found


def test_the_example_learns_and_goes_on_with_the_same_bits(world: World, tmp_path: Path) -> None:
    found = world.run(case_example, folder=str(tmp_path))
    assert found[0] == found[1]  # replicas, too
    assert found[0]["whole weights"] == found[0]["resumed weights"] != found[0]["dense weights"]
    assert found[0]["whole loss"] < found[0]["dense loss"] + MARGIN < 0.5
    for rank in range(2):
        whole, resumed = (
            torch.load(tmp_path / name / "3" / f"sparsync-{rank}-of-2.pt", weights_only=True)
            for name in ("whole", "resumed")
        )
        for kind in ("residuals", "velocities"):
            assert whole[kind].keys() == resumed[kind].keys() != set()
            for name, tensor in whole[kind].items():
                assert torch.equal(tensor, resumed[kind][name]), name
    first = torch.load(tmp_path / "whole" / "3" / "sparsync-0-of-2.pt", weights_only=True)
    assert digest(first["residuals"].values()) != digest(whole["residuals"].values())  # each rank has its own


# ---- wrappers, accumulation, clipping -------------------------------------------------------------------------------


def case_steps(rank: int, size: int, optimizer: str, folder: str, compiled: bool) -> dict[str, Any]:
    """Train with ``attach`` and ``keep``, save between two steps, and go back there."""
    made = accelerator(gradient_accumulation_steps=2, **({"dynamo_backend": "aot_eager"} if compiled else {}))
    model, stepped = prepared(made, optimizer, **({"momentum": 0.9} if optimizer == "SGD" else {}))
    sync = sparsync.attach(model, "topk", recipe="default", density=0.02, optimizer=stepped)
    sparsync.hosts.accelerate.keep(made, sync)
    found: dict[str, Any] = {"twice": error_of(sparsync.hosts.accelerate.keep, made, sync)}
    train(made, model, stepped, rank, 0, 3)
    made.save_state(folder)
    ends = []
    for _ in range(2):
        train(made, model, stepped, rank, 3, 6)
        ends.append(digest([*model.parameters(), *sync.state_dict()["residuals"].values()]))
        made.load_state(folder)
    total = sync.stats().total
    found |= {"ends": ends, "steps": total.steps, "names": [p.name for p in sync.parameters]}
    found["share"] = total.traffic / (4 * total.steps * sum(p.numel() for p in model.parameters()))
    sync.detach()
    made.save_state(f"{folder}/detached")
    found["betas"] = stepped.param_groups[0].get("betas")
    return found


@pytest.mark.parametrize(
    ("optimizer", "compiled"), [("AdamW", False), ("SGD", False), pytest.param("AdamW", True, marks=pytest.mark.slow)]
)
def test_accumulation_clipping_and_saved_states(world: World, tmp_path: Path, optimizer: str, compiled: bool) -> None:
    """A step is exchanged once, whatever it accumulates; ``load_state`` brings back all bits, residuals included."""
    for found in world.run(case_steps, optimizer=optimizer, folder=str(tmp_path), compiled=compiled):
        assert found["ends"][0] == found["ends"][1]
        assert found["steps"] == 9
        assert found["share"] < 0.2
        assert found["names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]  # with compile as without
        assert found["betas"] in ((0.9, 0.999), None)
        kind, text = found["twice"]
        assert kind == "ValueError"
        assert "name=" in text
    assert {path.name for path in tmp_path.glob("sparsync*")} == {"sparsync-0-of-2.pt", "sparsync-1-of-2.pt"}
    assert not list((tmp_path / "detached").glob("sparsync*"))


def case_scaler(rank: int, size: int) -> dict[str, Any]:
    """Attach to an optimizer that Accelerate steps by a loss scaler."""
    from accelerate.optimizer import AcceleratedOptimizer

    made = accelerator()
    model, optimizer = prepared(made)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled = AcceleratedOptimizer(AcceleratedOptimizer(optimizer.optimizer, scaler=scaler))
    sync = sparsync.attach(model, "topk", recipe="default", density=0.05, optimizer=scaled)
    found = {"inner": sync.plan.optimizer is optimizer.optimizer, "scaler": sync.plan.scaler is scaler}
    sync.detach()
    disabled = AcceleratedOptimizer(optimizer.optimizer, scaler=torch.amp.GradScaler("cpu", enabled=False))
    sync = sparsync.attach(model, "topk", recipe="default", density=0.05, optimizer=disabled)
    found["disabled"] = sync.plan.scaler is None
    sync.detach()
    return found


def test_a_wrappers_loss_scaler_is_found(world: World) -> None:
    for found in world.run(case_scaler):
        assert all(found.values()), found


# ---- what would train dense, or cannot be exchanged -----------------------------------------------------------------


def case_ignored_hook(rank: int, size: int, attached: bool) -> dict[str, Any]:
    """Give Accelerate the hook, which it ignores."""
    from accelerate.utils import DistributedDataParallelKwargs

    torch.manual_seed(0)
    bare = nn.Linear(64, 64)
    state, hook = sparsync.comm_hook(bare, "topk", density=0.05)
    made = accelerator(gradient_accumulation_steps=2, kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=hook)])
    model, optimizer = made.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
    if attached:
        model.register_comm_hook(state, hook)
    with logged() as messages:
        train(made, model, optimizer, rank, 0, 3)
    steps = state.stats().total.steps if attached else 0
    state.detach()
    return {"steps": steps, "told": [text for text in messages if "no bucket has come" in text]}


@pytest.mark.parametrize("attached", [False, True])
def test_a_hook_that_accelerate_ignores_is_told_of_once(world: World, attached: bool) -> None:
    found = world.run(case_ignored_hook, attached=attached)
    assert [one["steps"] for one in found] == [3 * attached] * 2
    assert [len(one["told"]) for one in found] == [int(not attached), 0]


def case_alone(rank: int, size: int) -> tuple[str, str]:
    made = accelerator()
    return error_of(sparsync.hosts.accelerate.attach, made, *prepared(made))


@pytest.mark.slow
def test_one_process_has_nothing_to_exchange() -> None:
    ((finished, found),) = World.once(1, case_alone)
    assert finished, found
    assert found[0] == "ValueError"
    assert "one process" in found[1]


def test_what_is_not_ddp_is_refused_before_the_model_is_looked_at() -> None:
    for processes, kind, says in ((1, "NO", "this Accelerator has one process"), (2, "FSDP", "uses FSDP")):
        made = SimpleNamespace(num_processes=processes, distributed_type=SimpleNamespace(value=kind))
        with pytest.raises(ValueError, match=says):
            sparsync.hosts.accelerate.attach(made, None, None)  # type: ignore[arg-type]


def case_other_hook(rank: int, size: int) -> tuple[str, str]:
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    made = accelerator(kwargs_handlers=[handler])
    return error_of(sparsync.hosts.accelerate.attach, made, *prepared(made))


def test_a_hook_that_accelerate_registers_is_named(world: World) -> None:
    for kind, text in world.run(case_other_hook):
        assert kind == "SparsyncError"
        assert "fp16_compress_hook" in text
