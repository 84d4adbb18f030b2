"""What P2 and P3 claim, and how that is judged."""

from __future__ import annotations

from sparsync_lab.papers.claim import POINT, SCORE, TO_DENSE, Claim, Stored, first_number, word_for

ALONE = "The same without momentum"  # a table of P2
LEARNED = "P2, table 1: layer by layer against globally"
ITS_CONDITION = "P3: its condition and its accuracy"  # of beyond/evidence, as the one above
PLAIN_TREE = "gTop-k, 0.001"
LEARNING = (("Top-k", "topk"), ("Random-k", "random+allgather"), ("Random-k (allReduce)", "random+shared"))


def _layers(stored: Stored) -> tuple[str, str]:
    rows = [row.cells for row in stored.table("p2/table1", ALONE).rows[1:]]
    pairs = [(cells[0], first_number(cells[1]), first_number(cells[2])) for cells in rows]
    held = sum(layer > whole for _, layer, whole in pairs)
    return ", ".join(f"{name} {layer:.1f} and {whole:.1f}" for name, layer, whole in pairs), word_for(held, len(pairs))


def _learned(stored: Stored, scheme: str, workers: int = 8) -> float:
    """Return the accuracy of a scheme where it was trained for 30 epochs without momentum."""
    return stored.number("beyond/evidence", LEARNED, f"{scheme}, W = {workers}, no momentum, 30 epochs", "last score")


def _layers_that_learn(stored: Stored) -> tuple[str, str]:
    pairs = {name: [_learned(stored, f"{key}, {scope}") for scope in ("layer", "global")] for name, key in LEARNING}
    told = ", ".join(f"{name} {layer:.1f} and {whole:.1f}" for name, (layer, whole) in pairs.items())
    return told, word_for(sum(layer > whole for layer, whole in pairs.values()), len(pairs))


def _blocks_that_learn(stored: Stored) -> tuple[str, str]:
    block, scattered = (_learned(stored, f"{key}+allgather, global") for key in ("block", "random"))
    return f"{block:.1f} and {scattered:.1f}", word_for(abs(block - scattered) < 2 * POINT, True)


def _block_sums(stored: Stored) -> tuple[str, str]:
    scores = [_learned(stored, "block+shared, layer", workers) for workers in (4, 8)]
    return f"{scores[0]:.1f} and {scores[1]:.1f} (W = 4 and 8)", word_for(scores[0] > scores[1], True)


def _shared_indices(stored: Stored) -> tuple[str, str]:
    """Compare shared indices with each worker's own, in blocks and scattered, with 4 and 8 workers."""
    told, held = [], 0
    for workers in (4, 8):
        pairs = [
            [_learned(stored, f"{key}+{how}, layer", workers) for how in ("shared", "allgather")]
            for key in ("block", "random")
        ]
        told.append(", ".join(f"{ours:.1f} against {own:.1f}" for ours, own in pairs) + f" (W = {workers})")
        (block, own_block), (scattered, own_scattered) = pairs
        held += own_block - block > POINT > own_scattered - scattered
    return "; ".join(told), word_for(held, 2)


def _only_blocks_are_faster(stored: Stored) -> tuple[str, str]:
    rows = stored.table("p2/table2", "A step").rows
    steps = {row.cells[0]: first_number(row.cells[-1]) for row in rows}
    dense = steps.pop("Standard SGD")
    faster = [name for name, ms in steps.items() if ms < dense]
    told = f"{len(faster)} of {len(steps)} are: the fastest {min(steps.values()):.1f} ms against {dense:.1f} dense"
    return told, word_for(all(name.startswith("Block") for name in faster) and bool(faster), True)


def _condition(stored: Stored) -> tuple[str, str]:
    rows = stored.table("p3/density", "P3's condition").rows
    looks, above = (sum(int(first_number(row.cells[at])) for row in rows) for at in (1, 4))
    worst = max(first_number(row.cells[2]) for row in rows)
    return f"holds at {looks - above} of {looks} looks, the largest ratio {worst:.4f}", word_for(looks - above, looks)


