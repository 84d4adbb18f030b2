"""AdamW with preconditioned feedback: ``beyond/adamw`` in the tables that readers look for."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from sparsync_lab.docs.sources import Sources, percent, plain, stored_table, table
from sparsync_lab.papers.adamw_sweep import MAIN
from sparsync_lab.papers.adamw_tables import ABLATIONS, AGAINST_BUDGET, MISSED, STANDING
from sparsync_lab.papers.claims.claim import UNDECIDED
from sparsync_lab.papers.differences import SEVERAL, in_words
from sparsync_lab.report import Table

FILE, ITEM = "beyond-adamw", "beyond/adamw"
RATES = "The search for rates: "
COLUMNS = 7  # of a table of scores; the rest is how long it took


def _if_run(block: Callable[[Sources], str]) -> Callable[[Sources], str]:
    """Let a block say that its trainings are not run yet."""

    @wraps(block)
    def written(sources: Sources) -> str:
        return block(sources) if sources.has_item(FILE) else f"Not run yet: `sparsync papers run {ITEM}`."

    return written


def _tables(sources: Sources) -> list[Table]:
    return list(sources.item(FILE).result.tables)


def _captioned(tables: list[Table]) -> str:
    parts = [part for own in tables for part in (f"**{plain(own.caption)}**", stored_table(own, COLUMNS))]
    return "\n\n".join(parts) or "Not run yet."


@_if_run
def standing(sources: Sources) -> str:
    """Return where preconditioned feedback stands against dense and the best of the others."""
    return stored_table(next(own for own in _tables(sources) if own.caption == STANDING))


UNSTEADY = 0.05  # of the mean: a deviation over the seeds, or a difference of one seed, that is worth telling
TIMES = "bench-adamw-gpu.csv"


def losses(sources: Sources) -> str:
    """Return in a line the settings in which preconditioned feedback misses its target."""
    own = next(own for own in _tables(sources) if own.caption == STANDING)
    target = own.headings.index("target")
    told = [
        f"{plain(cells[0])}: {cells[2]} instead of dense's {cells[1]}{_few_seeds(sources, cells[0])}"
        for cells in (row.cells for row in own.rows)
        if cells[target] in (MISSED, UNDECIDED)
    ]
    lines = [f"- AdamW, {MAIN}: {'; '.join(told) or 'its target was met in every setting that was run'}."]
    for row in own.rows:
        mean, _, deviation = row.cells[2].partition(" ± ")
        if deviation and float(deviation) > UNSTEADY * float(mean):
            lines.append(
                f"- Seeds of AdamW, {MAIN}, are far apart with {plain(row.cells[0])}: {row.cells[2]}, dense "
                f"{row.cells[1]}; a lower rate is the safer one where a worker sends several per cent."
            )
    return "\n".join([*lines, *_time_lost(sources)])


def _few_seeds(sources: Sources, setting: str) -> str:
    """Return how many seeds dense and preconditioned feedback have in a setting, where these are too few."""
    own = next(own for own in _tables(sources) if own.caption == setting)
    seeds = {row.cells[0]: row.cells[own.headings.index("seeds")] for row in own.rows}
    least = min(int(seeds[label]) for label in ("dense", MAIN))
    return f" ({in_words(least)} each)" if least < SEVERAL else ""


def _time_lost(sources: Sources) -> list[str]:
    """Return what hook and update cost on a GPU at worst, if that was measured."""
    if not (sources.folder / TIMES).is_file():
        return []
    timed = [line for line in sources.lines(TIMES) if line["method"] != line["floor"]]
    line = max(timed, key=lambda line: (int(line["size"]), float(line["ratio_to_floor"])))
    return [
        f"- AdamW on an {line['device']}: hook and update of {int(line['size']):,} parameters ({line['method']}) take "
        f"{float(line['p50_ms']):.1f} ms of a step, {float(line['ratio_to_floor']):.1f} times torch's fused AdamW "
        f"alone, and keep the host for {float(line['host_p50_ms']):.1f} ms."
    ]


def times(sources: Sources) -> str:
    """Return what hook and update cost on a GPU, as a table."""
    if not (sources.folder / TIMES).is_file():
        return "Not run yet: `sparsync bench adamw`."
    lines = sources.lines(TIMES)
    kept = ("launches", "allocations", "host_waits")
    rows = [
        [
            f"{int(line['size']):,}",
            line["method"],
            f"{float(line['p50_ms']):.2f}",
            f"{float(line['ratio_to_floor']):.2f} ×",
            f"{float(line['host_p50_ms']):.1f}",
            *(line.get(name) or "–" for name in kept),
        ]
        for line in lines
    ]
    headings = ["parameters", "hook + update", "ms", "to fused AdamW", "host ms", "launches", "allocations", "waits"]
    return f"{table(headings, rows)}\n\n{sources.made(TIMES, lines[0], 'sparsync bench adamw')}"


@_if_run
def against_budget(sources: Sources) -> str:
    """Return the scores at every budget, for AdamW and SGD."""
    return stored_table(next(own for own in _tables(sources) if own.caption == AGAINST_BUDGET))


@_if_run
def language_models(sources: Sources) -> str:
    """Return the tables of the GPTs."""
    return _captioned([own for own in _scores(sources) if own.caption.startswith("GPT")])


@_if_run
def image_models(sources: Sources) -> str:
    """Return the tables of models for images."""
    return _captioned([own for own in _scores(sources) if not own.caption.startswith("GPT")])


@_if_run
def ablations(sources: Sources) -> str:
    """Return a table for each budget whose settings are changed, below a list of the changes that matter most."""
    found = [own for own in _tables(sources) if own.caption.startswith(ABLATIONS)]
    return "\n\n".join(["\n".join(map(_far, found)), _captioned(found)]).strip()


def _far(own: Table) -> str:
    """Return in a line which changes end far from what is unchanged, the farthest first; of perplexities."""
    ratios = {row.cells[0].removeprefix("ablation: "): float(row.cells[2].removeprefix("× "))
              for row in own.rows if row.cells[2].startswith("× ")}  # fmt: skip
    told = []
    for words, sign in {"higher": 1, "lower": -1}.items():
        far = sorted((label for label, ratio in ratios.items() if sign * (ratio - 1) > UNSTEADY),
                     key=lambda label: -sign * ratios[label])  # fmt: skip
        told.append(f"More than {percent(UNSTEADY, 0)} {words}: {'; '.join(far) or 'none'}.")
    return plain(f"- {own.caption.removeprefix(ABLATIONS)}. {' '.join(told)}")


@_if_run
def figure(sources: Sources) -> str:
    """Return the picture."""
    return f"![AdamW at a fraction of the traffic]({sources.link}/papers/{FILE}.png)"


def _scores(sources: Sources) -> list[Table]:
    """Return the tables of all methods in a setting."""
    others = (ABLATIONS, RATES, STANDING, AGAINST_BUDGET)
    return [own for own in _tables(sources) if own.headings[0] == "training" and not own.caption.startswith(others)]
