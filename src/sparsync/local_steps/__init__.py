"""Local steps: workers train by themselves, and exchange every so many steps how far they went."""

from sparsync.local_steps.outer_loop import OuterLoop

__all__ = ["OuterLoop"]
