"""What P1 claims, and how that is judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from statistics import mean

from sparsync_lab.papers.claim import (
    MISSING,
    NOT,
    POINT,
    SCORE,
    TO_DENSE,
    Claim,
    Judge,
    StoredTables,
    at_most_partly,
    first_number,
    like_dense,
    none,
    seeds_by_label,
    stated_gap,
    word_for,
)
from sparsync_lab.papers.gradient_histograms import BESIDE_TOPK
from sparsync_lab.papers.p1_runs import AUTHORS, CARRIED, COUNTED, counts_title
from sparsync_lab.papers.vgg16_gap import ASKED, CLIPPED, PLAIN, cause_label, judge_gap, scores_by_cause
from sparsync_lab.report import LineChart

OWN, BESIDE = ("ResNet-20", "VGG-16"), "LeNet-5"  # models that P1 draws, and one that it does not
RESNET_50 = "25.6 M"  # entries
LEARNS = 20.0  # % of accuracy; 10 is chance
SHAPES = ("p1/fig2", "p1/fig7", "p1/fig8")
AUTHORS_PYTORCH = "Gaussian_k, authors' code (PyTorch)"
AUTHORS_ROWS = ("topk, authors' settings", "dense, authors' settings", "topk", "dense")
AUTHORS_SETTINGS, RANDOM = "P1, figure 6: with weight decay", "P1, figure 1: does Rand-k learn"  # beyond/evidence
MADE_FOR = "k = 0.1 % is what it is made for"
BELOW = "0.6 to 0.8 points below"


def _bells(stored: StoredTables) -> tuple[str, str]:
    rows = [row for item in SHAPES for table in stored.results[item].tables[:1] for row in table.rows]
    held = sum(row.cells[-1] == "yes" for row in rows)
    return f"{held} of {len(rows)} looks at six models and three methods", word_for(held, len(rows))


def _width(item: str, fits: Callable[[float], bool]) -> Judge:
    """Judge the deviation of gradient plus residual, in times that of Top-k, at each model's last look."""

    def judge(stored: StoredTables) -> tuple[str, str]:
        rows = stored.table(item, BESIDE_TOPK).rows
        ratios = [first_number(row.cells[-1]) for row in rows]
        here = f"its deviation is {min(ratios):.2g} to {max(ratios):.2g} times Top-k's ({len(rows)} models)"
        return here, word_for(sum(map(fits, ratios)), len(ratios))

    return judge


def _bounds(stored: StoredTables) -> tuple[str, str]:
    rows = [[float(cell) for cell in row.cells[1:]] for row in stored.table("p1/fig5", "A normal vector").rows]
    held = sum(exact <= ours <= before for exact, ours, before in rows)
    exact, ours, before = rows[0]
    return f"holds at {held} of {len(rows)} densities; at the lowest {exact:.4f} ≤ {ours:.4f} ≤ {before:.4f}", word_for(
        held, len(rows)
    )


def _selection(stored: StoredTables) -> tuple[str, str]:
    """Compare Top-k and Gaussian-k in plain PyTorch, at all sizes: alone, where that was measured, and with error
    feedback. What is told is ResNet-50's size, of which P1 gives a number."""
    told: list[str] = []
    faster: dict[str, list[bool]] = {}
    for table in stored.results["p1/fig4"].tables:
        forms = {"as printed": "Gaussian_k (PyTorch)", "in the authors' code": AUTHORS_PYTORCH}
        forms = {form: name for form, name in forms.items() if name in table.headings}
        at = [list(table.headings).index(name) for name in ("Top_k (torch.topk)", *forms.values())]
        times = {row.cells[0]: [first_number(row.cells[i]) for i in at] for row in table.rows}
        for number, form in enumerate(forms, 1):
            faster.setdefault(form, []).extend(own[number] < own[0] for own in times.values())
        how = "alone" if "alone" in table.caption else "with error feedback"
        top, *gauss = times.get(RESNET_50, [*times.values()][-1])
        own = ", ".join(f"{ms:.2f} {form}" for form, ms in zip(forms, gauss, strict=True))
        told.append(f"{how} torch.topk {top:.2f} ms, Gaussian-k in PyTorch {own}")
    ours = [
        stored.number("p1/fig4", "Time of selection with", RESNET_50, f"ours: {name}") for name in ("topk", "gaussian")
    ]
    here = f"H200, 25.6 M: {'; '.join(told)}; our kernels {ours[0]:.2f} and {ours[1]:.2f}; Gaussian-k "
    counts = ", ".join(f"{form} {sum(own)} of {len(own)}" for form, own in faster.items())
    every = [each for own in faster.values() for each in own]
    return f"{here}is faster at so many sizes and ways: {counts}", word_for(sum(every), len(every))


