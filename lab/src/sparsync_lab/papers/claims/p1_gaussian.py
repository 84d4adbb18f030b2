"""What P1 claims with figure 6: where Gaussian-k ends, and how much it sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import isfinite
from statistics import mean

from sparsync_lab.papers.claims.claim import Claim, Judge, Judgement, sentences
from sparsync_lab.papers.claims.p1_dense import AUTHORS_SETTINGS, CODE, TEXT, ends_like_dense
from sparsync_lab.papers.claims.p1_models import BESIDE, LONG, OWN, VGG, columns, own_models, spread, spread_in_words
from sparsync_lab.papers.claims.p1_momentum import momentum_corrected
from sparsync_lab.papers.claims.stored_tables import StoredTables, first_number
from sparsync_lab.papers.differences import POINT, UNDER_A_POINT, WITHIN_SPREAD, Held, in_words, near
from sparsync_lab.papers.evidence_figures import DRAWN
from sparsync_lab.papers.evidence_questions import AUTHORS_ASKED, EVIDENCE, SETTINGS
from sparsync_lab.papers.p1_runs import AUTHORS, COUNT_EVERY, COUNTED, ITS_COUNTS, SPARSE, counts_title
from sparsync_lab.papers.vgg16_gap import AUTHORS_DENSITIES
from sparsync_lab.report import Curve, LineChart

K_PERCENT = 100 * SPARSE["density"]


def ends_like_topk(stored: StoredTables, form: str, settings: str = "") -> Judgement:
    """Compare a form of Gaussian-k with Top-k, where it was trained, over the seeds that both have.

    Args:
        settings: what labels say of those of both; empty of the text's.
    """
    told: dict[str, str] = {}
    held: dict[str, Held] = {}
    for model in (*OWN, BESIDE):
        scores = stored.by_seed(model)
        own, top, dense = (scores.get(f"{label}{settings}", {}) for label in (form, "topk", "dense"))
        if both := sorted(own.keys() & top.keys()):
            ends = [mean(each[seed] for seed in both) for each in (own, top)]
            differ = spread(stored, model)
            held[model] = near(ends[0] - ends[1], len(both), differ)
            told[model] = f"{ends[0]:.2f} against {ends[1]:.2f} %"
            if held[model] is None and isfinite(differ):
                told[model] = f"{UNDER_A_POINT} apart"
                if differ > POINT:
                    told[model] = f"{WITHIN_SPREAD}{_both_far(ends, dense, both)}"
            told[model] += f" ({in_words(len(both))})"
    here, word, beside = own_models(told, held)
    apart = spread_in_words(stored) if VGG in told else ""
    return Judgement(here, word, f"{beside} {sentences(apart)}".strip())


def _both_far(ends: Sequence[float], dense: Mapping[str, float], seeds: Sequence[str]) -> str:
    """Return how far below dense both end at least; empty if that is less than a point, or dense is not trained."""
    least = mean(dense[seed] for seed in seeds) - max(ends) if {*seeds} <= dense.keys() else 0.0
    return f", both {least:.2f} points or more below dense" if least >= POINT else ""


def _like_topk(stored: StoredTables, form: str) -> Judgement:
    """Compare a form with Top-k; of Gaussian-k as printed tell the training that was made twice."""
    here, word, detail = ends_like_topk(stored, form)
    twice = [stored.by_seed(VGG).get(f"{form}{made}", {}).get("") for made in ("", ITS_COUNTS)]
    again = "" if None in twice else f"the training of {VGG} made twice ends at {twice[0]:.2f} and {twice[1]:.2f}"
    return Judgement(here, word, f"{detail} {sentences(again)}".strip())


def _sends(method: str) -> Judge:
    """Judge how many entries a form sends with the text's settings, in times k."""

    def judge(stored: StoredTables) -> Judgement:
        sent = columns(stored, "p1/fig6", method, "density")
        times = {model: first_number(share) / K_PERCENT for model, share in sent.items()}
        ends = _at_the_end(_counts(stored, COUNTED if method == "gaussiank" else method, "p1/fig6"))
        told = {model: f"{many:.2g} k{ends.get(model, '')}" for model, many in times.items()}
        return own_models(told, {model: _about(many) for model, many in times.items()})

    return judge


