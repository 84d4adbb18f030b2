"""What goes over the network: counted, as recipes ask for it, and what coding indices saves."""

from __future__ import annotations

from sparsync_lab.docs.sources import Line, Sources, stored_table, table

CASE = ("collective", "values", "indices", "recipe", "density")


def measured(sources: Sources) -> str:
    """Return what a network interface counted against what the collectives' ``traffic`` says."""
    lines = sources.lines("bench-traffic.csv")
    workers = sorted({int(line["workers"]) for line in lines})
    found = {(tuple(line[key] for key in CASE), int(line["workers"])): line for line in lines}
    rows = []
    for case in dict.fromkeys(case for case, _ in found):
        collective, values, indices, recipe, density = case
        name = f"`{collective}`" + (f" (recipe `{recipe}`)" if recipe else "")
        own = [found[case, count] for count in workers]
        ratios = [f"{float(line['ratio']):.3f} ({float(line['ratio_without_framing']):.3f})" for line in own]
        rows.append([name, f"{values}, {indices}", f"{float(density):.4g}", *ratios])
    first = lines[0]
    return "\n\n".join(
        [
            table(["collective", "values, indices", "density", *(f"{count} workers" for count in workers)], rows),
            sources.made("bench-traffic.csv", first, "sparsync bench traffic")
            + f" {first['exchanges']} exchanges of {int(first['entries']):,} entries; packet headers taken off, and in "
            "brackets Gloo's own framing as well.",
        ]
    )


def of_recipes(sources: Sources) -> str:
    """Return how many times less than dense each recipe sends, by number of workers."""
    stored = sources.item("p3-traffic")
    own = next(own for own in stored.result.tables if "recipes" in own.caption)
    made = f"From `{stored.command}` ({sources.linked('papers/p3-traffic.json')}), as the collectives count it."
    return f"{stored_table(own)}\n\n{made}"


def index_codec(sources: Sources) -> str:
    """Return what Elias-Fano coded indices save, and what making and reading messages takes beside selection."""
    lines = sources.lines("bench-wire-cpu.csv")
    workers = sorted({int(line["workers"]) for line in lines})
    cases = dict.fromkeys((line["entries"], line["density"], line["indices"], line["values"]) for line in lines)
    rows = []
    for case in cases:
        own = [line for line in lines if (line["entries"], line["density"], line["indices"], line["values"]) == case]
        entries, density, indices, values = case
        bits = f"{float(own[0]['bits_per_index']):.1f} ({float(own[0]['ratio_to_bound']):.2f} ×)"
        reads = [_beside_plain(line, "read") for line in own]
        once = [f"{float(own[0][f'{part}_ms']):.2f}" for part in ("clear", "select")]
        rows.append(
            [f"{int(entries):,}", density, f"{values}, {indices}", bits, _beside_plain(own[0], "encode"), *reads, *once]
        )
    headings = ["entries", "density", "format", "bits an index (to the entropy bound)", "encode"]
    more = [*(f"read {count}" for count in workers), "clear", "select"]
    made = sources.made("bench-wire-cpu.csv", lines[0], "sparsync bench wire")
    return f"{table([*headings, *more], rows)}\n\n{made} {lines[0]['threads']} thread; selection is `topk`'s."


def _beside_plain(line: Line, part: str) -> str:
    """Return milliseconds, and how many times as long plain PyTorch takes."""
    own, plain = float(line[f"{part}_ms"]), float(line[f"plain_{part}_ms"])
    return f"{own:.2f} ({plain / own:.1f} ×)"
