"""Seeded defects of sparsync_lab.papers."""

from __future__ import annotations

from tests.mutants import Mutant

PAPERS, TESTS = "lab/src/sparsync_lab/papers", "tests/lab"

MUTANTS = [
    Mutant(
        "a number that P2 prints is taken for ours",
        f"{PAPERS}/claims_p2.py",
        'if cell != "–":\n                    found[scheme, scope, workers] = float(cell)',
        'found[scheme, scope, workers] = float(cell.replace("–", "93"))',
        f"{TESTS}/test_verdicts.py::test_published_numbers_are_not_taken_for_ours",
    ),
    Mutant(
        "layer by layer is better whatever the rate",
        f"{PAPERS}/claims_p2.py",
        "    return told, at_most_partly(word)\n",
        "    return told, word\n",
        f"{TESTS}/test_verdicts.py::test_layers_are_judged_at_the_same_rate",
    ),
    Mutant(
        "P1 is judged by LeNet-5",
        f"{PAPERS}/claims_p1.py",
        "[held[model] for model in OWN if model in held]",
        "[*held.values()]",
        f"{TESTS}/test_verdicts.py::test_p1_is_judged_by_its_own_models",
    ),
    Mutant(
        "a gap is measured by a dense training that the change harms",
        f"{PAPERS}/vgg16_gap.py",
        "{what: score - dense for",
        '{what: score - scores.get(("dense", what), dense) for',
        f"{TESTS}/test_evidence.py::test_the_cause_of_the_gap_follows_the_numbers",
    ),
    Mutant(
        "figures are not compared",
        f"{PAPERS}/verify.py",
        'if figure["chart"] != fresh["chart"]:',
        "if False:",
        f"{TESTS}/test_verify.py::test_whatever_is_stated_is_made_again[figures]",
    ),
    Mutant(
        "another item's result is taken for an item's own",
        f"{PAPERS}/store.py",
        " if options.fullmatch(path.stem)]",
        "]",
        f"{TESTS}/test_verify.py::test_a_result_is_of_one_item_alone",
    ),
]
