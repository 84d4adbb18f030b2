"""What no paper claims and we asked: how the trainings answer it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from statistics import mean

from sparsync_lab.papers.adamw_sweep import MAIN
from sparsync_lab.papers.adamw_tables import STANDING
from sparsync_lab.papers.claim import (
    MISSING,
    NOT,
    POINT,
    SCORE,
    SEVERAL,
    Claim,
    Judge,
    Judgement,
    StoredTables,
    first_number,
    from_dense,
    raise_missing,
    seeds_by_label,
    sentences,
    stated_gap,
    word_for,
)
from sparsync_lab.papers.claims_p1 import BESIDE, OWN, RANDOM, columns, own_models
from sparsync_lab.papers.claims_p3 import PLAIN_TREE
from sparsync_lab.papers.p1_runs import CARRIED, COUNTED, HELD
from sparsync_lab.papers.p3 import DENSITIES
from sparsync_lab.papers.tables import STANDING as AT_EQUAL_BYTES
from sparsync_lab.papers.tuned import CAPTION as RATES
from sparsync_lab.papers.tuned import FALLS_ONCE
from sparsync_lab.papers.vgg16_gap import ASKED, CLIPPED, PLAIN, cause_label, judge_gap, scores_by_cause

AUTHORS_ROWS = ("topk, authors' settings", "dense, authors' settings", "topk", "dense")
AUTHORS_SETTINGS = "P1, figure 6: with weight decay"  # of beyond/evidence
ITS_CONDITION = "P3: its condition and its accuracy"  # of beyond/evidence
CORRECTED = f"{PLAIN_TREE}, momentum corrected, 0.5"
P1_RATE = "0.1"  # of ResNet-20
LOCAL_STEPS = "GPT on PTB, 16 workers of 4, 600 steps"  # of beyond/outer


def _gap_of_vgg16(stored: StoredTables) -> Judgement:
    return judge_gap(scores_by_cause({label: score for (_, label), score in stored.scores(ASKED).items()}))


def _clipped(stored: StoredTables) -> Judgement:
    """Compare Top-k and dense on VGG-16 for 120 epochs, clipped, with dense as it is and clipped."""
    scores = {label: score for (model, label), score in stored.scores(AUTHORS_SETTINGS).items() if model == "VGG-16"}
    top, dense = scores[f"topk, {CLIPPED}"], scores["dense"]
    beside = scores.get(f"dense, {CLIPPED}")
    gap, plain = (from_dense(stated_gap(score - dense)) for score in (top, scores["topk"]))
    here = f"{gap}, not clipped {plain}"
    alike = MISSING if beside is None else f"{from_dense(stated_gap(beside - dense))} that is not clipped"
    told = sentences(f"dense clipped, too: {alike}", _spread(stored))
    return Judgement(here, word_for(top - dense > -POINT, True), told)


def _spread(stored: StoredTables) -> str:
    """Return how far those trainings of VGG-16 end apart that send the k largest; empty if they are not stored."""
    forms = {"TopK-SGD": "topk", "Gaussian-k with its count held": HELD, "carried": CARRIED}
    with suppress(LookupError):
        ends = {name: stored.number("p1/fig6", "VGG-16: test", form, SCORE) for name, form in forms.items()}
        told = ", ".join(f"{name} {score:.2f}" for name, score in ends.items())
        return f"so far do trainings end apart that all send about the k largest, one seed each: {told} %"
    return ""


def _with_authors_settings(stored: StoredTables) -> Judgement:
    """Compare Top-k and dense, both with weight decay, Top-k with a density warm-up, on the models that were run."""
    rows, scores = stored.asked(AUTHORS_SETTINGS), stored.scores(AUTHORS_SETTINGS)
    told, held, without = {}, {}, []
    for model in OWN:
        by_label = seeds_by_label({label: score for (own, label), score in scores.items() if own == model})
        top, dense, *before = (by_label.get(how, {}) for how in AUTHORS_ROWS)
        if both := sorted(top.keys() & dense.keys()):
            gap, plain = (mean(a[seed] - b[seed] for seed in both) for a, b in ((top, dense), before))
            told[model] = from_dense(stated_gap(gap, len(both)))
            held[model] = gap > -POINT
            seeds = f"{len(both)} seed{'s' if len(both) > 1 else ''}"
            without.append(f"{model} {from_dense(stated_gap(plain, len(both)))} ({seeds})")
        elif top:
            told[model] = f"{top['']:.2f} %, dense with them {MISSING}"
    here, word, _ = own_models(told, held)
    sent = max(first_number(cells[4]) for (_, label), cells in rows.items() if label == AUTHORS_ROWS[0])
    more = f"with them it sends {sent:.3g} %, {1000 * sent - 100:.0f} % more than without"
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
    scores = stored.scores(RANDOM)
    told, held, warmed = [], [], []
    for model in (OWN[0], BESIDE):
        hows = ("no residual", "with residual, density warm-up", "no residual, density warm-up")
        changed = {how: scores[model, f"randk, {how}"] for how in hows if (model, f"randk, {how}") in scores}
        before = scores[model, "randk"]
        if not changed:
            told.append(f"{model} {before:.1f} %, the others {MISSING}")
            continue
        held.append(max(changed.values()) > before + POINT)
        alone = f"{changed[hows[0]]:.1f}" if hows[0] in changed else MISSING
        told.append(f"{model} {before:.1f} % with its residual, {alone} without")
        listed = ", ".join(f"{score:.1f} {how.partition(',')[0]}" for how, score in changed.items() if "warm-up" in how)
        warmed.append(f"{model} {listed or MISSING} (dense {scores[model, 'dense']:.1f})")
    word = word_for(sum(held), len(held)) if held else raise_missing(RANDOM)
    return Judgement("; ".join(told), word, sentences(f"with density warm-up, too: {'; '.join(warmed)}"))


def _carried_like_topk(stored: StoredTables) -> Judgement:
    """Compare Gaussian-k whose count is carried with Top-k, where it was trained."""
    carried, top = (columns(stored, "p1/fig6", method, SCORE) for method in (CARRIED, "topk"))
    gaps = {model: first_number(own) - first_number(top[model]) for model, own in carried.items()}
    seeds = {model: "" if "±" in cell else " (one seed)" for model, cell in carried.items()}
    told = {model: f"{carried[model]}{seeds[model]} against {top[model]} %" for model in gaps}
    here, word, beside = own_models(told, {model: gap > -POINT for model, gap in gaps.items()})
    short = {how: stored.scores(ASKED).get(("VGG-16", cause_label(how, PLAIN))) for how in (CARRIED, "topk")}
    twice = [columns(stored, "p1/fig6", form, SCORE).get("VGG-16") for form in ("gaussiank", COUNTED)]
    early = again = ""
    if None not in short.values():
        early = f"VGG-16 in 40 epochs, in which neither learns much: {short[CARRIED]:.1f} against {short['topk']:.1f}"
    if None not in twice:
        again = f"one training of VGG-16, Gaussian-k as printed, made twice ends at {twice[0]} and {twice[1]}"
    return Judgement(here, word, f"{beside} {sentences(early, again)}".strip())


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


def _on_resnet20(stored: StoredTables) -> dict[str, dict[str, float]]:
    """Return the last accuracies of ResNet-20 in P3's question, by training and seed."""
    scores = stored.scores(ITS_CONDITION)
    return seeds_by_label({label: score for (model, label), score in scores.items() if model == OWN[0]})


