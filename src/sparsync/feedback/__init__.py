"""What is kept: residuals and velocities by parameter name, and what is taken out of the optimizer."""

from sparsync.feedback.momentum import MOMENTA, TakenMomentum, give_back, rates_by_name, take_momentum, warn_of_momentum
from sparsync.feedback.residual import Correction, Feedback, accumulation_dtype

__all__ = [
    "MOMENTA",
    "Correction",
    "Feedback",
    "TakenMomentum",
    "accumulation_dtype",
    "give_back",
    "rates_by_name",
    "take_momentum",
    "warn_of_momentum",
]
