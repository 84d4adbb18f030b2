"""The memory-bound operations, a folder each.

``reference.py`` is plain PyTorch and the specification, ``triton.py`` has the kernels of a GPU, ``launch.py`` launches
them, ``cpu.py`` has compiled loops for the CPU; where they are many, ``<part>_triton.py`` and ``<part>_cpu.py`` have a
part each. ``path.py`` decides which of them works on a gradient.
"""

from sparsync.kernels.memory import Memory, Update, Velocity
from sparsync.kernels.path import KernelPath, choose_path

__all__ = ["KernelPath", "Memory", "Update", "Velocity", "choose_path"]