def _gap_to_dense(scores: Mapping[str, Mapping[str, float]], label: str) -> float:
    """Return how far a training is from dense with the same seeds, in the mean over them."""
    return mean(score - scores["dense"][seed] for seed, score in scores[label].items())


def _with_momentum_corrected(stored: StoredTables) -> Judgement:
    """Compare gTop-k at 0.1 % on ResNet-20, as published and with momentum before the residual, with dense."""
    scores, early = _on_resnet20(stored), f"{CORRECTED}, density warm-up"
    before, *gaps = (_gap_to_dense(scores, how) for how in (PLAIN_TREE, CORRECTED, early))
    words = [from_dense(stated_gap(gap, len(scores[how]))) for gap, how in zip(gaps, (CORRECTED, early), strict=True)]
    share = stored.asked(ITS_CONDITION)[OWN[0], early][4]
    more = f"with more entries at first, {share} in all and not 0.1 %, {words[1]} (seeds: {len(scores[early])})"
    here = f"{words[0]}, as published {from_dense(stated_gap(before))}"
    return Judgement(here, word_for(gaps[0] > -POINT, True), sentences(more, f"seeds: {len(scores[CORRECTED])}"))


def _at_these_bytes(fits: Callable[[str], bool]) -> Judge:
    """Judge what else was tried with gTop-k in the bytes of 0.1 %: the trainings whose label fits."""

    def judge(stored: StoredTables) -> Judgement:
        scores = _on_resnet20(stored)
        own = {label: seeds for label, seeds in scores.items() if label.startswith("gTop-k") and fits(label)}
        gaps = {label: _gap_to_dense(scores, label) for label in own} or raise_missing(ITS_CONDITION)
        told = ", ".join(
            f"{label.split(', ')[1]}: {from_dense(stated_gap(gap, len(own[label])))} (seeds: {len(own[label])})"
            for label, gap in gaps.items()
        )
        near = sum(gap > -POINT for gap in gaps.values())
        beside = sentences("dense has the same seeds and P1's rate", _dense_at_best(stored))
        return Judgement(f"{told}", word_for(near, len(gaps)), beside)

    return judge


