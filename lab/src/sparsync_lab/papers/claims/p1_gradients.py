"""What P1 claims of the shape of gradients and of its bounds, and how that is judged."""

from __future__ import annotations

from collections.abc import Callable
from math import nan

from sparsync_lab.papers.claims.claim import Claim, Judge, Judgement, at_most_partly, sentences, word_for, word_of
from sparsync_lab.papers.claims.stored_tables import StoredTables, first_number, raise_missing
from sparsync_lab.papers.gradient_histograms import (
    BESIDE_TOPK,
    CLIPPED_LOOKS,
    HOLDS,
    KURTOSIS,
    LAPLACE_WITHIN,
    LARGEST,
    NORMAL_WITHIN,
    SHAPES,
    THIS_ONE,
    TIMES,
    UNIFORM_WITHIN,
    WITHIN,
)
from sparsync_lab.papers.gradient_shapes import CATCH_UP, SHAPE

WATCHED = {"p1/fig2": "TopK-SGD", "p1/fig7": "Dense-SGD", "p1/fig8": "GaussianK-SGD"}
ALSO = ("p1/fig7", "p1/fig8")
# Between which shares of entries within a deviation a distribution is nearer to normal than to uniform or Laplace's.
BELL = (UNIFORM_WITHIN + NORMAL_WITHIN) / 2, (NORMAL_WITHIN + LAPLACE_WITHIN) / 2
MOST = 0.5  # of the entries
NEARLY_ALL = 0.9  # of the squared norm
AS_WIDE = 1.5  # times: so near are deviations that are alike


def _looks(stored: StoredTables, item: str, heading: str) -> list[str]:
    """Return a column of the shapes, of all models and looks."""
    table = stored.table(item, SHAPES)
    if heading not in table.headings:
        raise_missing(heading)
    at = list(table.headings).index(heading)
    return [row.cells[at] for row in table.rows] or raise_missing(item)


def _assumption(stored: StoredTables) -> Judgement:
    """Judge what Theorem 1's proof takes, which is a wide condition."""
    looks = [cell for item in WATCHED for cell in _looks(stored, item, HOLDS)]
    held = looks.count("yes")
    word = at_most_partly(word_of([*(cell == "yes" for cell in looks), *stored.untested(*WATCHED)]))
    here = f"π below its line and π² convex at {held} of {len(looks)} looks at six models and three methods"
    proof = "Theorem 1's proof takes π², which is convex where π is and falls to 0; π need not be convex where π² is"
    flat = "a uniform distribution just meets that, so it does not tell a bell"
    return Judgement(f"{here}; π's convexity not tested", word, sentences(proof, flat))


def _nearest(within: float) -> int:
    """Return whether a share of entries within a deviation is nearest to that of a uniform (0), a normal (1) or
    Laplace's distribution (2)."""
    return sum(within >= limit for limit in BELL)


def _within(stored: StoredTables, item: str) -> list[float]:
    """Return the shares of entries within a deviation, of all models and looks."""
    return [first_number(cell) / 100 for cell in _looks(stored, item, WITHIN)]


def _near_zero(stored: StoredTables) -> Judgement:
    """Judge whether most entries lie within a deviation of their mean."""
    shares = [share for item in WATCHED for share in _within(stored, item)]
    here = f"within a deviation lie {100 * min(shares):.1f} to {100 * max(shares):.1f} %, {len(shares)} looks"
    flat = f"a uniform distribution has {100 * UNIFORM_WITHIN:.1f} % there, so this does not tell a bell"
    word = word_of([*(share > MOST for share in shares), *stored.untested(*WATCHED)])
    return Judgement(here, word, sentences(flat))


