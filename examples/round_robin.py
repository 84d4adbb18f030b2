"""A compressor of one's own: entries take turns, so that each is sent once in 1/density steps."""

from dataclasses import dataclass

import torch
from torch import Tensor

import sparsync
from sparsync.plugins import Context, Rows, Segment, State, locate


@dataclass(frozen=True)
class RoundRobin(sparsync.Selecting):
    """The next k entries of every segment, wrapping round at its end.

    Adding the gradient to the residual, taking out what is sent, rounding, masking and looking for what is not finite
    are done by ``Selecting``. A compressor that needs neither step nor state defines only ``select(u, k)``.
    """

    def choose(self, u: Tensor, rows: Rows, segment: Segment, ctx: Context, state: State) -> Tensor:
        runs = segment.runs(ctx.unused)  # (start, stop) ranges of what may be sent from
        numel = sum(stop - start for start, stop in runs)
        k = min(segment.k, numel)
        if not k:
            return rows.start
        places = (torch.arange(k, device=u.device) + ctx.step * k) % numel
        return locate(places, runs).sort().values
