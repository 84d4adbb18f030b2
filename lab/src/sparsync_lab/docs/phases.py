"""Where the CPU time of an exchange goes."""

from __future__ import annotations

from sparsync_lab.docs.sources import Line, Sources, table

FILE = "bench-phases-cpu.csv"
TOTAL, LOCAL, BASE, AIM = "total", "local", ("topk@bucket", "sgd"), ("default", "sgd")


def on_cpus(sources: Sources) -> str:
    """Return CPU milliseconds of every phase and method, and what moving the bytes alone would take."""
    lines = sources.lines(FILE)
    found = {(line["method"], line["optimizer"], line["phase"]): line for line in lines}
    methods = list(dict.fromkeys((line["method"], line["optimizer"]) for line in lines if line["method"] != LOCAL))
    phases = [phase for phase in dict.fromkeys(line["phase"] for line in lines) if phase != TOTAL]
    rows = [[phase, *(_cell(found.get((*method, phase))) for method in methods)] for phase in [*phases, TOTAL]]
    headings = [f"`{name}`, {optimizer} ({_density(lines, name, optimizer)})" for name, optimizer in methods]
    local = float(found[LOCAL, "sgd", TOTAL]["cpu_ms"])
    totals = {method: float(found[*method, TOTAL]["cpu_ms"]) for method in methods}
    counted = [line for line in lines if (line["method"], line["optimizer"]) == AIM and float(line["bytes"])]
    least = totals[AIM] - sum(float(line["cpu_ms"]) - float(line["floor_ms"]) for line in counted)
    first = lines[0]
    return "\n\n".join(
        [
            table(["phase", *headings], rows),
            f"Of every total, {local:.1f} ms are the model's own, without any exchange. `default` with SGD takes "
            f"{totals[AIM] / totals[BASE]:.2f} × the CPU time of `topk` 0.1 % in buckets; were its counted phases at "
            f"their floor and the others as they are, {least / totals[BASE]:.2f} ×. The bytes of `topk`'s phases come "
            f"to {_floor(lines, BASE):.1f} ms, those of `default`'s to {_floor(lines, AIM):.1f} ms.",
            sources.made(FILE, first, "sparsync bench phases")
            + f" {int(first['entries']):,} entries, {first['workers']} workers, medians of {first['rounds']} steps.",
        ]
    )


def _cell(line: Line | None) -> str:
    """Return milliseconds, and the floor in brackets."""
    if line is None:
        return "–"
    return f"{float(line['cpu_ms']):.1f}" + (f" ({float(line['floor_ms']):.1f})" if float(line["bytes"]) else "")


def _density(lines: list[Line], name: str, optimizer: str) -> str:
    own = next(line for line in lines if (line["method"], line["optimizer"]) == (name, optimizer))
    return f"{100 * float(own['density']):.2g} %"


def _floor(lines: list[Line], method: tuple[str, str]) -> float:
    return sum(float(line["floor_ms"]) for line in lines if (line["method"], line["optimizer"]) == method)