def _bells(stored: StoredTables) -> Judgement:
    """Judge whether distributions are nearer to normal than to a flat or a peaked one, by what lies near 0."""
    within = {name: _within(stored, item) for item, name in WATCHED.items()}
    kurtosis = {name: [*map(first_number, _looks(stored, item, KURTOSIS))] for item, name in WATCHED.items()}
    held = {name: [_nearest(share) == 1 for share in own] for name, own in within.items()}
    bells = [bell for own in held.values() for bell in own]
    counted = ", ".join(f"{name} {sum(own)} of {len(own)}" for name, own in held.items())
    ranges = ", ".join(
        f"{name} {100 * min(own):.1f} to {100 * max(own):.1f} % (kurtosis {min(kurtosis[name]):.1f} to "
        f"{max(kurtosis[name]):,.0f})"
        for name, own in within.items()
    )
    known = (
        f"a normal distribution has {100 * NORMAL_WITHIN:.1f} % there (kurtosis 3), a uniform one "
        f"{100 * UNIFORM_WITHIN:.1f} (1.8), Laplace's {100 * LAPLACE_WITHIN:.1f} (6)"
    )
    here = f"nearer to normal than to uniform or Laplace at {sum(bells)} of {len(bells)} looks ({counted})"
    told = sentences(f"within a deviation of the mean lie {ranges}", known, "other workers' were not looked at")
    return Judgement(here, word_of([*bells, *stored.untested(*WATCHED)]), told)


def _norm_of_the_largest(stored: StoredTables) -> Judgement:
    """Judge how much of the squared norm the k largest entries have."""
    shares = [first_number(cell) / 100 for cell in _looks(stored, "p1/fig2", LARGEST)]
    here = f"k = 0.1 % has {100 * min(shares):.2g} to {100 * max(shares):.2g} % of ‖u‖², {len(shares)} looks"
    exact = stored.result("p1/fig5").rows.get("exact normal") or raise_missing("exact normal")
    normal = f"of a normal vector it has {100 * (1 - first_number(str(exact[0]))):.2g} %"
    word = word_of([*(share > NEARLY_ALL for share in shares), *stored.untested("p1/fig2")])
    return Judgement(here, word, sentences(normal))


def _width(item: str, fits: Callable[[float], bool]) -> Judge:
    """Judge a deviation, in times that of TopK-SGD's gradient plus residual, at each model's last look. A
    gradient of Dense-SGD that is clipped there does not count: the limit sets it."""

    def judge(stored: StoredTables) -> Judgement:
        table = stored.table(item, BESIDE_TOPK)
        rows = [dict(zip(table.headings, row.cells, strict=True)) for row in table.rows]
        cut = [row for row in rows if THIS_ONE in row.get(CLIPPED_LOOKS, "")]
        ratios = [first_number(row[TIMES]) for row in rows if row not in cut]
        if not ratios:
            raise_missing("models whose gradient is not clipped")
        steps = {row["step"] for row in rows}
        last = f" (step {int(steps.pop()):,})" if len(steps) == 1 else ""
        here = f"its deviation is {min(ratios):.2g} to {max(ratios):.2g} times Top-k's, {len(ratios)} models{last}"
        others = ", ".join(f"{row['model']} {row[TIMES]} (clipped at {row[CLIPPED_LOOKS]})" for row in cut)
        told = f"not counted, as clipping sets the deviation of the dense gradient: {others}" if others else ""
        word = word_of([*map(fits, ratios), *stored.untested(item, "p1/fig2")])
        return Judgement(here, word, sentences(told))

    return judge


def _shape_beside_topk(stored: StoredTables) -> Judgement:
    """Judge whether a look is nearest to the same distribution as the look of TopK-SGD at the same model and step."""
    shares = [_by_look(stored, item) for item in ("p1/fig8", "p1/fig2")]
    both = [[own[look] for own in shares] for look in shares[0] if look in shares[1]] or raise_missing("p1/fig2")
    held = [_nearest(own) == _nearest(top) for own, top in both]
    here = f"nearest to the same of uniform, normal and Laplace at {sum(held)} of {len(held)} looks"
    own, top = (f"{100 * min(each):.1f} to {100 * max(each):.1f} %" for each in zip(*both, strict=True))
    told = f"within a deviation of the mean lie {own}, with TopK-SGD {top}"
    return Judgement(here, word_of([*held, *stored.untested("p1/fig8", "p1/fig2")]), sentences(told))


def _by_look(stored: StoredTables, item: str) -> dict[tuple[str, str], float]:
    """Return the shares of entries within a deviation by model and step."""
    names = [row.cells[0].split() for row in stored.table(item, SHAPES).rows]
    return {(name[0], name[-1]): share for name, share in zip(names, _within(stored, item), strict=True)}


def _shape_of_pi(stored: StoredTables) -> Judgement:
    table = stored.table("p1/fig3", SHAPE)
    own = dict(zip(table.headings, table.rows[0].cells, strict=True))
    above = first_number(own["π − line, at most"])
    line = "π never rises above the line" if above <= 0 else f"π rises above the line by {above:.2g}"
    here = f"{line}; from convex π is {own['bend of π']} away, π² {own['bend of π²']}, at most"
    return Judgement(here, word_for(own[HOLDS] == "yes", True))


