"""What P1 claims of gradients, theory and trainings, and how that is judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from sparsync_lab.papers.claim import (
    LEARNS,
    MISSING,
    POINT,
    SCORE,
    TO_DENSE,
    Claim,
    Held,
    Judge,
    Judgement,
    StoredTables,
    at_most_partly,
    first_number,
    from_dense,
    like_dense,
    raise_missing,
    sentences,
    word_for,
    word_of,
)
from sparsync_lab.papers.gradient_histograms import BESIDE_TOPK
from sparsync_lab.papers.p1_runs import AUTHORS, COUNTED, counts_title
from sparsync_lab.report import LineChart

OWN, BESIDE = ("ResNet-20", "VGG-16"), "LeNet-5"  # models that P1 draws, and one that it does not
SHAPES = ("p1/fig2", "p1/fig7", "p1/fig8")
RANDOM = "P1, figure 1: does Rand-k learn"  # of beyond/evidence
DENSITY = 0.1  # %
BELOW = "0.6 to 0.8 points below"


def own_models(told: Mapping[str, str], held: Mapping[str, Held]) -> Judgement:
    """Judge by P1's own models, as far as they were trained; LeNet-5, which it does not draw, is told beside them."""
    own = [held[model] for model in OWN if model in held] or raise_missing("P1's own models")
    here = ", ".join(f"{model} {told.get(model, MISSING)}" for model in OWN)
    beside = sentences(f"{BESIDE}, which P1 does not draw, {told[BESIDE]}" if BESIDE in told else "")
    return Judgement(here, at_most_partly(word_of(own), len(own) == len(OWN)), beside)


def columns(stored: StoredTables, item: str, method: str, heading: str) -> dict[str, str]:
    """Return a method's cells of a column, by model, of the models that it was trained on."""
    found = {}
    for model in (*OWN, BESIDE):
        with suppress(LookupError):
            found[model] = stored.cell(item, f"{model}: test", method, heading)
    return found


def _bells(stored: StoredTables) -> Judgement:
    tables = [stored.results[item].tables[0] for item in SHAPES]
    rows = [row.cells for table in tables for row in table.rows]
    held = sum(cells[-1] == "yes" for cells in rows)
    kurtosis = [first_number(cells[list(tables[0].headings).index("kurtosis")]) for cells in rows]
    wide = f"it is a wide condition: kurtosis is {min(kurtosis):.1f} to {max(kurtosis):,.0f}, a normal distribution's 3"
    here = f"{held} of {len(rows)} looks at six models and three methods"
    return Judgement(here, word_for(held, len(rows)), sentences(wide))


def _width(item: str, fits: Callable[[float], bool]) -> Judge:
    """Judge the deviation of gradient plus residual, in times that of Top-k, at each model's last look."""

    def judge(stored: StoredTables) -> Judgement:
        rows = stored.table(item, BESIDE_TOPK).rows
        ratios = [first_number(row.cells[-1]) for row in rows]
        here = f"its deviation is {min(ratios):.2g} to {max(ratios):.2g} times Top-k's, {len(rows)} models"
        return Judgement(here, word_for(sum(map(fits, ratios)), len(ratios)))

    return judge


def _models_of_table_1(stored: StoredTables) -> Judgement:
    table = stored.table("p1/table1", "Ours")
    same = {name: sum("published" not in row.cells[table.headings.index(name)] for row in table.rows)
            for name in ("parameters", "batch", "learning rate")}  # fmt: skip
    momentum = {row.cells[0]: first_number(row.cells[table.headings.index("momentum")]) == 0.9 for row in table.rows}
    told = ", ".join(f"{name} {count}" for name, count in (same | {"momentum": sum(momentum.values())}).items())
    odd = ", ".join(model for model, alike in momentum.items() if not alike)
    word = word_for(sum(same.values()) + sum(momentum.values()), (len(same) + 1) * len(table.rows))
    other = f"another momentum, that of the authors' code, has {odd}" if odd else ""
    return Judgement(f"as printed of {len(table.rows)}: {told}", word, sentences(other))


def _shape_of_pi(stored: StoredTables) -> Judgement:
    (row,) = stored.table("p1/fig3", "The bell shape").rows
    here = f"π is at most {row.cells[1]} above its line, and π² bends by {row.cells[2]} at most"
    return Judgement(here, word_for(row.cells[-1] == "yes", True))


def _bounds(stored: StoredTables) -> Judgement:
    rows = [[float(cell) for cell in row.cells[1:]] for row in stored.table("p1/fig5", "A normal vector").rows]
    held = sum(exact <= ours <= before for exact, ours, before in rows)
    exact, ours, before = rows[0]
    here = f"holds at {held} of {len(rows)} densities; at the lowest {exact:.4f} ≤ {ours:.4f} ≤ {before:.4f}"
    return Judgement(here, word_for(held, len(rows)))


