"""What P1 claims of models and their accuracy, and how that is judged."""

from __future__ import annotations

from contextlib import suppress

from sparsync_lab.papers.claims.claim import LEARNS, Claim, Judgement, any_of, sentences, word_for
from sparsync_lab.papers.claims.p1_dense import BELOW, ends_like_dense
from sparsync_lab.papers.claims.p1_models import columns, own_models
from sparsync_lab.papers.claims.stored_tables import SCORE, MissingResult, StoredTables, first_number
from sparsync_lab.papers.differences import MISSING, Held
from sparsync_lab.papers.evidence_questions import EVIDENCE, RANDOM_ASKED

SIMILAR = f'"very similar performance"; with figure 6: {BELOW}'


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


def _random_is_slower(stored: StoredTables) -> Judgement:
    """Judge Rand-k with its residual, and without: P1 does not say which figure 1 has, so a model on which only one was
    trained, and failed, leaves it open."""
    top, rand = (columns(stored, "p1/fig1", method, SCORE) for method in ("topk", "randk"))
    without: dict[tuple[str, str], float] = {}
    with suppress(MissingResult):
        without = stored.scores(RANDOM_ASKED)
    told: dict[str, str] = {}
    held: dict[str, Held] = {}
    for model, own in rand.items():
        kept, lost = first_number(own), without.get((model, "randk, no residual"))
        ends = f"{kept:.1f} % with its residual, without: {MISSING}"
        if lost is not None:
            ends = f"{kept:.1f} % with and {lost:.1f} without its residual"
        told[model] = f"{ends}, TopK-SGD {MISSING}"
        if model in top:
            most = first_number(top[model])
            told[model] = f"{ends}, TopK-SGD {most:.1f}"
            held[model] = any_of(None if score is None else LEARNS < score < most for score in (kept, lost))
    here, word, beside = own_models(told, held)
    code = "the authors' code has both forms, and P1 does not say which figure 1 shows; 10 % is chance"
    return Judgement(here, word, f"{beside} {sentences(code)}".strip())


CLAIMS = (
    *ends_like_dense("p1/fig1", "topk", "TopK-SGD ends like dense (16 workers, 0.1 %)", SIMILAR),
    Claim(
        "p1/fig1", "RandK-SGD learns on CIFAR-10, but slower than TopK-SGD",
        '"much slower convergence than TopK-SGD"; on ImageNet it "cannot converge"', _random_is_slower, (EVIDENCE,),
    ),
    Claim("p1/table1", "the models and settings of table 1", "6 models", _models_of_table_1),
)  # fmt: skip
