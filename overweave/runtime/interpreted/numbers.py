"""Conversions of bf16, fp16 and fp8 numbers of interpreted kernels, rounded as a GPU rounds.

numpy has no bf16 and no fp8: their numbers are kept as bits. A result is rounded twice, first to float64 "to odd": its
last bit is set if the rounding was inexact. Then the second rounding gives what a single one would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter

Values = np.ndarray[Any, Any]
FP8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
BIT_DTYPES = {"bf16", *FP8}  # dtypes whose numbers are kept as bits
FLOATS = {*BIT_DTYPES, "fp16", "fp32", "fp64"}
_EVERY_BYTE = torch.arange(256).to(torch.uint8)
_FP8_NUMBERS = {name: _EVERY_BYTE.view(dtype).float().numpy() for name, dtype in FP8.items()}
_LARGEST = {name: torch.finfo(dtype).max for name, dtype in FP8.items()}


def handle_of(values: Values, dtype: Any) -> Any:
    """Return a tensor handle of values, rounded to nearest even of a dtype."""
    return triton_interpreter.TensorHandle(round_to_nearest(values, dtype.name), dtype)


def widen(handle: Any) -> Values:
    """Return the numbers of a floating-point handle as fp32, or as fp64 if they are fp64."""
    data: Values = handle.data
    name = handle.dtype.scalar.name
    if name in FP8:
        return _FP8_NUMBERS[name][data]
    if name == "bf16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data if data.dtype == np.float64 else data.astype(np.float32, copy=False)


def round_to_nearest(values: Values, name: str) -> Values:
    """Round numbers to nearest even; return the data of a dtype. Overflow of fp8 gives its largest number."""
    if name == "bf16":
        return round_to_bfloat16(values if values.dtype == np.float32 else _odd_float(_odd_double(values)))
    if name in FP8:
        return round_to_fp8(values, name)
    kind = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64}[name]
    with np.errstate(over="ignore"):
        wide = _odd_double(values) if name == "fp16" and values.dtype.kind in "iu" else values
        return wide.astype(kind, copy=False)


def round_towards_zero(values: Values, name: str) -> Values:
    """Round fp32 numbers towards zero; return the data of a narrower dtype. No finite number becomes infinite."""
    if name == "bf16":
        bits = (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), bits | np.uint16(0x40), bits)
    with np.errstate(over="ignore"):
        near = values.astype(np.float16)
        over = np.abs(near.astype(np.float32)) > np.abs(values)
        half: Values = np.where(over, np.nextafter(near, np.float16(0)), near)
    return half if name == "fp16" else (half.view(np.uint16) >> 8).astype(np.uint8)


def round_to_bfloat16(values: Values) -> Values:
    """Round fp32 values to nearest even; return bf16 bits (uint16). NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).reshape(values.shape)
    nearest = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    quiet = (bits >> 16).astype(np.uint16) | np.uint16(0x40)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, quiet, nearest)


def round_to_fp8(values: Values, name: str = "fp8e4nv") -> Values:
    """Round values to nearest even; return fp8 bits (uint8). Overflow gives the largest number."""
    clipped = np.clip(np.ascontiguousarray(values, np.float32), -_LARGEST[name], _LARGEST[name])
    return torch.from_numpy(clipped).to(FP8[name]).view(torch.uint8).numpy().reshape(values.shape)


def fp8e5_to_bfloat16(data: Values) -> Values:
    """Convert e5m2 to bf16 bits as Triton compiles it, by shifting bits: infinity gives 65536, and NaN larger numbers.

    MEASURED: one H200, Triton 3.6 (campaigns/bits): 0x7c is 0x4780.
    """
    magnitude = data & 0x7F
    beyond = ((magnitude.astype(np.uint16) << 5) + ((127 - 15) << 7)) | (data & 0x80).astype(np.uint16) << 8
    return np.where(magnitude >= 0x7C, beyond, round_to_bfloat16(_FP8_NUMBERS["fp8e5"][data]))


def to_integer(values: Values, dtype: np.dtype[Any]) -> Values:
    """Truncate floating-point numbers to integers, as PTX's `cvt.rzi`.

    Numbers out of range are clamped. NaN gives zero; if either side has 64 bits, the integer with the top bit alone.
    Integers of 8 bits are the lower half of 16-bit ones.
    """
    compute_dtype = np.dtype(f"{dtype.kind}2") if dtype.itemsize == 1 else dtype
    limits = np.iinfo(compute_dtype)
    whole = np.trunc(values.astype(np.float64))
    with np.errstate(invalid="ignore"):
        clamped = whole.astype(compute_dtype)
    clamped = np.where(whole >= float(limits.max), limits.max, clamped)
    clamped = np.where(whole <= float(limits.min), limits.min, clamped)
    wide = values.dtype == np.float64 or compute_dtype.itemsize == 8
    of_nan = (
        np.zeros(1, compute_dtype)
        if not wide
        else np.array([1 << (compute_dtype.itemsize * 8 - 1)], f"u{compute_dtype.itemsize}").view(compute_dtype)
    )
    result: Values = np.where(np.isnan(values), of_nan, clamped).astype(compute_dtype).astype(dtype)
    return result


