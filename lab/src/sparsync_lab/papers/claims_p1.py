"""What P1 claims of models and their accuracy, and how that is judged."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from statistics import mean

from sparsync_lab.papers.claim import (
    LEARNS,
    MISSING,
    NOT,
    PARTLY,
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
    seeds_by_label,
    sentences,
    stated_gap,
    word_for,
    word_of,
)
from sparsync_lab.papers.evidence_questions import AUTHORS_ASKED, RANDOM_ASKED
from sparsync_lab.papers.p1_runs import AUTHORS, COUNTED, counts_title
from sparsync_lab.report import LineChart

OWN, BESIDE = ("ResNet-20", "VGG-16"), "LeNet-5"  # models that P1 draws, and one that it does not
THEIRS = "authors' settings"  # in labels
DENSITY = 0.1  # %
ACCURACY = "accuracy, %"  # column of beyond/accuracy
SETTINGS = "the text prints no weight decay and no density warm-up; the authors' code has both"
LONGEST = ("11,700 steps", "700 steps")  # there, of P1's own models
BELOW = "0.6 to 0.8 points below"


def own_models(told: Mapping[str, str], held: Mapping[str, Held]) -> Judgement:
    """Judge by P1's own models; one that was not trained leaves it open. LeNet-5, which P1 does not draw, is told
    beside."""
    if not held.keys() & {*OWN}:
        raise_missing("P1's own models")
    here = ", ".join(f"{model} {told.get(model, MISSING)}" for model in OWN)
    beside = sentences(f"{BESIDE}, which P1 does not draw, {told[BESIDE]}" if BESIDE in told else "")
    return Judgement(here, word_of(held.get(model) for model in OWN), beside)


def columns(stored: StoredTables, item: str, method: str, heading: str) -> dict[str, str]:
    """Return a method's cells of a column, by model, of the models that it was trained on."""
    found = {}
    for model in (*OWN, BESIDE):
        with suppress(LookupError):
            found[model] = stored.cell(item, f"{model}: test", method, heading)
    return found


def _models_of_table_1(stored: StoredTables) -> Judgement:
    table = stored.table("p1/table1", "Ours")
    names = list(table.headings)
    settings = {
        (row.cells[0], name): "published" not in row.cells[names.index(name)]
        for row in table.rows
        for name in ("parameters", "batch", "learning rate")
    }
    settings |= {
        (row.cells[0], "momentum"): first_number(row.cells[names.index("momentum")]) == 0.9 for row in table.rows
    }
    odd = [f"{model}'s {name}" for (model, name), same in settings.items() if not same]
    but = f" but {len(odd)}: {', '.join(odd)}" if odd else ""
    word = word_for(len(settings) - len(odd), len(settings))
    other = "where momentum differs it is that of the authors' code" if any("momentum" in one for one in odd) else ""
    return Judgement(f"all {len(settings)} settings match{but}", word, sentences(other))


def _with_authors_settings(stored: StoredTables, method: str) -> dict[str, dict[str, float]]:
    """Return the last scores of a method with weight decay and density warm-up of the authors' code, by model and seed;
    of models on which that was trained."""
    found: dict[str, dict[str, float]] = {}
    with suppress(LookupError):
        scores = stored.scores(AUTHORS_ASKED)
        for model in OWN:
            own = {label: score for (trained, label), score in scores.items() if trained == model}
            if by_seed := seeds_by_label(own).get(f"{method}, {THEIRS}"):
                found[model] = by_seed
    return found


def _gaps_with_authors_settings(stored: StoredTables, method: str) -> dict[str, tuple[str, int]]:
    """Return a method's stated differences to dense with the authors' settings, over the seeds that both have, and how
    many these are."""
    own, dense = (_with_authors_settings(stored, name) for name in (method, "dense"))
    found = {}
    for model in own.keys() & dense.keys():
        if both := own[model].keys() & dense[model].keys():
            gap = mean(own[model][seed] - dense[model][seed] for seed in both)
            found[model] = stated_gap(gap, len(both)), len(both)
    return {model: found[model] for model in OWN if model in found}


