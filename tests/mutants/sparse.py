"""Seeded defects in sparse."""

from tests.mutants import Mutant

MUTANTS = [
    Mutant(
        "divided by a little more",
        "src/sparsync/sparse.py",
        "out[touched] = quotients = out[touched] / divisor",
        "out[touched] = quotients = out[touched] / (divisor * 1.0000001)",
        "tests/test_laws.py::test_law_3_density_1_is_dense[topk-allgather]",
    ),
]
