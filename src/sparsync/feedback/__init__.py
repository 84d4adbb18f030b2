"""What is kept: residuals and velocities by parameter name, and what is taken out of the optimizer."""

from sparsync.feedback.momentum import (
    MOMENTA,
    TakenMomentum,
    momentum_notice,
    rates_by_name,
    refuse_other_model,
    take_momentum,
)
from sparsync.feedback.optimizer_rules import is_adam, is_sgd, rules_of
from sparsync.feedback.preconditioner import Preconditioner
from sparsync.feedback.residual import Correction, Feedback, accumulation_dtype
from sparsync.feedback.rounding import RoundingFeedback
from sparsync.feedback.second_moment import AdamRule, Preconditioning, SecondMoment
from sparsync.feedback.taken_optimizer import TakenOptimizer

__all__ = [
    "MOMENTA",
    "AdamRule",
    "Correction",
    "Feedback",
    "Preconditioner",
    "Preconditioning",
    "RoundingFeedback",
    "SecondMoment",
    "TakenMomentum",
    "TakenOptimizer",
    "accumulation_dtype",
    "is_adam",
    "is_sgd",
    "momentum_notice",
    "rates_by_name",
    "refuse_other_model",
    "rules_of",
    "take_momentum",
]
