"""Claims of P2 are judged by stored numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from sparsync_lab.papers import ITEMS, p2, p2_learned
from sparsync_lab.papers.claims import p2 as p2_claims
from sparsync_lab.papers.claims.claim import NOT, PARTLY, REPRODUCED, UNDECIDED, Verdict
from sparsync_lab.papers.claims.p2_accuracies import LIKEWISE, PRINTED, both_scopes, settings
from sparsync_lab.papers.claims.p2_scopes import BETTER
from sparsync_lab.papers.claims.stored_tables import StoredTables
from sparsync_lab.papers.claims.verdicts import CLAIMS, verdicts
from sparsync_lab.papers.differences import MISSING
from sparsync_lab.papers.item import Result
from sparsync_lab.papers.published import P2_ACCURACY, P2_WORKERS
from sparsync_lab.papers.run import History
from sparsync_lab.papers.store import results_of
from sparsync_lab.report import Row, Table

RESULTS = Path("results/papers")
TOP = "Top-k 'outperforms the other two sparsification schemes across the board' (all-gather)"
MOMENTUM = "momentum 0.9 as P2 states"
FALLS = "'the accuracy decreases for all configurations with more workers'"
BLOCKS_FALL = "'for the block-random-k algorithm, the test accuracy drops significantly with more workers'"
COMPARABLE = "block-random-k 'has a comparable test accuracy to SGD'"


def learned(**cells: str) -> Result:
    """P2's table with trainings that learn: all "not run" but these, by scheme_scope_workers."""
    rows = []
    for scheme, (title, *published) in P2_ACCURACY.items():
        own = [title]
        for scope, accuracies in zip(p2.SCOPES, published, strict=True):
            for workers, accuracy in zip(P2_WORKERS, accuracies, strict=True):
                key = f"{scheme.replace('+', '_')}_{scope}_{workers}"
                own.append(f"{cells.get(key, '–')} ({accuracy:.2f})")
        rows.append(Row(own))
    asked = [
        Row([p2.at_layers_rate(p2.long_training(scheme, "global", 8)).label, "ResNet-18",
             cells.get(f"control_{scheme.replace('+', '_')}", "not run"), "%"])
        for scheme in P2_ACCURACY
    ] + [
        Row([p2.long_training(scheme, scope, 8).label, "ResNet-18",
             cells.get(f"{scheme.replace('+', '_')}_{scope}_8", "not run"), "%"])
        for scheme in P2_ACCURACY for scope in p2.SCOPES
    ] + [
        Row([p2.at_share_of_rate(run, share).label, "ResNet-18",
             cells.get(f"{run.method.replace('+', '_')}_at_{run.rate / share:g}", "not run"), "%"])
        for run in p2.block_and_random() for share in p2.LOWER
    ]  # fmt: skip
    return Result([Table("asked", [""] * 4, asked), Table(p2.LEARNED, p2.HEADINGS, rows)])


def judged(claim: str, **cells: str) -> tuple[str, str]:
    found = verdicts({"beyond/evidence": learned(**cells)})
    (one,) = (one for one in found if one.claim.text == f"{LIKEWISE} {claim}")
    return one.word, f"{one.here}. {one.detail}"


BOTH = {"topk_layer_8": "88.41", "topk_global_8": "73.28"}
NEAR = {"topk_layer_8": "93.00", "topk_global_8": "84.00"}  # not far from what P2 prints


def cells_of(places: Mapping[tuple[str, str, int], float]) -> dict[str, str]:
    return {f"{how.replace('+', '_')}_{scope}_{w}": f"{score:.2f}" for (how, scope, w), score in places.items()}


# All of P2's table, and one rate for both scopes where that is to be trained.
WHOLE = {**cells_of(PRINTED), **NEAR, **{f"control_{how.replace('+', '_')}": "80.00" for how in p2.AT_ONE_RATE}}


def without(cells: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: cell for name, cell in cells.items() if name not in names}


def test_published_numbers_are_not_taken_for_ours():
    for claim in CLAIMS:
        if claim.text.startswith(LIKEWISE):
            assert claim.verdict(StoredTables({"beyond/evidence": learned()})).word == MISSING
            assert claim.verdict(StoredTables({"beyond/evidence": learned(standard_layer_1="90.0")})).word == MISSING