def _models_of_table_1(stored: StoredTables) -> tuple[str, str]:
    table = stored.table("p1/table1", "Ours")
    same = {name: sum("published" not in row.cells[table.headings.index(name)] for row in table.rows)
            for name in ("parameters", "batch", "learning rate")}  # fmt: skip
    same["momentum"] = sum(first_number(row.cells[table.headings.index("momentum")]) == 0.9 for row in table.rows)
    told = ", ".join(f"{name} {count}" for name, count in same.items())
    return f"as printed of {len(table.rows)}: {told}", word_for(sum(same.values()), len(same) * len(table.rows))


def _shape_of_pi(stored: StoredTables) -> tuple[str, str]:
    (row,) = stored.table("p1/fig3", "The bell shape").rows
    here = f"π is at most {row.cells[1]} above its line, and π² bends by {row.cells[2]} at most"
    return here, word_for(row.cells[-1] == "yes", True)


def _own_models(told: Mapping[str, str], held: Mapping[str, bool]) -> tuple[str, str]:
    """Return a verdict by P1's own models, as far as they were trained; LeNet-5, which it does not draw, is told
    beside them."""
    own = [held[model] for model in OWN if model in held]
    if not own:
        none("P1's own models")
    beside = f"; {BESIDE}, which P1 does not draw, {told[BESIDE]}" if BESIDE in told else ""
    here = ", ".join(f"{model} {told.get(model, MISSING)}" for model in OWN)
    return f"{here}{beside}", at_most_partly(word_for(sum(own), len(own)), len(own) == len(OWN))


def _to_dense(item: str, method: str) -> Judge:
    def judge(stored: StoredTables) -> tuple[str, str]:
        gaps = _columns(stored, item, method, TO_DENSE)
        here, word = _own_models(gaps, {model: like_dense(gap) for model, gap in gaps.items()})
        return f"points to dense: {here}", word

    return judge


def _columns(stored: StoredTables, item: str, method: str, heading: str) -> dict[str, str]:
    """Return a method's cells of a column, by model, of the models that it was trained on."""
    found = {}
    for model in (*OWN, BESIDE):
        with suppress(LookupError):
            found[model] = stored.cell(item, f"{model}: test", method, heading)
    return found


def _random_is_slower(stored: StoredTables) -> tuple[str, str]:
    top, rand = (_columns(stored, "p1/fig1", method, SCORE) for method in ("topk", "randk"))
    told = {model: f"{first_number(own):.1f} against {first_number(top[model]):.1f}" for model, own in rand.items()}
    learns = {model: first_number(own) > LEARNS for model, own in rand.items()}
    with suppress(LookupError):  # the other form, where it was trained: in the authors' code nothing is kept
        scores = stored.scores(RANDOM)
        for model in OWN:
            other = scores.get((model, "randk, no residual"))
            if other is not None:
                told[model] += f" ({other:.1f} without its residual, as in the authors' code)"
                learns[model] = learns[model] or other > LEARNS
    here, word = _own_models(told, learns)
    return f"{here}; 10 is chance", word


def _sends(method: str) -> Judge:
    def judge(stored: StoredTables) -> tuple[str, str]:
        sent = _columns(stored, "p1/fig6", method, "density")
        near = {model: 0.05 < first_number(share) < 0.2 for model, share in sent.items()}
        ends = _last_counts(stored, COUNTED if method == "gaussiank" else method)
        told = {model: f"{share}{ends.get(model, '')}" for model, share in sent.items()}
        here, word = _own_models(told, near)
        return f"sends {here}", word

    return judge


