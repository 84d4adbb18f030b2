"""What the library gains, in README's sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from sparsync_lab.docs import adamw
from sparsync_lab.docs.accuracy import NAMES
from sparsync_lab.docs.schedules import (
    Tried,
    mean_of,
    schedules_table,
    score_of,
    shown_of,
    tried_of,
    with_authors_settings,
    without_decay,
)
from sparsync_lab.docs.sources import Sources, plain
from sparsync_lab.papers import tuned
from sparsync_lab.papers.adamw_sweep import MAIN, MAIN_BUDGET
from sparsync_lab.papers.adamw_tables import AT_DENSE_RATE, STANDING, fraction
from sparsync_lab.papers.differences import SEVERAL, from_dense, in_words, near, stated_gap
from sparsync_lab.papers.sweep import EARLY

NAMES_HERE = {EARLY: "ours", "dense": "dense", tuned.TOPK: tuned.TOPK}
GPT_ITEMS = (adamw.FILE, "beyond-accuracy", "beyond-outer")  # that may have trained the same GPT
NO_OTHERS = ("preconditioned", "ablation")  # how labels begin of what is no other method
ROUNDED = 1.001  # times: bytes are stored with five digits
SELECTION = "bench-select-gpu.csv"


def gains(sources: Sources) -> str:
    """Return what the library gains, a point a line."""
    told = (_at_equal_bytes(sources), _with_adamw(sources), _selection(sources))
    return "\n".join(f"- {one}" for one in told if one)


def _at_equal_bytes(sources: Sources) -> str:
    """Return where ResNet-20 ends, beside dense and TopK-SGD."""
    every = {method: rows for method, rows in tried_of(schedules_table(sources)).items() if method in NAMES_HERE}
    tried = {method: without_decay(rows) for method, rows in every.items()}
    found = {method: _best(rows) for method, rows in tried.items()}
    shown = {method: shown_of(rows) for method, rows in tried.items()}
    sent = {method: _megabytes(one.sent) for method, one in shown.items()}
    return (
        f"At **{sent['dense'] / sent[EARLY]:.0f} times fewer bytes** ResNet-20 on CIFAR-10, 16 workers, 120 epochs, "
        f"without weight decay, ends **{_beside_dense(shown[EARLY], shown['dense'])}** with `default` and "
        f"nothing sent dense ({found[EARLY]} and {found['dense']}); TopK-SGD, as published and at "
        f"{_beside(sent[tuned.TOPK], sent[EARLY])} bytes, ends at {found[tuned.TOPK]}{_authors_topk(sources)}. Virtual "
        f"workers, the best of the rates and schedules with three seeds{_edges(tried)}.{_with_decay(every)}"
    )


def _beside_dense(own: Tried, dense: Tried) -> str:
    """Return where a training ends beside dense, in words; a difference under a point counts for nothing."""
    seeds, gap = min(int(own.seeds), int(dense.seeds)), score_of(own) - score_of(dense)
    return "like dense training" if near(gap, seeds) and gap < 1 else from_dense(stated_gap(gap, seeds))


def _authors_topk(sources: Sources) -> str:
    """Return where TopK-SGD ends with what its authors' code has beside, and how much more it sends so."""
    asked = with_authors_settings(sources, "topk")
    if not asked:
        return ""
    return (
        f" (with weight decay and density warm-up of its authors' code, which sends {asked.density} of the entries, at "
        f"{mean_of(asked.scores.values())} %, {in_words(len(asked.scores))})"
    )


def _best(tried: Sequence[Tried]) -> str:
    """Return the score of the best, and a higher one of fewer seeds, if there is one."""
    best, shown = tried[0], shown_of(tried)
    if best is shown:
        return _score(best)
    return f"{_score(shown)} ({best.score} with rate {best.rate}, {in_words(int(best.seeds))})"


def _score(one: Tried) -> str:
    """Return a score in %, and of how many seeds it is, where these are too few."""
    return f"{one.score} %" + (f" ({in_words(int(one.seeds))})" if int(one.seeds) < SEVERAL else "")


def _with_decay(every: Mapping[str, Sequence[Tried]]) -> str:
    """Return what the methods reach with weight decay, where one of them ends higher than without."""
    best = {method: next((one for one in rows if one.decay != "0"), None) for method, rows in every.items()}
    found = {method: one for method, one in best.items() if one is not None}
    if all(score_of(one) <= score_of(shown_of(without_decay(every[method]))) for method, one in found.items()):
        return ""
    told = (f"{NAMES_HERE[method]} {_score(one)}" for method, one in found.items())
    return f" With weight decay {tuned.DECAY:g}: {', '.join(told)}."


