"""Seeded defects in config."""

from tests.mutants import Mutant

DISAGREE = "tests/failures/test_ranks_that_disagree.py::test_another_configuration_on_one_rank_is_named"

MUTANTS = [
    Mutant(
        "a text is taken for a truth value",
        "src/sparsync/config/options.py",
        "if not isinstance(given.get(name), bool | None):",
        "if False:",
        "tests/test_options.py::test_an_option_of_another_kind_is_refused_by_name",
    ),
    Mutant(
        "anything is taken for a loss scaler",
        "src/sparsync/config/options.py",
        'if scaler is not None and not callable(getattr(scaler, "get_scale", None)):',
        "if False:",
        "tests/test_options.py::test_an_option_of_another_kind_is_refused_by_name",
    ),
    Mutant(
        "a budget of True is all of dense",
        "src/sparsync/config/budget.py",
        "(is_number(self.share) and",
        "(isinstance(self.share, int | float) and",
        "tests/test_budget.py::test_what_makes_no_sense_is_refused",
    ),
    Mutant(
        "nodes may be larger than all ranks together",
        "src/sparsync/config/nodes.py",
        "if ranks > 1 and ranks % per_node:",
        "if ranks % min(ranks, per_node):",
        "tests/test_hierarchy.py::test_nodes_must_hold_all_ranks_once",
    ),
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
    Mutant(
        "nodes are not compared over the ranks",
        "src/sparsync/config/options.py",
        '            "per_node": self.per_node,\n',
        "",
        "tests/test_hierarchy.py::test_ranks_that_disagree_about_nodes_are_told",
    ),
    Mutant(
        "nodes may leave ranks out",
        "src/sparsync/config/nodes.py",
        "        if held != size:",
        "        if False:",
        "tests/test_hierarchy.py::test_nodes_must_hold_all_ranks_once",
    ),
    Mutant(
        "any collective divides for nodes",
        "src/sparsync/config/options.py",
        "        if self.per_node != 1 and not self.collective.node_sums:",
        "        if False:",
        "tests/test_hierarchy.py::test_a_collective_that_divides_by_itself_is_refused",
    ),
    Mutant(
        "a name that nobody registered is a KeyError",
        "src/sparsync/config/registry.py",
        "        if method not in known:\n",
        "        if False:\n",
        "tests/test_options.py::test_what_is_no_compressor_is_refused[nothing]",
    ),
    Mutant(
        "a class is taken for a compressor",
        "src/sparsync/config/registry.py",
        "if isinstance(method, type) or not hasattr(method, duty):",
        "if not hasattr(method, duty):",
        "tests/test_options.py::test_what_is_no_compressor_is_refused[TopK]",
    ),
]
