"""Symbolic evaluation of an author's expressions: a polynomial wherever possible, else an opaque value with tags."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from msgspec import Struct

from overweave.compiler.frontend.symbols.directives import AccessDirective, StreamDirective
from overweave.compiler.frontend.symbols.polynomials import ZERO, Polynomial, ceil_div, const_poly, floor_div
from overweave.compiler.frontend.symbols.values import (
    CONDITIONAL,
    LOADED,
    PROGRAM_ID,
    Condition,
    Constant,
    Number,
    SymbolicValue,
    TupleValue,
    arithmetic,
    as_condition,
    broadcast,
    compare,
    is_uniform,
    logical_and,
    logical_not,
    logical_or,
    merge_branches,
    narrowed,
    opaque,
    remainder,
    unknown,
    value_tags,
)
from overweave.compiler.frontend.walk.tl_functions import CONSTANT_FOLDS, TL_FUNCTIONS, expand_axes, transpose

METADATA = ("dtype", "type", "shape", "block_shape", "strides", "element_ty", "numel")  # the same in every tile
ARITHMETIC = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}
COMPARISONS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
Arguments = tuple[list[SymbolicValue], dict[str, SymbolicValue]]


class Walker(Protocol):
    """The interpreter of the statements around an expression: it knows names, functions and loops (`follow.py`)."""

    def tl_name(self, call: ast.Call) -> str:
        """Return the function of `tl` that is called, or that a builtin stands for; empty for any other call."""

    def call_helper(self, call: ast.Call, arguments: Arguments) -> SymbolicValue | None:
        """Return what an author's function returns; None for a function of Triton or Python."""

    def global_value(self, name: str) -> SymbolicValue:
        """Return the value of a name that is not a local variable."""

    def truth(self, test: ast.expr, condition: Condition) -> bool | None:
        """True if a condition always holds, False if never, None if that depends."""

    def record_access(self, call: ast.Call, kind: str, address: SymbolicValue, arguments: Arguments) -> None:
        """Record a load, store or atomic. kind: the name of its function."""


