"""Find how much a gradient is clipped."""

from sparsync.kernels.clip.launch import clip_scales
from sparsync.kernels.clip.reference import clip_scale

__all__ = ["clip_scale", "clip_scales"]