def _like_dense(stored: Stored) -> tuple[str, str]:
    gaps = {
        density: stored.number("p3/density", "gTop-k", f"gTop-k, {density}", TO_DENSE)
        for density in ("0.001", "0.005", "0.01")
    }
    near = sum(gap > -POINT for gap in gaps.values())
    return ", ".join(f"{gap:+.2f} at {density}" for density, gap in gaps.items()) + " points to dense", word_for(
        near, len(gaps)
    )


def _with_momentum_corrected(stored: Stored) -> tuple[str, str]:
    """Compare gTop-k at 0.1 % on ResNet-20, as published and with momentum before the residual, with dense."""
    rows = [row.cells for row in stored.table("beyond/evidence", ITS_CONDITION).rows]
    scores = {cells[0]: float(cells[2]) for cells in rows if cells[1] == "ResNet-20" and cells[2] != "not run"}
    own = f"{PLAIN_TREE}, momentum corrected, 0.5"
    before, *gaps = (scores[how] - scores["dense"] for how in (PLAIN_TREE, own, f"{own}, density warm-up"))
    told = f"{gaps[0]:+.2f} points to dense instead of {before:+.2f}, and {gaps[1]:+.2f} with more entries at first"
    return told, word_for(sum(gap > -POINT for gap in gaps), len(gaps))


def _more_is_better(stored: Stored) -> tuple[str, str]:
    scores = [stored.number("p3/density", "gTop-k", f"gTop-k, {d}", SCORE) for d in ("0.001", "0.005", "0.01")]
    told = ", ".join(f"{score:.2f}" for score in scores) + " % at 0.1, 0.5 and 1 %"
    return told, word_for(scores == sorted(scores), True)


def _growth(stored: Stored) -> tuple[str, str]:
    rows = {row.cells[0].split(" (")[0]: row.cells for row in stored.table("p3/traffic", "Bytes a worker").rows}
    top, tree = (first_number(rows["0.001, 128 workers"][at]) for at in (3, 5))
    return f"128 workers: {top:.0f} k and, at the root, {tree:.0f} k entries", word_for(top == 127 and tree == 7, True)


CLAIMS = (
    Claim("p2/table1", "layer by layer is better than globally (no momentum, W = 1)", "93.6 and 91.5 (Top-k)", _layers),
    Claim(
        "beyond/evidence", "P2, table 1, trained for 30 epochs, W = 8: layer by layer is better than globally",
        "93.4 and 91.5, 92.5 and 91.5, 92.4 and 91.3", _layers_that_learn,
    ),
    Claim(
        "beyond/evidence", "P2, table 1, likewise, globally, all-gather: block-random-k is as good as random-k",
        "90.5 and 91.5", _blocks_that_learn,
    ),
    Claim(
        "beyond/evidence", "P2, table 1, likewise, layer by layer: block-random-k by all-reduce degrades with W",
        "90.8 and 90.6 (W = 4 and 8)", _block_sums,
    ),
    Claim(
        "beyond/evidence",
        "P2, table 1, likewise, layer by layer: the same indices for all harm block-random-k, and not random-k",
        "90.8 against 93.1, 93.2 against 93.1 (W = 4); 90.6 against 93.1, 92.4 against 92.5 (W = 8)", _shared_indices,
    ),
    Claim("p2/table2", "only block-random-k is faster than dense", "K80, by eye", _only_blocks_are_faster),
    Claim("p3/density", "gTop-k is no worse than random-k on the sum", "assumed", _condition),
    Claim("p3/density", "so it converges like dense SGD", "in the abstract", _like_dense),
    Claim(
        "beyond/evidence", "P3: at 0.1 % it does with momentum before the residual", "not tried by P3",
        _with_momentum_corrected,
    ),
    Claim("p3/density", "more entries, faster convergence", "in the abstract", _more_is_better),
    Claim("p3/traffic", "O(k log P) against O(k P) entries", "the orders", _growth),
)  # fmt: skip
