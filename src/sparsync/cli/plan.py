"""``sparsync plan``: how long a step takes with each method, and what to do."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sparsync.planner import CostBook, ForeignCosts, Link, ModelShape, Network, Plan, Planner, StoredCosts
from sparsync.planner.links import LATENCY, LOCAL
from sparsync.planner.measure_link import measure_link, slowest
from sparsync.planner.methods import OPTIMIZERS
from sparsync.planner.quantities import bandwidth_of, seconds_of
from sparsync.planner.report import check_every
from sparsync.planner.shapes import SHAPES, Shapes
from sparsync.planner.stored_costs import measured_device

Draw = Callable[[Plan, Path], None]
TimeModel = Callable[[str, torch.device], float]
EXAMPLE = "sparsync plan --model resnet50 --workers 16 --bandwidth 10Gbit --compute 0.46s"


class OneSentence(argparse.ArgumentParser):
    """A parser whose errors are sentences like everybody else's."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see sparsync plan --help")


def plan(
    arguments: Sequence[str],
    models: Mapping[str, Shapes] = SHAPES,
    draw: Draw | None = None,
    time_model: TimeModel | None = None,
) -> int:
    """Run the command and return its exit code; raises ``ValueError`` for whatever the user can put right.

    Args:
        models: shapes by name.
        draw: draws a plan into a file.
        time_model: builds a model by its name and returns the seconds of its passes on a device.
    """
    parser = make_parser(models)
    try:
        given = parser.parse_args(arguments)
    except SystemExit as stopped:  # --help
        return int(stopped.code or 0)
    if given.plot is not None and draw is None:
        raise ValueError("--plot needs the laboratory, which is not installed: pip install sparsync-lab")
    if given.script is not None:
        return measure_script(given, draw)
    model = model_of(given, models)
    if given.measure:
        return measure_here(given, model, draw, time_model)
    needed = {"--bandwidth": given.bandwidth, "--compute": given.compute}
    missing = [option for option, value in needed.items() if value is None]
    if missing:
        raise ValueError(f"{' and '.join(missing)} must be given: {EXAMPLE}; or --measure, under torchrun")
    link = Link.at(bandwidth_of(given.bandwidth), latency_of(given))
    device = measured_device(given.device)
    show(make_plan(given, model, workers_of(given), link, seconds_of(given.compute), device), given.plot, draw)
    return 0


def make_parser(models: Mapping[str, Shapes]) -> argparse.ArgumentParser:
    parser = OneSentence("sparsync plan", description=f"How long a step takes with each method. {EXAMPLE}")
    add = parser.add_argument
    add("--model", help=f"one of {', '.join(sorted(models))}")
    add("--params", help="or its number of parameters: 124e6, 25.6M")
    add("--workers", type=int, help="how many train together")
    add("--nodes", type=int, help="or machines, with --per-node workers in each")
    add("--per-node", type=int, default=1, help="workers that share a machine's link; 1")
    add("--bandwidth", help="of a machine's link: 10Gbit, 25Gb/s, 1.2GB/s")
    add("--latency", help="of a message: 50us")
    add("--local-bandwidth", help="between the workers of a machine; 100Gbit")
    add("--trees", action="store_true", help="the backend sums in log2 P rounds (NCCL), not in rings (Gloo)")
    add("--compute", help="forward and backward of one worker: 0.46s, 460ms")
    add("--every", type=int, default=30, help="local steps of a round of OuterLoop; 30")
    add("--optimizer", default="sgd", help=f"one of {', '.join(OPTIMIZERS)}; sgd")
    add("--device", default="cpu", help="on which choosing and coding entries is measured: cpu, cuda; cpu")
    add("--costs", type=Path, metavar="FILE", help="what that takes, from a file measured elsewhere")
    add("--measure", action="store_true", help="under torchrun: measure network, compute and costs here")
    add(
        "--script",
        nargs=argparse.REMAINDER,
        metavar="FILE",
        help="with --measure, last: the model that FILE trains, and its arguments",
    )
    add("--plot", type=Path, metavar="FILE", help="draw step times over bandwidth")
    return parser


