"""Noticing gradients that no bucket brought: something makes the wrapper bypass the hook."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor

log = logging.getLogger("sparsync")

PYTHON_REDUCER = (
    'this model was wrapped while torch._dynamo.config.optimize_ddp was "python_reducer": DDP then gives its hook no '
    "buckets and ignores what it returns, so that every rank would train alone; set the option to "
    '"ddp_optimizer", torch\'s default, before the model is wrapped'
)
SENTENCE = (
    "backward has made gradients, and DDP gave no bucket to the hook: Sparsync exchanges nothing of this model, which "
    "trains dense, or every rank alone. Parameters are unused (DDP's find_unused_parameters=True), were frozen, "
    "replaced or cast (model.to) after the model was wrapped, or a copy of it trains; wrap the model that trains anew, "
    "and attach() to that"
)


class BucketCheck:
    """Looks whether a backward pass that DDP should have synchronised brought no bucket.

    Gradients that are made elsewhere need none: under ``no_sync``, by the bare model, or by hand for a step that makes
    state. It is told once, on every rank, as each sees it for itself. All parameters are watched until a first bucket
    has come, and two of them after that.

    Args:
        parameters: that are trained.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.came = False  # a bucket, since the last forward pass
        self._told = False
        self._synchronised = self._accumulated = False  # of the wrapper's last forward pass, and since
        self._hooks = [p.register_post_accumulate_grad_hook(self._note) for p in parameters]  # type: ignore[no-untyped-call]

    def before_forward(self, synchronised: bool) -> None:
        """Begin a forward pass; ``synchronised``: the gradients that follow are to be exchanged."""
        self.look()
        if self.came and len(self._hooks) > 2 and not torch.compiler.is_compiling():
            self.remove(slice(1, -1))  # here, as hooks cannot be removed while backward runs them
        self._synchronised, self._accumulated, self.came = synchronised, False, False

    def look(self) -> None:
        """Warn if gradients were made that should have come in buckets."""
        if self._accumulated and not self.came and not self._told:
            self._told = True
            log.warning("%s", SENTENCE)

    def remove(self, which: slice = slice(None)) -> None:
        """Watch these parameters no longer."""
        for hook in self._hooks[which]:
            hook.remove()
        del self._hooks[which]

    def _note(self, parameter: Tensor) -> None:
        self._accumulated = self._synchronised