def sum_to_odd(one: Values, other: Values) -> Values:
    """Add two fp64 numbers, rounded to odd."""
    with np.errstate(invalid="ignore", over="ignore"):
        total = np.add(one, other)
        part = total - one
        rest = (one - (total - part)) + (other - part)  # the exact rounding error
    is_inexact = np.isfinite(total) & (rest != 0) & (total.view(np.uint64) & 1 == 0)
    return np.where(is_inexact, np.nextafter(total, np.where(rest > 0, np.inf, -np.inf)), total)


def fma_to_odd(one: Values, other: Values, addend: Values) -> Values:
    """Return one * other + addend of numbers no wider than fp32, rounded to odd: their product is exact in fp64."""
    with np.errstate(invalid="ignore"):
        return sum_to_odd(np.multiply(one, other, dtype=np.float64), addend.astype(np.float64))


def _odd_double(values: Values) -> Values:
    """Convert numbers or integers to fp64, rounded to odd."""
    if values.dtype.kind not in "iu" or values.dtype.itemsize < 8:
        return values.astype(np.float64)
    high, low = values >> values.dtype.type(32), values & values.dtype.type(0xFFFFFFFF)
    return sum_to_odd(high.astype(np.float64) * 2.0**32, low.astype(np.float64))


def _odd_float(values: Values) -> Values:
    """Convert fp64 to fp32, rounded to odd."""
    with np.errstate(over="ignore", under="ignore"):
        near = values.astype(np.float32)
    over = np.abs(near.astype(np.float64)) > np.abs(values)
    below = np.where(over, np.nextafter(near, np.float32(0)), near)
    is_inexact = (below.astype(np.float64) != values) & ~np.isnan(values)
    odd: Values = (np.ascontiguousarray(below).view(np.uint32) | is_inexact.astype(np.uint32)).view(np.float32)
    return odd


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """Return numpy's dtype of the data of Triton's dtype."""
    result: np.dtype[Any] = triton_interpreter._get_np_dtype(dtype)
    return result


# What Triton's PTX for Hopper computes (compared with a GPU's own results by campaigns/bits): bf16 and fp16 add,
# subtract and multiply in one rounding to nearest even; fp32 remainders are `x - trunc(x / y) * y`; `max` and `min` of
# a number and NaN yield the number; +0 is larger than -0. fp8 has no arithmetic, on a GPU and here.
#
# A product that is added to something is one `fma` on a GPU, wherever the compiler sees it, and two roundings here.
# Quotients of `/`, roots and powers are the nearest numbers here, and within 2 units in the last place there. Applied
# by `interpreter.repair`.

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
    """Patch the interpreter for the rest of this process."""
    _Builder.binary_op, _Builder.unary_op = _binary, _unary
    _Builder.cast_impl, _Builder.create_fp_to_fp = _cast, _cast_rounding
    _Builder.create_dot, _Builder.create_fma = _dot, _fma
    _Builder.create_clampf, _Builder.create_frem = _clamp, _remainder
    _Builder.create_maxnumf, _Builder.create_minnumf = _as_binary(_larger), _as_binary(_smaller)
    _Builder.create_maximumf, _Builder.create_minimumf = _as_binary(_larger_or_nan), _as_binary(_smaller_or_nan)
    _Builder.get_bf16 = _bf16_constant


def matmul_fp32(left: Values, right: Values) -> Values:
    """Multiply in fp32 by numpy's own loops, not by a BLAS, which has threads and a spin lock of its own.

    If a thread of MKL holds that lock while a rank forks, every product of the rank waits for ever.
    """
    product: Values = np.einsum("...mk,...kn->...mn", left, right)
    return product


