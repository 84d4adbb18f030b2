"""Seeded defects in config."""

from tests.mutants import Mutant

DISAGREE = "tests/failures/test_ranks_that_disagree.py::test_another_configuration_on_one_rank_is_named"

MUTANTS = [
    Mutant(
        "clipping is not compared over the ranks",
        "src/sparsync/config/options.py",
        '            "clip": self.clip,\n',
        "",
        f"{DISAGREE}[clip-]",
    ),
    Mutant(
        "momentum is not compared over the ranks",
        "src/sparsync/config/options.py",
        '            "momentum": self.momentum,\n',
        "",
        f"{DISAGREE}[momentum-]",
    ),
    Mutant(
        "momentum correction is not compared over the ranks",
        "src/sparsync/config/options.py",
        '            "correction": self.correction,\n',
        "",
        f"{DISAGREE}[beta-]",
    ),
    Mutant(
        "a recipe's budget goes before a density that is given",
        "src/sparsync/config/recipes.py",
        'not chosen.isdisjoint(("density", "compressor"))',
        "False",
        "tests/test_budget.py::test_a_density_or_a_compressor_goes_before_the_recipes_budget",
    ),
    Mutant(
        "budgets are not compared over the ranks",
        "src/sparsync/config/options.py",
        '            "budget": self.budget,\n',
        "",
        "tests/test_budget.py::test_attach_describes_what_came_of_a_budget",
    ),
]
