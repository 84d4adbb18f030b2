"""Whatever a checkpoint holds, torn, damaged or somebody else's: a handle refuses it with a ``ValueError`` and is what
it was, or goes on from it."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import HashStore
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.engine.state_form import NEEDED, OPTIONAL
from sparsync.hosts.states.rank_files import load_ranks, save_ranks
from sparsync.hosts.states.sharded import own_state
from tests.failures.checked_training import inputs, mlp, square


@dataclass(frozen=True)
class Remembering(sparsync.Selecting):
    """A compressor of somebody's own, whose state is as large as the segment."""

    def init(self, layout: sparsync.Layout) -> dict[str, dict[str, Tensor]]:
        return {s.name: {"ages": torch.zeros(s.numel, dtype=torch.int32)} for s in layout.segments}

    def select(self, u: Tensor, k: int) -> Tensor:
        return u.abs().topk(k).indices


METHODS: dict[str, dict[str, Any]] = {
    "threshold": {"compressor": "threshold", "momentum": "correct"},
    "gaussian": {"compressor": sparsync.GaussianK(0.02, refine=True), "transactional": True},
    "adamw": {"compressor": "topk", "precondition": True},
    "scaled": {"compressor": "topk", "follow_lr": True, "scaler": torch.amp.GradScaler("cpu")},
    "auto": {"compressor": "auto"},
    "own": {"compressor": Remembering(0.02)},
}
JUNK: tuple[Any, ...] = (
    None, True, 0, 1, -1, 2**70, 1.5, math.nan, math.inf, "", "x", b"x", (), [], [1], {}, {"a": 1}, {1: "a"},
    torch.zeros(()), torch.ones(3), torch.zeros(0), torch.full((60, 40), math.nan), torch.full((60,), math.inf),
    torch.full((60,), 1e300, dtype=torch.float64), torch.zeros(60, dtype=torch.int8), torch.zeros(60, dtype=torch.bool),
    torch.zeros(60, dtype=torch.complex64), torch.zeros(60, device="meta"), torch.eye(60).to_sparse(),
    torch.zeros(60, requires_grad=True), torch.full((60,), -1.0), torch.tensor(-1), torch.tensor(2**62),
)  # fmt: skip

junk = st.sampled_from(JUNK).map(copy.deepcopy)  # else what is added to a dictionary of these would stay there


class Run:
    """A training of one process, after two steps."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.build()

    def build(self) -> None:
        method, options = self.method, dict(METHODS[self.method])
        self.ddp = DistributedDataParallel(mlp())
        make = torch.optim.AdamW if method == "adamw" else torch.optim.SGD
        self.optimizer = make(self.ddp.parameters(), 1e-2)
        if method in ("threshold", "adamw", "scaled"):
            options["optimizer"] = self.optimizer
        self.handle = sparsync.attach(self.ddp, options.pop("compressor"), dense_below=1, **options)
        self.batches = inputs(0, 8, 40, steps=4)
        self.train(self.batches[:2])
        self.whole, self.weights = self.handle.state_dict(), copy.deepcopy(self.ddp.state_dict())

    def go_back(self) -> None:
        self.handle.load_state_dict(self.whole)
        self.ddp.load_state_dict(self.weights)

    def build_anew(self) -> None:
        """Give up what failed, so that it fails no other test."""
        self.handle.detach()
        self.build()

    def train(self, batches: list[Tensor]) -> None:
        for batch in batches:
            self.optimizer.zero_grad()
            square(self.ddp(batch)).backward()
            self.handle.check()
            self.optimizer.step()


@contextmanager
def trainings() -> Iterator[dict[str, Run]]:
    """Make a training of every method, in a process group of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    found = {method: Run(method) for method in METHODS}
    yield found
    for run in found.values():
        run.handle.detach()
        del run.ddp
    gc.collect()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Run]]:
    with trainings() as found:
        yield found