def _last_counts(stored: StoredTables, method: str) -> dict[str, str]:
    """Return how many entries a form sends at the end of a training, by model, where that was counted."""
    charts = [figure.chart for figure in stored.results["p1/fig6"].figures if isinstance(figure.chart, LineChart)]
    return {
        model: f" (at the end {curve.y[-1]:.2g} k)"
        for model in (*OWN, BESIDE)
        for chart in charts
        for curve in chart.curves
        if chart.title == counts_title(model) and curve.label == method
    }


def _carried_like_topk(stored: StoredTables) -> tuple[str, str]:
    """Compare Gaussian-k whose count is carried with Top-k, where it was trained."""
    carried, top = (_columns(stored, "p1/fig6", method, SCORE) for method in (CARRIED, "topk"))
    gaps = {model: first_number(own) - first_number(top[model]) for model, own in carried.items()}
    seeds = {model: "" if "±" in cell else " (one seed)" for model, cell in carried.items()}
    told = {model: f"{carried[model]}{seeds[model]} against {top[model]}" for model in gaps}
    here, word = _own_models(told, {model: abs(gap) < POINT for model, gap in gaps.items()})
    short = {method: stored.scores(ASKED).get(("VGG-16", cause_label(method, PLAIN))) for method in (CARRIED, "topk")}
    if None not in short.values():
        here += f"; VGG-16 in 40 epochs, in which neither learns much, {short[CARRIED]:.1f} against {short['topk']:.1f}"
    twice = [_columns(stored, "p1/fig6", form, SCORE).get("VGG-16") for form in ("gaussiank", COUNTED)]
    if None not in twice:
        here += f"; one training of VGG-16, as printed, made twice ends at {twice[0]} and {twice[1]}"
    return here, word


def _order_of_times(stored: StoredTables) -> tuple[str, str]:
    """Compare dense and Top-k with P1's time of selection, and with ours."""
    ours, theirs = "Iteration time with P1's compute", "TopK-SGD with P1's 0.4 s"
    models = [row.cells[0] for row in stored.table("p1/table2", theirs).rows]

    def slower(caption: str) -> int:
        pairs = [[stored.number("p1/table2", caption, model, name) for name in ("TopK", "Dense")] for model in models]
        return sum(top > dense for top, dense in pairs)

    top, dense = (stored.cell("p1/table2", theirs, "ResNet-50", name) for name in ("TopK", "Dense"))
    with_theirs, with_ours = slower(theirs), slower(ours)
    told = f"with P1's 0.4 s of top-k slower for {with_theirs} of {len(models)}: ResNet-50 {top} against dense {dense}"
    return f"{told}; with an H200's selection for {with_ours}", word_for(with_theirs + with_ours, 2 * len(models))


def _order_of_methods(stored: StoredTables) -> tuple[str, str]:
    """Compare P1's three sparse methods, with our time of selection."""
    caption, names = "Iteration time with P1's compute", ("Gaussian", "DGC", "TopK")
    rows = [row.cells[0] for row in stored.table("p1/table2", caption).rows]
    times = [[stored.number("p1/table2", caption, row, name) for name in names] for row in rows]
    first = sum(own[0] == min(own) for own in times)
    last = sum(own[2] == max(own) for own in times)
    at = times[rows.index("ResNet-50")]
    told = ", ".join(f"{name} {seconds:.4f} s" for name, seconds in zip(names, at, strict=True))
    told = f"Gaussian-k is the fastest for {first} of {len(rows)}, Top-k the slowest for {last}; ResNet-50 {told}"
    measured = stored.results["p1/table2"].rows
    sent = {
        (model, method): float(many or 0)
        for model, method, many in zip(measured["model"], measured["method"], measured["sent"], strict=True)
    }
    share = sent["ResNet-50", "Gaussian"] / sent["ResNet-50", "TopK"]
    return f"with an H200's selection {told}; Gaussian-k sends {share:.2g} k", word_for(first + last, 2 * len(rows))