def _beside(sent: float, other: float) -> str:
    """Return in words how much was sent beside another."""
    alike = "the same" if sent == other else "about the same"
    return alike if abs(sent / other - 1) < 0.01 else f"{sent / other:.2f} times the"


def _edges(own: Mapping[str, Sequence[Tried]]) -> str:
    """Return of which methods the best rate is the lowest or the highest that was tried in its schedule."""
    at = []
    for method, (best, *others) in own.items():
        rates = [float(one.rate) for one in others if one.schedule == best.schedule]
        ends = {"below": all(rate > float(best.rate) for rate in rates),
                "above": all(rate < float(best.rate) for rate in rates)}  # fmt: skip
        at += [f"{NAMES_HERE[method]} {beyond} {best.rate}" for beyond, is_edge in ends.items() if is_edge]
    return f" (not tried in its schedule: {', '.join(at)})" if at else ""


def _megabytes(cell: str) -> float:
    return float(cell.removesuffix(" MB").replace(",", ""))


def _with_adamw(sources: Sources) -> str:
    """Return what preconditioned feedback reaches in its first setting; nothing, if it was not run."""
    if not sources.has_item(adamw.FILE):
        return ""
    own = next(own for own in sources.item(adamw.FILE).result.tables if own.caption == STANDING)
    cells = dict(zip(own.headings, own.rows[0].cells, strict=True))
    return (
        f"With AdamW, {plain(cells['setting'])}, preconditioned feedback ends at a perplexity of **{cells[MAIN]}** for "
        f"**{cells['sent, of dense']} of the bytes**, where tuned dense training ends at {cells['dense']} and the best "
        f"of the other methods with three seeds, within these bytes, at {best_of_others(sources)}; untuned, with "
        f"dense's best rate, it ends at {cells[AT_DENSE_RATE].removeprefix('× ')} times dense's."
    )


def best_of_others(sources: Sources) -> str:
    """Return the best without preconditioned feedback that has three seeds and sends no more than the main budget: of
    all items that train this GPT, which those do whose dense trainings are the same."""
    found = [_of_gpt(sources, file) for file in GPT_ITEMS if sources.has_item(file)]
    dense = [{own["run"]: float(own["bytes"]) for own in rows if own["method"] == "dense"} for rows in found]
    most = max(dense[0].values()) / MAIN_BUDGET
    same = (own for rows, runs in zip(found, dense, strict=True) if runs.keys() & dense[0].keys() for own in rows)
    groups: dict[tuple[str, float], dict[str, dict[str, Any]]] = {}
    for own in same:
        if own["bytes"] <= ROUNDED * most and not own["method"].startswith(NO_OTHERS):
            groups.setdefault((own["method"], own["rate"]), {})[own["run"]] = own
    scores = {key: [one["score"] for one in own.values()] for key, own in groups.items() if len(own) >= SEVERAL}
    best = min(scores, key=lambda key: mean(scores[key]))
    sent = fraction(mean(one["bytes"] for one in groups[best].values()) / MAIN_BUDGET / most)
    return f"{mean_of(scores[best])} ({NAMES.get(best[0], plain(best[0]))}; {sent})"


def _of_gpt(sources: Sources, file: str) -> list[dict[str, Any]]:
    """Return an item's trainings of the GPT of the first setting that ended with a score."""
    rows = sources.item(file).result.rows
    every = (dict(zip(rows, own, strict=True)) for own in zip(*rows.values(), strict=True))
    return [own for own in every if own["model"] == "gpt" and own["score"] is not None]


def _selection(sources: Sources) -> str:
    """Return how long choosing entries takes on a GPU, by threshold and exactly."""
    wanted = {"size": "100000000", "density": "0.001", "dtype": "fp32"}
    lines = [line for line in sources.lines(SELECTION) if all(line[key] == value for key, value in wanted.items())]
    about, exact = (next(line for line in lines if line["method"] == method) for method in ("threshold", "topk"))
    return (
        f"Selecting entries out of 100 million on an {about['device']} takes {float(about['p50_ms']):.2f} ms by "
        f"`threshold`, which sends about k entries, {float(about['ratio_to_floor']):.2f} times the addition that error "
        f"feedback needs anyway; by `topk`, which is exact, {float(exact['p50_ms']):.2f} ms."
    )
