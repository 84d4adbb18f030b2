"""Seeded defects in lab_report."""

from tests.mutants import Mutant

MUTANTS = [
    Mutant(
        "a page does not escape what it is given",
        "lab/src/sparsync_lab/report/page.py",
        "autoescape=True",
        "autoescape=False",
        "tests/lab/test_report.py::test_a_page_names_no_other_place_and_escapes_what_it_is_given",
    ),
    Mutant(
        "a wide table widens the page",
        "lab/src/sparsync_lab/report/page.html.jinja",
        ".scroll { overflow-x: auto;",
        ".scroll {",
        "tests/lab/test_report.py::test_a_page_does_not_scroll_sideways_and_loads_nothing[360]",
    ),
]
