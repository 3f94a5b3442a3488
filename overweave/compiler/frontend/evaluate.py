"""What an expression of an author's kernel is worth: a polynomial wherever it is one, else what it comes from."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from msgspec.structs import replace

from overweave.compiler.frontend.polynomials import (
    ZERO,
    Atom,
    Lane,
    Polynomial,
    Result,
    number,
    one,
    quotient,
    rounded_up,
    tags_of,
)
from overweave.compiler.frontend.values import (
    CASTS,
    CHOSEN,
    CLAMP,
    GREATEST,
    LEAST,
    LOADED,
    NUMBERED,
    WIDE,
    Condition,
    Constant,
    Descriptor,
    Number,
    Several,
    Value,
    as_condition,
    both,
    broadcast,
    combined,
    compared,
    joined,
    placed,
    remainder,
    unknown,
)

SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}
COMPARED = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
SAME = ("multiple_of", "max_contiguous", "max_constancy")  # words that leave a number what it is
FOLDED: dict[str, Callable[..., int]] = {  # Results of numbers alone
    LEAST: min,
    GREATEST: max,
    "next_power_of_2": lambda value: 1 << max(0, value - 1).bit_length(),
    "BitAnd": lambda a, b: a & b,
    "BitOr": lambda a, b: a | b,
    "BitXor": lambda a, b: a ^ b,
}
Arguments = tuple[list[Value], dict[str, Value]]


class Reader(Protocol):
    """What knows the kernel around an expression."""

    def word(self, call: ast.Call) -> str:
        """The word of the language that is called, or Python's own of the same meaning."""

    def called(self, call: ast.Call, arguments: Arguments) -> Value | None:
        """What a function of the file returns; None if it is none."""

    def named(self, name: str) -> Value:
        """What a name is that no variable has."""

    def truth(self, test: ast.expr, condition: Condition) -> bool | None:
        """Whether a condition holds wherever it is asked; None if that depends."""

    def reached(self, call: ast.Call, kind: str, place: Value, arguments: Arguments) -> None:
        """Sees a load or store."""


