"""The values of an author's kernel as the compiler reckons with them: polynomials, conditions, descriptors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from msgspec import Struct

from overweave.compiler.frontend.symbols.polynomials import (
    ZERO,
    Atom,
    BlockOf,
    LaneIndex,
    LoopIndex,
    OpaqueResult,
    Polynomial,
    Quotient,
    number,
    one,
    tags_of,
)

LOADED, CHOSEN, CARRIED, NUMBERED, CALLERS, ELSEWHERE = (
    "what is loaded",
    "a condition",
    "a variable that goes on from turn to turn",
    "a program's number",
    "a choice that the caller makes",
    "a function that no file here shows",
)
CLAMP = "clamp"  # Result of (value, bound): the value where it is less than the bound, something below it elsewhere
LEAST, GREATEST = "minimum", "maximum"  # Results of numbers
CASTS = {  # Result of one number -> the whole numbers that the type holds exactly
    "int1": (0, 1),
    "int8": (-(1 << 7), (1 << 7) - 1),
    "uint8": (0, (1 << 8) - 1),
    "int16": (-(1 << 15), (1 << 15) - 1),
    "uint16": (0, (1 << 16) - 1),
    "uint32": (0, (1 << 32) - 1),
    "uint64": (0, (1 << 64) - 1),
    "float8e4nv": (-(1 << 4), 1 << 4),
    "float8e5": (-(1 << 3), 1 << 3),
    "bfloat16": (-(1 << 8), 1 << 8),
    "float16": (-(1 << 11), 1 << 11),
    "float32": (-(1 << 24), 1 << 24),
    "float64": (-(1 << 53), 1 << 53),
}
WIDE = ("int32", "int64")  # what Triton reckons addresses in
_fresh = count()


class Number(Struct, frozen=True):
    """A whole number, or a tensor of `rank` dimensions of such: a polynomial; pointers are those of their parameter."""

    poly: Polynomial
    rank: int = 0


class Condition(Struct, frozen=True):
    """True where every part is above zero. is_exact: whether the parts are all that it says. tags: of the rest.
    denied: what holds where it does not, if that is known though the condition itself is not.
    """

    parts: tuple[Polynomial, ...]
    rank: int = 0
    is_exact: bool = True
    tags: frozenset[str] = frozenset()
    denied: Condition | None = None

    @property
    def truth(self) -> bool | None:
        """Whether it holds wherever it is asked; None if that depends."""
        known = [part.constant for part in self.parts]
        if any(part is not None and part <= 0 for part in known):
            return False
        return True if self.is_exact and all(part is not None for part in known) else None

    @property
    def comes_from(self) -> frozenset[str]:
        return self.tags | tags_of(*self.parts)


class Constant(Struct, frozen=True):
    """None, a text or a fraction that a call passes, or a word of the language."""

    value: Any


class Several(Struct, frozen=True):
    """A tuple."""

    values: tuple[SymbolicValue, ...]


class Descriptor(Struct, frozen=True):
    """A tensor descriptor or block pointer: elements `offset + lane` of dimensions, `stride` apart, up to `shape`."""

    pointer: Polynomial
    strides: tuple[Polynomial, ...]
    block: tuple[Polynomial, ...]
    offsets: tuple[Polynomial, ...]
    shape: tuple[Polynomial, ...]

    def place(self, offsets: Sequence[Polynomial]) -> Number:
        """Where a block lies."""
        made = self.pointer
        for at, (stride, length, offset) in enumerate(zip(self.strides, self.block, offsets, strict=True)):
            lane = ZERO if length.constant == 1 else one(LaneIndex(length, at))
            made = made + (offset + lane) * stride
        return Number(made, len(self.block))


SymbolicValue = Number | Condition | Constant | Several | Descriptor


def unknown(of: str, *values: SymbolicValue, tags: frozenset[str] = frozenset()) -> Number:
    """What an operation makes that is no polynomial: the same for the same numbers, another thing each time else."""
    inputs = [value.poly for value in values if isinstance(value, Number)]
    if len(inputs) == len(values) and values and not tags:
        rank = max(value.rank for value in values if isinstance(value, Number))
        aligned = (broadcast(value, rank) for value in values if isinstance(value, Number))
        return Number(one(OpaqueResult(of, tuple(aligned), tags_of(*inputs))), rank)
    made = tags.union(*map(comes_from, values))
    return Number(one(OpaqueResult(f"{of} {next(_fresh)}", (), made)))


def comes_from(value: SymbolicValue) -> frozenset[str]:
    """The tags of what a value is made from."""
    if isinstance(value, Number):
        return tags_of(value.poly)
    if isinstance(value, Condition):
        return value.comes_from
    if isinstance(value, Several):
        return frozenset[str]().union(*map(comes_from, value.values))
    if isinstance(value, Descriptor):
        return tags_of(value.pointer, *value.strides, *value.offsets)
    return frozenset()


def placed(poly: Polynomial, places: Mapping[int, int]) -> Polynomial:
    """The same lanes along other dimensions."""

    def moved(atom: Atom) -> Polynomial | None:
        return one(LaneIndex(atom.length, places[atom.place])) if isinstance(atom, LaneIndex) else None

    return poly if all(old == new for old, new in places.items()) else poly.replaced(moved)


def broadcast(value: Number, rank: int) -> Polynomial:
    """Its polynomial as that of a tensor of more dimensions, which come before its own."""
    behind = rank - value.rank
    return placed(value.poly, {at: at + behind for at in range(value.rank)}) if behind > 0 else value.poly


def combined(left: Number, right: Number, sign: str) -> Number:
    """Sum, difference or product."""
    rank = max(left.rank, right.rank)
    a, b = broadcast(left, rank), broadcast(right, rank)
    return Number(a + b if sign == "+" else a - b if sign == "-" else a * b, rank)


def remainder(left: Number, right: Number) -> Number:
    """`left % right`, by the quotient: where both come together again they are the number itself."""
    rank = max(left.rank, right.rank)
    a, b = broadcast(left, rank), broadcast(right, rank)
    if a.constant is not None and b.constant:
        return Number(number(a.constant % b.constant), rank)
    return Number(ZERO if b.constant == 1 else a - b * one(Quotient(a, b)), rank)


def compared(left: Number, right: Number, sign: str) -> Condition:
    """A comparison of numbers."""
    rank = max(left.rank, right.rank)
    a, b = broadcast(left, rank), broadcast(right, rank)
    if sign in ("<", "<="):
        return _told(b - a + number(int(sign == "<=")), rank)
    if sign in (">", ">="):
        return _told(a - b + number(int(sign == ">=")), rank)
    difference = (a - b).constant
    if difference is not None:
        return Condition(() if (difference == 0) == (sign == "==") else (ZERO,), rank)
    return Condition((), rank, is_exact=False, tags=tags_of(a, b) | ({CHOSEN} if differs(a - b) else set()))


def _told(part: Polynomial, rank: int) -> Condition:
    return Condition(() if (part.constant or 0) > 0 else (part,), rank)


def both(left: Condition, right: Condition) -> Condition:
    """What holds where both do."""
    rank = max(left.rank, right.rank)
    parts = [broadcast(Number(part, each.rank), rank) for each in (left, right) for part in each.parts]
    exact = left.is_exact and right.is_exact
    return Condition(tuple(dict.fromkeys(parts)), rank, exact, left.tags | right.tags)


def denied(value: Condition) -> Condition:
    """What holds where a condition does not."""
    if value.denied is not None:
        return value.denied
    if value.is_exact and len(value.parts) == 1:
        return Condition(() if value.truth is False else (number(1) - value.parts[0],), value.rank)
    if value.truth is not None:
        return Condition((ZERO,) if value.truth else (), value.rank)
    return either(value, value)


def either(left: Condition, right: Condition) -> Condition:
    """What holds where one of two does."""
    if left.truth or right.truth:
        return Condition(())
    if left.truth is False or right.truth is False:
        return right if left.truth is False else left
    met = both(left, right)
    tags = met.comes_from | ({CHOSEN} if met.parts else set())
    are_single = all((each.is_exact and len(each.parts) == 1) or each.denied is not None for each in (left, right))
    other = both(denied(left), denied(right)) if are_single else None
    return Condition((), met.rank, is_exact=False, tags=tags, denied=other)


def as_condition(value: SymbolicValue) -> Condition:
    """A value where a condition is asked for."""
    if isinstance(value, Condition):
        return value
    if isinstance(value, Constant):
        return Condition(() if value.value else (ZERO,))
    if isinstance(value, Number) and value.poly.constant is not None:
        return Condition(() if value.poly.constant else (ZERO,), value.rank)
    rank = value.rank if isinstance(value, Number) else 0
    is_callers = isinstance(value, Number) and not differs(value.poly)
    return Condition((), rank, is_exact=False, tags=comes_from(value) | (set() if is_callers else {CHOSEN}))


def differs(poly: Polynomial) -> bool:
    """Whether a number may differ from tile to tile, turn to turn or lane to lane."""
    return any(
        isinstance(atom, BlockOf | LaneIndex | LoopIndex)
        or (isinstance(atom, OpaqueResult) and (bool(atom.tags) or not atom.inputs))
        for atom in poly.atoms
    )


def is_callers(condition: Condition) -> bool:
    """Whether a condition is the same in every tile, turn and lane of a call."""
    return not condition.comes_from and not any(map(differs, condition.parts))


def joined(left: SymbolicValue | None, right: SymbolicValue | None, by: Condition) -> SymbolicValue:
    """A variable that one of two ways has left there. by: what decides which."""
    if left == right and left is not None:
        return left
    tags = frozenset({CALLERS}) if is_callers(by) else by.comes_from | {CHOSEN}
    return unknown("a choice", *(each for each in (left, right) if each is not None), tags=tags)
