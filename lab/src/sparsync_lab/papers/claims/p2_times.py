"""What P2 claims of the time of a step, and how that is judged."""

from __future__ import annotations

from sparsync_lab.papers.claims.claim import Claim, Judgement, partly_as, sentences, undecided_as, word_for
from sparsync_lab.papers.claims.p2_accuracies import TITLES
from sparsync_lab.papers.claims.stored_tables import StoredTables
from sparsync_lab.papers.step_times import PARTS

EXCHANGE, CODING, STEP = *PARTS[2:], "step"
BLOCKS = ("block+shared", "block+allgather")
EXCHANGE_COMPUTED = "the exchange is computed"
MOST = 0.5  # of a step


def _of_k80s(found: Judgement, *, computed: bool = True) -> Judgement:
    """Return the judgement of what P2 says of K80s. These code more slowly: where it fails, that may be why.

    Args:
        found: the judgement by the times here.
        computed: whether it rests on the exchange, which is computed.
    """
    found = undecided_as("P2 has K80s", found)
    return partly_as(EXCHANGE_COMPUTED, found) if computed else found


def _computed(stored: StoredTables) -> str:
    return f"the exchange is computed from its bytes at 10 Gbit/s, coding is measured on {stored.device('p2/table2')}"


def _times(stored: StoredTables, part: str) -> dict[str, float]:
    """Return the milliseconds of a part of a step, by scheme; dense first."""
    return {scheme: stored.number("p2/table2", "A step", title, part) for scheme, title in TITLES.items()}


def _told(times: dict[str, float]) -> str:
    return ", ".join(f"{TITLES[scheme]} {ms:.2f} ms" for scheme, ms in times.items())


def _exchange_falls(stored: StoredTables) -> Judgement:
    times = _times(stored, EXCHANGE)
    dense = times.pop("standard")
    held = sum(ms < dense for ms in times.values())
    here = f"less for {held} of {len(times)}: at most {max(times.values()):.2f} ms, dense {dense:.2f}"
    found = Judgement(here, word_for(held, len(times)), sentences(_told(times), _computed(stored)))
    return partly_as(EXCHANGE_COMPUTED, found)


def _coding_eats_the_gain(stored: StoredTables) -> Judgement:
    """Compare, for those of which P2 says it, what coding takes with what the exchange saves."""
    exchange, coding = _times(stored, EXCHANGE), _times(stored, CODING)
    saved = {
        scheme: exchange["standard"] - ms for scheme, ms in exchange.items() if scheme not in (*BLOCKS, "standard")
    }
    held = sum(coding[scheme] > ms for scheme, ms in saved.items())
    worst = max(saved, key=lambda scheme: coding[scheme])
    here = f"for {held} of {len(saved)}; {TITLES[worst]} codes for {coding[worst]:.2f} ms and saves {saved[worst]:.2f}"
    others = ", ".join(f"{TITLES[how]} {coding[how]:.2f} of {ms:.2f} ms" for how, ms in saved.items() if how != worst)
    return _of_k80s(Judgement(here, word_for(held, len(saved)), sentences(others, _computed(stored))))


def _blocks_are_faster(stored: StoredTables) -> Judgement:
    steps = _times(stored, STEP)
    own = {scheme: steps[scheme] for scheme in BLOCKS}
    here = f"{_told(own)}, dense {steps['standard']:.2f}"
    word = word_for(sum(ms < steps["standard"] for ms in own.values()), len(own))
    return partly_as(EXCHANGE_COMPUTED, Judgement(here, word, sentences(_computed(stored))))


def _only_blocks_are_faster(stored: StoredTables) -> Judgement:
    steps = _times(stored, STEP)
    faster = {scheme: ms for scheme, ms in sorted(steps.items(), key=lambda one: one[1]) if ms < steps["standard"]}
    others = {scheme: ms for scheme, ms in faster.items() if scheme not in BLOCKS}
    here = f"{_told(others) or 'no other'}; dense {steps['standard']:.2f}"
    told = f"{len(faster)} of {len(steps) - 1} are faster than dense"
    found = Judgement(here, word_for(bool(faster) and not others, True), sentences(told, _computed(stored)))
    return _of_k80s(found)


def _blocks_are_simple(stored: StoredTables) -> Judgement:
    """Compare the coding of blocks with that of the other two, where both are exchanged alike."""
    coding = _times(stored, CODING)
    pairs = [(block, other) for block in BLOCKS for other in ("random+shared", "random+allgather", "topk")
             if ("shared" in block) == ("shared" in other)]  # fmt: skip
    held = sum(coding[block] < coding[other] for block, other in pairs)
    here = "; ".join(f"{TITLES[one]} {coding[one]:.2f} ms, {TITLES[two]} {coding[two]:.2f}" for one, two in pairs)
    access = "what random access takes is in it, and not measured by itself"
    return _of_k80s(Judgement(here, word_for(held, len(pairs)), sentences(access)), computed=False)


def _top_selects_most(stored: StoredTables) -> Judgement:
    coding, steps = _times(stored, CODING), _times(stored, STEP)
    share = coding["topk"] / steps["topk"]
    here = f"{100 * share:.0f} % of its step is coding, {coding['topk']:.2f} of {steps['topk']:.2f} ms"
    more = {how: ms for how, ms in coding.items() if ms > coding["topk"]}
    longer = f"coding takes longer of {_told(more)}" if more else ""
    told = "coding is selecting, encoding and decoding; selection is not timed by itself"
    return _of_k80s(Judgement(here, word_for(share > MOST, True), sentences(longer, told)))


BARS = "bars, of K80s"
CLAIMS = tuple(
    Claim("p2/table2", text, BARS, judge)
    for text, judge in (
        ("compression 'leads to less time being spent in the exchanging gradients'", _exchange_falls),
        (
            "coding 'is too much to get any overall benefits' (all but block-random-k)", _coding_eats_the_gain,
        ),
        ("block-random-k 'is faster than standard SGD'", _blocks_are_faster),
        ("block-random-k is 'the only configuration that has lower execution time than standard SGD'",
         _only_blocks_are_faster),
        ("block-random-k codes faster than the other two, by its 'simplicity'", _blocks_are_simple),
        ("Top-k 'spends most of its time to find the top k gradients'", _top_selects_most),
    )
)  # fmt: skip
