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
        "alike = layer - control <= POINT",
        "alike = False",
        f"{TESTS}/test_verdicts.py::test_layers_are_judged_at_the_same_rate",
    ),
    Mutant(
        "what ends far below P2 reproduces it",
        f"{PAPERS}/claims_p2.py",
        "return at_most_partly(word, not far), told",
        "return word, told",
        f"{TESTS}/test_verdicts.py::test_every_scope_of_p2_counts",
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
        "a claim is reproduced with the text's settings alone",
        f"{PAPERS}/claims_p1.py",
        "len(every) == 2 * len(OWN)",
        "True",
        f"{TESTS}/test_claims_p1.py::test_both_settings_must_say_so",
    ),
    Mutant(
        "models whose gradient is clipped count",
        f"{PAPERS}/claims_p1_gradients.py",
        'row.cells[clipped].startswith("0 ")',
        "row.cells",
        f"{TESTS}/test_claims_p1.py::test_models_whose_gradient_is_clipped_do_not_count",
    ),
    Mutant(
        "methods are compared at the counts of a synthetic gradient",
        f"{PAPERS}/claims_p1_times.py",
        '(AT_K, "DGC", "TopK")',
        '("Gaussian", "DGC", "TopK")',
        f"{TESTS}/test_claims_p1.py::test_methods_are_compared_at_equal_counts",
    ),
    Mutant(
        "a gap is measured by a dense training that the change harms",
        f"{PAPERS}/vgg16_gap.py",
        "{what: score - dense for",
        '{what: score - scores.get(("dense", what), dense) for',
        f"{TESTS}/test_evidence.py::test_the_cause_of_the_gap_follows_the_numbers",
    ),
    Mutant(
        "one seed within a point of dense decides a verdict",
        f"{PAPERS}/claim.py",
        "None if seeds < SEVERAL and abs(gap) < spread else gap > -POINT",
        "gap > -POINT",
        f"{TESTS}/test_evidence.py::test_a_difference_under_a_point_is_stated_with_three_seeds_only",
    ),
    Mutant(
        "a part that is not decided has failed",
        f"{PAPERS}/claim.py",
        "UNDECIDED if None in every and True not in every else word_for",
        "word_for",
        f"{TESTS}/test_verdicts.py::test_what_few_seeds_leave_open_is_neither_held_nor_failed",
    ),
    Mutant(
        "one seed is compared with the mean of others",
        f"{PAPERS}/questions_p1.py",
        "mean(each[seed] for seed in both) for each in (own, top)",
        "mean(each.values()) for each in (own, top)",
        f"{TESTS}/test_questions.py::test_the_carried_form_is_compared_on_the_seeds_that_both_have",
    ),
    Mutant(
        "a target is met whatever the seeds differ by",
        f"{PAPERS}/adamw_tables.py",
        "return MET if lost + apart_by <=",
        "return MET if lost <=",
        f"{TESTS}/test_adamw_item.py::test_a_target_is_met_by_mean_and_deviation",
    ),
    Mutant(
        "a training of another length is among the short ones of VGG-16",
        f"{PAPERS}/vgg16_notes.py",
        "if (run.epochs, run.steps, run.seed, run.limit) == (like.epochs, None, 0, None):",
        "if run.seed == 0:",
        f"{TESTS}/test_evidence.py::test_every_short_training_of_vgg16_that_is_stored_is_in_the_table",
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
    Mutant(
        "a longer training's best rate may stand at an end of those it was made with",
        f"{PAPERS}/lr_search.py",
        "if 1 < len(asked) == len(made):",
        "if False:",
        f"{TESTS}/test_papers_failures.py::test_a_longer_training_whose_best_rate_is_at_an_end_is_made_with_the_next_one",
    ),
    Mutant(
        "the first seed decides which rate of a longer training is the best",
        f"{PAPERS}/lr_search.py",
        "mean(map(goodness, self.seeds(model, label, factor, length))) for factor in made",
        "goodness(self.seeds(model, label, factor, length)[0]) for factor in made",
        f"{TESTS}/test_papers_failures.py::test_a_longer_training_whose_best_rate_is_at_an_end_is_made_with_the_next_one",
    ),
    Mutant(
        "trainings of other items that are compared with do not count into a result",
        f"{PAPERS}/evidence.py",
        "histories += [done[run.name] for run in (*runs, *beside) if run.name in done]",
        "histories += [done[run.name] for run in runs if run.name in done]",
        f"{TESTS}/test_evidence.py::test_what_is_compared_with_belongs_to_the_result",
    ),
    Mutant(
        "rows with weight decay count as those without",
        f"{PAPERS}/tuned.py",
        'f"{run.rate:g}", f"{run.weight_decay:g}"',
        'f"{run.rate:g}", "0"',
        f"{TESTS}/test_evidence.py::test_every_method_has_its_rows_of_the_schedules",
    ),
]