@pytest.mark.parametrize(
    ("cells", "word", "says"),
    [
        (BOTH, PARTLY, "0.1 W layer by layer and 0.01 W globally; one rate for both was not run"),
        (
            {**BOTH, "control_topk": "87.95"},
            PARTLY,
            "Top-k 88.41 and 73.28 % (W = 8); at one rate 88.41 and 87.95, under a point. P2's rate is",
        ),
        (  # one pair does not speak for the other
            {**BOTH, "control_topk": "87.95", "topk_layer_1": "89.38", "topk_global_1": "73.89"},
            PARTLY,
            "the difference of Top-k (W = 8) is explained by P2's rates; 1 of 2 pairs were not run at one rate",
        ),
        ({**BOTH, "control_topk": "80.00"}, PARTLY, "far below P2, which has 300 epochs: global up to 18 points"),
        (  # every scheme that is compared counts, and none that is not
            {**BOTH, "block_allgather_layer_8": "57.36", "block_allgather_global_8": "24.80",
             "block_shared_layer_8": "10.08", "block_shared_global_8": "19.01", "random_shared_layer_8": "20.00"},
            PARTLY,
            "300 epochs: layer up to 36, global up to 66 points",
        ),
        (WHOLE | dict.fromkeys(("topk_global_1", "random_shared_global_8"), "60.00"), PARTLY, "global up to 31 points"),
        (WHOLE, REPRODUCED, "Top-k (W = 8), Random-k (allGather) (W = 8), Block-random-k (allGather) (W = 8) is not"),
        ({**WHOLE, "control_topk": "92.50"}, PARTLY, "the difference of Top-k (W = 8) is explained by P2's rates"),
        (  # a training at one rate may turn the order round: then P2's rates do not explain it
            {**BOTH, "control_topk": "91.00"},
            PARTLY,
            "Top-k 88.41 and 91.00 % (W = 8); the difference of Top-k (W = 8) is reversed at one rate.",
        ),
        (  # one that diverged says nothing
            {**BOTH, "control_topk": "nan"},
            PARTLY,
            "one seed: Top-k 88.41 and diverged % (W = 8). What is compared",
        ),
        (without(WHOLE, "control_topk"), PARTLY, "in 18 of 18 pairs"),
        (without(WHOLE, "random_shared_global_2"), PARTLY, "in 17 of 17 pairs"),
        ({**NEAR, "control_topk": "92.50"}, PARTLY, "the difference of Top-k (W = 8) is explained by P2's rates."),
        (
            {**NEAR, "control_topk": "92.50", "block_allgather_layer_8": "92.0", "block_allgather_global_8": "88.0",
             "control_block_allgather": "87.0"},
            PARTLY,
            "(allGather) (W = 8) is not explained by the rate alone; the difference of Top-k (W = 8) is",
        ),
        (  # that of a pair that does not learn says nothing
            {**WHOLE, "block_shared_layer_8": "10.0", "block_shared_global_8": "19.0", "control_block_shared": "10.0"},
            REPRODUCED,
            "Block-random-k (allGather) (W = 8) is not explained by the rate alone;",
        ),
        (
            {**BOTH, "control_topk": "80.00", "topk_layer_1": "70.0", "topk_global_1": "71.0"},
            PARTLY,
            "Top-k 70.00 and 71.00 % (W = 1)",
        ),
        (
            {"block_shared_layer_8": "10.1", "block_shared_global_8": "29.0"},
            UNDECIDED,
            "in 0 of 1 pairs that learn; Block-random-k (allReduce) 10.10 and 29.00 % (W = 8)",
        ),
        ({"block_shared_layer_8": "10.1", "block_shared_global_8": "19.0"}, MISSING, ""),
    ],
)  # fmt: skip
def test_layers_are_judged_at_the_same_rate(cells, word, says):
    found, here = judged(BETTER, **cells)
    assert found == word
    assert says in here