class Expressions:
    """Evaluates expressions. variables: name -> value. One method a node type, `_binop` for ast.BinOp."""

    def __init__(self, walker: Walker) -> None:
        self.walker = walker
        self.variables: dict[str, SymbolicValue] = {}

    def value(self, node: ast.expr) -> SymbolicValue:
        """Evaluate an expression."""
        kind = type(node).__name__
        rule: Callable[[Any], SymbolicValue] | None = getattr(self, f"_{kind.lower()}", None)
        return rule(node) if rule else opaque(kind, *map(self.value, _child_expressions(node)))

    def _constant(self, node: ast.Constant) -> SymbolicValue:
        return Number(const_poly(int(node.value))) if isinstance(node.value, int) else Constant(node.value)

    def _name(self, node: ast.Name) -> SymbolicValue:
        return self.variables[node.id] if node.id in self.variables else self.walker.global_value(node.id)

    def _tuple(self, node: ast.Tuple | ast.List) -> SymbolicValue:
        return TupleValue(tuple(self.value(element) for element in node.elts))

    _list = _tuple

    def _unaryop(self, node: ast.UnaryOp) -> SymbolicValue:
        inner = self.value(node.operand)
        if isinstance(node.op, ast.USub) and isinstance(inner, Number):
            return Number(ZERO - inner.poly, inner.rank)
        if isinstance(node.op, ast.Not | ast.Invert):
            return logical_not(as_condition(inner))
        return inner if isinstance(node.op, ast.UAdd) else opaque("-", inner)

    def _binop(self, node: ast.BinOp) -> SymbolicValue:
        left, right = self.value(node.left), self.value(node.right)
        return binary_op(left, right, node.op)

    def _boolop(self, node: ast.BoolOp) -> SymbolicValue:
        result = as_condition(self.value(node.values[0]))
        for operand in node.values[1:]:
            other = as_condition(self.value(operand))
            result = logical_and(result, other) if isinstance(node.op, ast.And) else logical_or(result, other)
        return result

    def _compare(self, node: ast.Compare) -> SymbolicValue:
        """Evaluate a comparison; with the arguments of a call, one that is equal in all tiles is decided."""
        result = Condition(())
        left = self.value(node.left)
        for sign, operand in zip(node.ops, node.comparators, strict=True):
            right = self.value(operand)
            result = logical_and(result, _compare_values(left, right, sign))
            left = right
        truth = self.walker.truth(node, result) if is_uniform(result) else None
        return result if truth is None else Condition(() if truth else (ZERO,), result.rank)

    def _ifexp(self, node: ast.IfExp) -> SymbolicValue:
        """Evaluate the branch that is taken, or merge both."""
        test = as_condition(self.value(node.test))
        truth = self.walker.truth(node.test, test)
        if truth is not None:
            return self.value(node.body if truth else node.orelse)
        return merge_branches(self.value(node.body), self.value(node.orelse), test)

    def _attribute(self, node: ast.Attribute) -> SymbolicValue:
        """Evaluate an attribute of a variable, or a dotted name of another file; any other is unknown or opaque."""
        name = dotted(node)
        if name and name.split(".")[0] not in self.variables:
            return self.walker.global_value(name) if node.attr != "value" else self.value(node.value)
        inner = self.value(node.value)
        if node.attr == "T":
            return transpose(inner)
        if node.attr == "value" or node.attr in METADATA:
            return inner if node.attr == "value" else unknown(node.attr)
        return opaque(node.attr, inner)

    def _subscript(self, node: ast.Subscript) -> SymbolicValue:
        """Evaluate an item of a tuple, or an expansion `x[:, None]`; any other subscript is opaque."""
        inner = self.value(node.value)
        index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if isinstance(inner, TupleValue) and len(index) == 1:
            index_value = self.value(index[0])
            if (
                isinstance(index_value, Number)
                and index_value.poly.constant is not None
                and index_value.poly.constant < len(inner.values)
            ):
                return inner.values[index_value.poly.constant]
        if isinstance(inner, Number | Condition) and all(_is_axis(one) for one in index):
            return expand_axes(inner, [isinstance(one, ast.Slice) for one in index])
        return opaque("[]", inner)

    def _starred(self, node: ast.Starred) -> SymbolicValue:
        return opaque("*", self.value(node.value))

    def _call(self, node: ast.Call) -> SymbolicValue:
        """Evaluate a call of `tl` by TL_FUNCTIONS, of a helper by interpreting its body; record loads and stores."""
        arguments = list(self._positional(node)), {str(k.arg): self.value(k.value) for k in node.keywords}
        word = self.walker.tl_name(node)
        if not word:
            result = self.walker.call_helper(node, arguments)
            if result is not None:
                return result
            if isinstance(node.func, ast.Attribute):
                return self._method(node, node.func, arguments)
            return _opaque(ast.unparse(node.func), arguments)
        access = word.removesuffix("_tensor_descriptor")
        if access in ("load", "store") or word.startswith("atomic_"):
            first = [*arguments[0][:1], *(arguments[1][name] for name in ("pointer", "desc") if name in arguments[1])]
            self.walker.record_access(node, access, first[0] if first else Constant(None), arguments)
            return _loaded(word)
        rule = TL_FUNCTIONS.get(word)
        result = rule(*arguments) if rule else None
        return result or _opaque(word, arguments)

    def _positional(self, node: ast.Call) -> Iterator[SymbolicValue]:
        """Yield the positional arguments of a call; a starred tuple is unpacked."""
        for arg in node.args:
            value = self.value(arg.value if isinstance(arg, ast.Starred) else arg)
            yield from value.values if isinstance(arg, ast.Starred) and isinstance(value, TupleValue) else (value,)

    def _method(self, node: ast.Call, function: ast.Attribute, arguments: Arguments) -> SymbolicValue:
        """Evaluate `x.f(...)` as `tl.f(x, ...)`; record a load, store or atomic of a descriptor."""
        inner, name = self.value(function.value), function.attr
        if name in ("load", "store", "gather", "scatter") or name.startswith("atomic_"):
            self.walker.record_access(node, name, inner, arguments)
            return _loaded(name)
        rule = TL_FUNCTIONS.get(name)
        result = rule([inner, *arguments[0]], arguments[1]) if rule else None
        return result or _opaque(name, ([inner, *arguments[0]], arguments[1]))


def _loaded(word: str) -> SymbolicValue:
    """Return a loaded value. What an atomic returns depends on the order of programs: it is tagged as a program id."""
    return opaque("load", tags=frozenset({LOADED, PROGRAM_ID} if word.startswith("atomic_") else {LOADED}))


def binary_op(left: SymbolicValue, right: SymbolicValue, sign: ast.operator) -> SymbolicValue:
    """Return `left sign right`."""
    if isinstance(left, Condition) or isinstance(right, Condition):
        are_conditions = isinstance(left, Condition) and isinstance(right, Condition)
        if isinstance(sign, ast.BitAnd) or (isinstance(sign, ast.Mult) and are_conditions):
            return logical_and(as_condition(left), as_condition(right))
        either = logical_or(as_condition(left), as_condition(right))
        if isinstance(sign, ast.BitOr) or either.truth is False:
            return either
        known, other = sorted(map(as_condition, (left, right)), key=lambda one: one.truth is None)
        if isinstance(sign, ast.BitXor) and known.truth is not None:
            return logical_not(other) if known.truth else other
        return Condition((), either.rank, is_exact=False, tags=value_tags(left) | value_tags(right) | {CONDITIONAL})
    if not (isinstance(left, Number) and isinstance(right, Number)):
        return opaque(type(sign).__name__, left, right)
    return narrowed(_of_numbers(left, right, sign), left, right)


