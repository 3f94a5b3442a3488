"""What an expression of an author's kernel is worth: a polynomial wherever it is one, else what it comes from."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any, Protocol

from overweave.compiler.frontend.symbols.polynomials import (
    ZERO,
    number,
    quotient,
    rounded_up,
)
from overweave.compiler.frontend.symbols.values import (
    LOADED,
    NUMBERED,
    Condition,
    Constant,
    Number,
    Several,
    SymbolicValue,
    as_condition,
    both,
    broadcast,
    combined,
    compared,
    denied,
    either,
    joined,
    remainder,
    unknown,
)
from overweave.compiler.frontend.walk.words import FOLDED, WORDS, transposed, widened

SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}
COMPARED = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
Arguments = tuple[list[SymbolicValue], dict[str, SymbolicValue]]


class Reader(Protocol):
    """What knows the kernel around an expression."""

    def word(self, call: ast.Call) -> str:
        """The word of the language that is called, or Python's own of the same meaning."""

    def called(self, call: ast.Call, arguments: Arguments) -> SymbolicValue | None:
        """What a function of the file returns; None if it is none."""

    def named(self, name: str) -> SymbolicValue:
        """What a name is that no variable has."""

    def truth(self, test: ast.expr, condition: Condition) -> bool | None:
        """Whether a condition holds wherever it is asked; None if that depends."""

    def reached(self, call: ast.Call, kind: str, place: SymbolicValue, arguments: Arguments) -> None:
        """Sees a load or store."""


class Expressions:
    """Evaluates expressions over variables."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.variables: dict[str, SymbolicValue] = {}

    def value(self, node: ast.expr) -> SymbolicValue:
        """The worth of an expression."""
        kind = type(node).__name__
        rule: Callable[[Any], SymbolicValue] | None = getattr(self, f"_{kind.lower()}", None)
        return rule(node) if rule else unknown(kind, *(self.value(one) for one in _inner(node)), tags=frozenset())

    def _constant(self, node: ast.Constant) -> SymbolicValue:
        return Number(number(int(node.value))) if isinstance(node.value, int) else Constant(node.value)

    def _name(self, node: ast.Name) -> SymbolicValue:
        return self.variables[node.id] if node.id in self.variables else self.reader.named(node.id)

    def _tuple(self, node: ast.Tuple | ast.List) -> SymbolicValue:
        return Several(tuple(self.value(element) for element in node.elts))

    _list = _tuple

    def _unaryop(self, node: ast.UnaryOp) -> SymbolicValue:
        inner = self.value(node.operand)
        if isinstance(node.op, ast.USub) and isinstance(inner, Number):
            return Number(ZERO - inner.poly, inner.rank)
        if isinstance(node.op, ast.Not | ast.Invert):
            return denied(as_condition(inner))
        return inner if isinstance(node.op, ast.UAdd) else unknown("-", inner)

    def _binop(self, node: ast.BinOp) -> SymbolicValue:
        left, right = self.value(node.left), self.value(node.right)
        return operated(left, right, node.op)

    def _boolop(self, node: ast.BoolOp) -> SymbolicValue:
        made = as_condition(self.value(node.values[0]))
        for each in node.values[1:]:
            other = as_condition(self.value(each))
            made = both(made, other) if isinstance(node.op, ast.And) else either(made, other)
        return made

    def _compare(self, node: ast.Compare) -> SymbolicValue:
        made = Condition(())
        left = self.value(node.left)
        for sign, each in zip(node.ops, node.comparators, strict=True):
            right = self.value(each)
            made = both(made, _compared(left, right, sign))
            left = right
        return made

    def _ifexp(self, node: ast.IfExp) -> SymbolicValue:
        test = as_condition(self.value(node.test))
        truth = self.reader.truth(node.test, test)
        if truth is not None:
            return self.value(node.body if truth else node.orelse)
        return joined(self.value(node.body), self.value(node.orelse), test)

    def _attribute(self, node: ast.Attribute) -> SymbolicValue:
        if node.attr == "T":
            return transposed(self.value(node.value))
        return Constant(node.attr) if node.attr != "value" else self.value(node.value)

    def _subscript(self, node: ast.Subscript) -> SymbolicValue:
        inner = self.value(node.value)
        index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if isinstance(inner, Several) and len(index) == 1:
            at = self.value(index[0])
            if isinstance(at, Number) and at.poly.constant is not None and at.poly.constant < len(inner.values):
                return inner.values[at.poly.constant]
        if isinstance(inner, Number | Condition) and all(_is_axis(one) for one in index):
            return widened(inner, [isinstance(one, ast.Slice) for one in index])
        return unknown("[]", inner)

    def _starred(self, node: ast.Starred) -> SymbolicValue:
        return unknown("*", self.value(node.value))

    def _call(self, node: ast.Call) -> SymbolicValue:
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
            return _what_was_there(word)
        rule = WORDS.get(word)
        made = rule(*arguments) if rule else None
        return made or _opaque(word, arguments)

    def _method(self, node: ast.Call, function: ast.Attribute, arguments: Arguments) -> SymbolicValue:
        inner, name = self.value(function.value), function.attr
        if name in ("load", "store", "gather", "scatter") or name.startswith("atomic_"):
            self.reader.reached(node, name, inner, arguments)
            return _what_was_there(name)
        rule = WORDS.get(name)
        made = rule([inner, *arguments[0]], arguments[1]) if rule else None
        return made or _opaque(name, ([inner, *arguments[0]], arguments[1]))


def _what_was_there(word: str) -> SymbolicValue:
    """What a load gives; or an atomic, which counts the programs that came before: it numbers them."""
    return unknown("load", tags=frozenset({LOADED, NUMBERED} if word.startswith("atomic_") else {LOADED}))


def operated(left: SymbolicValue, right: SymbolicValue, sign: ast.operator) -> SymbolicValue:
    """What an operator makes of two values."""
    if isinstance(left, Condition) or isinstance(right, Condition):
        are_conditions = isinstance(left, Condition) and isinstance(right, Condition)
        if isinstance(sign, ast.BitAnd) or (isinstance(sign, ast.Mult) and are_conditions):
            return both(as_condition(left), as_condition(right))
        return either(as_condition(left), as_condition(right))
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


def _compared(left: SymbolicValue, right: SymbolicValue, sign: ast.cmpop) -> Condition:
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


def _opaque(of: str, arguments: Arguments) -> SymbolicValue:
    given = (*arguments[0], *arguments[1].values())
    return unknown(of, *(value for value in given if not isinstance(value, Constant)))
