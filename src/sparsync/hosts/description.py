"""What is exchanged, and how: in plain words first, then every option in a line of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import Tensor

from sparsync.engine.auto import AutoSwitch
from sparsync.engine.reducer import Reducer
from sparsync.engine.traffic import bytes_per_step
from sparsync.hosts.checks.coverage import describe_left_out
from sparsync.kernels import KernelPath
from sparsync.planner.quantities import bytes_text, count_text
from sparsync.version import __version__


def describe_exchange(
    reducer: Reducer,
    trained: Mapping[str, Tensor],
    dense_names: frozenset[str],
    left_out: dict[str, str],
    momentum_taken: str | None,
    auto: AutoSwitch | None = None,
    shards: str | None = None,
) -> str:
    """Return what is compressed, how, and what each worker sends in a step.

    Args:
        trained: the parameters that are exchanged, by name.
        left_out: parameters that never come in a bucket, and what becomes of them.
        momentum_taken: what was done to the optimizer, if anything.
        auto: chooses between this and other ways, if any does.
        shards: which parts of parameters this rank has, if not all.
    """
    numel = {name: p.numel() for name, p in trained.items()}
    dense = sum(numel[name] for name in dense_names)
    sparse = sum(numel.values()) - dense
    about = reducer.plan.describe(reducer.step, momentum_taken)
    lines = {
        "recipe": about.pop("recipe"),
        "compressor": about.pop("compressor"),
        "collective": about.pop("collective"),
        "compressed": f"{count_text(len(numel) - len(dense_names), 'tensor')}, {sparse:,} entries",
        "dense": f"{count_text(len(dense_names), 'tensor')}, {dense:,} entries (1-D or small)",
        **({"left out": describe_left_out(left_out)} if left_out else {}),
        **({"shards": shards} if shards else {}),
        **({"nodes": _describe_nodes(reducer)} if reducer.stage.groups else {}),
        **about,
        "kernels": _describe_kernels(reducer),
        **(auto.describe() if auto is not None else {}),
    }
    if auto is not None and auto.dense_now:
        lines |= {"compressor": "none: every entry", "collective": "the backend's all-reduce, values as bf16"}
    dense_now = auto is not None and auto.dense_now
    plain = [
        _say_what(reducer, dense_now, len(numel), len(dense_names), sparse, dense),
        _say_how_much(reducer, dense_now, trained),
        _say_changes(reducer, momentum_taken),
    ]
    title = f"sparsync {__version__} on {count_text(reducer.channel.size, 'worker')} ({reducer.channel.backend})"
    details = [f"  {name:<12} {text}" for name, text in lines.items()]
    return "\n".join([title, *(f"  {sentence}" for sentence in plain), *details])


def _say_what(reducer: Reducer, dense_now: bool, tensors: int, whole: int, sparse: int, dense: int) -> str:
    """Return a sentence: how many of all entries a worker sends.

    Args:
        tensors: in all.
        whole: of which so many travel dense.
        sparse, dense: entries of the others, and of these.
    """
    density = 1.0 if dense_now else reducer.plan.density_at(reducer.step)
    if density == 1.0 or not sparse:
        return f"Every entry of the gradient is sent{' for now' if dense_now else ''}."
    share = (density * sparse + dense) / (sparse + dense)
    are = "is" if whole == 1 else "are"
    also = f", and all of the other {whole}, which {are} small ({dense:,})" if whole else ""
    return (
        f"About {100 * share:.3g} % of all entries are sent in a step: {100 * density:.3g} % of those of "
        f"{count_text(tensors - whole, 'tensor')} ({sparse:,}){also}. The rest is kept, and sent later."
    )


def _say_how_much(reducer: Reducer, dense_now: bool, trained: Mapping[str, Tensor]) -> str:
    """Return a sentence: bytes of a step, against dense."""
    plan, groups = reducer.plan, reducer.stage.groups
    workers = len(groups) or reducer.channel.size
    if workers == 1:
        return "There is nobody to send to: one worker, or one machine."
    dense = 2 * (workers - 1) / workers * 4 * sum(p.numel() for p in trained.values())
    sent = dense / 2 if dense_now else bytes_per_step(plan, trained, workers)(plan.density_at(reducer.step))
    said = f"That is {bytes_text(sent)} a step and {'machine' if groups else 'worker'}"
    if plan.spending is not None and not dense_now:
        sent = plan.spending.mean
        said += f" now, and {bytes_text(sent)} on average over {plan.spending.steps:,} steps"
    factor = dense / sent
    less = f"{factor:.3g} times less than" if factor >= 1.01 else f"{1 / factor:.3g} times"
    return f"{said}, {less} the {bytes_text(dense)} of a dense all-reduce in fp32."


def _say_changes(reducer: Reducer, momentum_taken: str | None) -> str:
    """Return a sentence: what is other than before in the user's training."""
    if reducer.plan.precondition:
        name = type(reducer.plan.optimizer).__name__
        return f"Changed: {name} applies the updates that were exchanged instead of its own rule, until detach()."
    return f"Changed: {momentum_taken}, until detach()." if momentum_taken else "Your optimizer is not changed."


def _describe_nodes(reducer: Reducer) -> str:
    """Return how ranks share nodes, and what this one does."""
    groups, rank = reducer.stage.groups, reducer.channel.rank
    own = next(group for group in groups if rank in group)
    sizes = sorted({len(group) for group in groups})
    ranks = count_text(sizes[0], "rank") if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} ranks"
    role = "leads" if rank == own[0] else f"is led by rank {own[0]} on"
    return (
        f"{len(groups)} of {ranks}, dense sums inside, one residual each; collective and bytes are between their "
        f"first ranks; rank {rank} {role} ranks {', '.join(map(str, own))}"
    )


def _describe_kernels(reducer: Reducer) -> str:
    """Return what works on the units' gradients, which is decided when they are first compressed."""
    paths = Counter(unit.workspace.find(KernelPath) for unit in reducer.buckets.units)
    known = (f"{path} for {count_text(many, 'unit')}" for path, many in paths.items() if path is not None)
    return ", ".join(known) or "chosen in the first step"
