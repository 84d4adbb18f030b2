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
        "on a phone a table is cut off",
        "lab/src/sparsync_lab/report/page.html.jinja",
        "@media screen and (max-width: 40rem) {",
        "@media screen and (max-width: 4rem) {",
        "tests/lab/test_report.py::test_on_a_phone_all_of_the_table_is_seen_and_charts_stay_readable",
    ),
]
