"""The ``sparsync`` command with everything the laboratory adds to it."""

from __future__ import annotations

import typer

from sparsync.cli.info import info
from sparsync.version import __version__
from sparsync_lab.cli import (
    bench_adamw,
    bench_follow,
    bench_momentum,
    bench_select,
    bench_step,
    bench_traffic,
    bench_wire,
    compare,
    demo,
    lab,
    lab_auto,
    lab_predict,
    lab_real,
    lab_train,
    plan,
    train,
)
from sparsync_lab.cli.papers import papers

ALL_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}  # which the library parses by itself

app = typer.Typer(
    name="sparsync",
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
bench = typer.Typer(help="Measure.", no_args_is_help=True)
bench.command("adamw")(bench_adamw.adamw)
bench.command("follow")(bench_follow.follow_command)
bench.command("momentum")(bench_momentum.momentum)
bench.command("select")(bench_select.select)
bench.command("step")(bench_step.step)
bench.command("traffic")(bench_traffic.traffic)
bench.command("wire")(bench_wire.wire)
bench.callback()(lambda: None)
app.add_typer(bench, name="bench")
network = typer.Typer(help="Measure on hosts of this machine whose links are as slow as asked.", no_args_is_help=True)
network.command("auto")(lab_auto.auto)
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
