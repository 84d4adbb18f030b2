"""What P1 claims, and how that is judged."""

from __future__ import annotations

from collections.abc import Callable

from sparsync_lab.papers.claim import (
    POINT,
    SCORE,
    TO_DENSE,
    Claim,
    Judge,
    Stored,
    first_number,
    none,
    word_for,
)
from sparsync_lab.papers.gradient_histograms import BESIDE_TOPK
from sparsync_lab.papers.vgg16_gap import ASKED, judge_gap, scores_by_cause

MODELS = ("LeNet-5", "ResNet-20", "VGG-16")
SHAPES = ("p1/fig2", "p1/fig7", "p1/fig8")
AUTHORS = "Gaussian_k, authors' code (PyTorch)"
AUTHORS_SETTINGS, RANDOM = "P1, figure 6: with weight decay", "P1, figure 1: does Rand-k learn"  # beyond/evidence
BELOW = "0.6 to 0.8 points below"


def _bells(stored: Stored) -> tuple[str, str]:
    rows = [row for item in SHAPES for table in stored.results[item].tables[:1] for row in table.rows]
    held = sum(row.cells[-1] == "yes" for row in rows)
    return f"{held} of {len(rows)} looks at six models and three methods", word_for(held, len(rows))


def _width(item: str, fits: Callable[[float], bool]) -> Judge:
    """Judge the deviation of gradient plus residual, in times that of Top-k, at each model's last look."""

    def judge(stored: Stored) -> tuple[str, str]:
        rows = stored.table(item, BESIDE_TOPK).rows
        ratios = [first_number(row.cells[-1]) for row in rows]
        here = f"its deviation is {min(ratios):.2g} to {max(ratios):.2g} times Top-k's ({len(rows)} models)"
        return here, word_for(sum(map(fits, ratios)), len(ratios))

    return judge


def _bounds(stored: Stored) -> tuple[str, str]:
    rows = [[float(cell) for cell in row.cells[1:]] for row in stored.table("p1/fig5", "A normal vector").rows]
    held = sum(exact <= ours <= before for exact, ours, before in rows)
    exact, ours, before = rows[0]
    return f"holds at {held} of {len(rows)} densities; at the lowest {exact:.4f} ≤ {ours:.4f} ≤ {before:.4f}", word_for(
        held, len(rows)
    )


def _selection(stored: Stored) -> tuple[str, str]:
    """Compare Top-k and Gaussian-k in plain PyTorch, at all sizes: alone, where that was measured, and with error
    feedback."""
    told, faster = [], []
    for table in stored.results["p1/fig4"].tables:
        names = ("Top_k (torch.topk)", AUTHORS if AUTHORS in table.headings else "Gaussian_k (PyTorch)")
        at = [list(table.headings).index(name) for name in names]
        pairs = {row.cells[0]: [first_number(row.cells[i]) for i in at] for row in table.rows}
        faster += [gauss < top for top, gauss in pairs.values()]
        how = "alone" if "alone" in table.caption else "with error feedback"
        top, gauss = pairs["100 M"]
        told.append(f"{how} torch.topk {top:.2f} ms, Gaussian-k in PyTorch {gauss:.2f}")
    ours = [
        stored.number("p1/fig4", "Time of selection with", "100 M", f"ours: {name}") for name in ("topk", "gaussian")
    ]
    here = f"H200, 100 M entries: {'; '.join(told)}; our kernels {ours[0]:.2f} and {ours[1]:.2f}"
    return here, word_for(sum(faster), len(faster))


def _to_dense(item: str, method: str) -> Judge:
    def judge(stored: Stored) -> tuple[str, str]:
        gaps = {model: stored.number(item, f"{model}: test", method, TO_DENSE) for model in MODELS}
        near = sum(gap > -POINT for gap in gaps.values())
        return ", ".join(f"{model} {gap:+.2f}" for model, gap in gaps.items()) + " points to dense", word_for(
            near, len(gaps)
        )

    return judge


def _random_is_slower(stored: Stored) -> tuple[str, str]:
    scores = {
        model: [stored.number("p1/fig1", f"{model}: test", method, SCORE) for method in ("topk", "randk")]
        for model in MODELS
    }
    told = ", ".join(f"{model} {rand:.1f} against {top:.1f}" for model, (top, rand) in scores.items())
    learns = sum(rand > 20 for _, rand in scores.values())  # 10 is chance
    return f"{told}; it learns in {learns} of {len(scores)}", word_for(learns, len(scores))