def test_blocks_are_judged_by_their_gap_at_the_same_number_of_workers():
    """Both fall with W here, by as much: the gap does not grow."""
    claim = "block-random-k by all-reduce is worse than by all-gather, the more so with W"
    near = {"block_shared_layer_4": "88.0", "block_allgather_layer_4": "91.0"}
    word, here = judged(claim, **near, block_shared_layer_8="87.0", block_allgather_layer_8="91.0")
    assert (word, "points; growing in 1 of 1 pairs of W that learn, of 4." in here) == (PARTLY, True)
    assert judged(claim, **WHOLE)[0] == REPRODUCED
    assert "growing in 4 of 4 pairs of W that learn, of 4." in judged(claim, **WHOLE)[1]
    assert judged(claim, **without(WHOLE, "block_shared_global_2"))[0] == PARTLY
    assert judged(claim, block_shared_layer_8="87.0", block_allgather_layer_8="85.0")[0] == UNDECIDED
    assert judged(claim, **near, block_shared_layer_8="81.0", block_allgather_layer_8="84.0")[0] == PARTLY
    word, here = judged(claim, **near, block_shared_layer_8="10.1", block_allgather_layer_8="57.4")
    assert word == PARTLY  # it holds, and is far from what P2 trained: its row says so
    assert "; partly" not in here  # as most settings are missing
    lower = {**cells_of({place: score - 30.0 for place, score in PRINTED.items()})}
    assert "of W that learn, of 4; partly: far below P2. Global" in judged(claim, **lower)[1]
    assert "far below P2, which has 300 epochs: layer up to 81 points" in here
    far = {"block_shared_global_2": "28.2", "block_allgather_global_2": "54.1"}
    assert (
        "300 epochs: layer up to 81, global up to 60 points"
        in judged(claim, **near, **far, block_shared_layer_8="10.1", block_allgather_layer_8="57.4")[1]
    )
    lost = {"block_shared_layer_8": "10.1", "block_allgather_layer_8": "84.0"}  # and so far below P2
    both = {"block_shared_layer_2": "90.0", "block_allgather_layer_2": "91.5"}
    word, here = judged(claim, **{**WHOLE, **both, **near, **lost})
    assert word == PARTLY
    assert "growing in 3 of 3 pairs of W that learn, of 4; partly: far below P2." in here
    assert "it does not learn (layer, W = 8), where the gap cannot grow" in here


def test_blocks_are_compared_with_random_entries_at_lower_rates():
    block, single = p2.block_and_random()
    high = {block.label: 57.4, single.label: 83.9}
    assert p2_learned.block_gap_text(high) == ""
    low = {p2.at_share_of_rate(block, 16).label: 63.8, p2.at_share_of_rate(single, 16).label: 65.8}
    told = p2_learned.block_gap_text({**high, **low})
    assert (
        "57.4 and 83.9 (rate 0.8), 63.8 and 65.8 (rate 0.05): lower rates, down to 0.05, bring block-random-k at most "
        "6.4 of the 35.7 points" in told
    )
    high[block.label] = 70.0
    assert "bring block-random-k less than a point of the 23.1 points" in p2_learned.block_gap_text(
        {**low, block.label: 70.0, single.label: 83.9}
    )