class Expressions:
    """Evaluates expressions over variables."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.variables: dict[str, Value] = {}

    def value(self, node: ast.expr) -> Value:
        """The worth of an expression."""
        kind = type(node).__name__
        rule: Callable[[Any], Value] | None = getattr(self, f"_{kind.lower()}", None)
        return rule(node) if rule else unknown(kind, *(self.value(one) for one in _inner(node)), tags=frozenset())

    def _constant(self, node: ast.Constant) -> Value:
        return Number(number(int(node.value))) if isinstance(node.value, int) else Constant(node.value)

    def _name(self, node: ast.Name) -> Value:
        return self.variables[node.id] if node.id in self.variables else self.reader.named(node.id)

    def _tuple(self, node: ast.Tuple | ast.List) -> Value:
        return Several(tuple(self.value(element) for element in node.elts))

    _list = _tuple

    def _unaryop(self, node: ast.UnaryOp) -> Value:
        inner = self.value(node.operand)
        if isinstance(node.op, ast.USub) and isinstance(inner, Number):
            return Number(ZERO - inner.poly, inner.rank)
        if isinstance(node.op, ast.Not | ast.Invert):
            return _denied(as_condition(inner))
        return inner if isinstance(node.op, ast.UAdd) else unknown("-", inner)

    def _binop(self, node: ast.BinOp) -> Value:
        left, right = self.value(node.left), self.value(node.right)
        return operated(left, right, node.op)

    def _boolop(self, node: ast.BoolOp) -> Value:
        made = as_condition(self.value(node.values[0]))
        for each in node.values[1:]:
            other = as_condition(self.value(each))
            made = both(made, other) if isinstance(node.op, ast.And) else _either(made, other)
        return made

    def _compare(self, node: ast.Compare) -> Value:
        made = Condition(())
        left = self.value(node.left)
        for sign, each in zip(node.ops, node.comparators, strict=True):
            right = self.value(each)
            made = both(made, _compared(left, right, sign))
            left = right
        return made

    def _ifexp(self, node: ast.IfExp) -> Value:
        test = as_condition(self.value(node.test))
        truth = self.reader.truth(node.test, test)
        if truth is not None:
            return self.value(node.body if truth else node.orelse)
        return joined(self.value(node.body), self.value(node.orelse), test)

    def _attribute(self, node: ast.Attribute) -> Value:
        if node.attr == "T":
            return _transposed(self.value(node.value))
        return Constant(node.attr) if node.attr != "value" else self.value(node.value)

    def _subscript(self, node: ast.Subscript) -> Value:
        inner = self.value(node.value)
        index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if isinstance(inner, Several) and len(index) == 1:
            at = self.value(index[0])
            if isinstance(at, Number) and at.poly.constant is not None and at.poly.constant < len(inner.values):
                return inner.values[at.poly.constant]
        if isinstance(inner, Number | Condition) and all(_is_axis(one) for one in index):
            return _widened(inner, [isinstance(one, ast.Slice) for one in index])
        return unknown("[]", inner)

    def _starred(self, node: ast.Starred) -> Value:
        return unknown("*", self.value(node.value))

    def _call(self, node: ast.Call) -> Value:
        arguments = [self.value(arg) for arg in node.args], {str(k.arg): self.value(k.value) for k in node.keywords}
        word = self.reader.word(node)
        if not word:
            made = self.reader.called(node, arguments)
            if made is not None:
                return made
            if isinstance(node.func, ast.Attribute):
                return self._method(node, node.func, arguments)
            return _opaque(ast.unparse(node.func), arguments)
        if word in ("load", "store") or word.startswith("atomic_"):
            place = arguments[0][0] if arguments[0] else arguments[1].get("pointer", Constant(None))
            self.reader.reached(node, word, place, arguments)
            return unknown("load", tags=frozenset({LOADED}))
        rule = _WORDS.get(word)
        made = rule(*arguments) if rule else None
        return made or _opaque(word, arguments)

    def _method(self, node: ast.Call, function: ast.Attribute, arguments: Arguments) -> Value:
        inner, name = self.value(function.value), function.attr
        if name in ("load", "store", "gather", "scatter") or name.startswith("atomic_"):
            self.reader.reached(node, name, inner, arguments)
            return unknown("load", tags=frozenset({LOADED}))
        rule = _WORDS.get(name)
        made = rule([inner, *arguments[0]], arguments[1]) if rule else None
        return made or _opaque(name, ([inner, *arguments[0]], arguments[1]))


def folded(poly: Polynomial, numbers: Mapping[str, int]) -> Polynomial:
    """A polynomial with numbers in the place of names, and of what is made of numbers alone."""

    def by(atom: Atom) -> Polynomial | None:
        if isinstance(atom, str):
            return number(numbers[atom]) if atom in numbers else None
        if isinstance(atom, Result) and atom.of in FOLDED and atom.inputs:
            inputs = [folded(value, numbers).constant for value in atom.inputs]
            known = [value for value in inputs if value is not None]
            return number(FOLDED[atom.of](*known)) if len(known) == len(inputs) else None
        return None

    return poly.replaced(by)


def operated(left: Value, right: Value, sign: ast.operator) -> Value:
    """What an operator makes of two values."""
    if isinstance(left, Condition) or isinstance(right, Condition):
        if isinstance(sign, ast.BitAnd):
            return both(as_condition(left), as_condition(right))
        return _either(as_condition(left), as_condition(right))
    if not (isinstance(left, Number) and isinstance(right, Number)):
        return unknown(type(sign).__name__, left, right)
    if word := SIGNS.get(type(sign)):
        return combined(left, right, word)
    rank = max(left.rank, right.rank)
    over, by = broadcast(left, rank), broadcast(right, rank)
    if isinstance(sign, ast.FloorDiv) and by.constant != 0:
        return Number(rounded_up(over - by + number(1), by), rank)
    if isinstance(sign, ast.Mod) and by.constant != 0:
        return remainder(left, right)
    if isinstance(sign, ast.LShift | ast.RShift) and by.constant is not None and 0 <= by.constant < 64:
        power = number(1 << by.constant)
        return Number(over * power if isinstance(sign, ast.LShift) else quotient(over, power), rank)
    word = type(sign).__name__
    if over.constant is not None and by.constant is not None and word in FOLDED:
        return Number(number(FOLDED[word](over.constant, by.constant)), rank)
    return unknown(type(sign).__name__, left, right)


def _inner(node: ast.expr) -> list[ast.expr]:
    return [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]


def _is_axis(node: ast.expr) -> bool:
    is_all = isinstance(node, ast.Slice) and node.lower is None and node.upper is None and node.step is None
    return is_all or (isinstance(node, ast.Constant) and node.value is None)


def _widened(value: Number | Condition, kept: list[bool]) -> Value:
    """`value[:, None]`: its dimensions are those that are kept, in their order."""
    places = dict(enumerate(at for at, is_kept in enumerate(kept) if is_kept))
    if len(places) < value.rank:
        return unknown("[]", value)
    places = {at: to for at, to in places.items() if at < value.rank}
    if isinstance(value, Number):
        return Number(placed(value.poly, places), len(kept))
    parts = tuple(placed(part, places) for part in value.parts)
    return Condition(parts, len(kept), value.is_exact, value.tags)


def _transposed(value: Value) -> Value:
    if isinstance(value, Number) and value.rank == 2:
        return Number(placed(value.poly, {0: 1, 1: 0}), 2)
    return value if isinstance(value, Number) and value.rank < 2 else unknown("T", value)


def _denied(value: Condition) -> Condition:
    if value.is_exact and len(value.parts) == 1:
        return Condition(() if value.truth is False else (number(1) - value.parts[0],), value.rank)
    if value.truth is not None:
        return Condition((ZERO,) if value.truth else (), value.rank)
    return _either(value, value)


def _either(left: Condition, right: Condition) -> Condition:
    if left.truth or right.truth:
        return Condition(())
    if left.truth is False or right.truth is False:
        return right if left.truth is False else left
    met = both(left, right)
    tags = met.comes_from | ({CHOSEN} if met.parts else set())
    return Condition((), met.rank, is_exact=False, tags=tags)


def _compared(left: Value, right: Value, sign: ast.cmpop) -> Condition:
    word = COMPARED.get(type(sign))
    if isinstance(left, Number) and isinstance(right, Number) and word:
        return compared(left, right, word)
    if isinstance(left, Constant) and isinstance(right, Constant):
        same = left.value is right.value or left.value == right.value
        if isinstance(sign, ast.Is | ast.Eq | ast.IsNot | ast.NotEq):
            return Condition(() if same == isinstance(sign, ast.Is | ast.Eq) else (ZERO,))
    if isinstance(sign, ast.Is | ast.IsNot) and isinstance(right, Constant) and right.value is None:
        return Condition((), is_exact=False)
    met = both(as_condition(left), as_condition(right))
    return Condition((), met.rank, is_exact=False, tags=met.comes_from)


def _opaque(of: str, arguments: Arguments) -> Value:
    given = (*arguments[0], *arguments[1].values())
    return unknown(of, *(value for value in given if not isinstance(value, Constant)))


def _arange(args: list[Value], named: Mapping[str, Value]) -> Value | None:
    if len(args) == 2 and all(isinstance(arg, Number) for arg in args):
        low, high = (arg.poly for arg in args if isinstance(arg, Number))
        return Number(low + one(Lane(high - low, 0)), 1)
    return None


def _cdiv(args: list[Value], named: Mapping[str, Value]) -> Value | None:
    if len(args) == 2 and isinstance(args[0], Number) and isinstance(args[1], Number):
        rank = max(args[0].rank, args[1].rank)
        return Number(rounded_up(broadcast(args[0], rank), broadcast(args[1], rank)), rank)
    return None


def _where(args: list[Value], named: Mapping[str, Value]) -> Value | None:
    test = as_condition(args[0]) if args else Condition(())
    if len(args) == 3 and test.truth is not None:
        return args[1] if test.truth else args[2]
    if len(args) == 3 and isinstance(args[1], Number) and test.is_exact and len(test.parts) == 1:
        bound = broadcast(Number(test.parts[0], test.rank), args[1].rank) + args[1].poly
        if test.rank <= args[1].rank and not any(isinstance(atom, Lane) for atom in bound.atoms):
            return _clamped(args[1], bound)
    return unknown("where", *args, tags=test.comes_from | {CHOSEN})


def _clamped(value: Number, bound: Any) -> Number:
    inputs = (value.poly, bound)
    return Number(one(Result(CLAMP, inputs, tags_of(*inputs))), value.rank)


def _least(args: list[Value], named: Mapping[str, Value]) -> Value | None:
    if len(args) == 2 and isinstance(args[0], Number) and isinstance(args[1], Number):
        left, right = args[0], args[1]
        for value, bound in ((left, right), (right, left)):
            if value.rank > bound.rank and bound.rank == 0:
                return _clamped(value, bound.poly + number(1))
    return _extreme(LEAST, args)


def _extreme(word: str, args: list[Value]) -> Value | None:
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
    return Number(one(Result(word, tuple(polys), tags_of(*polys))), rank)


def _full(args: list[Value], named: Mapping[str, Value]) -> Value | None:
    filled = args[1] if len(args) > 1 else named.get("value")
    rank = len(args[0].values) if args and isinstance(args[0], Several) else 1
    dtype = args[2] if len(args) > 2 else named.get("dtype")
    return _cast_to(Number(filled.poly, rank), dtype) if isinstance(filled, Number) else None


def _cast(args: list[Value], named: Mapping[str, Value]) -> Value | None:
    dtype = args[1] if len(args) > 1 else named.get("dtype")
    if not args or named.get("bitcast") is not None:
        return None
    return _cast_to(args[0], dtype) if isinstance(args[0], Number) else args[0]


def _cast_to(value: Number, dtype: Value | None) -> Number:
    """A number as another type holds it."""
    of = dtype.value if isinstance(dtype, Constant) and isinstance(dtype.value, str) else ""
    if dtype is None or of in WIDE or value.poly.constant == 0:
        return value
    known = of if of in CASTS else "a cast to a type that nothing tells"
    return Number(one(Result(known, (value.poly,), tags_of(value.poly))), value.rank)


def _zeros(args: list[Value], named: Mapping[str, Value]) -> Value | None:
    return Number(ZERO, len(args[0].values) if args and isinstance(args[0], Several) else 1)


def _broadcast_to(args: list[Value], named: Mapping[str, Value]) -> Value | None:
    shape = args[1:] if len(args) > 2 else args[1].values if len(args) > 1 and isinstance(args[1], Several) else ()
    return Number(broadcast(args[0], len(shape)), len(shape)) if shape and isinstance(args[0], Number) else None


def _expand_dims(args: list[Value], named: Mapping[str, Value]) -> Value | None:
    at = args[1] if len(args) > 1 else named.get("axis")
    if isinstance(args[0], Number | Condition) and isinstance(at, Number) and at.poly.constant is not None:
        kept, place = [True] * args[0].rank, at.poly.constant
        kept.insert(place if place >= 0 else len(kept) + 1 + place, False)
        return _widened(args[0], kept)
    return None


def _same(args: list[Value], named: Mapping[str, Value]) -> Value | None:
    return args[0] if args else None


def _descriptor(args: list[Value], named: Mapping[str, Value]) -> Value | None:
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


def _polys(values: tuple[Value, ...]) -> list[Any]:
    return [value.poly for value in values if isinstance(value, Number)]


def _advance(args: list[Value], named: Mapping[str, Value]) -> Value | None:
    by = args[1] if len(args) > 1 else named.get("offsets")
    if args and isinstance(args[0], Descriptor) and isinstance(by, Several):
        steps = _polys(by.values)
        moved = tuple(old + step for old, step in zip(args[0].offsets, steps, strict=False))
        return replace(args[0], offsets=moved)
    return None


def _program(args: list[Value], named: Mapping[str, Value]) -> Value | None:
    axis = args[0] if args else named.get("axis", Number(ZERO))
    inputs = (axis.poly,) if isinstance(axis, Number) else ()
    return Number(one(Result("program_id", inputs, frozenset({NUMBERED}))))


def _programs(args: list[Value], named: Mapping[str, Value]) -> Value | None:
    return Number(one(Result("num_programs", (), frozenset({NUMBERED}))))


_WORDS: dict[str, Callable[[list[Value], Mapping[str, Value]], Value | None]] = {
    "arange": _arange,
    "cdiv": _cdiv,
    "where": _where,
    LEAST: _least,
    GREATEST: lambda args, named: _extreme(GREATEST, args),
    "full": _full,
    "zeros": _zeros,
    "broadcast_to": _broadcast_to,
    "expand_dims": _expand_dims,
    "trans": lambda args, named: _transposed(args[0]) if len(args) == 1 else None,
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
