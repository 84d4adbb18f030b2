"""What selecting entries costs, and how near ``threshold`` comes to the k largest."""

from __future__ import annotations

from collections.abc import Sequence

from sparsync_lab.bench.preconditioned_methods import PRECONDITIONED_FLOOR
from sparsync_lab.docs.sources import Line, Sources, percent, table

HEADINGS = ("method", "ms, median", "ratio to `e += g`", "count / k")
FLOOR = "e += g"
PLAIN = (FLOOR, "threshold")  # shown beside what is preconditioned
WARM_UP = 20  # steps of a training that are not judged


def on_a_gpu(sources: Sources) -> str:
    """Return a table for 100 million entries on a GPU."""
    lines = sources.lines("bench-select-gpu.csv")
    chosen = _of(lines, size="100000000", density="0.001", dtype="fp32")
    return "\n\n".join(
        [
            table(HEADINGS, map(_row, sorted(chosen, key=lambda line: float(line["p50_ms"])))),
            sources.made("bench-select-gpu.csv", lines[0], "sparsync bench select")
            + f" {int(chosen[0]['size']):,} fp32 entries, density {chosen[0]['density']}, with error feedback; "
            f"Triton {lines[0]['triton']}.",
        ]
    )


def over_sizes(sources: Sources) -> str:
    """Return ratios to the floor over sizes and densities, of our methods, on a GPU."""
    lines = [line for line in sources.lines("bench-select-gpu.csv") if line["dtype"] == "fp32"]
    sizes = sorted({int(line["size"]) for line in lines})
    rows = []
    for method in dict.fromkeys(line["method"] for line in lines if line["family"] == "ours"):
        for density in dict.fromkeys(line["density"] for line in lines):
            own = {int(line["size"]): line["ratio_to_floor"] for line in _of(lines, method=method, density=density)}
            if own:
                cells = (f"{float(own[size]):.2f} ×" if size in own else "–" for size in sizes)
                rows.append([f"`{method}`", percent(density, 2), *cells])
    made = dict.fromkeys((line["date"], line["commit"]) for line in lines)
    when = [
        f"{', '.join(f'{size / 1e6:,g}' for size in sizes if _of(lines, size=str(size), commit=commit))} million: "
        f"commit {commit}, {date}"
        for date, commit in made
    ]
    headings = ["method", "density", *(f"{size / 1e6:,g} million" for size in sizes)]
    return "\n\n".join([table(headings, rows), "; ".join(when) + "."])


def by_layers(sources: Sources) -> str:
    """Return the time with a threshold for each layer, on the tensors of real models."""
    lines = sources.lines("bench-select-shapes-gpu.csv")
    own = [line for line in lines if line["model"] and line["family"] == "ours"]
    rows = [
        [
            line["model"],
            f"`{line['method']}`",
            line["scope"],
            f"{float(line['p50_ms']):.3f}",
            f"{float(line['ratio_to_floor']):.2f} ×",
        ]
        for line in own
    ]
    file = "bench-select-shapes-gpu.csv"
    return "\n\n".join(
        [
            table(["model", "method", "scope", "ms, median", "ratio to `e += g`"], rows),
            sources.made(file, lines[0], "sparsync bench select --shapes"),
        ]
    )


def preconditioned(sources: Sources) -> str:
    """Return what sketches, updates and selection take together on a GPU, beside selection alone."""
    file = "bench-select-gpu.csv"
    lines = _of(sources.lines(file), size="100000000", density="0.001", dtype="fp32")
    chosen = [line for line in lines if PRECONDITIONED_FLOOR in (line["method"], line["floor"])]
    chosen += [line for line in lines if line["method"] in PLAIN]
    rows = [
        [*_row(line), line["syncs"] or "–", line["allocations_5_steps"] or "–"] for line in sorted(chosen, key=_median)
    ]
    return "\n\n".join(
        [
            table([*HEADINGS, "waits for the GPU", "allocations in 5 steps"], rows),
            sources.made(file, lines[0], "sparsync bench select")
            + f" {int(lines[0]['size']):,} fp32 entries, density 0.001; Triton {lines[0]['triton']}.",
        ]
    )


def on_a_cpu(sources: Sources) -> str:
    """Return a table for 25.6 million entries on a CPU."""
    lines = sources.lines("bench-select-cpu.csv")
    parts = []
    for density in ("0.001", "0.01"):
        chosen = _of(lines, size="25600000", density=density, dtype="fp32")
        parts += [f"Density {density}:", table(HEADINGS, map(_row, sorted(chosen, key=_median)))]
    command = "sparsync bench select --device cpu --density 0.001 --density 0.01 --dtype fp32 --rounds 20"
    made = sources.made("bench-select-cpu.csv", lines[0], command)
    return "\n\n".join([*parts, f"{made} {lines[0]['threads']} thread, 25,600,000 fp32 entries, with error feedback."])


def nearness(sources: Sources) -> str:
    """Return how near ``threshold`` comes to the k largest in trainings."""
    lines = [line for line in sources.lines("bench-follow-gpu.csv") if int(line["step"]) > WARM_UP]
    rows = []
    for model in dict.fromkeys(line["model"] for line in lines):
        own = _of(lines, model=model)
        counts = [float(line["count_over_k"]) for line in own]
        energy = min(float(line["energy_over_topk"]) for line in own)
        entries = f"{int(own[0]['parameters']):,}"
        rows.append([model, entries, f"{min(counts):.3f} to {max(counts):.3f}", f"at least {percent(energy)}"])
    last = max(int(line["step"]) for line in lines)
    return "\n\n".join(
        [
            table(["model", "entries", "count / k", "energy, of exact top-k's"], rows),
            sources.made("bench-follow-gpu.csv", lines[0], "sparsync bench follow")
            + f" Every one of {last} steps but the first {WARM_UP}, density {lines[0]['density']}, with error "
            "feedback, the learning rate divided by 10 in the middle.",
        ]
    )


def _of(lines: Sequence[Line], **wanted: str) -> list[Line]:
    return [line for line in lines if all(line[key] == value for key, value in wanted.items())]


def _median(line: Line) -> float:
    return float(line["p50_ms"])


def _row(line: Line) -> list[str]:
    name = f"`{line['method']}`" if line["family"] != "PyTorch" else line["method"]
    count = f"{float(line['count_over_k']):.2f}" if line["count_over_k"] else ""
    against = "" if line["floor"] == FLOOR else f" of `{line['floor']}`"
    return [name, f"{_median(line):.3f}", f"{float(line['ratio_to_floor']):.2f} ×{against}", count]