def test_every_scope_of_p2_counts():
    claim = "block-random-k is as good as random-k layer by layer, and worse globally (all-gather)"
    layer = {"block_allgather_layer_8": "90.5", "random_allgather_layer_8": "91.0"}
    assert judged(claim, **layer)[0] == PARTLY  # one setting of eight
    assert judged(claim, **layer, block_allgather_global_8="80", random_allgather_global_8="70")[0] == PARTLY
    failed = {name: "50.0" for name in WHOLE if name.startswith("block_allgather_layer")}
    assert judged(claim, **{**WHOLE, **failed})[0] == PARTLY
    no_globals = [name for name in WHOLE if "_global_" in name]
    assert judged(claim, **without({**WHOLE, **failed}, *no_globals))[0] == UNDECIDED  # worse in 0 of 0
    word, here = judged(TOP, **layer, topk_layer_8="92.0")
    assert word == PARTLY
    assert "1 of 8 settings are trained" in here
    same = {"random_shared_layer_8": "90.5", "random_allgather_layer_8": "91.0", "random_shared_global_2": "60"}
    assert judged("random-k by all-reduce is as good as by all-gather", **same)[0] == PARTLY
    assert (
        judged("random-k by all-reduce is as good as by all-gather", **same, random_allgather_global_2="70")[0]
        == PARTLY
    )
    every = {f"random_{how}_{scope}_{w}": f"{score}" for how, score in (("shared", 90.5), ("allgather", 91.0))
             for scope in p2.SCOPES for w in (2, 4, 8)}  # fmt: skip
    assert judged("random-k by all-reduce is as good as by all-gather", **every)[0] == REPRODUCED
    far = {name: "70.0" for name in every if "global" in name}
    word, here = judged("random-k by all-reduce is as good as by all-gather", **{**every, **far})
    assert word == PARTLY
    assert here.endswith("which has 300 epochs: global up to 22 points.")
    tops = {f"{scheme}_{scope}_{w}": score for scheme, score in
            (("topk", "92.0"), ("random_allgather", "91.0"), ("block_allgather", "90.0"))
            for scope in p2.SCOPES for w in P2_WORKERS}  # fmt: skip
    assert judged(TOP, **tops)[0] == REPRODUCED
    word, here = judged(TOP, **{**tops, "topk_layer_1": "91.9", "topk_global_8": "80.0"})
    assert word == PARTLY
    assert "in 6 of 8 settings it is ahead by a point or more, in 1 within a point" in here
    worse = {"random_shared_layer_8": "80", "random_allgather_layer_8": "91.0"}
    assert judged("random-k by all-reduce is as good as by all-gather", **worse)[0] == UNDECIDED  # one of six
    for less, verdict in {"86": NOT, "80": UNDECIDED}.items():  # so far below P2 it may be as they do not end
        worse = {name: less for name in every if "shared" in name}
        word, here = judged("random-k by all-reduce is as good as by all-gather", **{**every, **worse})
        assert (word, "; not decided: far below P2" in here) == (verdict, verdict == UNDECIDED)


def test_with_momentum_what_learns_is_judged():
    """Where dense ends below what has a tenth of its rate, or does not learn, the scope decides nothing."""
    one = of_table("p2/table1", MOMENTUM)
    assert one.word == UNDECIDED
    random = "in 0 of 2 pairs that decide, of 18: Random-k (allGather) 11.92 and 25.68 % (W = 1), dense 72.77;"
    assert one.here == f"{random} see 30 epochs, beyond/evidence; not decided: far below P2"
    assert one.detail.startswith("Likewise Random-k (allReduce) 10.00 and 20.12 % (W = 2), dense 56.93.")
    assert "Not deciding: Top-k 61.55 and 76.55 % (W = 1), dense 72.77" in one.detail
    assert "In 12 pairs neither learns." in one.detail
    random = "With momentum random-k and block-random-k end at 9.74 to 25.68 %, in P2 at 78.11 to 93.43."
    assert random in one.detail
    assert one.detail.endswith("layer up to 83, global up to 72 points.")
    no_dense = {"standard_layer, W = 1": "12.00 (94.50)", "standard_layer, W = 2": "12.00 (94.50)"}
    one = of_table("p2/table1", MOMENTUM, **no_dense)
    assert (one.word, one.here.startswith("none of 18 pairs can decide: Top-k 61.55")) == (UNDECIDED, True)
    dense = {"standard_layer, W = 1": "90.00 (94.50)"}
    one = of_table("p2/table1", MOMENTUM, **dense)
    assert one.here.startswith("in 0 of 3 pairs that decide, of 18: Top-k 61.55 and 76.55 % (W = 1), dense 90.00")
    better = {"topk_layer, W = 1": "80.00 (93.63)"}
    assert of_table("p2/table1", MOMENTUM, **dense, **better).word == PARTLY