def _to_dense(item: str, method: str) -> Judge:
    """Judge whether a method ends like dense: with the text's settings, and with those of the authors' code. It is
    reproduced if both say so of every model."""

    def judge(stored: StoredTables) -> Judgement:
        gaps, theirs = columns(stored, item, method, TO_DENSE), _gaps_with_authors_settings(stored, method)
        held = {model: like_dense(gap) for model, gap in gaps.items()}
        here, _, beside = own_models({model: from_dense(gap) for model, gap in gaps.items()}, held)
        word = _with_both_settings(held, {model: like_dense(gap) for model, (gap, _) in theirs.items()})
        listed = ", ".join(f"{model} {gap}" for model, (gap, _) in theirs.items()) or MISSING
        seeds = ", ".join(f"{model} {many}" for model, many in columns(stored, item, method, "seeds").items())
        more = ", ".join(f"{model} {many}" for model, (_, many) in theirs.items())
        told = sentences(f"seeds: {seeds}{f'; with {THEIRS} {more}' if more else ''}", SETTINGS)
        return Judgement(f"text's settings: {here}; authors': {listed}", word, f"{beside} {told}".strip())

    return judge


def _with_both_settings(held: Mapping[str, Held], theirs: Mapping[str, Held]) -> str:
    """Return the verdict on what was tested with the text's settings and with those of the authors' code. Where these
    were not run at all, it can be reproduced in part at most."""
    every = [own.get(model) for own in (held, theirs) if own for model in OWN]
    return at_most_partly(word_of(every), bool(theirs))


def _like_topk(stored: StoredTables) -> Judgement:
    """Compare Gaussian-k as printed with Top-k."""
    printed, top = (columns(stored, "p1/fig6", method, SCORE) for method in ("gaussiank", "topk"))
    told = {model: f"{own} against {top[model]} %" for model, own in printed.items()}
    return own_models(told, {model: first_number(top[model]) - first_number(printed[model]) < POINT for model in told})


def _random_is_slower(stored: StoredTables) -> Judgement:
    """Judge Rand-k with its residual, and without, where that was trained: P1 does not say which figure 1 has."""
    top, rand = (columns(stored, "p1/fig1", method, SCORE) for method in ("topk", "randk"))
    forms = {model: [first_number(own)] for model, own in rand.items()}
    with suppress(LookupError):
        scores = stored.scores(RANDOM_ASKED)
        for model in forms.keys() & {*OWN}:
            forms[model] += [scores[model, "randk, no residual"]] if (model, "randk, no residual") in scores else []
    told = {
        model: f"{f'{own[0]:.1f} % with and {own[1]:.1f} without its residual' if own[1:] else f'{own[0]:.1f} %'}, "
        f"TopK-SGD {first_number(top[model]):.1f}"
        for model, own in forms.items()
    }
    held = {model: any(LEARNS < score < first_number(top[model]) for score in own) for model, own in forms.items()}
    here, word, beside = own_models(told, held)
    code = "the authors' code has both forms, and P1 does not say which figure 1 shows; 10 % is chance"
    return Judgement(here, word, f"{beside} {sentences(code)}".strip())


def _sends(method: str) -> Judge:
    """Judge how many entries a form sends, in times k."""

    def judge(stored: StoredTables) -> Judgement:
        sent = columns(stored, "p1/fig6", method, "density")
        times = {model: first_number(share) / DENSITY for model, share in sent.items()}
        near = {model: 0.5 < many < 2 for model, many in times.items()}
        ends = _last_counts(stored, COUNTED if method == "gaussiank" else method)
        told = {model: f"{many:.2g} k{ends.get(model, '')}" for model, many in times.items()}
        here, _, beside = own_models(told, near)
        theirs = _sent_with_authors_settings(stored, method)
        word = _with_both_settings(near, {model: 0.5 < many < 2 for model, many in theirs.items()})
        listed = ", ".join(f"{model} {many:.2g} times" for model, many in theirs.items())
        more = f"with {THEIRS} it sends, beside TopK-SGD with them: {listed or MISSING}"
        return Judgement(f"text's settings: {here}", word, f"{beside} {sentences(more)}".strip())

    return judge


