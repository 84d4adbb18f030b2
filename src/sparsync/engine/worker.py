"""What one worker keeps between steps, in a process of its own or among virtual workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from sparsync.collectives.comm.header_checks import OnStream
from sparsync.compressors import State
from sparsync.config import ExchangePlan
from sparsync.engine.ledger import Cause, Ledger
from sparsync.engine.snapshot import Snapshot
from sparsync.feedback import Feedback, Preconditioner, RoundingFeedback, SecondMoment
from sparsync.layout import Parameter

LARGEST_FALL = 100.0  # of a learning rate from its highest, that residuals follow
LARGEST_RISE = torch.finfo(torch.float32).max  # of a loss scale: 0 times infinity would not be a number
SUDDEN = 0.9  # a learning rate that falls to less of itself in one step: thresholds do not follow by themselves


class WorkerState:
    """Residuals, velocities, the compressors' state, and the scale that these are in.

    Args:
        rank: of the worker.
        parameters: of the model, in its order.
        on_stream: gives the stream that a device's exchanges run on.
        preconditioner: if there is one; virtual workers share theirs.
        ranks: whose gradients' sum comes in here: those of the node that this worker leads, or 0 if another leads it.
    """

    def __init__(
        self,
        rank: int,
        parameters: Sequence[Parameter],
        plan: ExchangePlan,
        on_stream: OnStream = lambda device: nullcontext(),
        preconditioner: Preconditioner | None = None,
        ranks: int = 1,
    ) -> None:
        self.rank, self.plan, self.preconditioner = rank, plan, preconditioner
        self.feedback = Feedback(parameters, plan.transactional, plan.correction, plan.precondition, ranks)
        self.rounding = RoundingFeedback(self.feedback)
        self.ledger = Ledger(self.feedback, on_stream)
        self.compressor_state: State = {}
        self.loss_scale: float | None = None
        self.rates: dict[str, float] = {}
        self._last_rates = self.rates
        self.highest_rates: dict[str, float] = {}
        self._snapshot = Snapshot()

    def begin_step(self, loss_scale: float | None, rates: Mapping[str, float] | None) -> None:
        """Begin a step: bring what is kept to the scale of the gradient that is about to come in.

        Args:
            loss_scale: of this step, if losses are scaled; the residual follows its changes.
            rates: learning rates by parameter name, if the residual is divided by their changes, or holds updates.
        """
        self.rounding.begin_step()
        scale, last = loss_scale or 1.0, self.loss_scale or 1.0  # a loaded state may be of a training with or without
        if scale != last:
            self._follow_loss_scale(min(scale / last, LARGEST_RISE))
        self.loss_scale = loss_scale
        if self.preconditioner is None and rates is not None:
            self.rates = self.feedback.follow(self.rates, self._bounded(rates))
        if self.plan.transactional:  # saved in the new scale, which the residual keeps if the step is undone
            self._snapshot.take(self.compressor_state)
        if self.preconditioner is not None:
            self._follow_rates(rates or {}, self.preconditioner.dense_names)

    def _bounded(self, rates: Mapping[str, float]) -> dict[str, float]:
        """Return the rates that residuals are divided by the changes of: those given, but no less than a part of the
        highest that there was. A cosine ends near 0, and what is left would come out as a gradient without bound."""
        self.highest_rates = {**self.highest_rates, **{n: max(rates[n], self.highest_rates.get(n, 0.0)) for n in rates}}
        return {name: max(rate, self.highest_rates[name] / LARGEST_FALL) for name, rate in rates.items() if rate}

    def _follow_rates(self, rates: Mapping[str, float], dense: frozenset[str]) -> None:
        """Note the rates that residuals with updates are in: the pass that adds to a residual lets it follow. A step
        that is undone takes this back, unlike a change of the loss scale.

        Args:
            dense: names of tensors that keep no update.
        """
        last, now = self.rates, {name: rate for name, rate in rates.items() if rate}
        self._last_rates = last
        if now.items() <= last.items():  # the same object says that nothing has changed
            return
        self.rates = {**last, **now}
        ratio = min((rate / last[n] for n, rate in now.items() if last.get(n) and n not in dense), default=1.0)
        if ratio < SUDDEN:
            self.plan.compressor.rescale(self.compressor_state, ratio)

    def _follow_loss_scale(self, ratio: float) -> None:
        """Bring what is in units of the gradient to another loss scale; what is preconditioned is in the update's."""
        if self.preconditioner is None:
            self.feedback.rescale(dict.fromkeys(self.feedback.parameters, ratio), velocity=True)
            self.plan.compressor.rescale(self.compressor_state, ratio)
        else:
            self.feedback.rescale(dict.fromkeys(self.preconditioner.dense_names, ratio))

    def add_state(self, fresh: State) -> None:
        """Add the state of segments that the compressor has not seen before."""
        for name, bag in fresh.items():
            if name not in self.compressor_state:
                self.compressor_state[name] = bag
                if self.plan.transactional:
                    self._snapshot.add(name, bag)

    def load(
        self,
        residuals: Mapping[str, Tensor],
        velocities: Mapping[str, Tensor],
        compressor: State,
        loss_scale: float | None,
        rates: Mapping[str, float],
        highest_rates: Mapping[str, float],
    ) -> None:
        """Go on from what a checkpoint holds."""
        self.ledger.clear()
        self.feedback.load_state_dict(residuals, velocities)
        self.loss_scale, self.rates, self.highest_rates = loss_scale, dict(rates), dict(highest_rates)
        # On the host: memory of the caller's stream would be free again before ours has read it.
        self.compressor_state = {
            n: {k: t.detach().to("cpu", copy=True) for k, t in bag.items()} for n, bag in compressor.items()
        }

    def commit(self) -> None:
        """Keep what the last step did: what it sent was applied, or is back in the residual."""
        self.feedback.commit()
        self.ledger.clear()

    def undo(self) -> None:
        """Make everything what it was before the last step."""
        self.ledger.restore(Cause.UNDONE)
        if self.preconditioner is not None:
            self.preconditioner.undo()
            self.rates = self._last_rates
        self._snapshot.restore(self.compressor_state)


def preconditioner_for(
    plan: ExchangePlan,
    parameters: Sequence[Parameter],
    dense_names: frozenset[str],
    device: torch.device,
    workers: int,
    senders: int | None = None,
) -> Preconditioner | None:
    """Return the preconditioner that a plan asks for.

    Args:
        workers: ranks.
        senders: gradients that are exchanged, or sums of them: one of n ranks may be the root of n times as large.
    """
    if plan.preconditioning is None:
        return None
    noise = workers * workers // (senders or workers)
    moment = SecondMoment(parameters, dense_names, plan.preconditioning, device, plan.seed, noise)
    return Preconditioner(moment, plan.transactional, plan.clip)
