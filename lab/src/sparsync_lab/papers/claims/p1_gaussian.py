"""What P1 claims with figure 6: where Gaussian-k ends, how much it sends, and what momentum correction brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import mean

from sparsync_lab.papers.claims.claim import PARTLY, UNDECIDED, Claim, Judge, Judgement, sentences, word_of
from sparsync_lab.papers.claims.p1_dense import AUTHORS_SETTINGS, CODE, TEXT, ends_like_dense
from sparsync_lab.papers.claims.p1_models import BESIDE, OWN, VGG, columns, own_models, spread, spread_in_words
from sparsync_lab.papers.claims.stored_tables import TO_DENSE, MissingResult, StoredTables, first_number, raise_missing
from sparsync_lab.papers.differences import POINT, UNDER_A_POINT, Held, in_words, near
from sparsync_lab.papers.evidence_questions import AUTHORS_ASKED, EVIDENCE
from sparsync_lab.papers.p1_runs import AUTHORS, COUNTED, SPARSE, counts_title
from sparsync_lab.report import LineChart

K_PERCENT = 100 * SPARSE["density"]
ACCURACY = "accuracy, %"  # column of beyond/accuracy
LONGEST = ("11,700 steps", "700 steps")  # there, of P1's own models


def ends_like_topk(stored: StoredTables, form: str) -> Judgement:
    """Compare a form of Gaussian-k with Top-k, where it was trained, over the seeds that both have."""
    told: dict[str, str] = {}
    held: dict[str, Held] = {}
    for model in (*OWN, BESIDE):
        scores = stored.by_seed(model)
        own, top = (scores.get(label, {}) for label in (form, "topk"))
        if both := sorted(own.keys() & top.keys()):
            ends = [mean(each[seed] for seed in both) for each in (own, top)]
            apart = spread(stored, model)
            held[model] = near(ends[0] - ends[1], len(both), apart)
            told[model] = f"{ends[0]:.2f} against {ends[1]:.2f} %"
            if held[model] is None and isfinite(apart):
                told[model] = f"{UNDER_A_POINT} apart"
                if apart > POINT:
                    told[model] = f"within the spread of its trainings{_both_far(ends, scores.get('dense', {}), both)}"
            told[model] += f" ({in_words(len(both))})"
    here, word, beside = own_models(told, held)
    return Judgement(here, word, f"{beside} {sentences(spread_in_words(stored))}".strip())


def _both_far(ends: Sequence[float], dense: Mapping[str, float], seeds: Sequence[str]) -> str:
    """Return how far below dense both end at least; empty if that is less than a point, or dense is not trained."""
    least = mean(dense[seed] for seed in seeds) - max(ends) if {*seeds} <= dense.keys() else 0.0
    return f", both {least:.2f} points or more below dense" if least >= POINT else ""


def _like_topk(stored: StoredTables) -> Judgement:
    """Compare Gaussian-k as printed with Top-k."""
    here, word, detail = ends_like_topk(stored, "gaussiank")
    twice = [stored.by_seed(VGG).get(form, {}).get("") for form in ("gaussiank", COUNTED)]
    again = "" if None in twice else f"the training of {VGG} made twice ends at {twice[0]:.2f} and {twice[1]:.2f}"
    return Judgement(here, word, f"{detail} {sentences(again)}".strip())


def _sends(method: str) -> Judge:
    """Judge how many entries a form sends with the text's settings, in times k."""

    def judge(stored: StoredTables) -> Judgement:
        sent = columns(stored, "p1/fig6", method, "density")
        times = {model: first_number(share) / K_PERCENT for model, share in sent.items()}
        ends = _last_counts(stored, COUNTED if method == "gaussiank" else method)
        told = {model: f"{many:.2g} k{ends.get(model, '')}" for model, many in times.items()}
        return own_models(told, {model: _about(many) for model, many in times.items()})

    return judge


def _sends_with_the_authors(method: str) -> Judge:
    """Judge how many entries a form sends with the settings of the authors' code, in times those of TopK-SGD with them:
    both begin with more than k."""

    def judge(stored: StoredTables) -> Judgement:
        rows = stored.asked(AUTHORS_ASKED)
        pairs = {
            model: [rows.get((model, f"{name}, {AUTHORS_SETTINGS}")) for name in (method, "topk")] for model in OWN
        }
        times = {
            model: first_number(own[4]) / first_number(top[4]) for model, (own, top) in pairs.items() if own and top
        }
        told = {model: f"{many:.2g} times TopK-SGD's" for model, many in times.items()}
        return own_models(told, {model: _about(many) for model, many in times.items()})

    return judge


