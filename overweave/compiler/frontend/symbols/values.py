"""The symbolic values of an author's kernel: polynomials, conditions, descriptors.

A tag names an origin of a value that no address may depend on, such as loaded data.
"""

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
    atom_poly,
    const_poly,
    tags_of,
)

LOADED, CONDITIONAL, LOOP_CARRIED, PROGRAM_ID, CALLER_CHOICE, UNSEEN_FUNCTION = (
    "loaded data",
    "a condition",
    "a variable that is carried between iterations",
    "a program id",
    "a choice that the caller makes",
    "a function that no file here shows",
)
CLAMP = "clamp"  # operation on (value, bound): the value if it is below the bound, else anything below the bound
MINIMUM, MAXIMUM = "minimum", "maximum"  # operations on numbers
CASTS = {  # operation (the dtype) -> (low, high) of the integers that the dtype represents exactly
    "int1": (0, 1),
    "int8": (-(1 << 7), (1 << 7) - 1),
    "uint8": (0, (1 << 8) - 1),
    "int16": (-(1 << 15), (1 << 15) - 1),
    "uint16": (0, (1 << 16) - 1),
    "int32": (-(1 << 31), (1 << 31) - 1),
    "int64": (-(1 << 63), (1 << 63) - 1),
    "uint32": (0, (1 << 32) - 1),
    "uint64": (0, (1 << 64) - 1),
    "float8e4nv": (-(1 << 4), 1 << 4),
    "float8e5": (-(1 << 3), 1 << 3),
    "bfloat16": (-(1 << 8), 1 << 8),
    "float16": (-(1 << 11), 1 << 11),
    "float32": (-(1 << 24), 1 << 24),
    "float64": (-(1 << 53), 1 << 53),
}
ADDRESS_DTYPES = ("int32", "int64")  # dtypes in which Triton computes addresses
NARROW = CASTS.keys() - {*ADDRESS_DTYPES, "uint32", "uint64"}
_next_id = count()


class Number(Struct, frozen=True):
    """An integer, or a tensor of `rank` dimensions of integers. A pointer is its parameter's name plus an offset."""

    poly: Polynomial
    rank: int = 0


class Condition(Struct, frozen=True):
    """A condition that implies `part > 0` for every part; equivalent to that if is_exact.

    Without parts it is True; `(ZERO,)` is False. tags: origins of what the parts leave out. negation: the exact
    negation, of some conditions that are not exact themselves.
    """

    parts: tuple[Polynomial, ...]
    rank: int = 0
    is_exact: bool = True
    tags: frozenset[str] = frozenset()
    negation: Condition | None = None

    @property
    def truth(self) -> bool | None:
        """True if it always holds, False if it never does, None if that depends."""
        constants = [part.constant for part in self.parts]
        if any(part is not None and part <= 0 for part in constants):
            return False
        return True if self.is_exact and all(part is not None for part in constants) else None

    @property
    def all_tags(self) -> frozenset[str]:
        return self.tags | tags_of(*self.parts)


class Constant(Struct, frozen=True):
    """A value that is not an integer: None, a string or a float that a call passes, or a name such as a dtype."""

    value: Any


class TupleValue(Struct, frozen=True):
    """A tuple of values."""

    values: tuple[SymbolicValue, ...]


class Descriptor(Struct, frozen=True):
    """A tensor descriptor or block pointer: elements `offset + lane` below `shape`, `stride` apart."""

    pointer: Polynomial
    strides: tuple[Polynomial, ...]
    block: tuple[Polynomial, ...]
    offsets: tuple[Polynomial, ...]
    shape: tuple[Polynomial, ...]

    def address(self, offsets: Sequence[Polynomial]) -> Number:
        """Return the addresses of the block at these offsets: a Number of the block's rank."""
        address = self.pointer
        for at, (stride, length, offset) in enumerate(zip(self.strides, self.block, offsets, strict=True)):
            lane = ZERO if length.constant == 1 else atom_poly(LaneIndex(length, at))
            address = address + (offset + lane) * stride
        return Number(address, len(self.block))


SymbolicValue = Number | Condition | Constant | TupleValue | Descriptor


