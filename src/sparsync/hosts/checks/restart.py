"""Noticing a training that was started again and has found no residuals."""

from __future__ import annotations

import os

SENTENCE = (
    "this training was restarted ({} times) and no state was loaded: residuals start from zero, and what they held is "
    "lost; save sync.state_dict() on every rank, and load it before the first step"
)


def restarts() -> int:
    """Return how often torchrun has started these workers again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