def flat(state: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Return all that a state holds by its path, tensors as their bits."""
    if isinstance(state, dict):
        return {path: sorted(state)} | {
            at: leaf for key in state for at, leaf in flat(state[key], (*path, key)).items()
        }
    if isinstance(state, Tensor):
        return {
            path: (
                state.dtype,
                state.shape,
                state.flatten().view(torch.uint8).tolist() if state.dim() else state.item(),
            )
        }
    return {path: state}


def paths_of(state: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = [at for key in state for at in paths_of(state[key], (*path, key))] if isinstance(state, dict) else []
    return [*([path] if path else []), *inner]


def damaged(state: dict[str, Any], data: st.DataObject) -> Any:
    """Return a copy with something missing, of another type, renamed, in another's place, or cut."""
    state = copy.deepcopy(state)
    for _ in range(data.draw(st.integers(1, 2))):
        paths = paths_of(state)
        path = data.draw(st.sampled_from(paths))
        parent = state
        for key in path[:-1]:
            parent = parent[key]
        what, own = data.draw(st.sampled_from(["drop", "junk", "rename", "swap", "bend", "add"])), parent[path[-1]]
        if what == "junk":
            parent[path[-1]] = data.draw(junk)
        elif what == "add":
            parent[data.draw(st.sampled_from(["", "x", "0.weight", 3]))] = data.draw(junk)
        elif what == "swap":
            other = state
            for key in data.draw(st.sampled_from(paths)):
                other = other[key]
            parent[path[-1]] = copy.deepcopy(other)
        elif what == "bend" and isinstance(own, Tensor) and own.layout == torch.strided and not own.is_meta:
            bend = [Tensor.double, Tensor.half, Tensor.int, Tensor.cfloat, Tensor.flatten, Tensor.to_sparse]
            bend += [lambda t: t[..., None], lambda t: t[:-1] if t.dim() else t, lambda t: t.float() * 1e38 * 1e38]
            parent[path[-1]] = data.draw(st.sampled_from(bend))(own)
        else:
            del parent[path[-1]]
            if what == "rename":
                parent[data.draw(st.sampled_from(["", "x", "2.weight", 7]))] = own
    return state


def refuses(run: Run, state: Any) -> bool:
    """Load; whether it was refused. If so nothing is changed; if not, a step can be made. Then all is as before."""
    run.train(run.batches[3:])  # so that it is not at what the state was made of
    before = flat(run.handle.state_dict())
    try:
        try:
            run.handle.load_state_dict(state)
            refused = False
        except ValueError:
            refused = True
            assert flat(run.handle.state_dict()) == before
        if not refused:
            run.train(run.batches[2:3])
            made = run.handle.state_dict()
            for kind in ("residuals", "velocities"):
                assert all(tensor.isfinite().all() for tensor in made[kind].values())
            run.handle.load_state_dict(made)
        run.go_back()
    except BaseException:
        run.build_anew()
        raise
    return refused


quiet = settings(
    max_examples=4 * settings().max_examples,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize("method", METHODS)
@quiet
@given(data=st.data())
def test_any_state_is_refused_or_loaded_as_a_whole(runs: dict[str, Run], method: str, data: st.DataObject) -> None:
    load_damaged(runs[method], data)


def load_damaged(run: Run, data: st.DataObject) -> None:
    state: Any = damaged(run.whole, data)
    form = data.draw(st.sampled_from(["own", "own", "list", "two", "tuple"]))
    if form == "two":
        state = [run.whole | {"workers": 2}, state | {"workers": 2, "rank": 1}]
    elif form != "own":
        state = [state] if form == "list" else (state,)
    refuses(run, state)


@pytest.mark.parametrize(
    "wrong", [5, None, "state", [5], [None], [[]], {}, {"schema": torch.zeros(3)}, b"", ({},)], ids=str
)
def test_what_is_no_state_is_refused(runs: dict[str, Run], wrong: Any) -> None:
    assert refuses(runs["threshold"], wrong)


def test_moments_of_a_parameter_that_is_not_there_are_refused(runs: dict[str, Run]) -> None:
    whole = runs["adamw"].whole
    moments = whole["moments"]
    assert refuses(runs["adamw"], whole | {"moments": moments | {"none": next(m for n, m in moments.items() if n)}})


@pytest.mark.parametrize("key", [*NEEDED, *OPTIONAL])
def test_a_value_of_another_type_is_refused(runs: dict[str, Run], key: str) -> None:
    for wrong in (b"x", math.nan, {"a": {3: torch.zeros(2)}}, {"0.weight": {"a": 7}}):
        assert refuses(runs["adamw"], runs["adamw"].whole | {key: wrong})


@pytest.mark.parametrize("method", METHODS)
def test_a_state_that_was_not_touched_is_loaded(runs: dict[str, Run], method: str) -> None:
    assert not refuses(runs[method], runs[method].whole)


def test_another_compressors_state_is_refused(runs: dict[str, Run]) -> None:
    for method, other in (("threshold", "gaussian"), ("gaussian", "threshold")):
        whole, its = runs[method].whole, runs[other].whole
        assert refuses(runs[method], whole | {"compressor": its["compressor"], "holds": ""})


@pytest.mark.parametrize(
    ("name", "key", "tensor"),
    [
        ("0.weight", "squares", torch.ones(7)),
        ("0.weight", "squares", torch.full((100,), -1.0)),
        ("0.weight", "numbers", torch.ones(2)),
        ("0.weight", "numbers", torch.full((3,), math.inf)),
        ("", "draws", torch.tensor(-1)),
        ("", "max_norm", torch.ones(1)),
    ],
)
def test_moments_of_another_form_are_refused(runs: dict[str, Run], name: str, key: str, tensor: Tensor) -> None:
    whole = copy.deepcopy(runs["adamw"].whole)
    assert key in whole["moments"][name]
    whole["moments"][name][key] = tensor
    assert refuses(runs["adamw"], whole)


@pytest.mark.parametrize(
    ("key", "number"),
    [("floor", 2**31), ("floor", 2**62), ("floor", -1), ("k", -1), ("left", -1), ("inflow", -(2**62))],
)
def test_thresholds_that_no_magnitude_has_are_refused(runs: dict[str, Run], key: str, number: int) -> None:
    """They are kept in 64 bits and compared in 32."""
    whole = copy.deepcopy(runs["threshold"].whole)
    whole["compressor"]["0.weight"][key].fill_(number)
    assert refuses(runs["threshold"], whole)


@pytest.mark.parametrize("number", [0, 1, 0x7F800000, 2**31 - 1])
def test_any_threshold_that_fits_is_gone_on_from(runs: dict[str, Run], number: int) -> None:
    whole = copy.deepcopy(runs["threshold"].whole)
    whole["compressor"]["0.weight"]["floor"].fill_(number)
    assert not refuses(runs["threshold"], whole)


@pytest.mark.parametrize(
    ("key", "number"),
    [(key, 10**400) for key in ("loss_scale", "rates", "highest_rates")]
    + [("loss_scale", number) for number in (5e-324, 1e-38, 1e39)],
)
def test_numbers_that_do_not_fit_are_refused(runs: dict[str, Run], key: str, number: float) -> None:
    """An integer beyond every float; and loss scales that no scaler has, as it keeps them in fp32."""
    whole = runs["threshold"].whole
    assert refuses(runs["threshold"], whole | {key: number if key == "loss_scale" else {"0.weight": number}})


@pytest.mark.parametrize("method", ["threshold", "gaussian", "scaled", "own"])
def test_what_is_kept_saturates_on_its_way_to_another_loss_scale(runs: dict[str, Run], method: str) -> None:
    whole = copy.deepcopy(runs[method].whole) | {"loss_scale": 1.2e-38}
    for own in whole["residuals"].values():
        own.mul_(1e4)[0] = 0  # which stays so
    for bag in whole["compressor"].values():
        bag.get("floor", torch.zeros(())).zero_()
    assert not refuses(runs[method], whole)


def test_what_is_kept_saturates_on_its_way_to_another_rate(runs: dict[str, Run]) -> None:
    run = runs["scaled"]
    assert not refuses(run, run.whole | {"rates": dict.fromkeys(run.whole["residuals"], 1e300)})


AUTO = {"on": "dense", "times": {}, "workers": 1, "waited": 0.0, "probe": 1, "density": 0.1}


@pytest.mark.parametrize(
    "wrong",
    [
        5,
        {},
        {"on": "dense"},
        {"on": 5, "times": {}, "workers": 1},
        AUTO | {"waited": math.inf},
        AUTO | {"probe": 10**400},
    ],
    ids=["number", "empty", "torn", "kind", "infinite", "beyond"],
)
def test_what_auto_cannot_go_on_from_is_refused_before_anything_changes(runs: dict[str, Run], wrong: Any) -> None:
    assert refuses(runs["auto"], runs["auto"].whole | {"auto": wrong})
    assert not refuses(runs["auto"], runs["auto"].whole | {"auto": AUTO})


def test_a_number_of_workers_is_no_size_to_allocate(runs: dict[str, Run]) -> None:
    whole = runs["threshold"].whole
    assert refuses(runs["threshold"], [whole | {"workers": 2**62}])


def test_residuals_that_do_not_fit_their_type_are_refused(runs: dict[str, Run]) -> None:
    """The number of a wider type would be infinite here."""
    run = runs["threshold"]
    wide = {name: torch.full_like(own, 1e300, dtype=torch.float64) for name, own in run.whole["residuals"].items()}
    assert refuses(run, run.whole | {"residuals": wide})


@quiet
@given(data=st.data())
def test_any_file_is_refused_or_loaded_as_a_whole(runs: dict[str, Run], tmp_path: Path, data: st.DataObject) -> None:
    load_torn_file(runs["threshold"], tmp_path, data)


def load_torn_file(run: Run, folder: Path, data: st.DataObject) -> None:
    save_ranks(run.handle, folder)
    (file,) = folder.iterdir()
    torn = bytearray(file.read_bytes())
    method = data.draw(st.sampled_from(["cut", "flip", "more", "other"]))
    at = int(data.draw(st.floats(0, 1, exclude_max=True)) * len(torn))
    if method == "cut":
        del torn[at:]
    elif method == "flip":
        torn[at] ^= 1 << data.draw(st.integers(0, 7))
    elif method == "more":
        torn[at:at] = data.draw(st.binary(min_size=1, max_size=40))
    file.write_bytes(torn)
    if method == "other":
        torch.save(data.draw(st.sampled_from([run.ddp.state_dict(), [run.whole], 7, {}])), file)
    before = flat(run.handle.state_dict())
    try:
        load_ranks(run.handle, folder)
    except ValueError:
        assert flat(run.handle.state_dict()) == before
    run.handle.load_state_dict(run.whole)


@settings(quiet, max_examples=settings().max_examples)
@given(data=st.data())
def test_any_distributed_checkpoint_is_refused_or_loaded_as_a_whole(
    runs: dict[str, Run], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Its tensors are torn, or there are other ones; its index is torch's own pickle, and only cut."""
    run, folder = runs["threshold"], tmp_path_factory.mktemp("rows")
    dcp.save({"sparsync": run.handle.sharded_state_dict()}, checkpoint_id=folder)
    file = folder / data.draw(st.sampled_from([".metadata", "__0_0.distcp"]))
    torn = file.read_bytes()
    cut = int(data.draw(st.floats(0, 1, exclude_max=True)) * len(torn))
    file.write_bytes(torn[:cut] + (b"" if file.suffix != ".distcp" else data.draw(st.binary(max_size=9)) + torn[cut:]))
    before = flat(run.handle.state_dict())
    try:
        run.handle.load_sharded(folder)
    except ValueError:
        assert flat(run.handle.state_dict()) == before
    run.handle.load_state_dict(run.whole)


@pytest.mark.parametrize(
    "wrong", [{"step": 2}, {"step": torch.zeros(0)}, {"workers": 0}, {"rates": {"a": torch.zeros(3)}}], ids=str
)
def test_rows_that_do_not_fit_are_refused(runs: dict[str, Run], wrong: dict[str, Any]) -> None:
    room = {"step": torch.tensor([2, 2]), "workers": 2, "holds": ""}
    with pytest.raises(ValueError, match="not whole"):
        own_state(room | wrong, None)