def test_what_p2_prints_reproduces_what_it_claims():
    """So no criterion asks for more than P2 itself shows, but one rate for both scopes. Its own table breaks two of its
    sentences."""
    found = verdicts({"beyond/evidence": learned(**{**WHOLE, **cells_of(PRINTED)})})
    own = {one.claim.text: one.word for one in found if one.claim.text.startswith(LIKEWISE)}
    assert len(own) == 8
    assert {own.pop(f"{LIKEWISE} {claim}") for claim in (FALLS, BLOCKS_FALL)} == {PARTLY}
    assert set(own.values()) == {REPRODUCED}
    assert judged(BETTER, **cells_of(PRINTED))[0] == PARTLY
    titles = {how: own[0] for how, own in P2_ACCURACY.items() if "shared" not in how}
    rows = [Row([title, *(f"{PRINTED[how, scope, 1]:.2f}" for scope in p2.SCOPES)]) for how, title in titles.items()]
    (one,) = (one for one in CLAIMS if "no momentum, W = 1" in one.text)
    alone = one.verdict(StoredTables({"p2/table1": Result([Table(p2.AS_PRINTED, [""] * 3, rows)])}))
    assert (alone.word, alone.here) == (PARTLY, "Top-k 93.63 and 91.45 %; partly: the rate differs")


def test_what_p2_prints_is_counted():
    pairs = both_scopes(PRINTED)
    assert sum(layer > whole for layer, whole in pairs.values()) == len(pairs) == 18
    best = settings(PRINTED, "topk", "random+allgather", "block+allgather").values()
    assert (sum(top > max(others) for top, *others in best), len(best)) == (6, 8)
    published = {one.text: one.published for one in p2_claims.CLAIMS}
    assert published[f"{LIKEWISE} {FALLS}"] == "in 10 of 11 as printed: not Top-k global 91.45 and 91.50 (W = 1, 8)"
    assert "91.50, 91.45 and 90.45 % (global, W = 8); the best in 6 of 8" in published[f"{LIKEWISE} {TOP}"]
    assert published[f"{LIKEWISE} {COMPARABLE}"].endswith("93.10 and 94.30 (layer, W = 8)")


def test_accuracy_falls_with_workers_by_what_counts():
    down = {place: score - 2.0 * (place[2] == 8) for place, score in PRINTED.items()}
    assert judged(FALLS, **cells_of(down))[0] == REPRODUCED
    word, here = judged(FALLS, **cells_of(down | {("topk", "layer", 8): 93.5, ("topk", "global", 8): 99.0}))
    assert word == PARTLY
    assert (
        "by a point or more in 9 of 11 configurations (1 under a point, one seed). Under a point: Top-k layer." in here
    )
    assert judged(FALLS, topk_layer_1="90.0", topk_layer_8="88.0")[0] == PARTLY  # of one alone
    assert judged(FALLS, topk_layer_1="90.0", topk_layer_8="89.5")[0] == UNDECIDED  # one seed
    assert judged(FALLS, topk_layer_1="90.0", topk_layer_8="91.0")[0] == UNDECIDED  # one of eleven
    up = {place: score + 20.0 * (place[2] == 8) for place, score in PRINTED.items()}
    assert judged(FALLS, **cells_of(up))[0] == NOT


def test_blocks_fall_with_workers_by_a_point_or_more():
    down = {place: score - 2.0 * (place[2] == 8) for place, score in PRINTED.items()}
    assert judged(BLOCKS_FALL, **cells_of(down))[0] == REPRODUCED
    word, here = judged(BLOCKS_FALL, **cells_of(PRINTED))  # by all-gather its cells hardly fall
    assert (word, here.startswith("(allGather) layer 93.16 → 93.10, (allGather) global")) == (PARTLY, True)
    own = {place: score for place, score in PRINTED.items() if place[0] == "block+allgather"}
    assert judged(BLOCKS_FALL, **cells_of(own))[0] == UNDECIDED
    up = {place: score + 20.0 * (place[2] == 8) for place, score in PRINTED.items()}
    assert judged(BLOCKS_FALL, **cells_of(up))[0] == NOT
    far = cells_of(down | {("block+allgather", "layer", 8): 57.36, ("topk", "layer", 8): 20.0})
    word, here = judged(BLOCKS_FALL, **far)
    assert (word, here.endswith("epochs: layer up to 36 points.")) == (PARTLY, True)


