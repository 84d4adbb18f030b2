"""Every block by name, and how a page's blocks are filled."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from sparsync_lab.docs import (
    accuracy,
    adamw,
    demo,
    examples,
    faults,
    gains,
    items,
    messages,
    method_costs,
    missing,
    network,
    outer,
    paying,
    phases,
    planner,
    provenance,
    run_times,
    schedules,
    selection,
    sketches,
    steps,
    traffic,
)
from sparsync_lab.docs.sources import Sources

Block = Callable[[Sources], str]

BLOCKS: Mapping[str, Block] = {
    "gains": gains.gains,
    "losses": accuracy.losses,
    "minutes saved": network.gains,
    "minutes": network.minutes,
    "steps on slow links": network.steps,
    "auto beside others": network.never_slower,
    "predictions": network.predictions,
    "real training": network.real_training,
    "accuracy by length": accuracy.by_length,
    "standing": accuracy.standing,
    "rates and schedules": schedules.schedules,
    "ablations": accuracy.ablations,
    "other models": accuracy.other_models,
    "edges of rates": accuracy.edges,
    "accuracy against budget": adamw.against_budget,
    "AdamW, standing": adamw.standing,
    "AdamW, figure": adamw.figure,
    "AdamW, language models": adamw.language_models,
    "AdamW, image models": adamw.image_models,
    "AdamW, ablations": adamw.ablations,
    "AdamW, times": adamw.times,
    "local steps": outer.scores,
    "local steps, best of each": outer.best_of_each,
    "cost of sketches": sketches.cost,
    "papers": items.papers,
    "provenance": provenance.commits,
    "provenance of items": provenance.measured,
    "provenance of data": provenance.data,
    "running times": run_times.of_items,
    "verdicts": items.judged,
    "questions on gTop-k": items.of_gtopk,
    "trainings that are missing": missing.trainings,
    "GPT on 1 Gbit/s": paying.gpt_on_1_gbit,
    "GPT-2 on paper": paying.gpt2_on_paper,
    "by link": paying.by_link,
    "plan, network alone": planner.network_alone,
    "planner check": planner.check,
    "demo": demo.demo_table,
    "demo, where": demo.where,
    "momentum": demo.momentum,
    "step on CPUs": steps.on_cpus,
    "step on a GPU": steps.on_a_gpu,
    "exchange on a GPU": steps.exchange,
    "phases on CPUs": phases.on_cpus,
    "GPU tests": steps.gpu_tests,
    "selection on a GPU": selection.on_a_gpu,
    "selection over sizes": selection.over_sizes,
    "selection by layers": selection.by_layers,
    "selection before AdamW": selection.preconditioned,
    "selection on a CPU": selection.on_a_cpu,
    "nearness to top-k": selection.nearness,
    "traffic": traffic.measured,
    "traffic of recipes": traffic.of_recipes,
    "index codec": traffic.index_codec,
    "fault matrix": faults.matrix,
    "example of a compressor": examples.compressor,
    "example of a collective": examples.collective,
    "refused": messages.refused,
    **method_costs.COSTS,
}
MARKED = re.compile(r"<!-- generated: (?P<name>[^>]*?) -->\n.*?<!-- end -->", re.DOTALL)


def fill(page: str, results: Path, place: Path) -> str:
    """Return a page with its blocks written anew.

    Args:
        page: the text.
        results: folder of the results.
        place: of the page, relative to the folder that ``results/`` is in; links are written from there.
    """
    sources = Sources(results, "../" * (len(place.parts) - 1) + "results")

    def written(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in BLOCKS:
            raise ValueError(f"{place}: block must be one of {', '.join(BLOCKS)}, got {name!r}")
        return f"<!-- generated: {name} -->\n\n{BLOCKS[name](sources).strip()}\n\n<!-- end -->"

    return MARKED.sub(written, page)