def _about(times: float) -> bool:
    return 0.5 < times < 2


def _last_counts(stored: StoredTables, method: str) -> dict[str, str]:
    """Return how many entries a form sends at the end of a training, by model, where that was counted."""
    charts = [figure.chart for figure in stored.result("p1/fig6").figures if isinstance(figure.chart, LineChart)]
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
    item, methods = "beyond/accuracy", ("TopK-SGD", "DGC")
    parts: list[tuple[float, float] | None] = []
    told, untried, means = [], [], ""
    for model, steps in zip(OWN, LONGEST, strict=True):
        caption = f"{model} on CIFAR-10, 16 workers of 32, {steps}"
        try:
            top, dgc = (first_number(stored.cell(item, caption, row, TO_DENSE)) for row in methods)
        except MissingResult:
            parts.append(None)
            told.append(f"{model} {UNDECIDED}")
        else:
            seeds = min(int(stored.number(item, caption, row, "seeds")) for row in methods)
            alike = near(dgc - top, seeds) is None
            more = f"{UNDER_A_POINT} away ({in_words(seeds)})" if alike else f"{dgc:+.2f}"
            told.append(f"{model} {top:+.2f}, DGC {more}")
            parts.append((top, dgc))
        if any(f"{model} on CIFAR-10, {steps}" in one for one in stored.result(item).missing):
            untried.append(f"{model}, {steps}")
    try:
        kept, fixed = (stored.number(item, "Ablations: ResNet-20", f"ablation: momentum {how}", ACCURACY)
                       for how in ("kept", "corrected, 0.9"))  # fmt: skip
        dense = stored.number(item, "ResNet-20 on CIFAR-10, 16 workers of 32, 1,400 steps", "dense", ACCURACY)
    except MissingResult:
        parts.append(None)
        told.append(f"signs {UNDECIDED}")
    else:
        parts.append((kept - dense, fixed - dense))
        told.append(f"signs {kept - dense:+.2f}, corrected {fixed - dense:+.2f}")
        means = (
            f"signs on {OWN[0]}, 1,400 steps: {kept:.2f} % with momentum kept, {fixed:.2f} corrected by 0.9, dense "
            f"{dense:.2f}"
        )
    tested = [pair for pair in parts if pair is not None] or raise_missing(item)
    like = [None if pair is None else pair[1] > -POINT for pair in parts]
    less = any(after > before / 2 for before, after in tested)
    word = PARTLY if less and True not in like else word_of(like)
    here = f"to dense: {', '.join(told)}"
    alone = "DGC differs from TopK-SGD in more than that; correction alone was not trained in P1's settings"
    rates = f"rates are still missing there ({'; '.join(untried)}), and either may have a better one" if untried else ""
    return Judgement(here, word, sentences(means, alone, rates))


CLOSE = '"very close top-k largest absolute values"'


def _sends_about_k(method: str, text: str) -> tuple[Claim, Claim]:
    """Return the two claims that a form sends about k entries."""
    return (
        Claim("p1/fig6", f"{text}, {TEXT}", CLOSE, _sends(method)),
        Claim("p1/fig6", f"{text}, {CODE}", CLOSE, _sends_with_the_authors(method), (EVIDENCE,)),
    )


CLAIMS = (
    *ends_like_dense("p1/fig6", "gaussiank", "GaussianK-SGD as printed ends like dense"),
    Claim(
        "p1/fig6", "GaussianK-SGD as printed ends like TopK-SGD", '"nearly consistent validation accuracy"', _like_topk,
        (EVIDENCE,),
    ),
    *_sends_about_k("gaussiank", "Gaussian-k as printed sends about k entries"),
    *ends_like_dense("p1/fig6", AUTHORS, "GaussianK-SGD with its authors' selection alone ends like dense"),
    *_sends_about_k(AUTHORS, "Gaussian-k with its authors' selection alone sends about k entries"),
    Claim(
        "p1/fig6", "momentum correction takes away what TopK-SGD loses to dense", '"would address this problem"',
        _momentum_corrected, ("beyond/accuracy",),
    ),
)  # fmt: skip
