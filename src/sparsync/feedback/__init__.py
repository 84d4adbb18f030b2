"""What is kept: residuals and velocities by parameter name, and what is taken out of the optimizer."""

from sparsync.feedback.momentum import (
    MOMENTA,
    TakenMomentum,
    momentum_notice,
    rates_by_name,
    refuse_other_model,
    take_momentum,
)
from sparsync.feedback.residual import Correction, Feedback, accumulation_dtype

__all__ = [
    "MOMENTA",
    "Correction",
    "Feedback",
    "TakenMomentum",
    "accumulation_dtype",
    "momentum_notice",
    "rates_by_name",
    "refuse_other_model",
    "take_momentum",
]
