"""Arithmetic of interpreted kernels as compiled ones compute it: the interpreter's builder, repaired.

What the instructions do that Triton compiles for Hopper (read from its PTX, and held against a GPU's own results by
campaigns/bits): bf16 and fp16 add, subtract and multiply in one rounding to nearest even; fp32 remainders are
`x - trunc(x / y) * y`; of two numbers one of which is NaN, `max` and `min` yield the other; +0 is larger than -0.
Two numbers of one fp8 dtype have no arithmetic, on a GPU and here.

A product that is added to something is one `fma` on a GPU, wherever the compiler sees it, and two roundings here.
Quotients of `/`, roots and powers are the nearest numbers here, and within 2 units in the last place there.
Applied by `interpreter.repair`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter

from overweave.runtime.interpreted.numbers import (
    FLOATS,
    FP8,
    PATTERNS,
    Values,
    fma_to_odd,
    fp8e5_to_bfloat16,
    handle_of,
    numpy_dtype,
    round_to_nearest,
    round_towards_zero,
    to_integer,
    widen,
)

_Builder = triton_interpreter.InterpreterBuilder
_Handle = triton_interpreter.TensorHandle
_Operation = Callable[..., Values]
_ROUNDING = triton_interpreter._ir.ROUNDING_MODE
_NOT_COMPILED = {("fp32", "fp8e4nv")}  # rounded towards zero
_original_binary: Callable[..., Any] = _Builder.binary_op
_original_unary: Callable[..., Any] = _Builder.unary_op
_original_cast: Callable[..., Any] = _Builder.cast_impl
_original_fp_to_fp: Callable[..., Any] = _Builder.create_fp_to_fp
_original_dot: Callable[..., Any] = _Builder.create_dot
_original_rmw: Callable[..., Any] = _Builder.create_atomic_rmw


def install_gpu_arithmetic() -> None:
    """For the rest of this process."""
    _Builder.binary_op, _Builder.unary_op = _binary, _unary
    _Builder.cast_impl, _Builder.create_fp_to_fp = _cast, _cast_rounding
    _Builder.create_dot, _Builder.create_fma = _dot, _fma
    _Builder.create_clampf, _Builder.create_frem = _clamp, _remainder
    _Builder.create_maxnumf, _Builder.create_minnumf = _as_binary(_larger), _as_binary(_smaller)
    _Builder.create_maximumf, _Builder.create_minimumf = _as_binary(_larger_or_nan), _as_binary(_smaller_or_nan)
    _Builder.get_bf16 = _bf16_constant


def matmul_fp32(left: Values, right: Values) -> Values:
    """fp32, by numpy's own loops: a BLAS works for each program's thread with threads and a spin lock of its own.

    Where one of MKL's threads still holds that lock while a rank forks, every product of the rank waits for ever.
    """
    made: Values = np.einsum("...mk,...kn->...mn", left, right)
    return made


def atomic_rmw(self: Any, operation: Any, pointer: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
    """As `InterpreterBuilder.create_atomic_rmw`, which cannot add bf16."""
    if value.dtype.scalar.name != "bf16" or operation != triton_interpreter._ir.ATOMIC_OP.FADD:
        return _original_rmw(self, operation, pointer, value, mask, sem, scope)
    kept = np.broadcast_to(mask.data, pointer.data.shape)
    added = np.broadcast_to(value.data, pointer.data.shape)
    found = np.zeros(pointer.data.shape, np.uint16)
    found[kept] = _add_atomically(pointer.data[kept], _Handle(added[kept], tl.bfloat16))
    return _Handle(found, tl.bfloat16)


def _binary(self: Any, lhs: Any, rhs: Any, operation: _Operation) -> Any:
    kind = lhs.dtype.scalar
    if kind.name not in PATTERNS or lhs.data.dtype == bool:
        return _original_binary(self, lhs, rhs, operation)
    _refuse_fp8(kind, operation)
    made = operation(widen(lhs), widen(rhs))
    return _Handle(made, tl.int1) if made.dtype == bool else handle_of(made, kind)


def _unary(self: Any, argument: Any, operation: _Operation) -> Any:
    kind = argument.dtype.scalar
    if kind.name not in PATTERNS:
        return _original_unary(self, argument, operation)
    _refuse_fp8(kind, operation)
    return handle_of(operation(widen(argument)), kind)


def _refuse_fp8(kind: Any, operation: Any) -> None:
    if kind.name in FP8:
        name = getattr(operation, "__name__", str(operation)).lstrip("_")
        raise TypeError(f"{name} of two {kind}: Triton compiles none for a GPU. Widen both: x.to(tl.float32)")


def _as_binary(operation: _Operation) -> Callable[[Any, Any, Any], Any]:
    return lambda self, lhs, rhs: self.binary_op(lhs, rhs, operation)


def _larger(one: Values, other: Values) -> Values:
    zeros = (one == 0) & (other == 0)  # of +0 and -0 the sum is +0
    return np.where(zeros, one + other, np.fmax(one, other))


def _smaller(one: Values, other: Values) -> Values:
    return -_larger(-one, -other)


def _larger_or_nan(one: Values, other: Values) -> Values:
    return np.where(np.isnan(one) | np.isnan(other), one.dtype.type(np.nan), _larger(one, other))


def _smaller_or_nan(one: Values, other: Values) -> Values:
    return -_larger_or_nan(-one, -other)


def _clamp(self: Any, argument: Any, low: Any, high: Any, propagate_nans: Any) -> Any:
    if propagate_nans == triton_interpreter._ir.PROPAGATE_NAN.ALL:
        return self.create_minimumf(self.create_maximumf(argument, low), high)
    return self.create_minnumf(self.create_maxnumf(argument, low), high)


def _remainder(self: Any, lhs: Any, rhs: Any) -> Any:
    return self.binary_op(lhs, rhs, _remainder_of)


def _remainder_of(one: Values, other: Values) -> Values:
    if one.dtype == np.float64:
        return np.fmod(one, other)
    with np.errstate(all="ignore"):
        whole = np.trunc(one / other)
        rest = round_to_nearest(fma_to_odd(-whole, other, one), "fp32")
    return np.where(np.isinf(other), one, rest)


def _fma(self: Any, one: Any, other: Any, addend: Any) -> Any:
    kind = addend.dtype.scalar
    _refuse_fp8(kind, "fma")
    if kind.name == "fp64":
        return _Handle(one.data * other.data + addend.data, kind)
    return handle_of(fma_to_odd(widen(one), widen(other), widen(addend)), kind)


def _dot(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
    if not {a.dtype.scalar.name, b.dtype.scalar.name} <= FLOATS - {"fp64"} or d.dtype.scalar.name not in (
        "fp32",
        "fp16",
    ):
        return _original_dot(self, a, b, d, *how)
    return handle_of(matmul_fp32(widen(a), widen(b)) + widen(d), d.dtype.scalar)


def _cast(self: Any, source: Any, target: Any) -> Any:
    have, want = source.dtype.scalar, target.scalar
    if have == want or (source.data.dtype == bool and want.name not in PATTERNS):
        return _original_cast(self, source, target)
    if have.name in FLOATS and want.is_int():
        return _Handle(to_integer(widen(source), numpy_dtype(want)), want)
    if have.name in FLOATS and want.name in FLOATS:
        if {have.name, want.name} <= {"fp64", *FP8}:
            raise TypeError(f"{have} to {want}: Triton compiles none for a GPU. Make it fp32 first")
        if (have.name, want.name) == ("fp8e5", "bf16"):
            return _Handle(fp8e5_to_bfloat16(source.data), want)
        return handle_of(widen(source), want)
    if have.is_int() and want.name in FLOATS:
        return handle_of(source.data.astype(np.int32) if source.data.dtype == bool else source.data, want)
    return _original_cast(self, source, target)


def _cast_rounding(self: Any, source: Any, target: Any, mode: Any) -> Any:
    have, want = source.dtype.scalar, target.scalar
    if not {have.name, want.name} <= FLOATS:
        return _original_fp_to_fp(self, source, target, mode)
    if mode != _ROUNDING.RTZ:
        return _cast(self, source, target)
    if have.name != "fp32" or (have.name, want.name) in _NOT_COMPILED:
        raise TypeError(
            f"{have} to {want} towards zero: Triton compiles none for a GPU. Begin with fp32, and not to e4m3"
        )
    return _Handle(round_towards_zero(source.data, want.name), want)


def _bf16_constant(self: Any, value: float) -> Any:
    """Triton's compiler reads constants of bf16 from six decimals: 1e-7 is zero."""
    return handle_of(np.array([float(f"{np.float32(value):f}")]), tl.bfloat16)


def _add_atomically(pointers: Values, value: Any) -> Values:
    """What stood there before. One element after another, until nobody came between: a kernel may name one twice."""
    native = triton_interpreter._interpreter
    found, left = np.zeros(len(pointers), np.uint16), np.arange(len(pointers))
    while left.size:
        at = pointers[left]
        seen = native.load(at, np.ones(len(at), bool), np.zeros(len(at), np.uint16), np.dtype(np.uint16))
        summed = round_to_nearest(widen(_Handle(seen, tl.bfloat16)) + widen(value)[left], "bf16")
        held = native.atomic_cas(at, seen.copy(), summed, native.MEM_SEMANTIC.ACQUIRE_RELEASE)
        found[left] = held
        left = left[held != seen]
    return found