def _sends_with_the_authors(method: str) -> Judge:
    """Judge how many entries a form sends with the settings of the authors' code, in times those of TopK-SGD with them:
    both begin with more than k."""

    def judge(stored: StoredTables) -> Judgement:
        rows = stored.asked(AUTHORS_ASKED)
        pairs = {
            model: [rows.get((model, f"{name}, {AUTHORS_SETTINGS}")) for name in (method, "topk")]
            for model in (*OWN, BESIDE)
        }
        times = {
            model: first_number(own[4]) / first_number(top[4]) for model, (own, top) in pairs.items() if own and top
        }
        counts = _counts(stored, f"{method}, {AUTHORS_SETTINGS}", EVIDENCE, f", {DRAWN[SETTINGS][0]}")
        ends = _at_the_end(counts)
        told = {model: f"{many:.2g} times TopK-SGD's{ends.get(model, '')}" for model, many in times.items()}
        here, word, beside = own_models(told, {model: _about(many) for model, many in times.items()})
        return Judgement(here, word, f"{beside} {sentences(_after_warm_up(counts))}".strip())

    return judge


def _about(times: float) -> bool:
    """Return whether so many times k are about k: what Algorithm 1 itself takes for k."""
    return 2 / 3 <= times <= 4 / 3


def _counts(stored: StoredTables, method: str, item: str, words: str = "") -> dict[str, Curve]:
    """Return the counts of a form over a training, in times k, by model, where they were taken.

    Args:
        item: that draws them.
        words: what its charts' titles say behind the model.
    """
    charts = [figure.chart for figure in stored.result(item).figures if isinstance(figure.chart, LineChart)]
    return {
        model: curve
        for model in (*OWN, BESIDE)
        for chart in charts
        for curve in chart.curves
        if chart.title == counts_title(f"{model}{words}") and curve.label == method
    }


def _at_the_end(counts: Mapping[str, Curve]) -> dict[str, str]:
    return {model: f" on average, {curve.y[-1]:.2g} k at the end" for model, curve in counts.items()}


def _after_warm_up(counts: Mapping[str, Curve]) -> str:
    """Return what is sent on average once the density warm-up is over, in words; empty if it was not counted."""
    told = []
    for model, curve in counts.items():
        over = len(AUTHORS_DENSITIES) / LONG * curve.x[-1]
        later = [many for step, many in zip(curve.x, curve.y, strict=True) if step - COUNT_EVERY >= over]
        told += [f"{model} {mean(later):.2g} k"] if later else []
    return f"without the first {len(AUTHORS_DENSITIES)} epochs on average {', '.join(told)}" if told else ""


CONSISTENT = '"nearly consistent validation accuracy"'
CLOSE = '"very close top-k largest absolute values"'

RULE = "with its authors' threshold rule (three masks, two-sided)"


def _ends_like_topk(form: str, text: str) -> tuple[Claim, Claim]:
    """Return the two claims that a form ends like Top-k."""
    theirs = partial(ends_like_topk, form=form, settings=f", {AUTHORS_SETTINGS}")
    return (
        Claim("p1/fig6", f"{text}, {TEXT}", CONSISTENT, partial(_like_topk, form=form), (EVIDENCE,)),
        Claim("p1/fig6", f"{text}, {CODE}", CONSISTENT, theirs, (EVIDENCE,)),
    )


def _sends_about_k(method: str, text: str) -> tuple[Claim, Claim]:
    """Return the two claims that a form sends about k entries."""
    return (
        Claim("p1/fig6", f"{text}, {TEXT}", CLOSE, _sends(method)),
        Claim("p1/fig6", f"{text}, {CODE}", CLOSE, _sends_with_the_authors(method), (EVIDENCE,)),
    )


CLAIMS = (
    *ends_like_dense("p1/fig6", "gaussiank", "GaussianK-SGD as printed ends like dense"),
    *_ends_like_topk("gaussiank", "GaussianK-SGD as printed ends like TopK-SGD"),
    *_sends_about_k("gaussiank", "Gaussian-k as printed sends about k entries"),
    *ends_like_dense("p1/fig6", AUTHORS, f"GaussianK-SGD {RULE} ends like dense"),
    *_ends_like_topk(AUTHORS, f"GaussianK-SGD {RULE} ends like TopK-SGD"),
    *_sends_about_k(AUTHORS, f"Gaussian-k {RULE} sends about k entries"),
    Claim(
        "p1/fig6", "momentum correction takes away what TopK-SGD loses to dense", '"would address this problem"',
        momentum_corrected, ("beyond/accuracy", EVIDENCE),
    ),
)  # fmt: skip