def _dense_at_best(stored: StoredTables) -> str:
    """Return what dense reaches with its best rate in the same schedule, beside what it does with P1's."""
    rows = [row.cells for row in stored.table("beyond/evidence", RATES).rows]
    kind = ["dense", FALLS_ONCE]  # without weight decay
    own = {c[2]: c[4] for c in rows if c[:2] == kind and c[3] == "0" and int(c[5]) >= SEVERAL}
    if P1_RATE not in own or len(own) < 2:
        return ""
    best = next(iter(own))  # the best first
    return f"with that rate, {P1_RATE}, dense ends at {own[P1_RATE]} %, with its best, {best}, at {own[best]}"


def _more_is_better(stored: StoredTables) -> Judgement:
    scores = [stored.number("p3/density", "gTop-k", f"gTop-k, {density:g}", SCORE) for density in DENSITIES]
    told = ", ".join(f"{score:.2f}" for score in scores)
    return Judgement(f"{told} % at 0.1, 0.5 and 1 % of the entries", word_for(scores == sorted(scores), True))


def _at_equal_bytes(stored: StoredTables) -> Judgement:
    """Judge the library's recipes at the bytes of 0.1 % by all settings in which they were trained."""
    rows = [row.cells for row in stored.table("beyond/accuracy", AT_EQUAL_BYTES).rows]
    held = [cells for cells in rows if cells[-1].endswith(("target met", "does not lose"))]
    longest = max((cells for cells in rows if cells[0] == rows[0][0]), key=lambda cells: first_number(cells[1]))
    lost = ", ".join(f"{cells[0]} ends at {cells[3]}, dense at {cells[2]}" for cells in rows if cells not in held)
    here = f"in {len(held)} of {len(rows)} settings; {longest[0]}, {longest[1]} steps, {longest[3]}, dense {longest[2]}"
    return Judgement(here, word_for(len(held), len(rows)), sentences(lost))


