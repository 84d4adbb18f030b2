"""An account in double precision of what came in, what was applied and what is kept; no code of the library is in it.

The law, for every entry, as means over the workers: what was kept before + what came in = what was applied + what is
kept now. *Came in* is the gradient as backward made it, or the velocity where momentum is corrected. Kept is what the
handle shows: its residual. All of it is counted in the units of the unscaled gradient (times the learning rate where
residuals follow that), so that it holds over changes of the loss scale. Since what is kept is read at every look, and
saved by this account itself, errors do not add up, and nothing can go missing between a checkpoint and its restoring.

Rounding is bounded by ``ROUNDINGS`` times the number of workers, in units in the last place of fp32 of the sum of all
magnitudes that were added: one rounding where a gradient meets the residual, one where it is taken out, one for every
worker's message in a sum, one of a division, those of rescaling.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

import sparsync

EPS = float(torch.finfo(torch.float32).eps)
LEAST = 2.0**-120  # in place of 0, for what is below fp32's normal range
ROUNDINGS = 4.0


class LawBroken(AssertionError):
    """A law does not hold; the text says which, and where."""


class Ledger:
    """One rank's account, and the comparison over all of them.

    Args:
        model: whose parameters are trained.
        counts: whether gradients, or velocities, are what is exchanged; of Adam's updates only what is kept is compared
            from checkpoint to checkpoint, and the replicas.
        keeps: whether anything is kept of what is not sent, which is not so where all is.
        beta: momentum before the residual, if there is any.
        undoes: a step that is not finite, or is rolled back, must leave what is kept as it was, bit for bit.
    """

    def __init__(self, model: nn.Module, counts: bool, keeps: bool, beta: float | None, undoes: bool) -> None:
        self.names, self.parameters = map(list, zip(*model.named_parameters(), strict=True))
        self.counts, self.keeps, self.beta, self.undoes = counts, keeps, beta, undoes
        self.total = sum(p.numel() for p in self.parameters)
        self.came = [torch.zeros(0)] * len(self.names)  # of the backward under way, as it comes
        self.before = self.kept = self.velocity = torch.zeros(self.total, dtype=torch.float64)
        self.open = False  # between a backward's begin and its end
        self.unit = self.kept_unit = 1.0  # what a gradient, and what is kept, has to be multiplied with
        self.worst, self.looks, self.drift = 0.0, 0, self._nothing()
        self.anchor = self._nothing()  # the mean of what all ranks kept, at the last look
        self._forget()

    # ---- a step, on this rank ----------------------------------------------------------------------------------------

    def begin(self, unit: float, sync: sparsync.Handle | None) -> None:
        """Begin a backward whose gradients are exchanged; ``unit``: of its gradients."""
        self.unit, self.open = unit, True
        self.ratio = self.kept_unit / unit if sync is not None else 1.0  # what is kept follows
        self.old = [None if p.grad is None else p.grad.detach().double().flatten() for p in self.parameters]
        self.came = [torch.zeros(p.numel(), dtype=torch.float64) for p in self.parameters]

    def came_in(self, index: int, grad: Tensor) -> None:
        """Note the gradient of a parameter, before anybody has seen it."""
        self.came[index] = grad.detach().double().flatten()

    def end(self, sync: sparsync.Handle | None, undone: bool = False) -> bool:
        """Note what became of it, before the optimizer does anything; ``undone``: the user has rolled it back.

        Returns whether the step is good, so that it may be applied.
        """
        self.open = False
        grads = [p.grad for p in self.parameters]
        applied = torch.cat([_flat(g, p) for g, p in zip(grads, self.parameters, strict=True)])
        good = bool(applied.isfinite().all()) and not undone
        came, size = self._all_that_came(sync)
        kept_before, velocity_before = self.kept * self.ratio, self.velocity * self.ratio
        if sync is not None:
            self.read(sync)
        nothing = torch.zeros_like(came)
        if good:
            self._count(came, applied, size, kept_before)
        elif self.undoes and sync is not None:
            if not self.counts:
                kept_before = self._in_this_scale(kept_before, sync.dense_names)
            self._assert_as_before(kept_before, velocity_before)
            self._count(nothing, nothing, nothing, kept_before)
        else:
            # What was finite stays, and nothing is applied. Of what travels dense nothing is kept.
            dense = sync.dense_names if sync is not None and self.keeps else frozenset(self.names)
            whole = torch.cat(
                [torch.full((p.numel(),), n in dense) for n, p in zip(self.names, self.parameters, strict=True)]
            )
            came = torch.where(whole, self.kept - kept_before, torch.where(came.isfinite(), came, 0.0))
            self._count(came, nothing, size.nan_to_num(0, 0, 0), kept_before)
        return good

    def _in_this_scale(self, kept: Tensor, dense: Collection[str]) -> Tensor:
        """Return what was kept where updates are exchanged: of tensors that travel dense it is what bf16 cuts off their
        gradients, and follows the loss scale, by one power of 2 for all of them."""
        parts = [torch.full((p.numel(),), n in dense) for n, p in zip(self.names, self.parameters, strict=True)]
        whole = torch.cat(parts) & (kept != 0)
        if not bool(whole.any()):
            return kept
        ratio = float(self.kept[whole][0] / kept[whole][0])
        return torch.where(whole, ratio * kept, kept) if math.frexp(ratio)[0] == 0.5 else kept

    def _assert_as_before(self, kept: Tensor, velocity: Tensor) -> None:
        """Compare bit for bit, or within the rounding of a learning rate that was followed."""
        exact = math.frexp(self.ratio)[0] == 0.5
        for kind, now, then in (("residual", self.kept, kept), ("velocity", self.velocity, velocity)):
            if not (torch.equal(now, then) if exact else torch.allclose(now, then, rtol=4 * EPS, atol=LEAST)):
                raise LawBroken(f"a step that was undone has changed the {kind} of {self._where(now - then)}")

    def _all_that_came(self, sync: sparsync.Handle | None) -> tuple[Tensor, Tensor]:
        """Return gradients, with those that were accumulated before, or the velocities that they make; and the sum of
        the magnitudes of all these."""
        parts = [torch.cat(self.came)]
        parts.append(
            torch.cat([torch.zeros_like(c) if o is None else o for c, o in zip(self.came, self.old, strict=True)])
        )
        if self.beta is not None and sync is not None:
            used = torch.cat([torch.full(c.shape, bool(c.any())) for c in self.came])  # who has no gradient rests
            parts.append(torch.where(used, self.beta * self.ratio * self.velocity, 0.0))
        every = torch.stack(parts)
        return every.sum(0), every.abs().sum(0)

    def after_failure(self, sync: sparsync.Handle, unit: float) -> None:
        """Look whether the residual is whole after a step that was not completed: of every parameter it is what it was,
        and where steps cannot be undone, it may hold all that came in instead.

        Args:
            unit: of the residual.
        """
        if not self.open or not (self.counts or self.undoes):
            return
        then = self.kept_unit * self.kept
        came, size = ((self.unit * t).nan_to_num(0, 0, 0) for t in self._all_that_came(sync))
        self.unit = unit
        self.read(sync)
        now = self.kept_unit * self.kept
        if not self.counts:
            then = self._in_this_scale(then, sync.dense_names)
        slack = 8 * EPS * (then.abs() + size) + LEAST
        sizes = [p.numel() for p in self.parameters]
        parts = zip(self.names, *(torch.split(t, sizes) for t in (now, then, came, slack)), strict=True)
        for name, kept, before, new, bound in parts:
            as_before = bool(((kept - before).abs() <= bound).all())
            with_all = bool(((kept - before - new).abs() <= bound).all())
            if not (as_before or (with_all and not self.undoes)):
                at = int(((kept - before - new).abs() / bound).argmax())
                raise LawBroken(
                    f"a step that failed has left {kept[at]:.9g} in the residual of {name}, entry {at}, where there "
                    f"was {before[at]:.9g} and {new[at]:.9g} came in"
                )

    def read(self, sync: sparsync.Handle) -> None:
        """Read what is kept by this rank."""
        both = [(sync.residual(name), sync.velocity(name)) for name in self.names]
        self.kept = torch.cat([_flat(kept, p) for (kept, _), p in zip(both, self.parameters, strict=True)])
        self.velocity = torch.cat([_flat(speed, p) for (_, speed), p in zip(both, self.parameters, strict=True)])
        self.kept_unit = self.unit
        if not bool(self.kept.isfinite().all() and self.velocity.isfinite().all()):
            raise LawBroken("what is kept is not finite")

    def forgo(self, sync: sparsync.Handle, unit: float) -> None:
        """Count nothing of steps in which this rank had no data; read what they left, in this unit."""
        kept_before = self.kept * (self.kept_unit / unit)
        self.unit = unit
        self.read(sync)
        self._count(self._nothing(), self._nothing(), self._nothing(), kept_before)

    def _count(self, came: Tensor, applied: Tensor, size: Tensor, kept_before: Tensor) -> None:
        """Add up what came in and was applied; ``size``: the magnitudes that made what came in."""
        unit, kept_unit = self.unit, self.kept_unit
        self.sum_in += unit * came
        self.sum_applied += unit * applied
        self.sizes += unit * (size + applied.abs() + kept_before.abs()) + kept_unit * self.kept.abs()

    # ---- over all ranks ----------------------------------------------------------------------------------------------

    def look(self, step: int, exchanges: int, source: int = 0) -> None:
        """Compare all ranks: every rank calls this after the same step; all raise the same if a law does not hold.

        Args:
            exchanges: that this rank has made.
            source: a rank that has made all steps, if some had no data for them.
        """
        weights = torch.cat([p.detach().flatten() for p in self.parameters])
        about = [float(step), float(exchanges), float(weights.isfinite().all()), *map(float, digest_of(weights))]
        own = torch.tensor(about, dtype=torch.float64)
        rows = gather(torch.cat([own, self.sum_in, self.sum_applied, self.kept_unit * self.kept, self.sizes]))
        heads = rows[:, : own.numel()]
        for place, what in enumerate(("step", "number of exchanges")):
            if len({*(said := heads[:, place].tolist())}) > 1:
                raise LawBroken(f"the ranks are not at the same {what}: {said}")
        if not heads[:, 2].all():
            raise LawBroken(f"weights are not finite on rank {heads[:, 2].argmin().item()}")
        if not bool((heads == heads[0]).all()):
            different = (heads != heads[0]).any(1).nonzero().flatten().tolist()
            raise LawBroken(f"the weights of rank {different} differ from those of rank 0")
        came, applied, kept, sizes = rows[:, own.numel() :].reshape(len(rows), 4, self.total).unbind(1)
        if self.counts:
            self._balance(came.mean(0), applied[source], kept.mean(0), sizes.sum(0))
        self.anchor, self.looks = kept.mean(0), self.looks + 1
        self._forget()

    def _balance(self, came: Tensor, applied: Tensor, kept: Tensor, sizes: Tensor) -> None:
        """Hold what was kept and came in against what was applied and is kept."""
        error = applied + kept - came - self.anchor
        workers = dist.get_world_size()
        bound = ROUNDINGS * workers * EPS * (sizes / workers + self.anchor.abs()) + LEAST
        share = (error.abs() / bound).nan_to_num(math.inf, math.inf)
        self.worst, self.drift = max(self.worst, share.max().item()), self.drift + error
        if self.worst > 1:
            at = int(share.argmax())
            raise LawBroken(
                f"{'mass was lost' if abs(came[at] + self.anchor[at]) > abs(applied[at] + kept[at]) else 'mass came'} "
                f"in {self._where(share)}: kept {self.anchor[at]:.9g} + came in {came[at]:.9g} is not "
                f"applied {applied[at]:.9g} + kept {kept[at]:.9g}, by {error[at]:.3g}, bound {bound[at]:.3g}"
            )

    def saved(self, rate: float) -> dict[str, Tensor]:
        """Return the means of what all ranks keep, and of its magnitudes, to be compared when it is loaded. All ranks
        call this.

        Args:
            rate: the learning rate that it is in, or 1.
        """
        kept, velocity = self._gather_kept()
        both = {"kept": kept / rate, "velocity": velocity / rate}
        return {kind: torch.stack([rows.mean(0), rows.abs().mean(0)]) for kind, rows in both.items()}

    def _gather_kept(self) -> tuple[Tensor, Tensor]:
        rows = gather(self.kept_unit * torch.cat([self.kept, self.velocity]))
        return rows[:, : self.total], rows[:, self.total :]

    def loaded(self, sync: sparsync.Handle, saved: dict[str, Tensor] | None, unit: float, rate: float) -> None:
        """Compare what ranks keep now with what was saved, on any number of ranks; ``None``: nothing was.

        Args:
            unit: of what was loaded, without the ``rate`` that it is in.
        """
        self.unit = unit
        self.read(sync)
        saved = saved or dict.fromkeys(("kept", "velocity"), torch.zeros(2, self.total, dtype=torch.float64))
        for (kind, (then, size)), now in zip(saved.items(), self._gather_kept(), strict=True):
            wrong = (now.mean(0) - then).abs() - 16 * EPS * size - LEAST
            at = int(wrong.argmax())
            if wrong[at] > 0:
                raise LawBroken(
                    f"what was saved is not restored: the mean {kind} of {self._where(wrong.clamp(min=0))} was "
                    f"{then[at]:.9g} and is {now.mean(0)[at]:.9g}"
                )
            if kind == "kept":
                self.anchor = rate * now.mean(0)
        self.kept_unit = unit * rate
        self._forget()

    def _forget(self) -> None:
        self.sum_in, self.sum_applied, self.sizes = self._nothing(), self._nothing(), self._nothing()

    def _nothing(self) -> Tensor:
        return torch.zeros(self.total, dtype=torch.float64)

    def _where(self, wrong: Tensor) -> str:
        at = int(wrong.abs().argmax())
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if at < parameter.numel():
                return f"{name}, entry {at}"
            at -= parameter.numel()
        raise IndexError(at)


def gather(own: Tensor) -> Tensor:
    """Return the rows of all ranks, over torch's own process group."""
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    return torch.stack(rows)


def digest_of(weights: Tensor) -> bytes:
    """Return bytes that differ when any bit differs."""
    return hashlib.sha256(weights.numpy().tobytes()).digest()[:16]


def weights_of(parameters: Sequence[Tensor]) -> Tensor:
    return torch.cat([p.detach().flatten() for p in parameters])


def _flat(tensor: Tensor | None, like: Tensor) -> Tensor:
    if tensor is None:
        return torch.zeros(like.numel(), dtype=torch.float64)
    return tensor.detach().double().flatten()
