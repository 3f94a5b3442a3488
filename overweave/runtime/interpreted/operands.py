"""Operands of interpreted operators, prepared on a short way where nothing has to be prepared.

Before each operator Triton 3.6 finds out by dozens of questions which type both sides become and which shape, to
convert neither most of the time: half of what a kernel of small tiles costs. Two sides of one type and one shape are
taken as they are here, a Python integer takes the integer type of the other side, and an integer added to a pointer
stays what it is. Whatever else comes goes Triton's own way. Applied by `interpreter.repair`.
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
_CLOSED_DTYPES = {*_INTEGERS, "fp32", "fp64"}  # two of one become that one, whatever the operator
_PLAIN = {tl.tensor, tl.dtype, tl.block_type, tl.pointer_type, int, bool, float, str, type(None)}

_original_check: Callable[..., Any] = TritonSemantic.binary_op_type_checking_impl
_original_broadcast: Callable[..., Any] = TritonSemantic.broadcast_impl_value
_original_unwrap: Callable[[Any], Any] = tl.core._unwrap_if_constexpr
_original_equal: Callable[[Any, Any], bool] = tl.dtype.__eq__
_BUILTIN_WRAPPER = tl.core.builtin(len).__code__  # of all functions of the language that ask whether they were told


def install_operand_shortcuts() -> None:
    """For the rest of this process; before the language is patched, whose functions keep what they are made from."""
    TritonSemantic.binary_op_type_checking_impl = _check
    TritonSemantic.broadcast_impl_value = _broadcast
    tl.core._unwrap_if_constexpr = tl._unwrap_if_constexpr = _unwrap
    tl.dtype.__eq__ = _equal
    triton_interpreter._patch_attr = _patch_attribute


def _check(self: Any, lhs: Any, rhs: Any, *how: Any, **named: Any) -> Any:
    left, right = type(lhs), type(rhs)
    if left is tl.tensor and right is tl.tensor:
        kind = lhs.dtype
        if kind.name == rhs.dtype.name and kind.name in _CLOSED_DTYPES:
            return self.broadcast_impl_value(lhs, rhs)
        if how[:1] == (True,) and kind.is_ptr() and rhs.dtype.name in _INTEGERS:
            return self.broadcast_impl_value(lhs, rhs)
    elif left is tl.tensor and right is int and _is_within(rhs, lhs.dtype):
        return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, lhs.dtype))
    elif right is tl.tensor and left is int and _is_within(lhs, rhs.dtype):
        return self.broadcast_impl_value(self.scalar_constant(lhs, rhs.dtype), rhs)
    return _original_check(self, lhs, rhs, *how, **named)


def _is_within(value: int, kind: Any) -> bool:
    bounds = _INTEGERS.get(kind.name)
    return bounds is not None and bounds[0] <= value <= bounds[1]


def _broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
    """Shapes are made once: equal ones are one."""
    left, right = lhs.type, rhs.type
    if not left.is_block():
        return (_splat(lhs, right), rhs) if right.is_block() else (lhs, rhs)
    if not right.is_block():
        return lhs, _splat(rhs, left)
    return (lhs, rhs) if left.shape is right.shape else _original_broadcast(self, lhs, rhs)


def _splat(scalar: Any, like: Any) -> Any:
    """A tensor of the sizes of a type, of one number."""
    kind = scalar.type.scalar
    data = np.full(like.shape.values, scalar.handle.data, triton_interpreter._get_np_dtype(kind))
    return tl.tensor(triton_interpreter.TensorHandle(data, kind), like.with_element_ty(kind))


def _unwrap(value: Any) -> Any:
    return value if type(value) in _PLAIN else _original_unwrap(value)


def _equal(self: Any, other: Any) -> bool:
    return self is other or _original_equal(self, other)


def _patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """The function of the language itself, told whose semantic it has: nobody asks at each call whether it was told."""
    semantic = TritonSemantic(builder)
    function = member.__wrapped__ if getattr(member, "__code__", None) is _BUILTIN_WRAPPER else member

    def call(*given: Any, **named: Any) -> Any:
        named["_semantic"] = semantic
        return function(*given, **named)

    scope.set_attr(owner, name, call)
