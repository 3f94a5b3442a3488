"""Functions of `tl` on symbolic values. Each returns None for arguments that it cannot express."""

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
    atom_poly,
    ceil_div,
    const_poly,
    tags_of,
)
from overweave.compiler.frontend.symbols.values import (
    ADDRESS_DTYPES,
    CASTS,
    CLAMP,
    CONDITIONAL,
    MAXIMUM,
    MINIMUM,
    PROGRAM_ID,
    UNSEEN_FUNCTION,
    Condition,
    Constant,
    Descriptor,
    Number,
    SymbolicValue,
    TupleValue,
    as_condition,
    broadcast,
    logical_and,
    logical_not,
    logical_or,
    move_lanes,
    narrow_dtype,
    opaque,
    value_tags,
)

# PTX registers that differ between programs or SMs: which program runs where belongs to the schedule.
_PROGRAM_REGISTER = re.compile(r"%n?(?:ctaid|clusterid|cluster_ctaid|cluster_ctarank|smid|gridid)")

IDENTITIES = ("multiple_of", "max_contiguous", "max_constancy")  # hints that return their argument
CONSTANT_FOLDS: dict[str, Callable[..., int]] = {  # operation -> its value on constants
    MINIMUM: min,
    MAXIMUM: max,
    "next_power_of_2": lambda value: 1 << max(0, value - 1).bit_length(),
    "BitAnd": lambda a, b: a & b,
    "BitOr": lambda a, b: a | b,
    "BitXor": lambda a, b: a ^ b,
}


def substitute_ints(poly: Polynomial, int_args: Mapping[str, int]) -> Polynomial:
    """Replace names by integers, and fold operations whose inputs are then all constant."""

    def replacement(atom: Atom) -> Polynomial | None:
        if isinstance(atom, str):
            return const_poly(int_args[atom]) if atom in int_args else None
        if isinstance(atom, OpaqueResult) and atom.operation in CONSTANT_FOLDS and atom.inputs:
            inputs = [substitute_ints(value, int_args).constant for value in atom.inputs]
            constants = [value for value in inputs if value is not None]
            return const_poly(CONSTANT_FOLDS[atom.operation](*constants)) if len(constants) == len(inputs) else None
        return None

    return poly.substitute(replacement)


def expand_axes(value: Number | Condition, is_kept_dim: list[bool]) -> SymbolicValue:
    """Return `value[:, None]`. is_kept_dim: of each dimension of the result, whether it is `:`."""
    new_dims = dict(enumerate(at for at, is_kept in enumerate(is_kept_dim) if is_kept))
    if len(new_dims) < value.rank:
        return opaque("[]", value)
    new_dims = {at: to for at, to in new_dims.items() if at < value.rank}
    if isinstance(value, Number):
        return Number(move_lanes(value.poly, new_dims), len(is_kept_dim))
    parts = tuple(move_lanes(part, new_dims) for part in value.parts)
    return Condition(parts, len(is_kept_dim), value.is_exact, value.tags)


def transpose(value: SymbolicValue) -> SymbolicValue:
    """Return `value.T`."""
    if isinstance(value, Number) and value.rank == 2:
        return Number(move_lanes(value.poly, {0: 1, 1: 0}), 2)
    return value if isinstance(value, Number) and value.rank < 2 else opaque("T", value)


