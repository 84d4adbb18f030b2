"""What the planner says, and how it compares with published times."""

from __future__ import annotations

from sparsync.planner import FixedCosts, Link, ModelShape, Network, Plan, Planner
from sparsync.planner.report import HEADINGS
from sparsync_lab.docs.sources import Sources, plain, stored_table, table

MODEL, WORKERS, BANDWIDTH, COMPUTE = "resnet50", 16, 10e9, 0.46  # of P1
CHECK = "p1-table2-model"


def network_alone(sources: Sources) -> str:
    """Return a plan in which nothing but the network takes time."""
    planner = Planner(ModelShape.named(MODEL), WORKERS, COMPUTE, FixedCosts())
    made = Plan(planner, Network(Link.at(BANDWIDTH)))
    shown = table(HEADINGS[:-1], [[f"`{cells[0]}`", *cells[1:-1]] for cells in made.cells()])
    about = (
        f"ResNet-50, {WORKERS} workers, 10 Gbit/s, 50 µs a message, {1e3 * COMPUTE:.0f} ms of compute, with SGD; "
        "choosing and coding entries taken for nothing, so that this is the most that a sparse method can win there."
    )
    return f"{shown}\n\n{about}"


def check(sources: Sources) -> str:
    """Return P1's table 2 as the planner predicts it, beside what is published."""
    stored = sources.item(CHECK)
    tables = [f"**{plain(own.caption)}**\n\n{stored_table(own)}" for own in stored.result.tables]
    notes = "\n".join(f"- {plain(note)}" for note in stored.result.notes)
    file, commits = sources.linked(f"papers/{CHECK}.json"), "[Commits and data](papers-provenance.md)"
    made = f"From `{stored.command}` ({file}). {commits}."
    return "\n\n".join([*tables, notes, made])
