"""What P1 claims of models and their accuracy, and how that is judged."""

from __future__ import annotations

from contextlib import suppress

from sparsync_lab.papers.claim import (
    LEARNS,
    SCORE,
    Claim,
    Judgement,
    StoredTables,
    first_number,
    sentences,
    word_for,
)
from sparsync_lab.papers.claims_p1_dense import ends_like_dense
from sparsync_lab.papers.claims_p1_models import columns, own_models
from sparsync_lab.papers.evidence_questions import EVIDENCE, RANDOM_ASKED


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
    """Judge Rand-k with its residual, and without, where that was trained: P1 does not say which figure 1 has."""
    top, rand = (columns(stored, "p1/fig1", method, SCORE) for method in ("topk", "randk"))
    forms = {model: [first_number(own)] for model, own in rand.items()}
    with suppress(LookupError):
        scores = stored.scores(RANDOM_ASKED)
        for model in forms:
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


CLAIMS = (
    Claim("p1/table1", "the models and settings of table 1", "6 models", _models_of_table_1),
    *ends_like_dense("p1/fig1", "topk", "TopK-SGD ends like dense (16 workers, 0.1 %)"),
    Claim(
        "p1/fig1", "RandK-SGD learns on CIFAR-10, but slower than TopK-SGD",
        '"much slower convergence than TopK-SGD"; on ImageNet it "cannot converge"', _random_is_slower, (EVIDENCE,),
    ),
)  # fmt: skip
