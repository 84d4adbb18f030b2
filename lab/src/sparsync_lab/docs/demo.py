"""The demo's table, and what becomes of momentum behind a residual."""

from __future__ import annotations

from sparsync_lab.docs.sources import Line, Sources, percent, table

NAMES = {
    "dense": "dense (plain DDP)",
    "paper": "`paper`: TopK-SGD as published",
    "default": "`default`: our recipe",
    "topk 0.1 %": "`topk`, 0.1 %, layer by layer",
    "random+shared 1 %": "`random+shared`, 1 %",
    "topk+gtopk 1 %": "`topk+gtopk`, 1 %",
}
MOMENTA = {"dense": "dense", "keep": "kept", "move": "moved", "correct": "corrected, 0.5"}


def demo_table(sources: Sources) -> str:
    """Return the demo's table."""
    files = [sources.lines("demo.csv"), sources.lines("demo-200.csv")]
    longer = {line["method"]: line for line in files[1]}
    rows = [
        [
            NAMES[line["method"]],
            _accuracy(line),
            _accuracy(longer[line["method"]]),
            f"{int(line['bytes_per_step']):,}",
            f"{float(line['times_less_than_dense']):.3g} ×",
            f"{float(line['step_p50_ms']):.1f} ms",
        ]
        for line in files[0]
    ]
    lengths = [f"test accuracy after {lines[0]['steps']} steps" for lines in files]
    return table(["method", *lengths, "bytes per step", "less than dense", "step time"], rows)


def _accuracy(line: Line) -> str:
    missed = f", misses dense by {float(line['points_under_dense']):.1f} points" * (line["misses_dense"] == "yes")
    return f"{percent(line['accuracy_mean']).removesuffix(' %')} ± {percent(line['accuracy_std'])}{missed}"


def where(sources: Sources) -> str:
    """Return what the demo trains."""
    line = sources.lines("demo.csv")[0]
    longer = f"`sparsync demo --steps 200` ({sources.linked('demo-200.csv')})"
    return (
        f"{sources.made('demo.csv', line, 'make demo')} The second column is of {longer}. "
        f"An MLP on scikit-learn's digits, {line['workers']} workers of {line['batch']} images that share these cores, "
        f"SGD with rate {line['rate']} and momentum {line['momentum']}; mean ± standard deviation of {line['seeds']} "
        "seeds. Bytes are what one worker puts on the network, computed from message sizes. Step times show the "
        "overhead on one machine, not what a slow network would gain."
    )


def momentum(sources: Sources) -> str:
    """Return accuracies with momentum kept, moved and corrected, after some lengths."""
    lines = sources.lines("bench-momentum.csv")
    first = lines[0]
    found = {(line["steps"], line["momentum"]): f"{line['accuracy']} ± {line['spread']} %" for line in lines}
    lengths = list(dict.fromkeys(line["steps"] for line in lines))
    rows = [[shown, *(found[length, name] for length in lengths)] for name, shown in MOMENTA.items()]
    return "\n\n".join(
        [
            table(["momentum of 0.9", *(f"after {length} steps" for length in lengths)], rows),
            f"{sources.made('bench-momentum.csv', first, 'sparsync bench momentum')} Digits, `topk` at "
            f"{percent(first['density'])}, {first['workers']} workers, {first['seeds']} seeds.",
        ]
    )
