"""Noticing that gradients are not zeroed between two exchanges."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from torch import Tensor
from torch.utils.hooks import RemovableHandle

SENTENCE = (
    "backward adds to what the last exchange gave, which is then exchanged again: nothing is lost, but it is delayed a "
    "second time; call optimizer.zero_grad() after each step, and accumulate under ddp.no_sync()"
)


def notice_old_gradients(
    parameters: Iterable[Tensor], exchanged: Callable[[], bool], tell: Callable[[str], None]
) -> Callable[[], None]:
    """Look once, when the first backward after an exchange begins, whether gradients were zeroed; ``tell`` if not.

    Only before a gradient is added can it be told from what was there. One look will do: whoever does not zero
    gradients does so from the start, and on a GPU a look waits for the device.

    Args:
        exchanged: whether there has been an exchange.

    Returns:
        What ends the search.
    """
    hooks: list[RemovableHandle] = []

    def stop() -> None:
        for hook in hooks:
            hook.remove()
        hooks.clear()

    def look(parameter: Tensor, _: Tensor) -> None:
        if hooks and exchanged():
            stop()
            if parameter.grad is not None and bool(parameter.grad.any()):
                tell(SENTENCE)

    hooks += [p.register_hook(partial(look, p)) for p in parameters]  # type: ignore[no-untyped-call]
    return stop
