"""The form of a checkpoint: which keys it has, and of which types. A file may be torn, or anybody's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

SCHEMA = 2
SCALES = torch.finfo(torch.float32)  # in which a scaler keeps its scale


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _tensor(value: Any) -> bool:
    """Whether it is a plain tensor of real numbers that are there."""
    plain = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
    return plain and not value.is_quantized and not value.is_complex()


def _kept(value: Any) -> bool:
    return _tensor(value) and value.is_floating_point()


def _by_name(inner: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Mapping) and all(_text(key) and inner(own) for key, own in value.items())


NEEDED: dict[str, Callable[[Any], bool]] = {
    "rank": _count,
    "workers": _count,
    "step": _count,
    "training": _text,
    "options": _text,
    "holds": _text,
    "residuals": _by_name(_kept),
    "velocities": _by_name(_kept),
    "compressor": _by_name(_by_name(_tensor)),
    "rates": _by_name(_number),
}
OPTIONAL: dict[str, Callable[[Any], bool]] = {
    "nodes": _text,
    "method": _text,
    "corrected": lambda value: isinstance(value, bool),
    "loss_scale": lambda value: value is None or (_number(value) and SCALES.tiny <= value <= SCALES.max),
    "highest_rates": _by_name(_number),
    "moments": _by_name(_by_name(_tensor)),
}


def check_form(state: Any) -> None:
    """Refuse what is no state of a rank."""
    schema = state.get("schema") if isinstance(state, Mapping) else type(state).__name__
    if type(schema) is not int or schema != SCHEMA:
        raise ValueError(f"this is not a sparsync state of schema {SCHEMA}: it says {schema!r:.200}")
    missing = [key for key in NEEDED if key not in state]
    if missing:
        raise ValueError(f"the state is not whole: it lacks {', '.join(map(repr, missing))}")
    for key, fits in (NEEDED | OPTIONAL).items():
        if key in state and not fits(state[key]):
            raise ValueError(f"the state is damaged: {key!r} is not what a state has there: {state[key]!r:.200}")
    if state["rank"] >= state["workers"]:
        raise ValueError(f"the state is damaged: rank {state['rank']} of {state['workers']}")
