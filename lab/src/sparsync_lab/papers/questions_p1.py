"""What we asked of P1's trainings and times: how the stored results answer it."""

from __future__ import annotations

from math import inf
from statistics import mean

from sparsync_lab.papers.claim import (
    MISSING,
    NOT,
    POINT,
    Held,
    Judgement,
    StoredTables,
    first_number,
    from_dense,
    in_words,
    near,
    question,
    seeds_by_label,
    sentences,
    stated_gap,
    word_for,
    word_of,
)
from sparsync_lab.papers.claims_p1 import BESIDE, OWN, own_models
from sparsync_lab.papers.evidence_questions import AUTHORS_ASKED, EVIDENCE, RANDOM_ASKED
from sparsync_lab.papers.p1_runs import CARRIED, COUNTED, HELD
from sparsync_lab.papers.vgg16_gap import ASKED, CLIPPED, PLAIN, cause_label, judge_gap, scores_by_cause

AUTHORS_ROWS = ("topk, authors' settings", "dense, authors' settings", "topk", "dense")
VGG = OWN[1]
ALIKE = ("topk", HELD, CARRIED)  # send about the k largest


def _gap_of_vgg16(stored: StoredTables) -> Judgement:
    scores = scores_by_cause({label: score for (_, label), score in stored.scores(ASKED).items()})
    return judge_gap(scores, int(first_number(stored.asked(ASKED)[VGG, cause_label("topk", PLAIN)][-1])))


def _clipped(stored: StoredTables) -> Judgement:
    """Compare Top-k and dense on VGG-16 for 120 epochs, clipped, with dense as it is and clipped."""
    scores = {label: score for (model, label), score in stored.scores(AUTHORS_ASKED).items() if model == VGG}
    top, dense = scores[f"topk, {CLIPPED}"], scores["dense"]
    beside = scores.get(f"dense, {CLIPPED}")
    gap = from_dense(stated_gap(top - dense))
    plain = from_dense(stated_gap(scores["topk"] - dense)) if "topk" in scores else MISSING
    alike, harm = f"dense clipped, too, {MISSING}", ""
    if beside is not None:
        alike = f"{from_dense(stated_gap(top - beside))} clipped, too"
        harm = f"clipping {'costs' if beside < dense else 'brings'} dense itself {abs(beside - dense):.2f} points"
    apart, said = _spread(stored)
    word = word_of([near(top - dense, spread=apart)])
    return Judgement(f"{gap}, {alike}; not clipped {plain}", word, sentences(harm, said))


def _spread(stored: StoredTables) -> tuple[float, str]:
    """Return how far those trainings of VGG-16 end apart that send about the k largest, a point at least, and that in a
    sentence. As long as they are not stored, nobody knows, and no difference of one seed decides."""
    scores = stored.by_seed(VGG)
    ends = [scores[form][""] for form in ALIKE if "" in scores.get(form, {})]
    if len(ends) < len(ALIKE):
        return inf, ""
    low, high = min(ends), max(ends)
    said = f"on {VGG} runs that send about the k largest end between {low:.2f} and {high:.2f} %, one seed each"
    return max(POINT, high - low), f"{said}: smaller differences mean nothing"


def _with_authors_settings(stored: StoredTables) -> Judgement:
    """Compare Top-k and dense, both with weight decay, Top-k with a density warm-up, on the models that were run."""
    rows, scores = stored.asked(AUTHORS_ASKED), stored.scores(AUTHORS_ASKED)
    told, without = {}, []
    held: dict[str, Held] = {}
    for model in OWN:
        by_label = seeds_by_label({label: score for (own, label), score in scores.items() if own == model})
        top, dense, *before = (by_label.get(how, {}) for how in AUTHORS_ROWS)
        if both := sorted(top.keys() & dense.keys()):
            gap = mean(top[seed] - dense[seed] for seed in both)
            told[model] = f"{from_dense(stated_gap(gap, len(both)))} ({in_words(len(both))})"
            held[model] = near(gap, len(both), _spread(stored)[0] if model == VGG else POINT)
            if all(set(both) <= own.keys() for own in before):
                plain = mean(before[0][seed] - before[1][seed] for seed in both)
                without.append(f"{model} {from_dense(stated_gap(plain, len(both)))}")
        elif top:
            told[model] = f"{top['']:.2f} %, dense with them {MISSING}"
    here, word, _ = own_models(told, held)
    sent = [first_number(cells[4]) for (_, label), cells in rows.items() if label == AUTHORS_ROWS[0]]
    more = f"with them it sends {max(sent):.3g} %, {1000 * max(sent) - 100:.0f} % more than without" if sent else ""
    detail = sentences(f"without them: {', '.join(without)}" if without else "", more, _each_alone(stored))
    return Judgement(here, word, detail)