def opaque(of: str, *values: SymbolicValue, tags: frozenset[str] = frozenset()) -> Number:
    """Return an opaque result. It equals another result only if all inputs are equal Numbers and no tag is given.

    of: names the operation.
    """
    inputs = [value.poly for value in values if isinstance(value, Number)]
    if len(inputs) == len(values) and values and not tags:
        rank = max(value.rank for value in values if isinstance(value, Number))
        aligned = (broadcast(value, rank) for value in values if isinstance(value, Number))
        return Number(atom_poly(OpaqueResult(of, tuple(aligned), tags_of(*inputs))), rank)
    all_tags = tags.union(*map(value_tags, values))
    return Number(atom_poly(OpaqueResult(f"{of} {next(_next_id)}", (), all_tags)))


def unknown(of: str) -> Number:
    """Return an unknown value that is the same in every tile, iteration and lane."""
    return Number(atom_poly(OpaqueResult(f"{of} {next(_next_id)}", (ZERO,))))


def narrow_dtype(value: Number) -> str:
    """Return the dtype of a number that is cast to less than 32 bits; empty for any other."""
    atoms = {atom for monomial, _ in value.poly.terms for atom in monomial if not isinstance(atom, str)}
    casts = [atom.operation for atom in atoms if isinstance(atom, OpaqueResult) and atom.operation in NARROW]
    return max(casts, key=lambda dtype: CASTS[dtype][1]) if casts and len(casts) == len(atoms) else ""


def narrowed(result: Number, *operands: Number) -> Number:
    """Return the result of an operation, cast to the dtype of its operands where all of them are narrow or constant."""
    dtypes = [narrow_dtype(one) for one in operands]
    wide = [
        one for one, dtype in zip(operands, dtypes, strict=True) if not dtype and not one.poly.names >= one.poly.atoms
    ]
    if wide or not any(dtypes) or result.poly.constant is not None:
        return result
    dtype = max(filter(None, dtypes), key=lambda each: CASTS[each][1])
    return Number(atom_poly(OpaqueResult(dtype, (result.poly,), tags_of(result.poly))), result.rank)


def value_tags(value: SymbolicValue) -> frozenset[str]:
    """Return the tags of everything that a value is computed from."""
    if isinstance(value, Number):
        return tags_of(value.poly)
    if isinstance(value, Condition):
        return value.all_tags
    if isinstance(value, TupleValue):
        return frozenset[str]().union(*map(value_tags, value.values))
    if isinstance(value, Descriptor):
        return tags_of(value.pointer, *value.strides, *value.offsets, *value.shape)
    return frozenset()


def move_lanes(poly: Polynomial, dims: Mapping[int, int]) -> Polynomial:
    """Move lanes to other dimensions. dims: old dimension -> new dimension."""

    def moved_lane(atom: Atom) -> Polynomial | None:
        return atom_poly(LaneIndex(atom.length, dims[atom.dim])) if isinstance(atom, LaneIndex) else None

    return poly if all(old == new for old, new in dims.items()) else poly.substitute(moved_lane)


def broadcast(value: Number, rank: int) -> Polynomial:
    """Broadcast to `rank` dimensions: new dimensions lead, so lanes move back. Return the polynomial."""
    added = rank - value.rank
    return move_lanes(value.poly, {at: at + added for at in range(value.rank)}) if added > 0 else value.poly


def arithmetic(left: Number, right: Number, sign: str) -> Number:
    """Return `left sign right`; sign: `+`, `-` or `*`."""
    rank = max(left.rank, right.rank)
    a, b = broadcast(left, rank), broadcast(right, rank)
    return Number(a + b if sign == "+" else a - b if sign == "-" else a * b, rank)


def remainder(left: Number, right: Number) -> Number:
    """Return `left % right` as `left - right * (left // right)`, so that `x % n + n * (x // n)` cancels to x."""
    rank = max(left.rank, right.rank)
    a, b = broadcast(left, rank), broadcast(right, rank)
    if a.constant is not None and b.constant:
        return Number(const_poly(a.constant % b.constant), rank)
    return Number(ZERO if b.constant == 1 else a - b * atom_poly(Quotient(a, b)), rank)


