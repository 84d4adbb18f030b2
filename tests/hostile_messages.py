"""Messages that are not what they should be: flipped, torn, spliced, and those of a sender that lies and knows the
checksum."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor

from sparsync.kernels.message.header import ENTRIES, EXTRA, FLAGS, HEADER, WHERE
from sparsync.wire import seal

Damage = Callable[[Tensor, Tensor], Tensor]  # of a message, and another one about the same layout

LIES = (0, 1, 2, 3, 7, -1, -2, 2**15, 2**16 - 1, 2**30, 2**31 - 1, -(2**31), 0x7F800000, 0x7FC00000, 0x7F7FFFFF)
words = st.one_of(st.sampled_from(LIES), st.integers(-(2**31), 2**31 - 1))
parts = st.floats(0, 1, exclude_max=True)  # of a message: where in it


@st.composite
def damages(draw: st.DrawFn) -> Damage:
    """Draw what becomes of a message on its way, one to three times over, checksum not included."""
    steps = [draw(st.one_of(_flips(), _lies(), _words(), _tears(), _slides())) for _ in range(draw(st.integers(1, 3)))]

    def damage(message: Tensor, other: Tensor) -> Tensor:
        message = message.clone()
        for step in steps:
            message = step(message, other)
        return message

    return damage


def sealed(damage: Damage) -> Damage:
    """Return the same by a sender that knows the checksum."""
    return lambda message, other: seal(damage(message, other))


@st.composite
def _flips(draw: st.DrawFn) -> Damage:
    """Flip some bits."""
    places = draw(st.lists(st.tuples(parts, st.integers(0, 31)), min_size=1, max_size=5))

    def flip(message: Tensor, other: Tensor) -> Tensor:
        for part, bit in places:
            message[int(part * message.numel())] ^= torch.tensor(1 << bit).to(torch.int32)
        return message

    return flip


@st.composite
def _lies(draw: st.DrawFn) -> Damage:
    """Say something else of entries, flags, the parameter that was not finite, or the collective's own."""
    word, number = draw(st.sampled_from((ENTRIES, FLAGS, WHERE, EXTRA))), draw(words)
    near = draw(st.integers(-2, 2) | st.none())  # of entries: a few more or less than there are

    def lie(message: Tensor, other: Tensor) -> Tensor:
        message[word] = number if near is None else (int(message[word]) + near + 2**31) % 2**32 - 2**31
        return message

    return lie


@st.composite
def _words(draw: st.DrawFn) -> Damage:
    """Overwrite indices or values: with anything, or with what stands elsewhere."""
    places = draw(st.lists(st.tuples(parts, words | parts), min_size=1, max_size=5))

    def overwrite(message: Tensor, other: Tensor) -> Tensor:
        body = message[HEADER:]
        for part, word in places if body.numel() else ():
            body[int(part * body.numel())] = body[int(word * body.numel())] if isinstance(word, float) else word
        return message

    return overwrite


@st.composite
def _tears(draw: st.DrawFn) -> Damage:
    """Let only the first words arrive: what follows is empty, or that of another message."""
    part, empty = draw(parts), draw(st.booleans())

    def tear(message: Tensor, other: Tensor) -> Tensor:
        cut = int(part * message.numel())
        message[cut:] = 0 if empty else other[cut:]
        return message

    return tear


@st.composite
def _slides(draw: st.DrawFn) -> Damage:
    """Let words be lost, or come twice, so that all that follow are in the wrong place."""
    part, by = draw(parts), draw(st.integers(-3, 3))

    def slide(message: Tensor, other: Tensor) -> Tensor:
        cut = int(part * message.numel())
        message[cut:] = message[cut:].roll(by)
        return message

    return slide