def _bounds(stored: StoredTables) -> Judgement:
    """Compare the exact ratio with both bounds, on a normal vector and on gradients of trainings."""
    rows = stored.result("p1/fig5").rows
    columns = {name.removeprefix("exact "): own for name, own in rows.items() if name.startswith("exact ")}
    held, lowest = list[bool](), []
    for name, own in columns.items():
        lines = zip(own, rows["bound"], rows["previous bound"], strict=True)
        at = [[nan if cell is None else float(cell) for cell in line] for line in lines]  # nan: holds nowhere
        held += [exact <= ours <= before for exact, ours, before in at]
        lowest.append(f"{name} {at[0][0]:.4f} ≤ {at[0][1]:.4f} ≤ {at[0][2]:.4f}")
    here = f"holds at {sum(held)} of {len(held)} densities of {len(columns)} vectors, {len(columns) - 1} from training"
    word = at_most_partly(word_of([*held, *stored.untested("p1/fig5")]), len(columns) > 1)
    return Judgement(here, word, sentences(f"at the lowest density: {', '.join(lowest)}"))


def _catch_up(stored: StoredTables) -> Judgement:
    """Compare the iterations that P1 derives for Top-k with those of earlier results."""
    table = stored.table("p1/fig5", CATCH_UP)
    at = [list(table.headings).index(name) for name in ("c = d/k", "c⁴/(2c−1)²", "c²")]
    rows = [[first_number(row.cells[i]) for i in at] for row in table.rows]
    c, ours, before = rows[-1]
    here = f"by arithmetic, c = {c:,.0f}: {ours:,.0f} iterations against {before:,.0f}; not tested by training"
    printed = "from Eq. 14 as printed, iterations grow with 1/δ⁴ and not 1/δ², which makes the difference larger"
    word = word_for(sum(own < other for _, own, other in rows), len(rows))
    return Judgement(here, at_most_partly(word), sentences(printed))


CONVEX = '"π is convex and it is always less than the reference line"'
ALIKE = '"The gradient distributions in GaussianK-SGD are similar to TopK-SGD"'
CLAIMS = (
    Claim(
        "p1/fig2", "π of gradient plus residual is convex and lies below its line", CONVEX, _assumption, ALSO,
    ),
    Claim(
        "p1/fig2", "gradient plus residual has a Gaussian-like distribution",
        '"the elements of gradient follow Gaussian-like distributions"', _bells, ALSO,
    ),
    Claim(
        "p1/fig2", "most entries of gradient plus residual are close to zero",
        '"most coordinates of u_t are close to zero"', _near_zero, ALSO,
    ),
    Claim(
        "p1/fig2", "the k largest have nearly all of the norm: ‖Top_k(u)‖² ≈ ‖u‖²", '"very close"',
        _norm_of_the_largest, ("p1/fig5",),
    ),
    Claim(
        "p1/fig7", "gradients of Dense-SGD are narrower than gradient plus residual of TopK-SGD",
        '"TopK-SGD shows wider distributions"', _width("p1/fig7", lambda x: x < 1), ("p1/fig2",),
    ),
    Claim(
        "p1/fig8", "gradient plus residual is as wide as with TopK-SGD where Gaussian-k, as printed, selects",
        ALIKE, _width("p1/fig8", lambda x: 1 / AS_WIDE < x < AS_WIDE), ("p1/fig2",),
    ),
    Claim(
        "p1/fig8", "gradient plus residual has the shape of TopK-SGD's where Gaussian-k, as printed, selects",
        ALIKE, _shape_beside_topk, ("p1/fig2",),
    ),
    Claim(
        "p1/fig3", "π of a normal vector is convex and lies below its line", CONVEX, _shape_of_pi,
    ),
    Claim(
        "p1/fig5", "(1 − k/d)² is a tighter bound than 1 − k/d, and holds, in training, too", "every k", _bounds,
    ),
    Claim(
        "p1/fig5", "Top-k catches up with dense after c⁴/(2c−1)² iterations, not c² (Theorem 2)",
        "T ≥ O(c⁴/(2c−1)²); earlier results T ≥ O(c²)", _catch_up,
    ),
)  # fmt: skip
