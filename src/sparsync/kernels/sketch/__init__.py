"""Sketch a gradient: signed sums of the rows and columns of its matrices, few numbers that tell how large they are."""

from sparsync.kernels.sketch.reference import Sketched, draw_signs, sketch

__all__ = ["Sketched", "draw_signs", "sketch"]