def atomic_rmw(self: Any, operation: Any, pointer: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
    """`InterpreterBuilder.create_atomic_rmw`, with atomic adds of bf16."""
    if value.dtype.scalar.name != "bf16" or operation != triton_interpreter._ir.ATOMIC_OP.FADD:
        return _original_rmw(self, operation, pointer, value, mask, sem, scope)
    inside = np.broadcast_to(mask.data, pointer.data.shape)
    values = np.broadcast_to(value.data, pointer.data.shape)
    previous = np.zeros(pointer.data.shape, np.uint16)
    previous[inside] = _add_atomically(pointer.data[inside], _Handle(values[inside], tl.bfloat16))
    return _Handle(previous, tl.bfloat16)


def _binary(self: Any, lhs: Any, rhs: Any, operation: _Operation) -> Any:
    """Compute in fp32 and round once, for dtypes that are kept as bits."""
    dtype = lhs.dtype.scalar
    if dtype.name not in BIT_DTYPES or lhs.data.dtype == bool:
        return _original_binary(self, lhs, rhs, operation)
    _refuse_fp8(dtype, operation)
    result = operation(widen(lhs), widen(rhs))
    return _Handle(result, tl.int1) if result.dtype == bool else handle_of(result, dtype)


def _unary(self: Any, argument: Any, operation: _Operation) -> Any:
    dtype = argument.dtype.scalar
    if dtype.name not in BIT_DTYPES:
        return _original_unary(self, argument, operation)
    _refuse_fp8(dtype, operation)
    return handle_of(operation(widen(argument)), dtype)


def _refuse_fp8(dtype: Any, operation: Any) -> None:
    if dtype.name in FP8:
        name = getattr(operation, "__name__", str(operation)).lstrip("_")
        raise TypeError(f"{name} of two {dtype}: Triton compiles none for a GPU. Widen both: x.to(tl.float32)")


def _as_binary(operation: _Operation) -> Callable[[Any, Any, Any], Any]:
    return lambda self, lhs, rhs: self.binary_op(lhs, rhs, operation)


def _larger(one: Values, other: Values) -> Values:
    both_zero = (one == 0) & (other == 0)  # of +0 and -0 the sum is +0
    return np.where(both_zero, one + other, np.fmax(one, other))


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
    dtype = addend.dtype.scalar
    _refuse_fp8(dtype, "fma")
    if dtype.name == "fp64":
        return _Handle(one.data * other.data + addend.data, dtype)
    return handle_of(fma_to_odd(widen(one), widen(other), widen(addend)), dtype)


def _dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
    """Multiply and add in fp32, then round."""
    if not {a.dtype.scalar.name, b.dtype.scalar.name} <= FLOATS - {"fp64"} or d.dtype.scalar.name not in (
        "fp32",
        "fp16",
    ):
        return _original_dot(self, a, b, d, *options)
    return handle_of(matmul_fp32(widen(a), widen(b)) + widen(d), d.dtype.scalar)


def _cast(self: Any, source: Any, target: Any) -> Any:
    """Convert as a GPU, rounding to nearest even. Raises TypeError for casts that Triton does not compile."""
    source_dtype, target_dtype = source.dtype.scalar, target.scalar
    if source_dtype == target_dtype or (source.data.dtype == bool and target_dtype.name not in BIT_DTYPES):
        return _original_cast(self, source, target)
    if source_dtype.name in FLOATS and target_dtype.is_int():
        return _Handle(to_integer(widen(source), numpy_dtype(target_dtype)), target_dtype)
    if source_dtype.name in FLOATS and target_dtype.name in FLOATS:
        if {source_dtype.name, target_dtype.name} <= {"fp64", *FP8}:
            raise TypeError(f"{source_dtype} to {target_dtype}: Triton compiles none for a GPU. Make it fp32 first")
        if (source_dtype.name, target_dtype.name) == ("fp8e5", "bf16"):
            return _Handle(fp8e5_to_bfloat16(source.data), target_dtype)
        return handle_of(widen(source), target_dtype)
    if source_dtype.is_int() and target_dtype.name in FLOATS:
        return handle_of(source.data.astype(np.int32) if source.data.dtype == bool else source.data, target_dtype)
    return _original_cast(self, source, target)


def _cast_rounding(self: Any, source: Any, target: Any, mode: Any) -> Any:
    """Convert between floating-point dtypes with a rounding mode. Raises TypeError as `_cast`."""
    source_dtype, target_dtype = source.dtype.scalar, target.scalar
    if not {source_dtype.name, target_dtype.name} <= FLOATS:
        return _original_fp_to_fp(self, source, target, mode)
    if mode != _ROUNDING.RTZ:
        return _cast(self, source, target)
    if source_dtype.name != "fp32" or (source_dtype.name, target_dtype.name) in _NOT_COMPILED:
        cast = f"{source_dtype} to {target_dtype} towards zero"
        raise TypeError(f"{cast}: Triton compiles none for a GPU. Begin with fp32, and not to e4m3")
    return _Handle(round_towards_zero(source.data, target_dtype.name), target_dtype)


def _bf16_constant(self: Any, value: float) -> Any:
    """Return a bf16 constant of six decimals, as Triton's compiler parses it: 1e-7 is zero."""
    return handle_of(np.array([float(f"{np.float32(value):f}")]), tl.bfloat16)


def _add_atomically(pointers: Values, value: Any) -> Values:
    """Add bf16 values by compare-and-swap, until no other thread interferes. Return the previous values.

    An address may occur more than once.
    """
    native = triton_interpreter._interpreter
    previous, remaining = np.zeros(len(pointers), np.uint16), np.arange(len(pointers))
    while remaining.size:
        at = pointers[remaining]
        seen = native.load(at, np.ones(len(at), bool), np.zeros(len(at), np.uint16), np.dtype(np.uint16))
        summed = round_to_nearest(widen(_Handle(seen, tl.bfloat16)) + widen(value)[remaining], "bf16")
        swapped = native.atomic_cas(at, seen.copy(), summed, native.MEM_SEMANTIC.ACQUIRE_RELEASE)
        previous[remaining] = swapped
        remaining = remaining[swapped != seen]
    return previous
