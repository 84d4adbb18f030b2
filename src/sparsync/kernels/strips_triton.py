"""The columns of the tables that ``strips.py`` describes, as kernels read them, and how many there are."""

# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl

from sparsync.kernels import strips as tables

STRIP, SEGMENT = tl.constexpr(len(tables.Strip._fields)), tl.constexpr(len(tables.SegmentRow._fields))
CHOICE, STATE = tl.constexpr(len(tables.ChoiceRow._fields)), tl.constexpr(len(tables.STATE))
START, LOW, HIGH, OWNER = map(tl.constexpr, range(STRIP.value))
K, CAPACITY, FIRST_REGION, REGIONS, ROOM, FIRST_ENTRY, NUMEL, FIRST_STRIP, STRIPS, FIRST_SAMPLE, SAMPLES = map(
    tl.constexpr, range(SEGMENT.value)
)
CANDIDATES, EDGE, BOUND, COUNT = map(tl.constexpr, range(CHOICE.value))
CARRIED, MADE_FOR, LEFT, INFLOW = map(tl.constexpr, range(STATE.value))
MOST_REGIONS = tl.constexpr(128)
PAD = tl.constexpr(32)  # words between counters: each on a line of its own