def _each_alone(stored: StoredTables) -> str:
    """Return what weight decay and density warm-up bring by themselves on VGG-16; empty if that was not trained."""
    rows = stored.asked(ASKED) if any(t.caption == ASKED for t in stored.results["beyond/evidence"].tables) else {}
    found = [rows.get(("VGG-16", cause_label("topk", what))) for what in (PLAIN, "weight decay", "density warm-up")]
    if None in found:
        return ""
    plain, decay, early = (cells for cells in found if cells is not None)
    told = f"{plain[2]} % without them, {decay[2]} with weight decay alone, {early[2]} with density warm-up alone"
    return f"in 40 epochs of VGG-16, one seed each, {told} ({early[4]} sent)"


def _random_otherwise(stored: StoredTables) -> Judgement:
    """Compare Rand-k as in figure 1 with what the authors' code does otherwise, on the models that were run."""
    scores = stored.scores(RANDOM_ASKED)
    told: dict[str, str] = {}
    held: dict[str, Held] = {}
    warmed = []
    for model in (*OWN, BESIDE):
        hows = ("no residual", "with residual, density warm-up", "no residual, density warm-up")
        changed = {how: scores[model, f"randk, {how}"] for how in hows if (model, f"randk, {how}") in scores}
        before = scores.get((model, "randk"))
        if before is None or not changed:
            continue
        held[model] = near(max(changed.values()) - before)
        alone = f"{changed[hows[0]]:.1f}" if hows[0] in changed else MISSING
        told[model] = f"{before:.1f} % with its residual, {alone} without"
        listed = ", ".join(f"{score:.1f} {how.partition(',')[0]}" for how, score in changed.items() if "warm-up" in how)
        warmed.append(f"{model} {listed or MISSING}")
    here, word, beside = own_models(told, held)
    early = sentences(f"with density warm-up, too: {'; '.join(warmed)}")
    return Judgement(here, word, f"{beside} {early}".strip())


def _carried_like_topk(stored: StoredTables) -> Judgement:
    """Compare Gaussian-k whose count is carried with Top-k, where it was trained, over the seeds that both have."""
    apart, said = _spread(stored)
    told: dict[str, str] = {}
    held: dict[str, Held] = {}
    for model in (*OWN, BESIDE):
        own, top = (stored.by_seed(model).get(form, {}) for form in (CARRIED, "topk"))
        if both := sorted(own.keys() & top.keys()):
            ends = [mean(each[seed] for seed in both) for each in (own, top)]
            told[model] = f"{ends[0]:.2f} against {ends[1]:.2f} % ({in_words(len(both))})"
            held[model] = near(ends[0] - ends[1], len(both), apart if model == VGG else POINT)
    here, word, beside = own_models(told, held)
    short = [stored.scores(ASKED).get((VGG, cause_label(how, PLAIN))) for how in (CARRIED, "topk")]
    twice = [stored.by_seed(VGG).get(form, {}).get("") for form in ("gaussiank", COUNTED)]
    early = again = ""
    if None not in short:
        early = f"{VGG} in 40 epochs, in which neither learns much: {short[0]:.1f} against {short[1]:.1f}"
    if None not in twice:
        again = f"one training of {VGG}, Gaussian-k as printed, made twice ends at {twice[0]} and {twice[1]}"
    alike = "whether held or carried, what lies above its threshold are by construction the k largest, as with TopK-SGD"
    return Judgement(here, word, f"{beside} {sentences(alike, said, again, early)}".strip())


def _model_of_times(stored: StoredTables) -> Judgement:
    """Judge TopK's column, which is predicted from what P1 states: its order, size and sign of the errors."""
    item, column = "p1/table2-model", "TopK, stated"
    cells = [stored.cell(item, "Iteration time", row.cells[0], column) for row in stored.table(item, "Iteration").rows]
    errors = [first_number(cell.split(", ")[1]) for cell in cells]
    right = stored.cell(item, "Errors by column", column, "faster than dense")
    off = stored.number(item, "Errors by column", column, "mean absolute error")
    here = f"TopK's column {off:.1f} % off on average; faster or slower than dense {right}"
    signs = f"its errors are {min(errors):+.1f} to {max(errors):+.1f} %{', all too long' if min(errors) > 0 else ''}"
    held = [right == "right for 4 of 4", off < 15, min(errors) < 0 < max(errors)]
    return Judgement(here, word_for(sum(held), len(held)) if held[0] else NOT, sentences(signs))


QUESTIONS = (
    question(
        EVIDENCE, "does TopK-SGD end like dense on VGG-16 with one setting changed, in 40 epochs?",
        _gap_of_vgg16
    ),
    question(
        EVIDENCE, "does TopK-SGD, clipped at a norm of 1, end like dense that is not, on VGG-16, 120 epochs?", _clipped
    ),
    question(
        EVIDENCE, "does TopK-SGD end like dense with weight decay and density warm-up of its authors' code?",
        _with_authors_settings,
    ),
    question(
        EVIDENCE,
        "is RandK-SGD better without its residual, as in one of the two forms in its authors' code, or with a density "
        "warm-up?",
        _random_otherwise,
    ),
    question(
        "p1/fig6", "does GaussianK-SGD that holds its count by itself end no lower than TopK-SGD?",
        _carried_like_topk, (EVIDENCE,),
    ),
    question(
        "p1/table2-model", "do P1's published times follow from its own top-k cost and two network constants?",
        _model_of_times,
    ),
)  # fmt: skip
