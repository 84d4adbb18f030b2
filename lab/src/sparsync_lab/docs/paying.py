"""Will it pay: what was measured on slow links, model by model, and what the planner says of a GPT-2."""

from __future__ import annotations

from sparsync.planner import FixedCosts, Link, ModelShape, Network, Plan, Planner
from sparsync.planner.quantities import bytes_text, seconds_text
from sparsync_lab.docs import adamw
from sparsync_lab.docs.charts import MODELS, WORKERS
from sparsync_lab.docs.network import AUTO, DENSE, OPTIMIZERS, TRAIN, minutes_text, rate_text, settings
from sparsync_lab.docs.sources import Sources, table

GIGABIT, COMPUTE = 1e9, 0.3  # bits a second; seconds of a step's passes
SHOWN = ("dense fp32", "dense bf16", "default")
COUNTS = (2, 4, 8, 16)


def gpt_on_1_gbit(sources: Sources) -> str:
    """Return what a GPT takes on links of 1 Gbit/s: minutes until dense's quality, and single steps."""
    own, rate = settings(sources)[0], "1000"
    dense = own.minutes_to_target(DENSE, rate)
    found = {label: own.minutes_to_target(label, rate) for label in own.labels}
    rows = [
        [label, minutes_text(minutes), f"{dense / minutes:.1f} ×"]
        for label, minutes in found.items()
        if minutes is not None and dense is not None
    ]
    shown = table([f"to {own.goal}, which dense ends with", "minutes", "faster"], rows)
    made = sources.made(TRAIN[0], sources.lines(TRAIN[0])[0], "sparsync lab train")
    return f"**{own.title}, links of {rate_text(rate)}, AdamW**\n\n{shown}\n\n{made}\n\n{_steps(sources, 'gpt', rate)}"


def by_link(sources: Sources) -> str:
    """Return how many times faster than dense in bf16 `auto` is, by model and rate of the links."""
    lines = [line for line in sources.lines(AUTO[0]) if line["workers"] == WORKERS]
    times = {(line["model"], line["rate_mbit"], line["method"]): float(line["step_p50_ms"]) for line in lines}
    rates = sorted({line["rate_mbit"] for line in lines}, key=float)
    rows = []
    for model, name in MODELS.items():
        pairs = [(times.get((model, rate, "bf16")), times.get((model, rate, "auto"))) for rate in rates]
        cells = [f"{half / ours:.2f} ×" if half and ours else "–" for half, ours in pairs]
        rows.append([name, *cells])
    made = sources.made(AUTO[0], lines[0], "sparsync lab auto")
    return f"{table([f'{WORKERS} workers', *map(rate_text, rates)], rows)}\n\n{made}"


def gpt2_on_paper(sources: Sources) -> str:
    """Return what the planner says of a GPT-2 small on 1 Gbit/s, as far as the network goes."""
    model, rows = ModelShape.named("gpt2"), []
    for workers in COUNTS:
        planner = Planner(model, workers, COMPUTE, FixedCosts(), optimizer="adamw")
        found = {row.method: row for row in Plan(planner, Network(Link.at(GIGABIT))).rows}
        half, ours = found["dense bf16"], found["default"]
        cells = [seconds_text(found[name].seconds) for name in SHOWN]
        rows.append([f"{workers}", *cells, f"{half.seconds / ours.seconds:.1f} ×", bytes_text(ours.traffic)])
    headings = ["workers", *(f"`{name}`" for name in SHOWN), "than bf16", "`default` sends a step"]
    about = (
        f"GPT-2 small, {model.numel / 1e6:,.0f} million parameters, AdamW, {rate_text('1000')}, "
        f"{1e3 * COMPUTE:.0f} ms of compute a step; choosing and coding entries taken for nothing, so this is the most "
        "that can be won."
    )
    return f"{table(headings, rows)}\n\n{about}{_on_a_gpu(sources)}"


def _on_a_gpu(sources: Sources) -> str:
    if not sources.has(adamw.TIMES):
        return ""
    timed = [line for line in sources.lines(adamw.TIMES) if line["method"] != line["floor"]]
    line = max(timed, key=lambda line: (int(line["size"]), float(line["ratio_to_floor"])))
    return (
        f" On an {line['device']} choosing and updating {int(line['size']):,} parameters was measured to take "
        f"{float(line['p50_ms']):.1f} ms."
    )


def _steps(sources: Sources, model: str, rate: str) -> str:
    """Return a model's steps on links of a rate, on every machine that measured them."""
    rows, made = [], []
    for name in AUTO:
        lines = [line for line in sources.lines(name) if (line["model"], line["rate_mbit"]) == (model, rate)]
        times = {(line["workers"], line["method"]): float(line["step_p50_ms"]) for line in lines}
        own = [line for line in lines if line["method"] == "auto"]
        for line in own:
            found = [times[line["workers"], method] for method in ("dense", "bf16", "auto")]
            place = f"{line['workers']}, {OPTIMIZERS[line['optimizer']]}, {line['cpus']} cores"
            rows.append([place, *(f"{time:.0f} ms" for time in found), f"{found[1] / found[2]:.2f} ×"])
        made += [sources.made(name, own[0], "sparsync lab auto")] if own else []
    shown = table(["workers", "dense", "dense in bf16", "`auto`", "than bf16"], rows)
    compute = f"{float(own[0]['compute_ms']):g} ms of compute"
    return "\n\n".join([f"A step of the same shapes, {compute}:", shown, *made])
