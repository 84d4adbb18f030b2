"""What P1 claims of models and their accuracy, and how that is judged."""

from __future__ import annotations

from math import isfinite

from sparsync_lab.papers.claims.claim import Claim, Judge, Judgement, sentences, word_for
from sparsync_lab.papers.claims.p1_dense import BELOW, ends_like_dense
from sparsync_lab.papers.claims.p1_models import columns, own_models, percent
from sparsync_lab.papers.claims.stored_tables import SCORE, StoredTables, first_number
from sparsync_lab.papers.differences import Held
from sparsync_lab.papers.evidence_questions import EVIDENCE, RANDOM_ASKED

FAR_BELOW = 10.0  # points: what "much slower" means where trainings of as many epochs end
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
    return Judgement(f"of {len(settings)} settings compared all match{but}", word, sentences(other))


def _random_is_slower(residual: bool) -> Judge:
    """Judge Rand-k beside Top-k, with its residual or without, by where they end."""

    def judge(stored: StoredTables) -> Judgement:
        top, rand = ({model: first_number(cell) for model, cell in columns(stored, "p1/fig1", method, SCORE).items()}
                     for method in ("topk", "randk"))  # fmt: skip
        if not residual:
            scores = stored.scores(RANDOM_ASKED)
            rand = {model: score for (model, label), score in scores.items() if label == "randk, no residual"}
        told = {model: f"{percent(own)}, TopK-SGD {percent(top.get(model))}" for model, own in rand.items()}
        held = {model: _far_below(own, top[model]) for model, own in rand.items() if model in top}
        here, word, beside = own_models(told, held)
        which = (
            "P1's text has a residual (Eq. 2); its authors' code has Rand-k with and without, and P1 does not say "
            "which of them figure 1 shows; 10 % is chance; on ImageNet it is not trained here"
        )
        return Judgement(here, word, f"{beside} {sentences(which)}".strip())

    return judge


def _far_below(own: float, top: float) -> Held:
    """Return whether Rand-k ends far below Top-k, as it does where it diverged."""
    return None if not isfinite(top) else not isfinite(own) or top - own >= FAR_BELOW


CLAIMS = (
    *ends_like_dense("p1/fig1", "topk", "TopK-SGD ends like dense (16 workers, 0.1 %)", SIMILAR),
    *(
        Claim(
            "p1/fig1", f"RandK-SGD {form} ends far below TopK-SGD on CIFAR-10",
            '"RandK-SGD has much slower convergence than TopK-SGD. RandK-SGD even cannot converge on ImageNet"',
            _random_is_slower(residual), (EVIDENCE,),
        )
        for form, residual in (("with its residual (Eq. 2)", True), ("without its residual", False))
    ),
    Claim("p1/table1", "the models and settings of table 1", "6 models", _models_of_table_1),
)  # fmt: skip