def _model_of_times(stored: StoredTables) -> tuple[str, str]:
    """Judge TopK's column, which is predicted from what P1 states: its order, size and sign of the errors."""
    item, column = "p1/table2-model", "TopK, stated"
    cells = [stored.cell(item, "Iteration time", row.cells[0], column) for row in stored.table(item, "Iteration").rows]
    errors = [first_number(cell.split(", ")[1]) for cell in cells]
    right = stored.cell(item, "Errors by column", column, "faster than dense")
    mean = stored.number(item, "Errors by column", column, "mean absolute error")
    told = f"TopK's column {mean:.1f} % off on average ({min(errors):+.1f} to {max(errors):+.1f} %"
    told += ", all too long)" if min(errors) > 0 else ")"
    held = [right == "right for 4 of 4", mean < 15, min(errors) < 0 < max(errors)]
    return f"{told}, faster or slower than dense {right}", word_for(sum(held), len(held)) if held[0] else NOT


def _gap_of_vgg16(stored: StoredTables) -> tuple[str, str]:
    return judge_gap(scores_by_cause({label: score for (_, label), score in stored.scores(ASKED).items()}))


def _with_authors_settings(stored: StoredTables) -> tuple[str, str]:
    """Compare Top-k and dense, both with weight decay, Top-k with a density warm-up, on the models that were run."""
    rows, scores = stored.asked(AUTHORS_SETTINGS), stored.scores(AUTHORS_SETTINGS)
    told, held = {}, {}
    for model in OWN:
        by_label = seeds_by_label({label: score for (own, label), score in scores.items() if own == model})
        top, dense, *before = (by_label.get(how, {}) for how in AUTHORS_ROWS)
        both = sorted(top.keys() & dense.keys())
        if both:
            gap, without = (mean(a[seed] - b[seed] for seed in both) for a, b in ((top, dense), before))
            words = [stated_gap(each, len(both)) for each in (gap, without)]
            told[model] = f"{words[0]} (without them {words[1]}; seeds: {len(both)})"
            held[model] = gap > -POINT
        elif top:
            told[model] = f"{top['']:.2f}, and dense with them {MISSING} ({before[1]['']:.2f} without)"
    here, word = _own_models(told, held)
    sent = max(first_number(cells[4]) for (_, label), cells in rows.items() if label == "topk, authors' settings")
    here = f"points to dense: {here}; it sends {sent:.3g} %, {1000 * sent - 100:.0f} % more than without"
    with suppress(LookupError):
        here += f". {_each_alone(stored)}"
    return here, word


def _each_alone(stored: StoredTables) -> str:
    """Return what weight decay and density warm-up bring by themselves on VGG-16, if that was trained."""
    rows = stored.asked(ASKED)
    found = [rows.get(("VGG-16", cause_label("topk", what))) for what in (PLAIN, "weight decay", "density warm-up")]
    plain, decay, early = (cells or none(ASKED) for cells in found)
    gains = [float(cells[2]) - float(plain[2]) for cells in (decay, early)]
    most = ": nearly all of it is the latter" if abs(gains[0]) < gains[1] / 10 else ""
    told = f"{plain[2]} without them, {decay[2]} with weight decay alone, {early[2]} with density warm-up alone"
    return f"In 40 epochs of VGG-16 {told} ({early[4]} sent){most}"


def _clipped(stored: StoredTables) -> tuple[str, str]:
    """Compare Top-k and dense on VGG-16 for 120 epochs, clipped, with dense as it is and clipped."""
    scores = {label: score for (model, label), score in stored.scores(AUTHORS_SETTINGS).items() if model == "VGG-16"}
    top, dense = scores[f"topk, {CLIPPED}"], scores["dense"]
    beside = scores.get(f"dense, {CLIPPED}")
    alike = f"{MISSING} clipped" if beside is None else f"{stated_gap(top - beside)} to dense clipped, too"
    told = f"points to dense: {stated_gap(top - dense)} (not clipped {stated_gap(scores['topk'] - dense)}), {alike}"
    return told, word_for(top - dense > -POINT, True)


