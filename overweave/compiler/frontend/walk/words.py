"""What the words of the language make of numbers, conditions and descriptors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from overweave.compiler.frontend.symbols.polynomials import (
    ZERO,
    Atom,
    LaneIndex,
    OpaqueResult,
    Polynomial,
    number,
    one,
    rounded_up,
    tags_of,
)
from overweave.compiler.frontend.symbols.values import (
    CASTS,
    CHOSEN,
    CLAMP,
    GREATEST,
    LEAST,
    NUMBERED,
    WIDE,
    Condition,
    Constant,
    Descriptor,
    Number,
    Several,
    SymbolicValue,
    as_condition,
    both,
    broadcast,
    denied,
    either,
    placed,
    unknown,
)

# Registers that tell programs apart, or SMs: which program runs where is the schedule's, too.
_OF_A_PROGRAM = re.compile(r"%n?(?:ctaid|clusterid|cluster_ctaid|cluster_ctarank|smid|gridid)")
SAME = ("multiple_of", "max_contiguous", "max_constancy")  # words that leave a number what it is
FOLDED: dict[str, Callable[..., int]] = {  # Results of numbers alone
    LEAST: min,
    GREATEST: max,
    "next_power_of_2": lambda value: 1 << max(0, value - 1).bit_length(),
    "BitAnd": lambda a, b: a & b,
    "BitOr": lambda a, b: a | b,
    "BitXor": lambda a, b: a ^ b,
}


def folded(poly: Polynomial, numbers: Mapping[str, int]) -> Polynomial:
    """A polynomial with numbers in the place of names, and of what is made of numbers alone."""

    def by(atom: Atom) -> Polynomial | None:
        if isinstance(atom, str):
            return number(numbers[atom]) if atom in numbers else None
        if isinstance(atom, OpaqueResult) and atom.of in FOLDED and atom.inputs:
            inputs = [folded(value, numbers).constant for value in atom.inputs]
            known = [value for value in inputs if value is not None]
            return number(FOLDED[atom.of](*known)) if len(known) == len(inputs) else None
        return None

    return poly.replaced(by)


def widened(value: Number | Condition, kept: list[bool]) -> SymbolicValue:
    """`value[:, None]`: its dimensions are those that are kept, in their order."""
    places = dict(enumerate(at for at, is_kept in enumerate(kept) if is_kept))
    if len(places) < value.rank:
        return unknown("[]", value)
    places = {at: to for at, to in places.items() if at < value.rank}
    if isinstance(value, Number):
        return Number(placed(value.poly, places), len(kept))
    parts = tuple(placed(part, places) for part in value.parts)
    return Condition(parts, len(kept), value.is_exact, value.tags)


def transposed(value: SymbolicValue) -> SymbolicValue:
    if isinstance(value, Number) and value.rank == 2:
        return Number(placed(value.poly, {0: 1, 1: 0}), 2)
    return value if isinstance(value, Number) and value.rank < 2 else unknown("T", value)


def _arange(args: list[SymbolicValue], named: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    if len(args) == 2 and all(isinstance(arg, Number) for arg in args):
        low, high = (arg.poly for arg in args if isinstance(arg, Number))
        return Number(low + one(LaneIndex(high - low, 0)), 1)
    return None


def _cdiv(args: list[SymbolicValue], named: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    if len(args) == 2 and isinstance(args[0], Number) and isinstance(args[1], Number):
        rank = max(args[0].rank, args[1].rank)
        return Number(rounded_up(broadcast(args[0], rank), broadcast(args[1], rank)), rank)
    return None


def _where(args: list[SymbolicValue], named: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    test = as_condition(args[0]) if args else Condition(())
    if len(args) == 3 and test.truth is not None:
        return args[1] if test.truth else args[2]
    if len(args) == 3 and isinstance(args[1], Number) and test.is_exact and len(test.parts) == 1:
        bound = broadcast(Number(test.parts[0], test.rank), args[1].rank) + args[1].poly
        if test.rank <= args[1].rank and not any(isinstance(atom, LaneIndex) for atom in bound.atoms):
            return _clamped(args[1], bound)
    return unknown("where", *args, tags=test.comes_from | {CHOSEN})


def _clamped(value: Number, bound: Any) -> Number:
    inputs = (value.poly, bound)
    return Number(one(OpaqueResult(CLAMP, inputs, tags_of(*inputs))), value.rank)


def _least(args: list[SymbolicValue], named: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    if len(args) == 2 and isinstance(args[0], Number) and isinstance(args[1], Number):
        left, right = args[0], args[1]
        for value, bound in ((left, right), (right, left)):
            if value.rank > bound.rank and bound.rank == 0:
                return _clamped(value, bound.poly + number(1))
    return _extreme(LEAST, args)


def _extreme(word: str, args: list[SymbolicValue]) -> SymbolicValue | None:
    """The least or the greatest of whole numbers."""
    values = [arg for arg in args if isinstance(arg, Number)]
    if len(values) != len(args) or len(args) < 2:
        return None
    rank = max(value.rank for value in values)
    polys = [broadcast(value, rank) for value in values]
    if len(set(polys)) == 1:
        return Number(polys[0], rank)
    known = [poly.constant for poly in polys if poly.constant is not None]
    if len(known) == len(polys):
        return Number(number(FOLDED[word](*known)), rank)
    return Number(one(OpaqueResult(word, tuple(polys), tags_of(*polys))), rank)


def _full(args: list[SymbolicValue], named: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    filled = args[1] if len(args) > 1 else named.get("value")
    rank = len(args[0].values) if args and isinstance(args[0], Several) else 1
    dtype = args[2] if len(args) > 2 else named.get("dtype")
    return _cast_to(Number(filled.poly, rank), dtype) if isinstance(filled, Number) else None


def _cast(args: list[SymbolicValue], named: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    dtype = args[1] if len(args) > 1 else named.get("dtype")
    if not args or named.get("bitcast") is not None:
        return None
    return _cast_to(args[0], dtype) if isinstance(args[0], Number) else args[0]


def _cast_to(value: Number, dtype: SymbolicValue | None) -> Number:
    """A number as another type holds it."""
    of = dtype.value if isinstance(dtype, Constant) and isinstance(dtype.value, str) else ""
    if dtype is None or of in WIDE or value.poly.constant == 0:
        return value
    known = of if of in CASTS else "a cast to a type that nothing tells"
    return Number(one(OpaqueResult(known, (value.poly,), tags_of(value.poly))), value.rank)


def _zeros(args: list[SymbolicValue], named: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    return Number(ZERO, len(args[0].values) if args and isinstance(args[0], Several) else 1)


def _broadcast_to(args: list[SymbolicValue], named: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    shape = args[1:] if len(args) > 2 else args[1].values if len(args) > 1 and isinstance(args[1], Several) else ()
    return Number(broadcast(args[0], len(shape)), len(shape)) if shape and isinstance(args[0], Number) else None


def _expand_dims(args: list[SymbolicValue], named: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    at = args[1] if len(args) > 1 else named.get("axis")
    if isinstance(args[0], Number | Condition) and isinstance(at, Number) and at.poly.constant is not None:
        kept, place = [True] * args[0].rank, at.poly.constant
        kept.insert(place if place >= 0 else len(kept) + 1 + place, False)
        return widened(args[0], kept)
    return None


def _reshape(args: list[SymbolicValue], named: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    """A block of one dimension among dimensions of one element each."""
    shape = args[1:] if len(args) > 2 else args[1].values if len(args) > 1 and isinstance(args[1], Several) else ()
    kept = [not (isinstance(each, Number) and each.poly.constant == 1) for each in shape]
    if args and isinstance(args[0], Number | Condition) and args[0].rank == 1 and sum(kept) == 1:
        return widened(args[0], kept)
    return None


def _assembly(args: list[SymbolicValue], named: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    """What assembly reads where a program runs numbers it, whatever it is given."""
    text = args[0] if args else named.get("asm")
    if isinstance(text, Constant) and isinstance(text.value, str) and _OF_A_PROGRAM.search(text.value):
        return unknown("inline assembly", tags=frozenset({NUMBERED}))
    return None


def _of_conditions(
    join: Callable[..., Condition],
) -> Callable[[list[SymbolicValue], Mapping[str, SymbolicValue]], SymbolicValue | None]:
    return lambda args, named: join(*map(as_condition, args))


def _same(args: list[SymbolicValue], named: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    return args[0] if args else None


def _descriptor(args: list[SymbolicValue], named: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    """A descriptor, `(base, shape, strides, block_shape)`; a block pointer has offsets before its block."""
    fourth = "offsets" if "offsets" in named or len(args) > 4 else "block_shape"
    names = ("base", "shape", "strides", fourth, "block_shape")
    given = dict(zip(names, args, strict=False)) | dict(named)
    block, strides = given.get("block_shape"), given.get("strides")
    base, offsets = given.get("base"), given.get("offsets")
    if not (isinstance(base, Number) and isinstance(block, Several) and isinstance(strides, Several)):
        return None
    starts = offsets.values if isinstance(offsets, Several) else tuple(Number(ZERO) for _ in block.values)
    shape = given.get("shape")
    ends = shape.values if isinstance(shape, Several) else ()
    polys = [_polys(each) for each in (strides.values, block.values, starts, ends)]
    return Descriptor(base.poly, *map(tuple, polys)) if all(len(one) == len(polys[1]) for one in polys) else None


def _polys(values: tuple[SymbolicValue, ...]) -> list[Any]:
    return [value.poly for value in values if isinstance(value, Number)]


def _advance(args: list[SymbolicValue], named: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    by = args[1] if len(args) > 1 else named.get("offsets")
    if args and isinstance(args[0], Descriptor) and isinstance(by, Several):
        steps = _polys(by.values)
        moved = tuple(old + step for old, step in zip(args[0].offsets, steps, strict=False))
        return replace(args[0], offsets=moved)
    return None


def _program(args: list[SymbolicValue], named: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    axis = args[0] if args else named.get("axis", Number(ZERO))
    inputs = (axis.poly,) if isinstance(axis, Number) else ()
    return Number(one(OpaqueResult("program_id", inputs, frozenset({NUMBERED}))))


def _programs(args: list[SymbolicValue], named: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    return Number(one(OpaqueResult("num_programs", (), frozenset({NUMBERED}))))


WORDS: dict[str, Callable[[list[SymbolicValue], Mapping[str, SymbolicValue]], SymbolicValue | None]] = {
    "arange": _arange,
    "cdiv": _cdiv,
    "where": _where,
    LEAST: _least,
    GREATEST: lambda args, named: _extreme(GREATEST, args),
    "full": _full,
    "zeros": _zeros,
    "broadcast_to": _broadcast_to,
    "expand_dims": _expand_dims,
    **dict.fromkeys(("reshape", "view"), _reshape),
    "inline_asm_elementwise": _assembly,
    "logical_and": _of_conditions(both),
    "logical_or": _of_conditions(either),
    "logical_not": _of_conditions(denied),
    "trans": lambda args, named: transposed(args[0]) if len(args) == 1 else None,
    "make_tensor_descriptor": _descriptor,
    "make_block_ptr": _descriptor,
    "advance": _advance,
    "program_id": _program,
    "num_programs": _programs,
    "cast": _cast,
    "to": _cast,
    **dict.fromkeys(SAME, _same),
    "int": _same,
    "constexpr": _same,
}
