"""What we asked of P1's trainings and times: how the stored results answer it."""

from __future__ import annotations

from sparsync_lab.papers.claims.claim import (
    LEARNS,
    NOT,
    Judge,
    Judgement,
    any_of,
    question,
    sentences,
    word_for,
    word_of,
)
from sparsync_lab.papers.claims.p1_dense import longer_warm_up
from sparsync_lab.papers.claims.p1_gaussian import ends_like_topk
from sparsync_lab.papers.claims.p1_models import BESIDE, OWN, VGG, columns, own_models, percent, spread, spread_in_words
from sparsync_lab.papers.claims.stored_tables import SCORE, StoredTables, first_number, raise_missing
from sparsync_lab.papers.differences import MISSING, Held, near
from sparsync_lab.papers.evidence_questions import AUTHORS_ASKED, EVIDENCE, RANDOM_ASKED
from sparsync_lab.papers.p1_runs import CARRIED
from sparsync_lab.papers.random_forms import FORMS
from sparsync_lab.papers.vgg16_gap import (
    ASKED,
    CLIPPED,
    PLAIN,
    SHORT,
    cause_label,
    judge_gap,
    one_seed_from,
    scores_by_cause,
)

BARE, WARM, BARE_WARM = FORMS  # of Rand-k: no residual, density warm-up, both
FOLLOWS = 15.0  # % that predicted times may be off on average


def _gap_of_vgg16(stored: StoredTables) -> Judgement:
    scores = scores_by_cause({label: score for (_, label), score in stored.scores(ASKED).items()})
    plain = stored.asked(ASKED).get((VGG, cause_label("topk", PLAIN))) or raise_missing(PLAIN)
    here, word, detail = judge_gap(scores, int(first_number(plain[-1])), spread(stored, VGG, SHORT))
    return Judgement(here, word, f"{detail} {sentences(longer_warm_up(stored))}".strip())


def _clipped(stored: StoredTables) -> Judgement:
    """Compare Top-k and dense on VGG-16 for 120 epochs, clipped, with dense as it is and clipped."""
    scores = {label: score for (model, label), score in stored.scores(AUTHORS_ASKED).items() if model == VGG}
    if not {f"topk, {CLIPPED}", "dense"} <= scores.keys():
        raise_missing(CLIPPED)
    top, dense = scores[f"topk, {CLIPPED}"], scores["dense"]
    beside = scores.get(f"dense, {CLIPPED}")
    apart = spread(stored, VGG)
    before = f"not clipped {one_seed_from(scores['topk'], dense, apart) if 'topk' in scores else MISSING}"
    also = f", clipped dense {MISSING if beside is None else f'{beside:.2f}'}"
    here = f"{top:.2f} %, dense {dense:.2f}{also} (one seed each): {one_seed_from(top, dense, apart)}; {before}"
    return Judgement(here, word_of([near(top - dense, spread=apart)]), sentences(spread_in_words(stored)))


def _random_learns(stored: StoredTables) -> Judgement:
    ends = {model: first_number(cell) for model, cell in columns(stored, "p1/fig1", "randk", SCORE).items()}
    told = {model: percent(end) for model, end in ends.items()}
    return own_models(told, {model: end > LEARNS for model, end in ends.items()})


def _random_otherwise(*changes: tuple[str, str, str]) -> Judge:
    """Compare forms of Rand-k before and after a change, on the models that were run: what has not learned is no
    better.

    Args:
        changes: of each what the form is called, and both labels' ends.
    """

    def judge(stored: StoredTables) -> Judgement:
        scores = stored.scores(RANDOM_ASKED)
        told: dict[str, str] = {}
        held: dict[str, Held] = {}
        for model in (*OWN, BESIDE):
            pairs = [
                (name, scores.get((model, f"randk{form}")), scores.get((model, f"randk{changed}")))
                for name, form, changed in changes
            ]
            if not any(None not in pair for pair in pairs):
                continue
            held[model] = any_of(_better(before, after, spread(stored, model)) for _, before, after in pairs)
            ends = (f"{name}{_percent(before)} → {_percent(after)}" for name, before, after in pairs)
            told[model] = f"{', '.join(ends)} %"
        return own_models(told, held)

    return judge


def _better(before: float | None, after: float | None, apart: float) -> Held:
    """Return whether what a change brings is no worse, and has learned."""
    return None if before is None or after is None else after > LEARNS and near(after - before, spread=apart)


def _percent(score: float | None) -> str:
    return MISSING if score is None else f"{score:.1f}"


def _carried_like_topk(stored: StoredTables) -> Judgement:
    """Compare Gaussian-k whose count is carried with Top-k."""
    here, word, detail = ends_like_topk(stored, CARRIED)
    short = [stored.scores(ASKED).get((VGG, cause_label(how, PLAIN))) for how in (CARRIED, "topk")]
    early = ""
    if None not in short:
        early = f"{VGG} in 40 epochs: {short[0]:.1f} against {short[1]:.1f}"
    alike = "whether held or carried, what lies above its threshold are by construction the k largest, as with TopK-SGD"
    return Judgement(here, word, f"{detail} {sentences(alike, early)}".strip())


def _model_of_times(stored: StoredTables) -> Judgement:
    """Judge TopK's column, which is predicted from what P1 states: its order, size and sign of the errors."""
    item, column = "p1/table2-model", "TopK, stated"
    cells = [stored.cell(item, "Iteration time", row.cells[0], column) for row in stored.table(item, "Iteration").rows]
    errors = [first_number(cell.split(", ")[1]) for cell in cells]
    right = stored.cell(item, "Errors by column", column, "faster than dense")
    off = stored.number(item, "Errors by column", column, "mean absolute error")
    here = f"TopK's column {off:.1f} % off on average; faster or slower than dense {right}"
    signs = f"its errors are {min(errors):+.1f} to {max(errors):+.1f} %{', all too long' if min(errors) > 0 else ''}"
    held = [right == f"right for {len(errors)} of {len(errors)}", off < FOLLOWS, min(errors) < 0 < max(errors)]
    return Judgement(here, word_for(sum(held), len(held)) if held[0] else NOT, sentences(signs))


QUESTIONS = (
    question(
        EVIDENCE, "does one changed setting of those tried let TopK-SGD end like the best dense on VGG-16 (40 epochs)?",
        _gap_of_vgg16,
    ),
    question(
        EVIDENCE, "does TopK-SGD, clipped at a norm of 1, end like unclipped dense on VGG-16 (120 epochs)?", _clipped
    ),
    question(
        "p1/fig1", "does RandK-SGD learn on CIFAR-10 with its residual (Eq. 2), as P1's text implies?", _random_learns
    ),
    question(
        EVIDENCE, "is RandK-SGD better without its residual, as in one of the two forms in its authors' code?",
        _random_otherwise(("", "", BARE)),
    ),
    question(
        EVIDENCE, "is RandK-SGD better with the density warm-up of its authors' code?",
        _random_otherwise(("", "", WARM), ("without residual ", BARE, BARE_WARM)),
    ),
    question(
        "p1/fig6",
        "does GaussianK-SGD end no lower than TopK-SGD if it searches its threshold, around the fitted quantile, for k "
        "entries?",
        _carried_like_topk, (EVIDENCE,),
    ),
    question(
        "p1/table2-model", "do P1's published times follow from its own top-k cost and two network constants?",
        _model_of_times,
    ),
)  # fmt: skip
