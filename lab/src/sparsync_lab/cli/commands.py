"""The ``sparsync`` command with everything the laboratory adds to it."""

from __future__ import annotations

from collections.abc import Mapping

import typer

from sparsync.cli.info import info
from sparsync.version import __version__
from sparsync_lab.cli import (
    bench_adamw,
    bench_exchange,
    bench_follow,
    bench_momentum,
    bench_phases,
    bench_select,
    bench_step,
    bench_traffic,
    bench_wire,
    compare,
    demo,
    lab,
    lab_auto,
    lab_chaos,
    lab_predict,
    lab_real,
    lab_train,
    plan,
    train,
)
from sparsync_lab.cli.command_list import CommandList
from sparsync_lab.cli.papers import papers

ALL_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}  # which the library parses by itself

PURPOSES: Mapping[str, tuple[str, ...]] = {
    "For your training": ("plan", "info"),
    "See it work": ("demo", "compare", "train"),
    "Measure the library, and make its published figures again": ("bench", "lab", "papers"),
}


class ByPurpose(CommandList):
    """Lists commands under what they are for."""

    def sections(self) -> dict[str, tuple[str, ...]]:
        assert sorted(self.commands) == sorted(name for names in PURPOSES.values() for name in names)
        return dict(PURPOSES)


app = typer.Typer(
    name="sparsync",
    cls=ByPurpose,
    help="Sparse gradient communication for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
app.command("compare")(compare.compare)
app.command("demo")(demo.demo)
app.command("train")(train.train)
app.command("info")(info)
app.command("plan", add_help_option=False, context_settings=ALL_ARGUMENTS)(plan.plan)
bench = typer.Typer(
    cls=CommandList, help="Time steps and their parts on this machine.", no_args_is_help=True, rich_markup_mode=None
)
bench.command("adamw")(bench_adamw.adamw)
bench.command("follow")(bench_follow.follow_command)
bench.command("momentum")(bench_momentum.momentum)
bench.command("select")(bench_select.select)
bench.command("step")(bench_step.step)
bench.command("traffic")(bench_traffic.traffic)
bench.command("phases")(bench_phases.phases)
bench.command("wire")(bench_wire.wire)
bench.command("exchange")(bench_exchange.exchange)
bench.callback()(lambda: None)
app.add_typer(bench, name="bench")
network = typer.Typer(
    cls=CommandList,
    help="Measure on hosts of this machine whose links are as slow as asked, or with faults.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
network.command("auto")(lab_auto.auto)
network.command("chaos")(lab_chaos.chaos)
network.command("collectives")(lab.collectives)
network.command("predict")(lab_predict.predict)
network.command("real")(lab_real.real)
network.command("step")(lab.step)
network.command("train")(lab_train.train)
network.callback()(lambda: None)
app.add_typer(network, name="lab")
app.add_typer(papers, name="papers")


@app.callback(invoke_without_command=True)
def options(version: bool = typer.Option(False, "--version", help="Show the version and exit.")) -> None:
    """Sparse gradient communication for PyTorch."""
    if version:
        print(f"sparsync {__version__}")
        raise typer.Exit
