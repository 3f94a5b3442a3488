"""Conversions of bf16, fp16 and fp8 numbers of interpreted kernels, rounded as a GPU rounds.

numpy has no bf16 and no fp8: their numbers are kept as bits. A result is rounded twice, first to float64 "to odd": its
last bit is set if the rounding was inexact. Then the second rounding gives what a single one would.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
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
