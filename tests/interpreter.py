"""Triton's interpreter, made quicker: what it looks up or makes again with every operation is kept.

Half of the time of the kernels' tests went into this. Values and memory are none of it.
"""

from __future__ import annotations

from typing import Any

from triton.language import core
from triton.runtime import interpreter


def quicken() -> None:
    """From now on, in this process; what a release of Triton does not have is left alone."""
    for owner, name, quick in (
        (interpreter.InterpretedFunction, "__call__", _call if hasattr(interpreter, "_patch_lang") else None),
        (interpreter, "_get_np_dtype", _np_dtype),
        (core, "_type_for_tuple_values", _tuple_type),
        (core.block_type, "with_element_ty", _with_element_ty),
    ):
        if quick is not None and hasattr(owner, name):
            setattr(owner, name, quick)


_patched: set[str] = set()
_np_dtypes: dict[str, Any] = {}
_tuple_types: dict[tuple[Any, ...], Any] = {}
_block_types: dict[tuple[str, str], Any] = {}
_np_dtype_of = getattr(interpreter, "_get_np_dtype", None)
_tuple_type_of = getattr(core, "_type_for_tuple_values", None)
_block_type_of = getattr(core.block_type, "with_element_ty", None)


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of one kernel's helper, but for a look through the whole language every time: launches patch it, and what
    other modules see is patched for good."""
    if self.fn.__module__ not in _patched:
        _patched.add(self.fn.__module__)
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **kwargs)


def _np_dtype(kind: Any) -> Any:
    name = kind.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _np_dtype_of(kind)
    return _np_dtypes[name]


def _tuple_type(values: Any, fields: Any = None) -> Any:
    """The type of a tuple of integers, as shapes are, is the same whenever they are."""
    key = tuple(value.value if type(value) is core.constexpr else value for value in values)
    if fields is not None or any(type(value) is not int for value in key):
        return _tuple_type_of(values, fields)
    if key not in _tuple_types:
        _tuple_types[key] = _tuple_type_of(values)
    return _tuple_types[key]


def _with_element_ty(self: Any, scalar: Any) -> Any:
    key = self.name, scalar.name
    if key not in _block_types:
        _block_types[key] = _block_type_of(self, scalar)
    return _block_types[key]
