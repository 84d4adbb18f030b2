"""Seeded defects in config."""

from tests.mutants import Mutant

MUTANTS = [
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