def _random_otherwise(stored: StoredTables) -> tuple[str, str]:
    """Compare Rand-k as in figure 1 with what the authors' code does otherwise, on the models that were run."""
    scores = stored.scores(RANDOM)
    told, held = [], []
    for model in ("ResNet-20", BESIDE):
        hows = ("no residual", "with residual, density warm-up", "no residual, density warm-up")
        changed = {how: scores[model, f"randk, {how}"] for how in hows if (model, f"randk, {how}") in scores}
        before = scores[model, "randk"]
        if not changed:
            told.append(f"{model} {before:.1f} as in figure 1, the others {MISSING}")
            continue
        held.append(max(changed.values()) > before + POINT)
        listed = ", ".join(f"{score:.1f} ({how})" for how, score in changed.items())
        told.append(f"{model} {before:.1f} as in figure 1, {listed}; dense {scores[model, 'dense']:.1f}")
    return "; ".join(told), word_for(sum(held), len(held)) if held else none(RANDOM)


CLAIMS = (
    Claim(SHAPES[0], "gradient plus residual is bell-shaped (Theorem 1's conditions)", "every model, by eye", _bells),
    Claim("p1/fig7", "without residuals it is narrower than with Top-k", "by eye", _width("p1/fig7", lambda x: x < 1)),
    Claim(
        "p1/fig8", "with Gaussian-k it is distributed as with Top-k", "by eye",
        _width("p1/fig8", lambda x: 2 / 3 < x < 1.5),
    ),
    Claim("p1/table1", "the models and settings of table 1", "6 models", _models_of_table_1),
    Claim("p1/fig3", "π of a normal vector lies below its line, and π² is convex", "drawn", _shape_of_pi),
    Claim("p1/fig5", "(1 − k/d)² is a tighter bound than 1 − k/d, and holds", "every k", _bounds),
    Claim(
        "p1/fig4", "top-k selection is slow on GPUs, Gaussian-k faster",
        "V100, 25.6 M: top-k 400 ms, Gaussian-k nearly free", _selection,
    ),
    Claim("p1/fig1", "TopK-SGD ends like dense (16 workers, 0.1 %)", BELOW, _to_dense("p1/fig1", "topk")),
    Claim(
        "beyond/evidence", "TopK-SGD ends like dense on VGG-16 with one setting changed", "P1 leaves settings open",
        _gap_of_vgg16,
    ),
    Claim(
        "beyond/evidence", "TopK-SGD ends like dense on VGG-16 when clipped at 1, 120 epochs", "P1 does not clip",
        _clipped,
    ),
    Claim(
        "beyond/evidence", "TopK-SGD ends like dense with weight decay and density warm-up of its authors' code", BELOW,
        _with_authors_settings,
    ),
    Claim(
        "p1/fig1", "RandK-SGD learns on CIFAR-10, but slower than TopK-SGD",
        "by eye; on ImageNet it cannot converge", _random_is_slower,
    ),
    Claim(
        "beyond/evidence",
        "RandK-SGD learns better without its residual, as in the authors' code, or with a density warm-up",
        "in the code", _random_otherwise,
    ),
    Claim("p1/fig6", "GaussianK-SGD as printed ends like dense", BELOW, _to_dense("p1/fig6", "gaussiank")),
    Claim("p1/fig6", "it sends about k entries", MADE_FOR, _sends("gaussiank")),
    Claim("p1/fig6", "in the form of its authors' code it ends like dense", BELOW, _to_dense("p1/fig6", AUTHORS)),
    Claim("p1/fig6", "that form sends about k entries", MADE_FOR, _sends(AUTHORS)),
    Claim(
        "p1/fig6", "with a count that it holds by itself GaussianK-SGD ends like TopK-SGD",
        "nearly consistent with TopK-SGD", _carried_like_topk,
    ),
    Claim(
        "p1/table2", "at 10 Gbit/s TopK-SGD is slower than dense", "4 of 4; ResNet-50 0.810 s against 0.699",
        _order_of_times,
    ),
    Claim(
        "p1/table2", "of the sparse methods GaussianK-SGD is the fastest, TopK-SGD the slowest",
        "4 of 4; ResNet-50 0.586, 0.655 (DGC), 0.810 s", _order_of_methods,
    ),
    Claim(
        "p1/table2-model", "the published times follow from P1's own top-k cost and two network constants",
        "Table 2", _model_of_times,
    ),
)  # fmt: skip
