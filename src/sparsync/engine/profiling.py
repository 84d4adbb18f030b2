"""Ranges that a profiler shows: ``sparsync/compress``, ``sparsync/exchange`` and ``sparsync/decode``.

``torch.profiler`` records the thread that started it, and backward's. With Gloo exchanges run on a thread of their own:
``experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)`` records that as well.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

# A tenth of a microsecond where nobody records; torch.profiler.record_function takes several.
_range = getattr(torch._C._profiler, "_RecordFunctionFast", torch.profiler.record_function)


def compressing() -> AbstractContextManager[None]:
    """Return the range in which entries are chosen, and taken out of the residual."""
    return _range("sparsync/compress")  # type: ignore[no-any-return]


def exchanging() -> AbstractContextManager[None]:
    """Return the range in which messages are made, sent and received."""
    return _range("sparsync/exchange")  # type: ignore[no-any-return]


def decoding() -> AbstractContextManager[None]:
    """Return the range in which messages are read and summed, and the mean is written into buckets."""
    return _range("sparsync/decode")  # type: ignore[no-any-return]
