"""Triton's interpreter, made quicker: what it looks up or makes again with every operation is kept, and what it works
out for nobody is left out.

Three quarters of the time of the kernels' tests went into this. Values and memory are none of it.
"""

from __future__ import annotations

import math
from typing import Any

from triton.language import core, semantic
from triton.runtime import interpreter


def quicken() -> None:
    """From now on, in this process; what a release of Triton does not have is left alone."""
    for owner, name, quick in (
        (interpreter.InterpretedFunction, "__call__", _call if _patch_of else None),
        (interpreter, "_patch_lang", _patch_once if hasattr(interpreter, "_LangPatchScope") else None),
        (interpreter, "_get_np_dtype", _np_dtype),
        (interpreter.InterpreterBuilder, "get_block_ty", _block_type),
        (core, "_type_for_tuple_values", _tuple_type),
        (core.block_type, "with_element_ty", _with_element_ty),
        (core.dtype, "__eq__", _same_dtype),
        (core.tensor, "__init__", _make_tensor),
        (semantic.TritonSemantic, "binary_op_sanitize_overflow_impl", _check_overflow),
        (semantic.TritonSemantic, "broadcast_impl_value", _broadcast),
    ):
        if quick is not None and hasattr(owner, name):
            setattr(owner, name, quick)


_patched: set[str] = set()
_np_dtypes: dict[str, Any] = {}
_tuple_types: dict[tuple[Any, ...], Any] = {}
_block_types: dict[tuple[str, tuple[int, ...]], Any] = {}
_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
_patch_of = getattr(interpreter, "_patch_lang", None)
_np_dtype_of = getattr(interpreter, "_get_np_dtype", None)
_tuple_type_of = getattr(core, "_type_for_tuple_values", None)
_dtype_is = core.dtype.__eq__
_overflow_of = getattr(semantic.TritonSemantic, "binary_op_sanitize_overflow_impl", None)
_broadcast_of = getattr(semantic.TritonSemantic, "broadcast_impl_value", None)


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of one kernel's helper, but for a look through the whole language every time."""
    interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **kwargs)


def _patch_once(fn: Any) -> Any:
    """The language as a module sees it is patched for good."""
    if fn.__module__ not in _patched:
        _patched.add(fn.__module__)
        _patch_of(fn)  # whoever launches would restore what this returns
    return interpreter._LangPatchScope()


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


def _block_type(builder: Any, scalar: Any, shape: Any) -> Any:
    key = scalar.name, tuple(shape)
    if key not in _block_types:
        _block_types[key] = core.block_type(scalar, shape)
    return _block_types[key]


def _with_element_ty(self: Any, scalar: Any) -> Any:
    return _block_type(None, scalar, self.shape)


def _same_dtype(self: Any, other: Any) -> bool:
    return self is other or bool(_dtype_is(self, other))


def _make_tensor(self: Any, handle: Any, type: Any) -> None:
    """Shapes are shared: nobody changes them."""
    shape = tuple(type.shape) if type.is_block() else ()
    if shape not in _shapes:
        _shapes[shape] = core.constexpr(math.prod(shape)), core.tuple([core.constexpr(size) for size in shape])
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _shapes[shape]


def _check_overflow(self: Any, *args: Any) -> None:
    """The operation once more in 64 bits; what comes of it is only looked at when one debugs."""
    if self.builder.options.debug:
        _overflow_of(self, *args)


def _broadcast(self: Any, one: Any, other: Any) -> Any:
    """Tensors of one shape stay as they are."""
    return (one, other) if one.shape is other.shape else _broadcast_of(self, one, other)
