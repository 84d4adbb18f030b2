"""Seeded defects in planner."""

from tests.mutants import Mutant

TESTS = "tests/test_planner.py"

MUTANTS = [
    Mutant(
        "a plan is made for machines that attach would refuse",
        "src/sparsync/planner/forecast.py",
        "        check_nodes_fit(per_node, workers)\n",
        "",
        "tests/test_planner.py::test_bad_numbers_are_refused",
    ),
    Mutant(
        "exchanges do not wait for one another",
        "src/sparsync/planner/overlap.py",
        "free = max(free, begin) + job.local + job.network",
        "free = begin + job.local + job.network",
        f"{TESTS}::test_exchanges_that_do_not_fit_wait_for_one_another",
    ),
    Mutant(
        "selection does not keep backward waiting",
        "src/sparsync/planner/overlap.py",
        "delay += job.select",
        "delay += 0.0",
        f"{TESTS}::test_selection_delays_backward_on_a_cpu_and_the_exchange_on_a_gpu",
    ),
    Mutant(
        "messages to everybody do not share a machine's link",
        "src/sparsync/planner/links.py",
        "leaving = inside * (workers - inside) / (workers - 1)",
        "leaving = 1.0",
        f"{TESTS}::test_messages_to_everybody_share_a_machines_link",
    ),
    Mutant(
        "packets have no headers",
        "src/sparsync/planner/links.py",
        "return cls(latency, 8 / (PAYLOAD * bits))",
        "return cls(latency, 8 / bits)",
        f"{TESTS}::test_a_links_line_rate_carries_headers_as_well",
    ),
    Mutant(
        "a fit below zero",
        "src/sparsync/planner/links.py",
        "if (found >= 0).all() and error < least - 1e-12:",
        "if error < least - 1e-12:",
        f"{TESTS}::test_no_part_of_a_fit_is_below_zero",
    ),
    Mutant(
        "plain DDP gathers headers",
        "src/sparsync/planner/forecast.py",
        "e.traffic.transfers[-1:]",
        "e.traffic.transfers",
        f"{TESTS}::test_forecasts_have_the_bytes_that_attach_predicts[dense fp32-sgd]",
    ),
    Mutant(
        "densities of the first step",
        "src/sparsync/planner/forecast.py",
        "(plan.density_at(step))",
        "(plan.density_at(0))",
        f"{TESTS}::test_forecasts_have_the_bytes_that_attach_predicts[default-sgd]",
    ),
    Mutant(
        "backward comes from the first tensor",
        "src/sparsync/planner/model.py",
        "for name in reversed([*self.tensors]):",
        "for name in self.tensors:",
        f"{TESTS}::test_buckets_are_ready_when_backward_has_done_their_work",
    ),
    Mutant(
        "bytes taken for bits",
        "src/sparsync/planner/quantities.py",
        "(8 if in_bytes else 1)",
        "1",
        f"{TESTS}::test_bandwidths_as_people_write_them[1.2GB/s-9600000000.0]",
    ),
    Mutant(
        "costs are measured again every time",
        "src/sparsync/planner/stored_costs.py",
        "self._known = {} if fresh else costs_in(read(self.file), self.name)",
        "self._known = {}",
        f"{TESTS}::test_costs_are_measured_once_and_kept",
    ),
    Mutant(
        "a gain that nobody would notice is advised",
        "src/sparsync/planner/forecast.py",
        "WORTH * sparse.seconds < dense.seconds",
        "sparse.seconds < dense.seconds",
        f"{TESTS}::test_a_gain_that_nobody_would_notice_is_no_advice",
    ),
    Mutant(
        "a link's rate is that of its largest message alone",
        "src/sparsync/planner/measure_link.py",
        "if per_byte <= 0:",
        "if per_byte > 0:",
        f"{TESTS}::test_what_an_idle_link_lets_pass_at_once_does_not_make_it_faster",
    ),
    Mutant(
        "a plan that does not pay says to compress",
        "src/sparsync/planner/report.py",
        "method.accurate and method.dense is not pays)",
        "method.accurate and not method.dense)",
        "tests/test_planner.py::test_the_sentence_says_what_to_do_and_why",
    ),
    Mutant(
        "a plan for an optimizer that nobody knows",
        "src/sparsync/planner/methods.py",
        "if name.lower() not in OPTIMIZERS:",
        "if False:",
        "tests/test_planner.py::test_bad_numbers_are_refused",
    ),
]