def _preconditioned(stored: StoredTables) -> Judgement:
    """Judge preconditioned feedback with AdamW by all settings in which it has a target."""
    table = stored.table("beyond/adamw", STANDING)
    rows = [dict(zip(table.headings, row.cells, strict=True)) for row in table.rows]
    rows = [cells for cells in rows if cells["target"] in ("met", "missed")]
    held = [cells for cells in rows if cells["target"] == "met"]
    first = rows[0] if rows else raise_missing(STANDING)
    missed = "; ".join(f"{c['setting']}, {c[MAIN]}, dense {c['dense']}" for c in rows if c not in held)
    here = f"in {len(held)} of {len(rows)} settings; {first['setting']}, {first[MAIN]}, dense {first['dense']}"
    return Judgement(here, word_for(len(held), len(rows)), sentences(f"not in {missed}" if missed else ""))


def _local_steps(stored: StoredTables) -> Judgement:
    """Compare the best of local steps with an exchange in every step, at the same share of dense's bytes."""
    table = stored.table("beyond/outer", LOCAL_STEPS)
    trained = [row.cells for row in table.rows if row.cells[1] != MISSING]
    scores = {cells[0]: (first_number(cells[1]), cells[1]) for cells in trained}
    local = {label: scores[label] for label in scores if label not in ("dense", MAIN)} or raise_missing(LOCAL_STEPS)
    best = min(local, key=lambda label: local[label][0])
    here = f"perplexity {local[best][1]} at best ({best}), {scores[MAIN][1]} with an exchange in every step"
    return Judgement(here, word_for(local[best][0] <= scores[MAIN][0], True), sentences(f"dense: {scores['dense'][1]}"))


def _asked(item: str, question: str, judge: Judge, also: Sequence[str] = ()) -> Claim:
    return Claim(item, question, "", judge, also)


EVIDENCE = "beyond/evidence"
QUESTIONS = (
    _asked(
        EVIDENCE, "does TopK-SGD end like dense on VGG-16 with one setting changed, in 40 epochs?",
        _gap_of_vgg16
    ),
    _asked(EVIDENCE, "does TopK-SGD end like dense on VGG-16 when clipped at a norm of 1, 120 epochs?", _clipped),
    _asked(
        EVIDENCE, "does TopK-SGD end like dense with weight decay and density warm-up of its authors' code?",
        _with_authors_settings,
    ),
    _asked(
        EVIDENCE, "is RandK-SGD better without its residual, as in the authors' code, or with a density warm-up?",
        _random_otherwise,
    ),
    _asked(
        "p1/fig6", "does GaussianK-SGD that holds its count by itself end no lower than TopK-SGD?",
        _carried_like_topk, (EVIDENCE,),
    ),
    _asked(
        "p1/table2-model", "do P1's published times follow from its own top-k cost and two network constants?",
        _model_of_times,
    ),
    _asked(
        EVIDENCE, "does gTop-k at 0.1 % end like dense on ResNet-20 with momentum before the residual?",
        _with_momentum_corrected,
    ),
    _asked(
        EVIDENCE, "does gTop-k at 0.1 % end like dense on ResNet-20 with momentum of 0.9 before the residual?",
        _at_these_bytes(lambda label: label.startswith(PLAIN_TREE) and label.endswith("0.9")),
    ),
    _asked(
        EVIDENCE, "does gTop-k end like dense on ResNet-20 in the bytes of 0.1 % with values of fewer bits?",
        _at_these_bytes(lambda label: not label.startswith(PLAIN_TREE)),
    ),
    _asked("p3/density", "does gTop-k end higher with more entries?", _more_is_better),
    _asked(
        "beyond/accuracy", "does a recipe of ours end like dense at the bytes of 0.1 %?",
        _at_equal_bytes
    ),
    _asked(
        "beyond/adamw", "does AdamW end like dense with preconditioned feedback and a 40th of the bytes?",
        _preconditioned,
    ),
    _asked(
        "beyond/outer", "do local steps end as well as an exchange in every step, at a 40th of dense's bytes?",
        _local_steps,
    ),
)  # fmt: skip