def _printed_form(stored: Stored) -> tuple[str, str]:
    sent = {model: stored.cell("p1/fig6", f"{model}: test", "gaussiank", "density") for model in MODELS}
    near = sum(0.05 < first_number(share) < 0.2 for share in sent.values())
    return "sends " + ", ".join(f"{share} ({model})" for model, share in sent.items()), word_for(near, len(sent))


def _order_of_times(stored: Stored) -> tuple[str, str]:
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


def _order_of_methods(stored: Stored) -> tuple[str, str]:
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


def _model_of_times(stored: Stored) -> tuple[str, str]:
    errors = "Errors by column"
    error = stored.number("p1/table2-model", errors, "TopK, stated", "mean absolute error")
    right = stored.cell("p1/table2-model", errors, "TopK, stated", "faster than dense")
    return f"TopK's column {error:.1f} % off on average, faster or slower than dense {right}", word_for(
        right == "right for 4 of 4" and error < 15, True
    )


def _gap_of_vgg16(stored: Stored) -> tuple[str, str]:
    rows = stored.table("beyond/evidence", ASKED).rows
    return judge_gap(scores_by_cause({row.cells[0]: float(row.cells[2]) for row in rows if row.cells[2] != "not run"}))


def _with_authors_settings(stored: Stored) -> tuple[str, str]:
    """Compare Top-k and dense, both with weight decay, Top-k with a density warm-up, on the models that were run."""
    rows = [row.cells for row in stored.table("beyond/evidence", AUTHORS_SETTINGS).rows]
    scores = {(cells[1], cells[0]): float(cells[2]) for cells in rows if cells[2] != "not run"}
    pairs = {model: [scores.get((model, f"{how}, authors' settings")) for how in ("topk", "dense")] for model in MODELS}
    gaps = {model: top - dense for model, (top, dense) in pairs.items() if top is not None and dense is not None}
    before = {model: scores[model, "topk"] - scores[model, "dense"] for model in gaps}
    told = ", ".join(
        f"{model} {gap:+.2f} points to dense (without them {before[model]:+.2f})" for model, gap in gaps.items()
    )
    return told or none(AUTHORS_SETTINGS), word_for(sum(gap > -POINT for gap in gaps.values()), len(gaps))


def _random_otherwise(stored: Stored) -> tuple[str, str]:
    """Compare Rand-k as in figure 1 with what the authors' code does otherwise."""
    rows = [row.cells for row in stored.table("beyond/evidence", RANDOM).rows]
    own = {cells[0]: float(cells[2]) for cells in rows if cells[1] == "LeNet-5" and cells[2] != "not run"}
    changed = [own[f"randk, {how}"] for how in ("no residual", "with residual, density warm-up")]
    changed.append(own["randk, no residual, density warm-up"])
    told = f"LeNet-5 {own['randk']:.1f} with its residual, {changed[0]:.1f} without; with more at first "
    told += f"{changed[1]:.1f} and {changed[2]:.1f}; dense {own['dense']:.1f}"
    return told, word_for(max(changed) > own["randk"], True)


CLAIMS = (
    Claim(SHAPES[0], "gradient plus residual is bell-shaped (Theorem 1's conditions)", "every model, by eye", _bells),
    Claim("p1/fig7", "without residuals it is narrower than with Top-k", "by eye", _width("p1/fig7", lambda x: x < 1)),
    Claim(
        "p1/fig8", "with Gaussian-k it is distributed as with Top-k", "by eye",
        _width("p1/fig8", lambda x: 2 / 3 < x < 1.5),
    ),
    Claim("p1/fig5", "(1 − k/d)² is a tighter bound than 1 − k/d, and holds", "every k", _bounds),
    Claim(
        "p1/fig4", "top-k selection is slow on GPUs, Gaussian-k faster",
        "V100: top-k 0.4 s at 25.6 M, Gaussian-k nearly free", _selection,
    ),
    Claim("p1/fig1", "TopK-SGD ends like dense (16 workers, 0.1 %)", BELOW, _to_dense("p1/fig1", "topk")),
    Claim("beyond/evidence", "on VGG-16 it does with one setting changed", "P1 leaves settings open", _gap_of_vgg16),
    Claim(
        "beyond/evidence", "it does with weight decay and density warm-up of its authors' code", BELOW,
        _with_authors_settings,
    ),
    Claim("p1/fig1", "RandK-SGD learns, but slower", "by eye", _random_is_slower),
    Claim(
        "beyond/evidence", "it learns better without its residual, as in the authors' code, or with a density warm-up",
        "in the code", _random_otherwise,
    ),
    Claim("p1/fig6", "GaussianK-SGD as printed ends like dense", BELOW, _to_dense("p1/fig6", "gaussiank")),
    Claim("p1/fig6", "it sends about k entries", "k = 0.1 % is what it is made for", _printed_form),
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
