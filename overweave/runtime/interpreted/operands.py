"""Shortcuts of operand conversion in interpreted operators.

Before each operator Triton 3.6 computes the common type and shape of both sides, and mostly converts neither: half of
the time of a kernel of small tiles. Here two sides of one type and shape are taken as they are, a Python integer takes
the integer type of the other side, and an integer added to a pointer keeps its type. Other operands are converted by
Triton. Applied by `interpreter.repair`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter
from triton.language.semantic import TritonSemantic

_INTEGERS = {
    kind.name: (kind.get_int_min_value(), kind.get_int_max_value())
    for kind in (tl.int8, tl.uint8, tl.int16, tl.uint16, tl.int32, tl.uint32, tl.int64, tl.uint64)
}
_CLOSED_DTYPES = {*_INTEGERS, "fp32", "fp64"}  # dtypes whose operators yield the same dtype
_PLAIN = {tl.tensor, tl.dtype, tl.block_type, tl.pointer_type, int, bool, float, str, type(None)}

_original_check: Callable[..., Any] = TritonSemantic.binary_op_type_checking_impl
_original_broadcast: Callable[..., Any] = TritonSemantic.broadcast_impl_value
_original_unwrap: Callable[[Any], Any] = tl.core._unwrap_if_constexpr
_original_equal: Callable[[Any, Any], bool] = tl.dtype.__eq__
_BUILTIN_WRAPPER = tl.core.builtin(len).__code__  # of all builtins, which check for `_semantic`


def install_operand_shortcuts() -> None:
    """Patch the interpreter for the rest of this process.

    Call it before `_patch_language`, which captures functions.
    """
    TritonSemantic.binary_op_type_checking_impl = _check
    TritonSemantic.broadcast_impl_value = _broadcast
    tl.core._unwrap_if_constexpr = tl._unwrap_if_constexpr = _unwrap
    tl.dtype.__eq__ = _equal
    triton_interpreter._patch_attr = _patch_attribute


def _check(self: Any, lhs: Any, rhs: Any, *options: Any, **named: Any) -> Any:
    """Convert both sides to a common type, by a shortcut where no conversion is needed."""
    left, right = type(lhs), type(rhs)
    if left is tl.tensor and right is tl.tensor:
        dtype = lhs.dtype
        if dtype.name == rhs.dtype.name and dtype.name in _CLOSED_DTYPES:
            return self.broadcast_impl_value(lhs, rhs)
        if options[:1] == (True,) and dtype.is_ptr() and rhs.dtype.name in _INTEGERS:
            return self.broadcast_impl_value(lhs, rhs)
    elif left is tl.tensor and right is int and _is_within(rhs, lhs.dtype):
        return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, lhs.dtype))
    elif right is tl.tensor and left is int and _is_within(lhs, rhs.dtype):
        return self.broadcast_impl_value(self.scalar_constant(lhs, rhs.dtype), rhs)
    return _original_check(self, lhs, rhs, *options, **named)


def _is_within(value: int, dtype: Any) -> bool:
    bounds = _INTEGERS.get(dtype.name)
    return bounds is not None and bounds[0] <= value <= bounds[1]


def _broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
    """Broadcast two sides. Shapes are cached (types.py): equal ones are identical."""
    left, right = lhs.type, rhs.type
    if not left.is_block():
        return (_splat(lhs, right), rhs) if right.is_block() else (lhs, rhs)
    if not right.is_block():
        return lhs, _splat(rhs, left)
    return (lhs, rhs) if left.shape is right.shape else _original_broadcast(self, lhs, rhs)


def _splat(scalar: Any, block_type: Any) -> Any:
    """Return a scalar broadcast to the shape of a block type."""
    dtype = scalar.type.scalar
    data = np.full(block_type.shape.values, scalar.handle.data, triton_interpreter._get_np_dtype(dtype))
    return tl.tensor(triton_interpreter.TensorHandle(data, dtype), block_type.with_element_ty(dtype))


def _unwrap(value: Any) -> Any:
    return value if type(value) in _PLAIN else _original_unwrap(value)


def _equal(self: Any, other: Any) -> bool:
    return self is other or _original_equal(self, other)


def _patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Patch a builtin to its undecorated function with `_semantic` bound: it is not checked for at each call."""
    semantic = TritonSemantic(builder)
    function = member.__wrapped__ if getattr(member, "__code__", None) is _BUILTIN_WRAPPER else member

    def call(*arguments: Any, **named: Any) -> Any:
        named["_semantic"] = semantic
        return function(*arguments, **named)

    scope.set_attr(owner, name, call)