def model_of(given: argparse.Namespace, models: Mapping[str, Shapes]) -> ModelShape:
    if (given.model is None) == (given.params is None):
        raise ValueError(f"either --model or --params must be given: {EXAMPLE}")
    return ModelShape.named(given.model, models) if given.model is not None else ModelShape.of_size(given.params)


def workers_of(given: argparse.Namespace) -> int:
    if given.per_node < 1:
        raise ValueError(f"per-node must be 1 or more, got {given.per_node}")
    if given.nodes is not None:
        workers = int(given.nodes * given.per_node)
        if given.workers not in (None, workers):
            raise ValueError(f"workers must be nodes times per-node, {workers}, got {given.workers}")
        return workers
    if given.workers is None:
        raise ValueError(f"--workers must be given: {EXAMPLE}")
    return int(given.workers)


def latency_of(given: argparse.Namespace) -> float:
    return LATENCY if given.latency is None else seconds_of(given.latency, "latency")


def make_plan(
    given: argparse.Namespace, model: ModelShape, workers: int, link: Link, compute: float, device: torch.device
) -> Plan:
    """Return the plan that was asked for."""
    check_every(given.every)
    book: CostBook = StoredCosts(device, fresh=given.measure) if given.costs is None else ForeignCosts(given.costs)
    local = LOCAL
    if given.local_bandwidth is not None:
        local = Link.at(bandwidth_of(given.local_bandwidth, "local-bandwidth"), LOCAL.latency)
    network = Network(link, given.per_node, local, given.trees)
    planner = Planner(model, workers, compute, book, given.optimizer, per_node=given.per_node)
    return Plan(planner, network, book.name, given.every)


def show(made: Plan, plot: Path | None, draw: Draw | None) -> None:
    print(made, flush=True)
    if plot is not None and draw is not None:
        draw(made, plot)
        print(f"plot: {plot}")


def measure_script(given: argparse.Namespace, draw: Draw | None) -> int:
    """Measure the model that a user's script trains, on all ranks."""
    from sparsync.cli.plan_script import run_script
    from sparsync.hosts.planning import device_of, shape_of

    if not given.measure or "RANK" not in os.environ or not given.script:
        raise ValueError(
            "--script needs --measure and processes: torchrun --nproc-per-node 2 -m sparsync plan --measure --script "
            "train.py ..."
        )
    if given.model is not None or given.params is not None or given.compute is not None:
        raise ValueError("--script says by itself what --model, --params and --compute would: leave them out")

    def report(ddp: DistributedDataParallel, seconds: float) -> None:
        device, group = device_of(ddp), ddp.process_group
        link, (compute,) = measure_link(device, group), slowest([seconds], device, group)
        made = make_plan(given, shape_of(ddp), dist.get_world_size(group), link, compute, device)
        if dist.get_rank(group) == 0:
            show(made, given.plot, draw)
        dist.barrier(group)  # the first may host the store

    run_script(Path(given.script[0]), given.script[1:], report)
    return 0


def measure_here(given: argparse.Namespace, model: ModelShape, draw: Draw | None, time_model: TimeModel | None) -> int:
    """Measure network, compute and costs, on all ranks; the first prints the plan."""
    if "RANK" not in os.environ:
        raise ValueError("--measure needs processes: torchrun --nproc-per-node 2 -m sparsync plan --measure ...")
    if given.compute is None and (time_model is None or given.model is None):
        lab = "" if time_model is not None else " (the laboratory, pip install sparsync-lab, times named models)"
        raise ValueError(f"--compute must be given: of this model nobody can be asked{lab}")
    device = measured_device(given.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        link = measure_link(device)
        if given.compute is not None:
            compute = seconds_of(given.compute)
        else:
            assert time_model is not None
            (compute,) = slowest([time_model(given.model, device)], device)
        made = make_plan(given, model, dist.get_world_size(), link, compute, device)
        if dist.get_rank() == 0:
            show(made, given.plot, draw)
        dist.barrier()  # the first hosts the store
    finally:
        dist.destroy_process_group()
    return 0