def compare(left: Number, right: Number, sign: str) -> Condition:
    """Return the condition `left sign right`."""
    rank = max(left.rank, right.rank)
    a, b = broadcast(left, rank), broadcast(right, rank)
    if sign in ("<", "<="):
        return _positive(b - a + const_poly(int(sign == "<=")), rank)
    if sign in (">", ">="):
        return _positive(a - b + const_poly(int(sign == ">=")), rank)
    difference = (a - b).constant
    if difference is not None:
        return Condition(() if (difference == 0) == (sign == "==") else (ZERO,), rank)
    equal = Condition((a - b + const_poly(1), b - a + const_poly(1)), rank)
    if sign == "==":
        return equal
    tags = tags_of(a, b) | ({CONDITIONAL} if varies(a - b) else set())
    return Condition((), rank, is_exact=False, tags=tags, negation=equal)


def _positive(part: Polynomial, rank: int) -> Condition:
    """Return the condition `part > 0`."""
    return Condition(() if (part.constant or 0) > 0 else (part,), rank)


def logical_and(left: Condition, right: Condition) -> Condition:
    """Return the conjunction of two conditions."""
    rank = max(left.rank, right.rank)
    parts = [broadcast(Number(part, each.rank), rank) for each in (left, right) for part in each.parts]
    is_exact = left.is_exact and right.is_exact
    return Condition(tuple(dict.fromkeys(parts)), rank, is_exact, left.tags | right.tags)


def logical_not(value: Condition) -> Condition:
    """Return the negation; exact for a single inequality: `not (p > 0)` is `1 - p > 0`."""
    if value.negation is not None:
        return value.negation
    if value.is_exact and len(value.parts) == 1:
        return Condition(() if value.truth is False else (const_poly(1) - value.parts[0],), value.rank)
    if value.truth is not None:
        return Condition((ZERO,) if value.truth else (), value.rank)
    return logical_or(value, value)  # unknown, with the same tags


def logical_or(left: Condition, right: Condition) -> Condition:
    """Return the disjunction. Its tags are known, and its negation if each side is one inequality."""
    if left.truth or right.truth:
        return Condition(())
    if left.truth is False or right.truth is False:
        return right if left.truth is False else left
    conjunction = logical_and(left, right)
    tags = conjunction.all_tags | ({CONDITIONAL} if conjunction.parts else set())
    are_single = all((each.is_exact and len(each.parts) == 1) or each.negation is not None for each in (left, right))
    negation = logical_and(logical_not(left), logical_not(right)) if are_single else None
    return Condition((), conjunction.rank, is_exact=False, tags=tags, negation=negation)


def as_condition(value: SymbolicValue) -> Condition:
    """Convert a value to a condition: its truth."""
    if isinstance(value, Condition):
        return value
    if isinstance(value, Constant):
        return Condition(() if value.value else (ZERO,))
    if isinstance(value, Number) and value.poly.constant is not None:
        return Condition(() if value.poly.constant else (ZERO,), value.rank)
    rank = value.rank if isinstance(value, Number) else 0
    is_uniform_number = isinstance(value, Number) and not varies(value.poly)
    return Condition((), rank, is_exact=False, tags=value_tags(value) | (set() if is_uniform_number else {CONDITIONAL}))


def varies(poly: Polynomial) -> bool:
    """Whether a number may differ between tiles, iterations or lanes."""
    return any(
        isinstance(atom, BlockOf | LaneIndex | LoopIndex)
        or (isinstance(atom, OpaqueResult) and (bool(atom.tags) or not atom.inputs))
        for atom in poly.atoms
    )


def is_uniform(condition: Condition) -> bool:
    """Whether a condition is the same in every tile, iteration and lane of a call."""
    return not condition.all_tags and not any(map(varies, condition.parts))


def merge_branches(left: SymbolicValue | None, right: SymbolicValue | None, by: Condition) -> SymbolicValue:
    """Return the value of a variable after an `if` whose branches set it to left and right. by: the condition."""
    if left == right and left is not None:
        return left
    tags = frozenset({CALLER_CHOICE}) if is_uniform(by) else by.all_tags | {CONDITIONAL}
    return opaque("a choice", *(each for each in (left, right) if each is not None), tags=tags)