def _sent_with_authors_settings(stored: StoredTables, method: str) -> dict[str, float]:
    """Return the share of the entries that a form sends with the authors' settings, in times that of TopK-SGD with
    them: both begin with more than k."""
    with suppress(LookupError):
        rows = stored.asked(AUTHORS_ASKED)
        pairs = {model: [rows.get((model, f"{name}, {THEIRS}")) for name in (method, "topk")] for model in OWN}
        return {
            model: first_number(own[4]) / first_number(top[4]) for model, (own, top) in pairs.items() if own and top
        }
    return {}


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


def _momentum_corrected(stored: StoredTables) -> Judgement:
    """Judge whether momentum correction takes the gap to dense away: DGC beside TopK-SGD, which differ in more than
    that, and signs with their momentum kept and corrected."""
    item = "beyond/accuracy"
    pairs = {}
    for model, steps in zip(OWN, LONGEST, strict=True):
        caption = f"{model} on CIFAR-10, 16 workers of 32, {steps}"
        pairs[model] = [first_number(stored.cell(item, caption, row, TO_DENSE)) for row in ("TopK-SGD", "DGC")]
    kept, fixed = (stored.number(item, "Ablations: ResNet-20", f"ablation: momentum {how}", ACCURACY)
                   for how in ("kept", "corrected, 0.9"))  # fmt: skip
    dense = stored.number(item, "ResNet-20 on CIFAR-10, 16 workers of 32, 1,400 steps", "dense", ACCURACY)
    every = [*pairs.values(), [kept - dense, fixed - dense]]
    told = ", ".join(f"{model} {top:+.2f} and {dgc:+.2f}" for model, (top, dgc) in pairs.items())
    signs = f"{OWN[0]} {kept - dense:+.2f} and {fixed - dense:+.2f} (signs)"
    like = [after > -POINT for _, after in every]
    less = [after > before / 2 for before, after in every]
    word = word_for(sum(like), len(like)) if any(like) else PARTLY if any(less) else NOT
    means = f"signs, 1,400 steps: {kept:.2f} % with momentum kept, {fixed:.2f} corrected by 0.9, dense {dense:.2f}"
    alone = "DGC differs from TopK-SGD in more than that; correction alone was not trained in P1's settings"
    return Judgement(f"points to dense without and with it: {told} (DGC), {signs}", word, sentences(means, alone))


CLOSE = '"very close top-k largest absolute values"'
CLAIMS = (
    Claim("p1/table1", "the models and settings of table 1", "6 models", _models_of_table_1),
    Claim(
        "p1/fig1", "TopK-SGD ends like dense (16 workers, 0.1 %)", BELOW, _to_dense("p1/fig1", "topk"),
        ("beyond/evidence",),
    ),
    Claim(
        "p1/fig1", "RandK-SGD learns on CIFAR-10, but slower than TopK-SGD",
        '"much slower convergence than TopK-SGD"; on ImageNet it "cannot converge"', _random_is_slower,
        ("beyond/evidence",),
    ),
    Claim(
        "p1/fig6", "GaussianK-SGD as printed ends like dense", BELOW, _to_dense("p1/fig6", "gaussiank"),
        ("beyond/evidence",),
    ),
    Claim(
        "p1/fig6", "GaussianK-SGD as printed ends like TopK-SGD", '"nearly consistent validation accuracy"', _like_topk,
    ),
    Claim(
        "p1/fig6", "Gaussian-k as printed sends about k entries", CLOSE, _sends("gaussiank"), ("beyond/evidence",),
    ),
    Claim(
        "p1/fig6", "GaussianK-SGD with its authors' selection alone ends like dense", BELOW,
        _to_dense("p1/fig6", AUTHORS), ("beyond/evidence",),
    ),
    Claim(
        "p1/fig6", "Gaussian-k with its authors' selection alone sends about k entries", CLOSE, _sends(AUTHORS),
        ("beyond/evidence",),
    ),
    Claim(
        "p1/fig6", "momentum correction takes away what TopK-SGD loses to dense", '"would address this problem"',
        _momentum_corrected, ("beyond/accuracy",),
    ),
)  # fmt: skip