def test_where_one_rate_is_missing_rates_around_it_are_told():
    """Below and above that of what is chosen globally: layers ahead at both, or at one of them."""
    both = {name: cell for how in ("block", "random") for name, cell in
            ((f"{how}_allgather_layer_8", "85.0"), (f"{how}_allgather_global_8", "70.15"))}  # fmt: skip
    around = {"block_allgather_at_0.05": "71.16", "block_allgather_at_0.0125": "50.0", "block_allgather_at_0.2": "90.0",
              "random_allgather_at_0.05": "65.76"}  # fmt: skip
    here = judged(BETTER, **both, **around)[1]
    block = "Block-random-k (allGather) 70.15 % globally at rate 0.08, layer by layer 71.16 at 0.05 and"
    assert f"{block} 90.00 at 0.2 (W = 8): layers stay ahead at both; Random" in here
    random = "Random-k (allGather) 70.15 % globally at rate 0.08, layer by layer 65.76 at 0.05 and 85.00 at 0.8"
    assert f"{random} (W = 8): the rate alone may explain the difference." in here
    less = {**around, "block_allgather_at_0.05": "70.20"}
    assert (
        f"{block.replace('71.16', '70.20')} 90.00 at 0.2 (W = 8): the rate alone" in judged(BETTER, **both, **less)[1]
    )
    below = {**both, "block_allgather_layer_8": "60.0", "block_allgather_at_0.05": "60.0"}
    assert "60.00 at 0.8 (W = 8): what is chosen globally stays ahead at both." in judged(BETTER, **below)[1]
    assert "at rates around" not in judged(BETTER, **both)[1]  # none is below
    control = {"control_block_allgather": "60.0", "control_random_allgather": "60.0"}
    assert "at rates around" not in judged(BETTER, **both, **around, **control)[1]


def test_blocks_are_compared_with_dense():
    dense = {"standard_layer_8": "94.0", "standard_layer_2": "94.0"}
    every = {f"standard_layer_{w}": "94.0" for w in P2_WORKERS}
    blocks = {f"block_allgather_layer_{w}": "92.9" for w in P2_WORKERS}
    assert judged(COMPARABLE, **every, **{**blocks, "block_allgather_layer_8": "92.0"})[0] == REPRODUCED  # P2: 1.2 less
    assert judged(COMPARABLE, **every, **dict.fromkeys(blocks, "88.0"))[0] == NOT
    assert judged(COMPARABLE, **every, **dict.fromkeys(blocks, "57.0"))[0] == UNDECIDED  # far below P2
    assert judged(COMPARABLE, **dense, block_allgather_layer_8="92.0")[0] == PARTLY  # in one of four settings
    word, here = judged(COMPARABLE, **dense, block_allgather_layer_8="92.0", block_allgather_layer_2="90.0")
    assert word == PARTLY
    assert "block-random-k and SGD: 92.00 and 94.00 % (layer, W = 8)" in here
    word, here = judged(COMPARABLE, **dense, block_allgather_layer_8="57.0", block_allgather_global_8="20.0")
    assert (word, here.endswith("epochs: layer up to 36 points.")) == (UNDECIDED, True)  # layers alone are compared
    assert judged(COMPARABLE, **dense, block_allgather_global_8="94.0")[0] == MISSING


def of_table(item: str, claim: str, **cells: str) -> Verdict:
    """The verdict on a claim by what is stored, with other numbers of its first table: by row and heading."""
    result = results_of(ITEMS[item], RESULTS)[0].result
    table = result.tables[0]
    rows = []
    for row in table.rows:
        scheme = next(how for how, own in P2_ACCURACY.items() if own[0] == row.cells[0]).replace("+", "_")
        rows.append(
            Row([cells.get(f"{scheme}_{at}", cell) for at, cell in zip(table.headings, row.cells, strict=True)])
        )
    other = Result([Table(table.caption, table.headings, rows), *result.tables[1:]])
    (one,) = (one for one in verdicts({item: other}) if claim in one.claim.text)
    return one


