"""Seeded defects in the network lab."""

from tests.mutants import Mutant

ROOM = "lab/src/sparsync_lab/network"
HOSTS = "tests/lab/test_network_hosts.py"
LINKS = f"{HOSTS}::test_links_have_the_rate_that_was_asked_for_also_after_a_change"

MUTANTS = [
    Mutant(
        "what a host receives is not held to its rate",
        f"{ROOM}/star.py",
        "dev {self.port} root {rate.token_bucket}",
        "dev {self.port} root pfifo",
        LINKS,
    ),
    Mutant(
        "what a host sends is not held to its rate",
        f"{ROOM}/star.py",
        "dev {INTERFACE} root {rate.token_bucket}",
        "dev {INTERFACE} root pfifo",
        LINKS,
    ),
    Mutant(
        "headers of packets are counted",
        f"{ROOM}/counters.py",
        "return count.bytes - HEADER * count.packets",
        "return count.bytes",
        f"{HOSTS}::test_headers_are_not_counted",
    ),
    Mutant(
        "a recipe is measured at its first density",
        f"{ROOM}/methods.py",
        "return plan_at(plan, density)",
        "return plan_at(plan, first)",
        "tests/lab/test_network.py::test_a_recipe_is_measured_at_the_mean_of_its_bytes",
    ),
    Mutant(
        "the rate never changes",
        f"{ROOM}/steps.py",
        "network.hosts[worker.rank].set_rate(cell.change.rate)",
        "network.hosts[worker.rank].set_rate(cell.rate)",
        f"{HOSTS}::test_a_rate_changes_in_the_middle_of_a_run",
    ),
    Mutant(
        "passes do not wait",
        f"{ROOM}/emulated_model.py",
        "            time.sleep(self.owed)\n",
        "",
        "tests/lab/test_network.py::test_an_emulated_model_waits_as_long_as_it_says_and_yields_gradients_from_last_to_first",
    ),
    Mutant(
        "every step of a stored training takes as long as its smallest",
        f"{ROOM}/train.py",
        "ends[0] + share * (ends[1] - ends[0])",
        "ends[0]",
        "tests/lab/test_network_train.py::test_minutes_follow_the_bytes_of_every_step",
    ),
    Mutant(
        "auto may be slower than its rival",
        f"{ROOM}/auto_comparison.py",
        "return self.ratio <= max(MARGIN, self.equal_runs)",
        "return True",
        "tests/lab/test_auto_comparison.py::test_a_comparison_is_lost_beyond_what_equal_runs_differ_by",
    ),
    Mutant(
        "dense steps are no rival",
        f"{ROOM}/auto_comparison.py",
        "own.method.name not in (AUTO, DENSE)",
        "own.method.name not in (AUTO, DENSE, BF16)",
        "tests/lab/test_auto_comparison.py::test_a_comparison_is_lost_beyond_what_equal_runs_differ_by",
    ),
    Mutant(
        "a byte takes no longer on slow links",
        f"{ROOM}/predict.py",
        "max(Link.at(rate.bits).seconds_per_byte, self.per_byte)",
        "self.per_byte",
        "tests/lab/test_predict.py::test_dense_steps_on_slow_links_take_as_long_as_their_bytes",
    ),
]
