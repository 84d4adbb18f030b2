"""What each compressor and each collective costs, for its own page."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sparsync.collectives import Collective
from sparsync.config.registry import COLLECTIVES, COMPRESSORS
from sparsync.layout import Layout, Span
from sparsync.planner.quantities import bytes_text
from sparsync.wire import Wire
from sparsync_lab.docs.network import STEPS, rate_text
from sparsync_lab.docs.sources import Line, Sources, table
from sparsync_lab.papers.traffic import RESNET50

Block = Callable[[Sources], str]
SELECTION = (("bench-select-gpu.csv", "100000000"), ("bench-select-cpu.csv", "25600000"))
DENSITIES = ("0.001", "0.01")
WORKERS = (2, 4, 8, 16, 64)
MEASURED = {  # the method of the network lab that shows a collective
    "dense": "dense",
    "allgather": "topk+allgather@bucket",
    "gtopk": "topk+gtopk@bucket",
    "balanced": "topk+balanced@bucket",
    "shared": "random+shared@bucket",
}


def compressor(name: str) -> Block:
    """Return what writes how long a compressor takes, on a GPU and on a CPU."""

    def block(sources: Sources) -> str:
        rows, made = [], []
        for file, size in SELECTION:
            lines = [line for line in sources.lines(file) if (line["size"], line["dtype"]) == (size, "fp32")]
            own = [line for line in lines if line["method"] == name and line["density"] in DENSITIES]
            for line in own:
                rows.append(_selection(line))
            made += [sources.made(file, own[0], "sparsync bench select")] if own else []
        if not rows:
            return "It is not among what `sparsync bench select` times."
        headings = ["device", "entries", "sent", "time", "to `e += g`", "count / k"]
        return "\n\n".join([table(headings, rows), *made])

    return block


def collective(name: str) -> Block:
    """Return what writes the bytes and rounds of a collective, and its steps on slow links."""

    def block(sources: Sources) -> str:
        method: Collective = COLLECTIVES[name]()
        layout = Layout.cut([Span("all", 0, RESNET50)], numel=RESNET50, scope="global", density=0.001)
        costs = [method.traffic(layout, Wire(), workers) for workers in WORKERS]
        rows = [
            ["sent by a worker", *(bytes_text(cost.mean_bytes) for cost in costs)],
            ["by the busiest", *(bytes_text(cost.max_bytes) for cost in costs)],
            ["rounds", *(f"{cost.rounds}" for cost in costs)],
        ]
        share = "all" if name == "dense" else "0.1 %"
        shown = table(["bytes in a step", *(f"{workers} workers" for workers in WORKERS)], rows)
        about = f"{share} of {RESNET50:,} entries in fp32, as the collective's own `traffic` counts it."
        return f"{shown}\n\n{about.capitalize()}\n\n{_steps(sources, MEASURED[name])}"

    return block


def _selection(line: Line) -> list[str]:
    count = f"{float(line['count_over_k']):.2f}" if line["count_over_k"] else "–"
    share = f"{100 * float(line['density']):g} %"
    took = f"{float(line['p50_ms']):.3g} ms"
    return [line["device"], f"{int(line['size']):,}", share, took, f"{float(line['ratio_to_floor']):.2f} ×", count]


def _steps(sources: Sources, method: str) -> str:
    """Return a method's steps on slow links beside dense's."""
    lines = sources.lines(STEPS[0])
    places: dict[tuple[str, ...], dict[str, str]] = {}
    for line in lines:
        place = tuple(line[key] for key in ("model", "workers", "rate_mbit"))
        places.setdefault(place, {})[line["method"]] = f"{float(line['step_p50_ms']):.0f} ms"
    compared = ("dense", "bf16", *((method,) if method != "dense" else ()))
    rows = [
        [f"{int(model):,} entries, {workers} workers, {rate_text(rate)}", *(own.get(name, "–") for name in compared)]
        for (model, workers, rate), own in places.items()
    ]
    shown = table(["a step without compute", *(f"`{name}`" for name in compared)], rows)
    return f"{shown}\n\n{sources.made(STEPS[0], lines[0], 'sparsync lab collectives')}"


COSTS: Mapping[str, Block] = {
    **{f"cost of {name}": compressor(name) for name in COMPRESSORS if name not in ("none", "random", "block")},
    **{f"cost of {name}": collective(name) for name in COLLECTIVES},
}
