"""Whether a method of P1 ends like dense: with the settings of its text, and with those of its authors' code."""

from __future__ import annotations

from contextlib import suppress
from math import isfinite
from statistics import mean

from sparsync_lab.papers.claims.claim import Claim, Judge, Judgement, sentences
from sparsync_lab.papers.claims.p1_models import BESIDE, OWN, VGG, columns, own_models, spread
from sparsync_lab.papers.claims.stored_tables import TO_DENSE, MissingResult, StoredTables, first_number
from sparsync_lab.papers.differences import (
    MISSING,
    Held,
    by_spread,
    from_dense,
    in_words,
    like_dense,
    near,
    stated_gap,
)
from sparsync_lab.papers.evidence_questions import AUTHORS_ASKED, EVIDENCE
from sparsync_lab.papers.vgg16_gap import ASKED, PLAIN, cause_label, warmed, warmed_in_words

AUTHORS_SETTINGS = "authors' settings"  # in labels
TEXT = "with the text's settings"
CODE = "with weight decay and density warm-up of its authors' code"
SETTINGS = "the text prints no weight decay and no density warm-up; the authors' code has both"
BELOW = "around 0.6 to 0.8 points below"


def ends_like_dense(item: str, method: str, text: str, published: str = BELOW) -> tuple[Claim, Claim]:
    """Return the two claims that a method ends like dense.

    Args:
        item: with the text's settings.
        text: what is claimed.
        published: what P1 says of it.
    """
    return (
        Claim(item, f"{text}, {TEXT}", published, _with_the_texts(item, method), (EVIDENCE,)),
        Claim(item, f"{text}, {CODE}", published, _with_the_authors(method), (EVIDENCE,)),
    )


def _with_the_texts(item: str, method: str) -> Judge:
    def judge(stored: StoredTables) -> Judgement:
        gaps, seeds = (columns(stored, item, method, heading) for heading in (TO_DENSE, "seeds"))
        held = {model: like_dense(gap, int(seeds[model]), spread(stored, model)) for model, gap in gaps.items()}
        told = {
            model: from_dense(by_spread(gap, spread(stored, model), int(seeds[model]))) for model, gap in gaps.items()
        }
        here, word, beside = own_models(told, held)
        warmer = longer_warm_up(stored) if method == "topk" else ""
        listed = ", ".join(f"{model} {many}" for model, many in seeds.items())
        return Judgement(here, word, f"{beside} {sentences(f'seeds: {listed}', SETTINGS, warmer)}".strip())

    return judge


def _with_the_authors(method: str) -> Judge:
    """Judge where a method and dense were trained with these settings, over the seeds that both have."""

    def judge(stored: StoredTables) -> Judgement:
        told, without = {}, []
        held: dict[str, Held] = {}
        for model in (*OWN, BESIDE):
            by_label = stored.by_seed(model)
            own, dense, *before = (
                by_label.get(how, {})
                for how in (f"{method}, {AUTHORS_SETTINGS}", f"dense, {AUTHORS_SETTINGS}", method, "dense")
            )
            if both := sorted(own.keys() & dense.keys()):
                gap = mean(own[seed] - dense[seed] for seed in both)
                apart, many = spread(stored, model), len(both)
                ends = [mean(each[seed] for seed in both) for each in (own, dense)]
                below = from_dense(by_spread(stated_gap(gap, many), apart, many))
                scores = f"{ends[0]:.2f} %, dense {ends[1]:.2f}: " if isfinite(gap) else ""
                told[model] = f"{scores}{below} ({in_words(many)})"
                held[model] = near(gap, many, apart)
                if all({*both} <= scores.keys() for scores in before):
                    plain = mean(before[0][seed] - before[1][seed] for seed in both)
                    without.append(f"{model} {from_dense(by_spread(stated_gap(plain, many), apart, many))}")
            elif own:
                told[model] = f"dense with them {MISSING}"
        here, word, beside = own_models(told, held)
        plainly = f"over the same seeds without them: {', '.join(without)}" if without else ""
        early = (_more_sent(stored), _each_alone(stored)) if method == "topk" else ()
        return Judgement(here, word, f"{beside} {sentences(plainly, *early)}".strip())

    return judge


def longer_warm_up(stored: StoredTables) -> str:
    """Return where TopK-SGD ends on VGG-16 with a longer warm-up of the rate; empty if that was not trained."""
    with suppress(MissingResult):
        scores = stored.last_scores(VGG)
        if {warmed().label, "dense"} <= scores.keys():
            return warmed_in_words(scores[warmed().label], scores["dense"], spread(stored, VGG))
    return ""


def _more_sent(stored: StoredTables) -> str:
    """Return what TopK-SGD sends with its density warm-up."""
    rows = stored.asked(AUTHORS_ASKED)
    sent = [first_number(cells[4]) for (_, label), cells in rows.items() if label == f"topk, {AUTHORS_SETTINGS}"]
    return f"with them it sends {max(sent):.3g} %, {1000 * max(sent) - 100:.0f} % more than without" if sent else ""


def _each_alone(stored: StoredTables) -> str:
    """Return what weight decay and density warm-up bring by themselves on VGG-16; empty if that was not trained."""
    rows = stored.asked(ASKED) if any(t.caption == ASKED for t in stored.result("beyond/evidence").tables) else {}
    found = [rows.get((VGG, cause_label("topk", what))) for what in (PLAIN, "weight decay", "density warm-up")]
    if None in found:
        return ""
    plain, decay, early = (cells for cells in found if cells is not None)
    told = f"{plain[2]} % without them, {decay[2]} with weight decay alone, {early[2]} with density warm-up alone"
    return f"in 40 epochs of VGG-16, one seed each, {told} ({first_number(early[4]):.3g} % sent)"
