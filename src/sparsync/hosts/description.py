"""What is exchanged, and how, in a few lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sparsync.engine.auto import AutoSwitch
from sparsync.engine.reducer import Reducer
from sparsync.hosts.coverage import describe_left_out
from sparsync.kernels import KernelPath
from sparsync.layout import Parameter
from sparsync.version import __version__


def describe_exchange(
    reducer: Reducer,
    parameters: Sequence[Parameter],
    dense_names: frozenset[str],
    left_out: dict[str, str],
    momentum_taken: str | None,
    auto: AutoSwitch | None = None,
    shards: str | None = None,
) -> str:
    """Return what is compressed, how, and what each worker sends in a step.

    Args:
        left_out: parameters that never come in a bucket, and what becomes of them.
        momentum_taken: what was done to the optimizer, if anything.
        auto: chooses between this and other ways, if any does.
        shards: which parts of parameters this rank has, if not all.
    """
    numel = {p.name: p.numel for p in parameters}
    dense = sum(numel[name] for name in dense_names)
    sparse = sum(numel.values()) - dense
    about = reducer.plan.describe(reducer.step, momentum_taken)
    lines = {
        "recipe": about.pop("recipe"),
        "compressor": about.pop("compressor"),
        "collective": about.pop("collective"),
        "compressed": f"{len(numel) - len(dense_names)} tensors, {sparse:,} entries",
        "dense": f"{len(dense_names)} tensors, {dense:,} entries (1-D or small)",
        **({"left out": describe_left_out(left_out)} if left_out else {}),
        **({"shards": shards} if shards else {}),
        **({"nodes": _describe_nodes(reducer)} if reducer.stage.groups else {}),
        **about,
        "kernels": _describe_kernels(reducer),
        **(auto.describe() if auto is not None else {}),
    }
    if auto is not None and auto.dense_now:
        lines |= {"compressor": "none: every entry", "collective": "the backend's all-reduce, values as bf16"}
    title = f"sparsync {__version__} on {reducer.channel.size} workers ({reducer.channel.backend})"
    return "\n".join([title, *(f"  {name:<12} {text}" for name, text in lines.items())])


def _describe_nodes(reducer: Reducer) -> str:
    """Return how ranks share nodes, and what this one does."""
    groups, rank = reducer.stage.groups, reducer.channel.rank
    own = next(group for group in groups if rank in group)
    sizes = sorted({len(group) for group in groups})
    ranks = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    role = "leads" if rank == own[0] else f"is led by rank {own[0]} on"
    return (
        f"{len(groups)} of {ranks} ranks, dense sums inside, one residual each; collective and bytes are between their "
        f"first ranks; rank {rank} {role} ranks {', '.join(map(str, own))}"
    )


def _describe_kernels(reducer: Reducer) -> str:
    """Return what works on the units' gradients, which is decided when they are first compressed."""
    paths = Counter(unit.workspace.find(KernelPath) for unit in reducer.buckets.units)
    known = (f"{path} for {many} unit{'s' * (many > 1)}" for path, many in paths.items() if path is not None)
    return ", ".join(known) or "chosen in the first step"
