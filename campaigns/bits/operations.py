"""Which operation takes which dtypes, as Triton 3.6 compiles them for Hopper: what is not here it refuses.

Two sides of one fp8 dtype have no arithmetic: fp8 is stored, cast, selected, reduced by maximum and minimum, and
multiplied by `tl.dot`. Beside another dtype of floating point fp8 is widened first.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

# Slots of `kernels.cast_kernel`.
DTYPES = (
    *("bfloat16", "float16", "float32", "float64", "float8e4nv", "float8e5"),
    *("int1", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
)
FLOATS, FP8 = DTYPES[:6], DTYPES[4:6]
NARROW = ("bfloat16", "float16", "float32", *FP8, "int8")  # of what arithmetic is asked, each with each
BITWISE = ("and", "or", "xor", "shl", "shr", "floordiv", "rem")
BINARY = (
    *("add", "sub", "mul", "div", "mod", "maximum", "maximum of NaN", "minimum", "minimum of NaN"),
    *("eq", "ne", "lt", "le", "gt", "ge", "where", "fma", "clamp", "clamp of NaN"),
    *BITWISE,
)
UNARY = ("neg", "abs", "x * 1.5", "3 - x", "x > 0", "relu", "full", "invert", "masked", "full of 1e-7", "0.1 - x")
REDUCTIONS = (
    *("sum", "max", "min", "argmax", "argmin", "argmax of fast ties", "cumsum", "cumprod", "sort", "reduce by *"),
    *("cumsum in reverse", "xor_sum"),
)
# What the hardware does not round: `div.full.f32` is 2 units in the last place away at most.
APPROXIMATE = ("div",)
# What is not the same on all lanes of a warp, as what they combine with comes from elsewhere: the first lane's counts,
# which is the one that stores a number.
OF_FIRST_LANE = ("argmax", "argmin", "argmax of fast ties")
ROUNDINGS = (None, "rtz")
DOTS = (*((dtype, dtype) for dtype in ("bfloat16", "float16", *FP8, "int8")), FP8, FP8[::-1])


class Launch(NamedTuple):
    """One kernel: `kind` names it, `dtypes` are its operands', `chosen` its operations. rounding: of a cast."""

    kind: str
    dtypes: tuple[str, ...]
    chosen: tuple[str, ...]
    rounding: str | None = None

    @property
    def every(self) -> tuple[str, ...]:
        """All operations of such a kernel, by slot."""
        return {"binary": BINARY, "unary": UNARY, "cast": DTYPES, "reduction": REDUCTIONS, "dot": ("dot",)}[self.kind]

    @property
    def mask(self) -> int:
        """A bit for each chosen slot."""
        return sum(1 << self.every.index(name) for name in self.chosen)

    def name(self, operation: str) -> str:
        """Of a row of the table."""
        return " ".join((self.kind, *self.dtypes, operation, *([self.rounding] if self.rounding else [])))


def launches() -> Iterator[Launch]:
    """Every kernel of the table."""
    yield from (Launch("binary", pair, _binary(*pair)) for pair in product(NARROW, NARROW) if _binary(*pair))
    yield from (Launch("unary", (dtype,), _unary(dtype)) for dtype in NARROW)
    for dtype, rounding in product(DTYPES, ROUNDINGS):
        if chosen := tuple(target for target in DTYPES if _casts(dtype, target, rounding)):
            yield Launch("cast", (dtype,), chosen, rounding)
    yield from (Launch("reduction", (dtype,), _reductions(dtype)) for dtype in NARROW)
    yield from (Launch("dot", pair, ("dot",)) for pair in DOTS)


def _binary(left: str, right: str) -> tuple[str, ...]:
    if left == right == "int8":
        return tuple(name for name in BINARY if name not in ("mod", "fma", "clamp", "clamp of NaN"))
    if left == right and left in FP8:
        return ("where",)
    if "int8" in (left, right) and (left in FP8 or right in FP8):
        return ()
    refused = [*BITWISE]
    if right in FP8:
        refused += ["clamp", "clamp of NaN"]
    if left in FP8 and right in FP8:  # fp16 is divided as fp32, and what fp8 becomes is not
        refused += ["div", "mod"]
    return tuple(name for name in BINARY if name not in refused)


def _unary(dtype: str) -> tuple[str, ...]:
    if dtype in FP8:
        return ("abs", "masked")
    refused = ("full", "full of 1e-7") if dtype == "int8" else ("invert",)
    return tuple(name for name in UNARY if name not in refused)


def _casts(source: str, target: str, rounding: str | None) -> bool:
    if rounding is not None:
        return source == "float32" and target in ("bfloat16", "float16", "float8e5")
    if source in FP8 or target in FP8:
        other = target if source in FP8 else source
        return other in ("bfloat16", "float16", "float32")
    return source != target


def _reductions(dtype: str) -> tuple[str, ...]:
    if dtype in FP8:
        return ("max", "min")
    return tuple(name for name in REDUCTIONS if dtype == "int8" or name != "xor_sum")
