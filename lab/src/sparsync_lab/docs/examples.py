"""The examples that pages show, as they stand in examples/."""

from __future__ import annotations

from sparsync_lab.docs.sources import Sources


def compressor(sources: Sources) -> str:
    """Return the compressor of examples/."""
    return _code(sources, "round_robin")


def collective(sources: Sources) -> str:
    """Return the collective of examples/."""
    return _code(sources, "every_other")


def _code(sources: Sources, name: str) -> str:
    text = (sources.folder.parent / "examples" / f"{name}.py").read_text(encoding="utf-8")
    return f"```python\n{text}```"
