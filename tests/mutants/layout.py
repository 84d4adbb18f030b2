"""Seeded defects in layout."""

from tests.mutants import Mutant

MUTANTS = [
    Mutant(
        "complex parameters count as real ones",
        "src/sparsync/layout.py",
        "real = torch.view_as_real(tensor) if tensor.is_complex() else tensor",
        "real = tensor",
        "tests/failures/test_dtypes_and_layouts.py::test_complex_parameters[layer]",
    ),
    Mutant(
        "every gradient is taken for contiguous",
        "src/sparsync/layout.py",
        "if not _dense_in_memory(shape, stride):",
        "if True:",
        "tests/failures/test_dtypes_and_layouts.py::test_channels_last_gives_the_same_residuals[layer]",
    ),
    Mutant(
        "a tiny density sends nothing",
        "src/sparsync/layout.py",
        "return min(numel, max(1, round(density * numel)))",
        "return min(numel, round(density * numel))",
        "tests/failures/test_number_of_entries.py::test_a_tiny_density_sends_one_entry",
    ),
]
