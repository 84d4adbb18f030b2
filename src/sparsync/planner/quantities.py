"""Bandwidths, times and counts as people write them: ``10Gbit``, ``1.2GB/s``, ``460ms``, ``124e6``."""

from __future__ import annotations

import math
import re

NUMBER = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*(.*?)\s*", re.IGNORECASE)
PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30}
RATE = re.compile(r"(?P<prefix>[kmgt]i?|)(?P<unit>bits?|bytes?|bps|b)(?:/s|ps)?", re.IGNORECASE)
SECONDS = {"": 1.0, "s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "min": 60.0}
COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}


def bandwidth_of(text: str | float, name: str = "bandwidth") -> float:
    """Return bits a second: ``10Gbit``, ``25Gb/s`` and ``100Mbps`` are bits, ``1.2GB/s`` bytes; a bare number is bits.

    As usual, a small ``b`` is a bit and a large one a byte.
    """
    number, unit = _split(text, name, "a rate such as 10Gbit, 25Gb/s or 1.2GB/s")
    if not unit:
        return number
    found = RATE.fullmatch(unit)
    if found is None:
        raise ValueError(f"{name} must be a rate such as 10Gbit, 25Gb/s or 1.2GB/s, got {text!r}")
    in_bytes = found["unit"] == "B" or found["unit"].lower().startswith("byte")
    return number * PREFIXES[found["prefix"].lower()] * (8 if in_bytes else 1)


def seconds_of(text: str | float, name: str = "compute") -> float:
    """Return seconds: ``0.46s``, ``460ms``, ``50us``; a bare number is seconds."""
    return _scaled(text, name, SECONDS, "a time such as 0.46s, 460ms or 50us")


def count_of(text: str | float, name: str = "params") -> int:
    """Return a count: ``124e6``, ``25.6M``, ``7B``."""
    return round(_scaled(text, name, COUNTS, "a number such as 124e6 or 25.6M"))


def _scaled(text: str | float, name: str, units: dict[str, float], wanted: str) -> float:
    number, unit = _split(text, name, wanted)
    if unit.lower() not in units:
        raise ValueError(f"{name} must be {wanted}, got {text!r}")
    return number * units[unit.lower()]


def _split(text: str | float, name: str, wanted: str) -> tuple[float, str]:
    found = NUMBER.fullmatch(str(text).replace(",", "").replace("_", ""))
    try:
        number = float(found[1]) if found is not None else math.nan
    except ValueError:
        number = math.nan
    if found is None or not (number > 0 and math.isfinite(number)):
        raise ValueError(f"{name} must be {wanted}, above 0, got {text!r}")
    return number, found[2]


def count_text(count: int, what: str) -> str:
    """Return a number of things: ``1 tensor``, ``2 tensors``."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def seconds_text(seconds: float) -> str:
    """Return a time with three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def bytes_text(count: float) -> str:
    """Return bytes with three digits."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def bandwidth_text(bits: float) -> str:
    """Return a bandwidth with two or three digits."""
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= 0.9995 * size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"
