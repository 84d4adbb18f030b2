"""What we asked beyond the papers: how the stored results answer it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sparsync_lab.papers.adamw_sweep import MAIN, OWN_RATES
from sparsync_lab.papers.adamw_tables import MET, MISSED
from sparsync_lab.papers.adamw_tables import STANDING as WITH_ADAMW
from sparsync_lab.papers.claims.claim import UNDECIDED, Judgement, question, sentences, word_of
from sparsync_lab.papers.claims.stored_tables import StoredTables, first_number, raise_missing
from sparsync_lab.papers.differences import DIVERGED, MISSING, NO_PAIR, PERCENT, SEVERAL, UNDER_A_POINT, Held, in_words
from sparsync_lab.papers.outer import begun_of
from sparsync_lab.papers.tables import MAY_DO_BETTER, RECIPE
from sparsync_lab.papers.tables import STANDING as AT_EQUAL_BYTES

ACCURACY, ADAMW, OUTER = "beyond/accuracy", "beyond/adamw", "beyond/outer"
OUTER_SETTING = "gpt"  # of OUTER, by which it is judged
Cells = Sequence[str]


def _at_equal_bytes(stored: StoredTables) -> Judgement:
    """Judge the library's recipes at the bytes of 0.1 % by every model at its longest length: the best of them, and
    the one that is the best on the first model alone."""
    rows = [row.cells for row in stored.table(ACCURACY, AT_EQUAL_BYTES).rows if "–" not in row.cells[2:4]]
    longest = {cells[0]: cells for cells in sorted(rows, key=lambda cells: first_number(cells[1]))}
    every = [longest[title] for title in dict.fromkeys(cells[0] for cells in rows)] or raise_missing(AT_EQUAL_BYTES)
    name = _recipe(every[0])
    best: dict[str, Held] = {}
    alone: dict[str, Held] = {}
    told, lost, few, most = [], [], [], 0
    for cells in every:
        title, recipe = cells[0], _recipe(cells)
        table = _of_setting(stored, title, cells[1])
        best[title] = _loses_nothing(cells, table[recipe])
        most = max(most, sum(label.startswith(RECIPE) for label in table))
        if not best[title]:
            lost.append(f"{title}: {cells[3]}, dense {cells[2]}")
        if int(table[recipe]["seeds"]) < SEVERAL:
            few.append(f"{title} ({in_words(int(table[recipe]['seeds']))})")
        if name in table:
            alone[title] = _loses_nothing(cells, table[name])
            told.append(f"{title} {table[name]['score']} (dense {cells[2]})")
    held, own = ([*parts.values()].count(True) for parts in (best, alone))
    here = f"the best of several recipes in {held} of {len(best)} settings; {name} alone in {own} of {len(alone)}"
    detail = sentences(
        f"the best is one of up to {most} recipes a setting, dense is one",
        f"not in {'; '.join(lost)}" if lost else "",
        f"{name}: {', '.join(told)}",
        f"few seeds have {', '.join(few)}" if few else "",
    )
    return Judgement(here, word_of([*best.values(), *alone.values()]), detail)


def _recipe(cells: Cells) -> str:
    """Return the recipe that a row of the summary is about."""
    return cells[-1].partition(": ")[0]


def _of_setting(stored: StoredTables, title: str, steps: str) -> dict[str, dict[str, str]]:
    """Return what was trained in a setting, by label: the cells by heading, and the score."""
    for table in stored.result(ACCURACY).tables:
        if table.caption.startswith(f"{title}, ") and table.caption.endswith(f", {steps} steps"):
            rows = [row.cells for row in table.rows if row.cells[1] != MISSING]
            less = {"less": table.headings[1]} if "less is better" in table.headings[1] else {}
            own = {cells[0]: dict(zip(table.headings, cells, strict=True)) for cells in rows}
            return {label: {**cells, "score": cells[table.headings[1]], **less} for label, cells in own.items()}
    return raise_missing(f"{title}, {steps} steps")


def _loses_nothing(summary: Cells, own: Mapping[str, str]) -> Held:
    """Return whether a training ends no lower than dense, or by no more than its setting may lose."""
    gap = own["to dense"]
    if gap == DIVERGED:
        return False
    if gap in (UNDER_A_POINT, NO_PAIR) or MAY_DO_BETTER in summary[-1]:
        return None
    lost = first_number(gap) if "less" in own else -first_number(gap)
    if "less" in own and int(own["seeds"]) < SEVERAL and abs(lost) < PERCENT * first_number(summary[2]):
        return None
    return lost <= (0.0 if summary[5] == "–" else first_number(summary[5]))


def _preconditioned(stored: StoredTables) -> Judgement:
    """Judge preconditioned feedback with AdamW by all settings in which it has a target, each counted once: with rates
    of its own, if it searched for them."""
    table = stored.table(ADAMW, WITH_ADAMW)
    rows = [dict(zip(table.headings, row.cells, strict=True)) for row in table.rows]
    words: dict[str, Held] = {MET: True, MISSED: False, UNDECIDED: None}
    rows = [cells for cells in rows if cells["target"] in words] or raise_missing(WITH_ADAMW)
    tuned = {cells["setting"].replace(OWN_RATES, "") for cells in rows if OWN_RATES in cells["setting"]}
    counted = [cells for cells in rows if cells["setting"] not in tuned]
    held = {cells["setting"]: words[cells["target"]] for cells in counted}
    first = counted[0]
    here = f"in {[*held.values()].count(True)} of {len(held)} settings; {_ends(first)}"
    missed = "; ".join(_ends(cells) for cells in counted if not held[cells["setting"]])
    seeds = {name: int(stored.number(ADAMW, name, MAIN, "seeds")) for name in held}
    few = "; ".join(f"{name} ({in_words(many)})" for name, many in seeds.items() if many < SEVERAL)
    taken = "; ".join(_ends(cells) for cells in rows if cells["setting"] in tuned)
    detail = sentences(
        f"not in {missed}" if missed else "",
        f"few seeds have {few}" if few else "",
        f"not counted, with the rate of another number of workers: {taken}" if taken else "",
    )
    return Judgement(here, word_of(held.values()), detail)


def _ends(cells: Mapping[str, str]) -> str:
    return f"{cells['setting']}, {cells[MAIN]}, dense {cells['dense']}"


def _local_steps(stored: StoredTables) -> Judgement:
    """Compare the best of local steps with an exchange in every step: of what is searched for to its end, and of single
    trainings of searches that are not done, which leave open whether another rate is better."""
    done, begun = begun_of(stored.result(OUTER), OUTER_SETTING)
    local = [cells for label, cells in done.items() if label not in ("dense", MAIN)]
    ends = [(first_number(cells["score"]), _finished(cells)) for cells in local]
    ends += [(one.score, f"{one.score:.2f} (one seed, search not finished)") for one in begun]
    if not ends:
        raise_missing(OUTER)
    named = {first_number(cells["score"]): cells["training"] for cells in local}
    named |= {one.score: f"{one.label} with rate {one.rate:g}" for one in begun}
    shown = sorted(min(own) for own in (ends[: len(local)], ends[len(local) :]) if own)
    each = done.get(MAIN) or raise_missing(MAIN)
    here = f"perplexity {', '.join(text for _, text in shown)}; with an exchange in every step {each['score']}"
    detail = sentences(
        "; ".join(f"{score:.2f} is {named[score]}" for score, _ in shown),
        f"dense: {done['dense']['score'] if 'dense' in done else MISSING}",
        f"searches that are not finished: {_listed(one.label for one in begun)}" if begun else "",
    )
    held: Held = shown[0][0] <= first_number(each["score"])
    return Judgement(here, word_of([held if held or not begun else None]), detail)


def _finished(cells: Mapping[str, str]) -> str:
    return f"{cells['score']} ({in_words(int(cells['seeds']))}, {cells['sent, of dense']})"


def _listed(labels: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(labels))


QUESTIONS = (
    question(ACCURACY, "does a recipe of ours lose nothing to tuned dense at the bytes of 0.1 %?", _at_equal_bytes),
    question(
        ADAMW, "does AdamW end like dense with preconditioned feedback and a 40th of the bytes?", _preconditioned
    ),
    question(
        OUTER, "do local steps end as well as an exchange in every step, within a 40th of dense's bytes?",
        _local_steps,
    ),
)  # fmt: skip