COMPUTED, OTHER_GPU = f"{PARTLY}: the exchange is computed", f"{UNDECIDED}: P2 has K80s"
P2_SPARSE = [how.replace("+", "_") for how in P2_ACCURACY if how != "standard"]
SLOW = {f"{how}_step": "80.00 ms" for how in ("topk", "random_allgather", "random_shared")}


@pytest.mark.parametrize(
    ("claim", "word", "cells", "other"),
    [
        ("exchanging gradients", COMPUTED, {f"{how}_exchange": "70.00 ms" for how in P2_SPARSE}, NOT),
        ("overall benefits", OTHER_GPU, {"topk_coding and decoding": "60.00 ms"}, PARTLY),
        ("overall benefits", OTHER_GPU, {f"{how}_coding and decoding": "70.00 ms" for how in P2_SPARSE}, COMPUTED),
        ("'is faster than standard SGD'", COMPUTED, {f"{how}_step": "80.00 ms" for how in P2_SPARSE}, NOT),
        ("'is faster than standard SGD'", COMPUTED, {"block_shared_step": "80.00 ms"}, PARTLY),
        ("the only configuration", OTHER_GPU, SLOW, COMPUTED),
        ("'simplicity'", PARTLY, {"block_allgather_coding and decoding": "1.00 ms"}, REPRODUCED),
        ("'simplicity'", PARTLY, {"block_shared_coding and decoding": "2.00 ms"}, OTHER_GPU),
        ("most of its time", OTHER_GPU, {"topk_coding and decoding": "9.00 ms"}, COMPUTED),
    ],
)
def test_what_p2_says_of_times_is_judged_by_itself(claim, word, cells, other):
    """The exchange is computed, and reproduces in part at most; what fails without a K80 is not decided."""
    for own, verdict in (({}, word), (cells, other)):
        one = of_table("p2/table2", claim, **own)
        assert one.word == verdict.partition(":")[0]
        assert one.here.endswith(f"; {verdict}") == (":" in verdict)


def test_most_of_a_difference_is_the_rate_if_the_same_rate_leaves_little():
    layer, whole = (p2.long_training("topk", scope, 8) for scope in p2.SCOPES)
    scores = {layer.label: 88.41, whole.label: 73.28}
    assert p2_learned.same_rate_text(scores) == ""
    told = p2_learned.same_rate_text({**scores, p2.at_layers_rate(whole).label: 87.95})
    assert (
        "the scopes differ by under a point, so most of the 15.1 points at P2's rates comes from the lower one" in told
    )
    told = p2_learned.same_rate_text({**scores, p2.at_layers_rate(whole).label: 79.0})
    assert told.endswith("the scopes differ by 9.41 points")
    told = p2_learned.same_rate_text({**scores, p2.at_layers_rate(whole).label: 91.48})
    assert told.endswith("(W = 8, one seed). At the same rate globally is 3.07 points ahead")
    told = p2_learned.same_rate_text({**scores, p2.at_layers_rate(whole).label: float("nan")})
    assert told.endswith("and globally diverged with the rate of layers (W = 8, one seed)")


def test_how_far_blocks_are_from_what_p2_prints_is_computed():
    done = {}
    for scheme, workers, score in (
        ("block+allgather", 1, 0.94),
        ("block+allgather", 8, 0.573),
        ("block+shared", 8, 0.1),
    ):
        run = p2.long_training(scheme, "layer", workers)
        done[run.label] = History(run, "accuracy", [1], [score], [1], [1.0], [1], 0.01, 1.0, 1, [], {})
    (note,) = (note for note in p2_learned.learned_notes(done) if note.startswith("Block-random-k beside"))
    below, above = "-80.6 (Block-random-k (allReduce), layer, W = 8)", "+0.8 (Block-random-k (allGather), layer, W = 1)"
    assert f"in points: {below} to {above}. W workers" in note
    run = p2.long_training("topk", "layer", 8)
    one = {run.label: History(run, "accuracy", [1], [0.9], [1], [1.0], [1], 0.01, 1.0, 1, [], {})}
    assert not any("Block-random-k" in note for note in p2_learned.learned_notes(one))