def _of_numbers(left: Number, right: Number, sign: ast.operator) -> Number:
    """Return `left sign right` of Numbers; opaque if it is no polynomial, division or folded constant."""
    if sign_text := ARITHMETIC.get(type(sign)):
        return arithmetic(left, right, sign_text)
    rank = max(left.rank, right.rank)
    dividend, divisor = broadcast(left, rank), broadcast(right, rank)
    if isinstance(sign, ast.FloorDiv) and divisor.constant != 0:
        return Number(ceil_div(dividend - divisor + const_poly(1), divisor), rank)
    if isinstance(sign, ast.Mod) and divisor.constant != 0:
        return remainder(left, right)
    if isinstance(sign, ast.LShift | ast.RShift) and divisor.constant is not None and 0 <= divisor.constant < 64:
        power = const_poly(1 << divisor.constant)
        return Number(dividend * power if isinstance(sign, ast.LShift) else floor_div(dividend, power), rank)
    sign_text = type(sign).__name__
    if dividend.constant is not None and divisor.constant is not None and sign_text in CONSTANT_FOLDS:
        return Number(const_poly(CONSTANT_FOLDS[sign_text](dividend.constant, divisor.constant)), rank)
    return opaque(type(sign).__name__, left, right)


def _child_expressions(node: ast.expr) -> list[ast.expr]:
    return [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]


def _is_axis(node: ast.expr) -> bool:
    """Whether an index is `:` or `None`."""
    is_all = isinstance(node, ast.Slice) and node.lower is None and node.upper is None and node.step is None
    return is_all or (isinstance(node, ast.Constant) and node.value is None)


def _compare_values(left: SymbolicValue, right: SymbolicValue, sign: ast.cmpop) -> Condition:
    """Return the condition `left sign right`, for values that may not be numbers."""
    sign_text = COMPARISONS.get(type(sign))
    if isinstance(left, Number) and isinstance(right, Number) and sign_text:
        return compare(left, right, sign_text)
    if isinstance(left, Constant) and isinstance(right, Constant):
        is_same = left.value is right.value or left.value == right.value
        if isinstance(sign, ast.Is | ast.Eq | ast.IsNot | ast.NotEq):
            return Condition(() if is_same == isinstance(sign, ast.Is | ast.Eq) else (ZERO,))
    if isinstance(sign, ast.Is | ast.IsNot) and isinstance(right, Constant) and right.value is None:
        return Condition((), is_exact=False)
    conjunction = logical_and(as_condition(left), as_condition(right))
    return Condition((), conjunction.rank, is_exact=False, tags=conjunction.all_tags)


def _opaque(operation: str, arguments: Arguments) -> SymbolicValue:
    """Return the opaque result of a call."""
    values = (*arguments[0], *arguments[1].values())
    return opaque(operation, *(value for value in values if not isinstance(value, Constant)))


class TracedAccess(Struct, frozen=True):
    """A load or store. address: a pointer or descriptor. arguments: of the call, positional and by keyword.

    guard: the condition under which it runs. reordered_loops: the loops around it that a schedule reorders: TILES, and
    the streamed axis of its loop. line: in the kernel's file; of the caller if it is in another file's function.
    """

    directive: AccessDirective | None
    kind: str
    address: SymbolicValue
    arguments: Arguments
    guard: Condition
    line: int
    reordered_loops: frozenset[str]
    is_in_helper: bool


class StreamStart(Struct, frozen=True):
    """Where a streamed loop begins. low: the first index of its range."""

    directive: StreamDirective
    low: Polynomial


class AccessTrace(Struct, frozen=True):
    """All loads and stores of a tile, and the starts of streamed loops. mismatches: first lines of the dispatch
    regions that compute other blocks than the first region does."""

    accesses: tuple[TracedAccess, ...]
    mismatches: tuple[int, ...]
    loop_starts: tuple[StreamStart, ...]


def dotted(node: ast.expr) -> str:
    """`a.b.c` as text; empty for anything but names and dots."""
    if isinstance(node, ast.Name):
        return node.id
    left = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{left}.{node.attr}" if left and isinstance(node, ast.Attribute) else ""
