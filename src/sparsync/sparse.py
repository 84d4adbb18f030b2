"""What travels: a gradient of which only some entries are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsync.value_range import HALF, cast_finite

# Flags that travel with a gradient, one bit each.
NONFINITE = 1  # the gradient that came in held NaN or infinity
FAILED = 2  # this rank could not produce its gradient, or an exchange had failed there before


@dataclass
class SparseGrad:
    """Entries of a flat gradient, in buffers of fixed capacity.

    Args:
        indices: int64 positions in the flat gradient, shape ``(capacity,)``, each at most once and in any order;
            ``None`` when ``values`` holds the whole gradient (the dense form). What is rejected may have several such
            rows, which are added one after another: so equal rows give equal bits.
        values: the entries, shape ``(capacity,)`` or, in the dense form, ``(numel,)``.
        count: 0-d int64 tensor on the same device: how many entries are real. The others have index 0 and
            value 0, so adding them changes nothing.
        numel: length of the flat gradient.
        flags: 0-d int32 tensor, the bits above.
        where: 0-d int32 tensor: the number of the first parameter with a non-finite gradient, or -1.
    """

    indices: Tensor | None
    values: Tensor
    count: Tensor
    numel: int
    flags: Tensor
    where: Tensor

    @classmethod
    def dense(cls, values: Tensor, flags: Tensor, where: Tensor) -> SparseGrad:
        """Return the whole gradient, every entry sent."""
        count = torch.tensor(values.numel(), dtype=torch.int64, device=values.device)
        return cls(None, values, count, values.numel(), flags, where)

    @classmethod
    def failed(cls, capacity: int, numel: int, dtype: torch.dtype, device: torch.device) -> SparseGrad:
        """Return what a rank sends that has no gradient to send: nothing, and the flag that says so."""
        word = torch.tensor([FAILED, -1], dtype=torch.int32, device=device)
        indices = torch.zeros(capacity, dtype=torch.int64, device=device)
        values = torch.zeros(capacity, dtype=dtype, device=device)
        return cls(indices, values, indices.new_zeros(()), numel, word[0], word[1])

    def add_to(self, out: Tensor) -> Tensor:
        """Add the entries into the flat tensor ``out``, in place."""
        if self.indices is None:
            return out.add_(self.values)
        values = self.values.to(out.dtype)
        if self.indices.dim() == 1:
            return out.index_add_(0, self.indices, values)
        for row, own in zip(self.indices, values, strict=True):
            out.index_add_(0, row, own)
        return out

    def densify(self) -> Tensor:
        """Return the same gradient with all its zeros."""
        return self.add_to(self.values.new_zeros(self.numel))


def write_mean(out: Tensor, terms: Sequence[SparseGrad], divisor: int) -> Tensor:
    """Overwrite ``out`` with the sum of ``terms``, in their order, divided once by ``divisor`` and cast once.

    Returns the entries that were written, without the zeros between them.

    The order of ``terms`` is the order of every addition, so equal terms give equal bits on every rank.
    """
    if terms[0].indices is None:
        (whole,) = (term.values for term in terms)  # a dense total is one sum
        if divisor != 1:
            whole = whole / divisor
        if whole.data_ptr() != out.data_ptr():
            out.copy_(cast_finite(whole, out.dtype))
        return out
    out.zero_()
    if len(terms) == 1 and out.device.type != "cpu":
        return _add_quotients(out, terms[0], divisor)
    touched = torch.cat([term.indices for term in terms if term.indices is not None])
    if out.dtype == terms[0].values.dtype:
        for term in terms:
            term.add_to(out)
        # Only what was touched is divided; an index that stands twice gets the same quotient twice.
        out[touched] = quotients = out[touched] / divisor
        return quotients
    # A half-precision bucket: sum the touched entries beside it in the terms' own dtype.
    unique, place = torch.unique(touched, return_inverse=True)
    sums = terms[0].values.new_zeros(unique.numel())
    start = 0
    for term in terms:
        sums.index_add_(0, place[start : start + term.values.numel()], term.values)
        start += term.values.numel()
    out[unique] = quotients = cast_finite(sums / divisor, out.dtype)
    return quotients


def _add_quotients(out: Tensor, term: SparseGrad, divisor: int) -> Tensor:
    """Do the same for one term, without waiting for the host: it has every index once, so that each is divided as it
    comes. Equal but for the sign of a 0, which a sum does not keep."""
    replace(term, values=cast_finite(term.values / divisor, out.dtype)).add_to(out)
    return out[term.indices]  # of a message that names one twice, too


def give_norm(out: Tensor, norms: Tensor, scale: float) -> Tensor:
    """Multiply ``out``, in place, by what makes its norm ``scale`` times that of ``norms``, themselves the norms of
    its parts; returns that: ``scale`` itself, where either norm is 0 or unknown, and less where fp16 has no room."""
    dtype = torch.promote_types(out.dtype, torch.float32)
    own, norm = torch.linalg.vector_norm(out, dtype=dtype), torch.linalg.vector_norm(norms)
    factor = torch.where((own > 0) & (norm > 0), norm / own, 1.0) * scale
    if out.dtype == torch.float16 and out.numel():
        peak = out.abs().amax().float()
        factor = torch.where((peak * factor > HALF) & peak.isfinite(), HALF / peak, factor)
    out.mul_(factor)
    return factor
