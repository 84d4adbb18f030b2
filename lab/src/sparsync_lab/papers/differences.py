"""How far trainings end from each other, and when a difference counts."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite

MISSING = "not run"
POINT = 1.0  # points of accuracy: so near to dense is "like dense"
MARGIN = 0.5  # points below that limit in which too few seeds decide nothing
PERCENT = 0.01  # of a perplexity: so near to dense is "like dense" there
SEVERAL = 3  # seeds: with fewer, a difference of less than a point is not stated, and decides nothing
UNDER_A_POINT, DIVERGED = "under a point", "diverged"
WITHIN_SPREAD = "within the spread of its trainings"
NO_PAIR = "–"  # in place of a difference: no seed is common to both
SEED = ", seed "  # of a label
Held = bool | None  # whether a part of a claim holds; ``None``: too few seeds to say


def stated_gap(gap: float, seeds: int = 1, digits: int = 2) -> str:
    """Return a difference in points of accuracy; that it is under a point, and no more, where the seeds are too few."""
    if not isfinite(gap):
        return DIVERGED
    return f"{gap:+.{digits}f}" if abs(gap) >= POINT or seeds >= SEVERAL else UNDER_A_POINT


def seeds_by_label(scores: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return scores by label and seed, from those by labels that tell the seed; that of the first seed is empty."""
    found: dict[str, dict[str, float]] = {}
    for each, score in scores.items():
        label, _, seed = each.partition(SEED)
        found.setdefault(label, {})[seed] = score
    return found


def near(gap: float, seeds: int = 1, spread: float = POINT) -> Held:
    """Return whether what ends so many points from another ends like it, or higher.

    Args:
        seeds: that both have.
        spread: by which trainings of one seed differ anyway.
    """
    if seeds < SEVERAL and (abs(gap) < spread or -POINT - MARGIN < gap <= -POINT):
        return None
    return gap > -POINT


def near_perplexity(own: float, other: float, seeds: int = 1) -> Held:
    """Return whether one perplexity is like another, or lower; arguments as in ``near``."""
    return None if seeds < SEVERAL and abs(own - other) < PERCENT * other else own < other * (1 + PERCENT)


def like_dense(gap: str, seeds: int = SEVERAL, spread: float = POINT) -> Held:
    """Return whether a stated difference to dense is so small that it ends like dense; what diverged does not.

    Args:
        seeds: that both have, as of ``near``.
        spread: as of ``near``.
    """
    return None if gap in (NO_PAIR, UNDER_A_POINT) else gap != DIVERGED and near(float(gap), seeds, spread)


def by_spread(gap: str, spread: float, seeds: int = 1) -> str:
    """Return a stated difference; that it is within the spread of trainings, and no more, where the seeds are too few
    and that spread is known to be more than a point. Arguments as of ``like_dense``."""
    few = gap != NO_PAIR and like_dense(gap, seeds, spread) is None
    return WITHIN_SPREAD if few and POINT < spread < inf else gap


def from_dense(gap: str, other: str = "dense") -> str:
    """Return a stated difference in points to dense in words.

    Args:
        other: what it is to, if not to dense as it is.
    """
    if gap == DIVERGED:
        return gap
    if gap == NO_PAIR:
        return f"{other} {MISSING} with its seed"
    if gap in (UNDER_A_POINT, WITHIN_SPREAD):
        return f"{gap} from {other}"
    return f"{gap.lstrip('+-')} points {'above' if gap.startswith('+') else 'below'} {other}"


def in_words(seeds: int) -> str:
    """Return a number of seeds in words."""
    return {1: "one seed", 2: "two seeds", 3: "three seeds"}.get(seeds, f"{seeds} seeds")
