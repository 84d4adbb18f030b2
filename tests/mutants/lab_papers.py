"""Seeded defects of sparsync_lab.papers."""

from __future__ import annotations

from tests.mutants import Mutant

PAPERS, TESTS = "lab/src/sparsync_lab/papers", "tests/lab"

MUTANTS = [
    Mutant(
        "a number that P2 prints is taken for ours",
        f"{PAPERS}/p2_accuracies.py",
        'if cell != "–":\n            found[scheme, scope, workers] = float(cell)',
        'found[scheme, scope, workers] = float(cell.replace("–", "93"))',
        f"{TESTS}/test_verdicts_p2.py::test_published_numbers_are_not_taken_for_ours",
    ),
    Mutant(
        "layer by layer is better whatever the rate",
        f"{PAPERS}/claims_p2_scopes.py",
        "if layer - whole >= POINT]",
        "]",
        f"{TESTS}/test_verdicts_p2.py::test_layers_are_judged_at_the_same_rate",
    ),
    Mutant(
        "what ends far below P2 reproduces it",
        f"{PAPERS}/p2_accuracies.py",
        "return at_most_partly(word, not far), told",
        "return word, told",
        f"{TESTS}/test_verdicts_p2.py::test_every_scope_of_p2_counts",
    ),
    Mutant(
        "the exchange of P2's table 2 is taken as it is stored",
        f"{PAPERS}/step_times.py",
        'exchange if name == "exchange_ms" else columns[name]',
        "columns.get(name, exchange)",
        f"{TESTS}/test_verify.py::test_the_exchange_of_p2_is_computed_again",
    ),
    Mutant(
        "with momentum a pair counts of which one does not learn",
        f"{PAPERS}/claims_p2_scopes.py",
        "if min(pair) > LEARNS",
        "if max(pair) > LEARNS",
        f"{TESTS}/test_verdicts_p2.py::test_with_momentum_what_learns_is_judged",
    ),
    Mutant(
        "a question is counted among the papers' claims",
        f"{PAPERS}/verdicts.py",
        "[one for one in found if not one.is_question]",
        "[*found]",
        f"{TESTS}/test_verdicts.py::test_a_sentence_begins_with_the_verdict",
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
        "trainings with different data pass",
        f"{PAPERS}/verify.py",
        "if len(sets) > 1:",
        "if False:",
        f"{TESTS}/test_verify.py::test_trainings_with_different_data_are_found",
    ),
    Mutant(
        "the best rate so far is taken for the best",
        f"{PAPERS}/lr_search.py",
        "if not known or len(known) < len(tried) or (",
        "if not known or (",
        f"{TESTS}/test_adamw_item.py::test_a_row_whose_search_lacks_a_rate_has_no_score",
    ),
    Mutant(
        "another item's result is taken for an item's own",
        f"{PAPERS}/store.py",
        " if options.fullmatch(path.stem)]",
        "]",
        f"{TESTS}/test_verify.py::test_a_result_is_of_one_item_alone",
    ),
]