def _to_dense(item: str, method: str) -> Judge:
    def judge(stored: StoredTables) -> Judgement:
        gaps = columns(stored, item, method, TO_DENSE)
        told = {model: from_dense(gap) for model, gap in gaps.items()}
        here, word, beside = own_models(told, {model: like_dense(gap) for model, gap in gaps.items()})
        seeds = ", ".join(f"{model} {many}" for model, many in columns(stored, item, method, "seeds").items())
        return Judgement(here, word, f"{beside} {sentences(f'seeds: {seeds}')}".strip())

    return judge


def _like_topk(stored: StoredTables) -> Judgement:
    """Compare Gaussian-k as printed with Top-k."""
    printed, top = (columns(stored, "p1/fig6", method, SCORE) for method in ("gaussiank", "topk"))
    told = {model: f"{own} against {top[model]} %" for model, own in printed.items()}
    return own_models(told, {model: first_number(top[model]) - first_number(printed[model]) < POINT for model in told})


def _random_is_slower(stored: StoredTables) -> Judgement:
    """Judge Rand-k as in figure 1, and without its residual, as in the authors' code, where that was trained."""
    top, rand = (columns(stored, "p1/fig1", method, SCORE) for method in ("topk", "randk"))
    forms = {model: [first_number(own)] for model, own in rand.items()}
    with suppress(LookupError):
        scores = stored.scores(RANDOM)
        for model in forms.keys() & {*OWN}:
            forms[model] += [scores[model, "randk, no residual"]] if (model, "randk, no residual") in scores else []
    told = {
        model: f"{f'{own[0]:.1f} % with and {own[1]:.1f} without its residual' if own[1:] else f'{own[0]:.1f} %'}, "
        f"TopK-SGD {first_number(top[model]):.1f}"
        for model, own in forms.items()
    }
    held = {model: any(LEARNS < score < first_number(top[model]) for score in own) for model, own in forms.items()}
    here, word, beside = own_models(told, held)
    code = "without its residual is as in the authors' code; 10 % is chance"
    return Judgement(here, word, f"{beside} {sentences(code)}".strip())


def _sends(method: str) -> Judge:
    """Judge how many entries a form sends, in times k."""

    def judge(stored: StoredTables) -> Judgement:
        sent = columns(stored, "p1/fig6", method, "density")
        times = {model: first_number(share) / DENSITY for model, share in sent.items()}
        near = {model: 0.5 < many < 2 for model, many in times.items()}
        ends = _last_counts(stored, COUNTED if method == "gaussiank" else method)
        told = {model: f"{many:.2g} k{ends.get(model, '')}" for model, many in times.items()}
        return own_models(told, near)

    return judge


def _last_counts(stored: StoredTables, method: str) -> dict[str, str]:
    """Return how many entries a form sends at the end of a training, by model, where that was counted."""
    charts = [figure.chart for figure in stored.results["p1/fig6"].figures if isinstance(figure.chart, LineChart)]
    return {
        model: f" on average, {curve.y[-1]:.2g} k at the end"
        for model in (*OWN, BESIDE)
        for chart in charts
        for curve in chart.curves
        if chart.title == counts_title(model) and curve.label == method
    }


CLAIMS = (
    Claim(
        SHAPES[0], "gradient plus residual has the shape that Theorem 1 rests on: π below its line, π² convex",
        "a bell, in every model, by eye", _bells, SHAPES[1:],
    ),
    Claim("p1/fig7", "without residuals it is narrower than with Top-k", "by eye", _width("p1/fig7", lambda x: x < 1)),
    Claim(
        "p1/fig8", "with Gaussian-k it is distributed as with Top-k", "by eye",
        _width("p1/fig8", lambda x: 2 / 3 < x < 1.5),
    ),
    Claim("p1/table1", "the models and settings of table 1", "6 models", _models_of_table_1),
    Claim("p1/fig3", "π of a normal vector lies below its line, and π² is convex", "drawn", _shape_of_pi),
    Claim("p1/fig5", "(1 − k/d)² is a tighter bound than 1 − k/d, and holds", "every k", _bounds),
    Claim("p1/fig1", "TopK-SGD ends like dense (16 workers, 0.1 %)", BELOW, _to_dense("p1/fig1", "topk")),
    Claim(
        "p1/fig1", "RandK-SGD learns on CIFAR-10, but slower than TopK-SGD",
        "by eye; on ImageNet it cannot converge", _random_is_slower, ("beyond/evidence",),
    ),
    Claim("p1/fig6", "GaussianK-SGD as printed ends like dense", BELOW, _to_dense("p1/fig6", "gaussiank")),
    Claim("p1/fig6", "GaussianK-SGD as printed ends like TopK-SGD", "nearly consistent with it", _like_topk),
    Claim(
        "p1/fig6", "Gaussian-k as printed sends about k entries", "k = 0.1 % is what it is made for",
        _sends("gaussiank"), ("beyond/evidence",),
    ),
    Claim(
        "p1/fig6", "GaussianK-SGD in the form of its authors' code ends like dense", BELOW,
        _to_dense("p1/fig6", AUTHORS), ("beyond/evidence",),
    ),
    Claim(
        "p1/fig6", "Gaussian-k in the form of its authors' code sends about k entries",
        "k = 0.1 % is what it is made for", _sends(AUTHORS), ("beyond/evidence",),
    ),
)  # fmt: skip