def _arange(args: list[SymbolicValue], keywords: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    """Return `tl.arange(low, high)`."""
    if len(args) == 2 and all(isinstance(arg, Number) for arg in args):
        low, high = (arg.poly for arg in args if isinstance(arg, Number))
        return Number(low + atom_poly(LaneIndex(high - low, 0)), 1)
    return None


def _cdiv(args: list[SymbolicValue], keywords: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    """Return `tl.cdiv(a, b)`."""
    if len(args) == 2 and isinstance(args[0], Number) and isinstance(args[1], Number):
        rank = max(args[0].rank, args[1].rank)
        return Number(ceil_div(broadcast(args[0], rank), broadcast(args[1], rank)), rank)
    return None


def _where(args: list[SymbolicValue], keywords: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    """Return `tl.where(test, a, b)`: a CLAMP if the test bounds a from above, `tl.where(a < n, a, b)`."""
    test = as_condition(args[0]) if args else Condition(())
    if len(args) == 3 and test.truth is not None:
        return args[1] if test.truth else args[2]
    if len(args) == 3 and isinstance(args[1], Number) and test.is_exact and len(test.parts) == 1:
        bound = broadcast(Number(test.parts[0], test.rank), args[1].rank) + args[1].poly
        own = {atom for atom in args[1].poly.atoms if isinstance(atom, OpaqueResult)}
        if test.rank <= args[1].rank and not any(isinstance(atom, LaneIndex) or atom in own for atom in bound.atoms):
            return _clamp(args[1], bound, value_tags(args[2]))
    return opaque("where", *args, tags=test.all_tags | {CONDITIONAL})


def _clamp(value: Number, bound: Any, tags: frozenset[str] = frozenset()) -> Number:
    """Return the CLAMP of a value below a bound. tags: of the value that replaces it above the bound."""
    inputs = (value.poly, bound)
    return Number(atom_poly(OpaqueResult(CLAMP, inputs, tags_of(*inputs) | tags)), value.rank)


def _minimum(args: list[SymbolicValue], keywords: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    """Return `tl.minimum(a, b)`: of a tensor and a scalar b a CLAMP of a below `b + 1`."""
    if len(args) == 2 and isinstance(args[0], Number) and isinstance(args[1], Number):
        left, right = args[0], args[1]
        for value, bound in ((left, right), (right, left)):
            if value.rank > bound.rank and bound.rank == 0:
                return _clamp(value, bound.poly + const_poly(1))
    return _min_or_max(MINIMUM, args)


def _min_or_max(word: str, args: list[SymbolicValue]) -> SymbolicValue | None:
    """Return `tl.minimum` or `tl.maximum` of numbers."""
    values = [arg for arg in args if isinstance(arg, Number)]
    if len(values) != len(args) or len(args) < 2:
        return None
    rank = max(value.rank for value in values)
    polys = [broadcast(value, rank) for value in values]
    if len(set(polys)) == 1:
        return Number(polys[0], rank)
    constants = [poly.constant for poly in polys if poly.constant is not None]
    if len(constants) == len(polys):
        return Number(const_poly(CONSTANT_FOLDS[word](*constants)), rank)
    return Number(atom_poly(OpaqueResult(word, tuple(polys), tags_of(*polys))), rank)


def _full(args: list[SymbolicValue], keywords: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    """Return `tl.full(shape, value, dtype)`."""
    fill = args[1] if len(args) > 1 else keywords.get("value")
    rank = len(args[0].values) if args and isinstance(args[0], TupleValue) else 1
    dtype = args[2] if len(args) > 2 else keywords.get("dtype")
    return _cast_to(Number(fill.poly, rank), dtype) if isinstance(fill, Number) else None


def _cast(args: list[SymbolicValue], keywords: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    """Return `tl.cast(x, dtype)` or `x.to(dtype)`; a bitcast is unknown."""
    dtype = args[1] if len(args) > 1 else keywords.get("dtype")
    if not args or keywords.get("bitcast") is not None:
        return None
    return _cast_to(args[0], dtype) if isinstance(args[0], Number) else args[0]


def _cast_to(value: Number, dtype: SymbolicValue | None) -> Number:
    """Return a number cast to a dtype; a cast to int32 or int64 is left out, since addresses are computed in these."""
    dtype_name = dtype.value if isinstance(dtype, Constant) and isinstance(dtype.value, str) else ""
    is_wide = dtype_name in ADDRESS_DTYPES and not narrow_dtype(value)
    if dtype is None or is_wide or value.poly.constant == 0:
        return value
    operation = dtype_name if dtype_name in CASTS else "a cast to an unknown dtype"
    return Number(atom_poly(OpaqueResult(operation, (value.poly,), tags_of(value.poly))), value.rank)


def _zeros(args: list[SymbolicValue], keywords: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    return Number(ZERO, len(args[0].values) if args and isinstance(args[0], TupleValue) else 1)


def _broadcast_to(args: list[SymbolicValue], keywords: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    shape = args[1:] if len(args) > 2 else args[1].values if len(args) > 1 and isinstance(args[1], TupleValue) else ()
    return Number(broadcast(args[0], len(shape)), len(shape)) if shape and isinstance(args[0], Number) else None


def _expand_dims(args: list[SymbolicValue], keywords: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    """Return `tl.expand_dims(x, axis)`."""
    axis_value = args[1] if len(args) > 1 else keywords.get("axis")
    if (
        isinstance(args[0], Number | Condition)
        and isinstance(axis_value, Number)
        and axis_value.poly.constant is not None
    ):
        is_kept_dim, axis = [True] * args[0].rank, axis_value.poly.constant
        is_kept_dim.insert(axis if axis >= 0 else len(is_kept_dim) + 1 + axis, False)
        return expand_axes(args[0], is_kept_dim)
    return None


def _reshape(args: list[SymbolicValue], keywords: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    """Return `tl.reshape(x, shape)` of one dimension into one that is not 1."""
    shape = args[1:] if len(args) > 2 else args[1].values if len(args) > 1 and isinstance(args[1], TupleValue) else ()
    is_kept_dim = [not (isinstance(each, Number) and each.poly.constant == 1) for each in shape]
    if args and isinstance(args[0], Number | Condition) and args[0].rank == 1 and sum(is_kept_dim) == 1:
        return expand_axes(args[0], is_kept_dim)
    return None


def _inline_asm(args: list[SymbolicValue], keywords: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    """Return an opaque value for PTX that reads `%ctaid` or its like, or that is no literal; None for any other."""
    text = args[0] if args else keywords.get("asm")
    is_text = isinstance(text, Constant) and isinstance(text.value, str)
    if is_text and not _PROGRAM_REGISTER.search(text.value):  # type: ignore[union-attr]
        return None
    return opaque("inline assembly", tags=frozenset({PROGRAM_ID if is_text else UNSEEN_FUNCTION}))


def _on_conditions(
    operation: Callable[..., Condition],
) -> Callable[[list[SymbolicValue], Mapping[str, SymbolicValue]], SymbolicValue | None]:
    return lambda args, keywords: operation(*map(as_condition, args))


def _identity(args: list[SymbolicValue], keywords: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    return args[0] if args else None


def _descriptor(args: list[SymbolicValue], keywords: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    """Return `make_tensor_descriptor(base, shape, strides, block_shape)`, or `make_block_ptr`, which has offsets."""
    fourth_name = "offsets" if "offsets" in keywords or len(args) > 4 else "block_shape"
    names = ("base", "shape", "strides", fourth_name, "block_shape")
    by_name = dict(zip(names, args, strict=False)) | dict(keywords)
    block, strides = by_name.get("block_shape"), by_name.get("strides")
    base, offsets = by_name.get("base"), by_name.get("offsets")
    if not (isinstance(base, Number) and isinstance(block, TupleValue) and isinstance(strides, TupleValue)):
        return None
    offsets_or_zero = offsets.values if isinstance(offsets, TupleValue) else tuple(Number(ZERO) for _ in block.values)
    shape = by_name.get("shape")
    ends = shape.values if isinstance(shape, TupleValue) else ()
    polys = [_polys(each) for each in (strides.values, block.values, offsets_or_zero, ends)]
    return Descriptor(base.poly, *map(tuple, polys)) if all(len(one) == len(polys[1]) for one in polys) else None


def _polys(values: tuple[SymbolicValue, ...]) -> list[Any]:
    return [value.poly for value in values if isinstance(value, Number)]


def _advance(args: list[SymbolicValue], keywords: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    """Return `tl.advance(block_pointer, offsets)`."""
    offsets = args[1] if len(args) > 1 else keywords.get("offsets")
    if args and isinstance(args[0], Descriptor) and isinstance(offsets, TupleValue):
        steps = _polys(offsets.values)
        new_offsets = tuple(old + step for old, step in zip(args[0].offsets, steps, strict=False))
        return replace(args[0], offsets=new_offsets)
    return None


def _program_id(args: list[SymbolicValue], keywords: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    axis = args[0] if args else keywords.get("axis", Number(ZERO))
    inputs = (axis.poly,) if isinstance(axis, Number) else ()
    return Number(atom_poly(OpaqueResult("program_id", inputs, frozenset({PROGRAM_ID}))))


def _num_programs(args: list[SymbolicValue], keywords: Mapping[str, SymbolicValue]) -> SymbolicValue | None:
    return Number(atom_poly(OpaqueResult("num_programs", (), frozenset({PROGRAM_ID}))))


TL_FUNCTIONS: dict[str, Callable[[list[SymbolicValue], Mapping[str, SymbolicValue]], SymbolicValue | None]] = {
    "arange": _arange,
    "cdiv": _cdiv,
    "where": _where,
    MINIMUM: _minimum,
    MAXIMUM: lambda args, keywords: _min_or_max(MAXIMUM, args),
    "full": _full,
    "zeros": _zeros,
    "broadcast_to": _broadcast_to,
    "expand_dims": _expand_dims,
    **dict.fromkeys(("reshape", "view"), _reshape),
    "inline_asm_elementwise": _inline_asm,
    "logical_and": _on_conditions(logical_and),
    "logical_or": _on_conditions(logical_or),
    "logical_not": _on_conditions(logical_not),
    "trans": lambda args, keywords: transpose(args[0]) if len(args) == 1 else None,
    "make_tensor_descriptor": _descriptor,
    "make_block_ptr": _descriptor,
    "advance": _advance,
    "program_id": _program_id,
    **dict.fromkeys(("num_programs", "smid"), _num_programs),
    "cast": _cast,
    "to": _cast,
    **dict.fromkeys(IDENTITIES, _identity),
    "int": _identity,
    "constexpr": _identity,
}
