"""The numbers of the table, as bits: those at which arithmetic differs, and some by chance. The same everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from campaigns.bits.operations import FLOATS, FP8

Bits = np.ndarray[Any, np.dtype[Any]]
TORCH = {"float8e4nv": torch.float8_e4m3fn, "float8e5": torch.float8_e5m2, "int1": torch.bool}
# Bits and bits of the mantissa of each, which are its code in the kernels, too.
FORMATS = {"bfloat16": (16, 7), "float16": (16, 10), "float32": (32, 23), "float64": (64, 52)} | {
    "float8e4nv": (8, 3),
    "float8e5": (8, 2),
}
_INTEGER = 63
_OVERFLOWS_E4M3 = 464.0
PAIRED = 32  # numbers of each dtype of which all pairs are taken, where both are of one; of others the first half
LANES, ROWS = 32, 32
SIDE, DEPTH = 16, 32
_BOUNDS = (0, 1, 2, 7, 8, 15, 16, 24, 31, 32, 52, 53, 62, 63, 64)  # powers of two that end integers or mantissas


def code(dtype: str) -> int:
    """As `kernels._put` stores it."""
    return 64 * FORMATS[dtype][0] + FORMATS[dtype][1] if dtype in FORMATS else 64 * width_of(dtype) + _INTEGER


def torch_dtype(dtype: str) -> torch.dtype:
    """Of a dtype of the Triton language."""
    found: torch.dtype = TORCH.get(dtype) or getattr(torch, dtype)
    return found


def paired(dtype: str, other: str) -> Bits:
    """One side of a binary operation."""
    return few(dtype)[: PAIRED if dtype == other else PAIRED // 2]


def few(dtype: str) -> Bits:
    """The first are those at which arithmetic differs."""
    if dtype == "int8":
        special = [0, 1, -1, 127, -128, 2, 3, 7, -7, 64, -64, 100, 5, -3, 85, -86]
        return _filled(np.array(special, np.int8).view(np.uint8), dtype, PAIRED)
    width, mantissa = FORMATS[dtype]
    one, infinity = _one(dtype), _infinity(dtype)
    sign = 1 << (width - 1)
    special = [0, sign, one, one | sign, infinity, infinity | sign, _nan(dtype), _largest(dtype), 1, sign | 1]
    special += [one + 1, one + (1 << mantissa), 1 << mantissa, one + (3 << mantissa) // 2 | sign, one - 1, one + 3]
    return _filled(np.array(special, np.uint64), dtype, PAIRED)


def many(dtype: str) -> Bits:
    """Sources of casts: all numbers of a byte, and 256 of others, with halves between numbers of narrower ones."""
    if dtype == "int1":
        return np.array([0, 1] * 8, np.uint8)
    if width_of(dtype) == 8:
        return np.arange(256, dtype=np.uint8)
    if dtype in FLOATS:
        chosen = np.concatenate([few(dtype)[:16], _as_bits(_bounds(), dtype), _as_bits(_ties(dtype), dtype)])
    else:
        chosen = _as_integers(dtype)
    return _filled(chosen, dtype, 256)


def rows(dtype: str) -> Bits:
    """[ROWS, LANES] to be reduced: by chance of every size, small ones, ties, and some with a NaN."""
    generator = np.random.default_rng(7)
    if dtype == "int8":
        return generator.integers(0, 256, (ROWS, LANES)).astype(np.uint8)
    numbers = generator.standard_normal((ROWS, LANES))
    numbers[8:16] = generator.integers(-4, 5, (8, LANES))
    numbers[16:20] *= 2.0 ** generator.integers(-9, 9, (4, LANES))
    bits = _as_bits(numbers.ravel(), dtype).reshape(ROWS, LANES)
    bits[20:26] = _filled(few(dtype)[:0], dtype, 6 * LANES).reshape(6, LANES)
    for row in range(26, ROWS):
        bits[row, generator.integers(0, LANES, row - 25)] = _nan(dtype)
    return bits


def matrix(dtype: str, seed: int) -> Bits:
    """[SIDE * DEPTH] of which every sum of products is exact; the last row of the first side holds a NaN."""
    numbers = np.random.default_rng(seed).integers(-3, 4, SIDE * DEPTH)
    if dtype == "int8":
        return numbers.astype(np.int8).view(np.uint8)
    bits = _as_bits(numbers.astype(float), dtype)
    if seed == 0:
        bits[-1] = _nan(dtype)
    return bits


def dtype_of(found: int) -> str:
    """The dtype that has a code; of integers one of the width, whatever the sign."""
    return {code(name): name for name in (*FORMATS, "int1", "int8", "int16", "int32", "int64")}[found]


def numbers_of(bits: Bits, dtype: str) -> Bits:
    """Floating-point numbers as float64."""
    stored = torch.from_numpy(bits.astype(f"uint{width_of(dtype)}").view(f"int{width_of(dtype)}").copy())
    found: Bits = stored.view(torch_dtype(dtype)).double().numpy()
    return found


def width_of(dtype: str) -> int:
    return FORMATS[dtype][0] if dtype in FORMATS else 1 if dtype == "int1" else int(dtype.strip("uint"))


def unsigned(dtype: str) -> np.dtype[Any]:
    return np.dtype(f"uint{max(8, width_of(dtype))}")


def _filled(special: Bits, dtype: str, count: int) -> Bits:
    """The special ones, and bits by chance up to a count."""
    if len(special) > count:
        raise ValueError(f"{len(special)} chosen numbers of {dtype} are more than {count}")
    chance = np.random.default_rng(len(dtype) + count).integers(0, 2**64, count - len(special), np.uint64)
    bits: Bits = np.concatenate([special.astype(np.uint64), chance >> np.uint64(64 - width_of(dtype))])
    return bits.astype(unsigned(dtype))


def _one(dtype: str) -> int:
    width, mantissa = FORMATS[dtype]
    return ((1 << (width - 2 - mantissa)) - 1) << mantissa


def _infinity(dtype: str) -> int:
    """Of e4m3, which has none, the number below its largest."""
    width, mantissa = FORMATS[dtype]
    return 0x7D if dtype == "float8e4nv" else ((1 << (width - 1 - mantissa)) - 1) << mantissa


def _nan(dtype: str) -> int:
    return 0x7F if dtype == "float8e4nv" else _infinity(dtype) | 1 << (FORMATS[dtype][1] - 1)


def _largest(dtype: str) -> int:
    return 0x7E if dtype == "float8e4nv" else _infinity(dtype) - 1


def _as_bits(numbers: Bits, dtype: str) -> Bits:
    width = width_of(dtype)
    signed = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[width]
    held = torch.from_numpy(np.asarray(numbers, np.float64)).to(torch_dtype(dtype)).view(signed)
    bits: Bits = held.numpy().view(unsigned(dtype))
    if dtype == "float8e4nv":  # newer torch makes the largest number of what overflows, and older NaN
        bits = np.where(np.abs(numbers) > _OVERFLOWS_E4M3, bits | 0x7F, bits).astype(np.uint8)
    return bits


def _bounds() -> Bits:
    """Where integers end, and a little beside."""
    ends = [2.0**power for power in _BOUNDS]
    return np.array([sign * (end + by) for end in ends for by in (-0.5, 0.0, 0.5) for sign in (1, -1)])


def _ties(dtype: str) -> Bits:
    """Halfway between neighbours of narrower dtypes, and one unit of this dtype to both sides; beyond their largest."""
    found: list[float] = []
    generator = np.random.default_rng(3)
    for narrow in ("bfloat16", "float16", *FP8):
        if FORMATS[narrow][1] >= FORMATS[dtype][1]:
            continue
        lower = generator.integers(0, _largest(narrow), 9).astype(np.uint64)
        lower[:3] = 0, 1, _largest(narrow) - 1
        one, other = numbers_of(lower, narrow), numbers_of(lower + np.uint64(1), narrow)
        for value in (*((one + other) / 2), float(numbers_of(np.array([_largest(narrow)]), narrow)[0]) * 1.04):
            bits = _as_bits(np.array([value]), dtype).astype(np.uint64)
            found += [*numbers_of(np.concatenate([bits, bits + np.uint64(1), bits - np.uint64(bits[0] > 0)]), dtype)]
    return np.array(found)


def _as_integers(dtype: str) -> Bits:
    """Ends of integers, and halves of what floating-point dtypes hold of them."""
    width = width_of(dtype)
    chosen = [sign * (2**power + by) for power in range(width) for by in (-1, 0, 1) for sign in (1, -1)]
    halves = [
        2**power + 2 ** (power - 1 - bits) + by
        for bits in (7, 10, 23)
        for power in (bits + 2, width - 2)
        for by in (0, 1)
    ]
    wrapped = [value % 2**width for value in (*chosen[:: max(1, len(chosen) // 180)], *halves)]
    return np.array(wrapped, np.uint64)
