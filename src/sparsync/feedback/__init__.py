"""What is kept: residuals and velocities by parameter name, and what is taken out of the optimizer."""

from sparsync.feedback.adam import TakenAdam, check_adam, is_adam
from sparsync.feedback.momentum import (
    MOMENTA,
    TakenMomentum,
    momentum_notice,
    rates_by_name,
    refuse_other_model,
    take_momentum,
)
from sparsync.feedback.preconditioner import Preconditioner
from sparsync.feedback.residual import Correction, Feedback, accumulation_dtype
from sparsync.feedback.second_moment import AdamRule, Preconditioning, SecondMoment

__all__ = [
    "MOMENTA",
    "AdamRule",
    "Correction",
    "Feedback",
    "Preconditioner",
    "Preconditioning",
    "SecondMoment",
    "TakenAdam",
    "TakenMomentum",
    "accumulation_dtype",
    "check_adam",
    "is_adam",
    "momentum_notice",
    "rates_by_name",
    "refuse_other_model",
    "take_momentum",
]
