"""Follows an author's kernel through one tile: where its loads and stores reach, as polynomials.

The kernel is walked, never run. Loops are walked once, with the number of the turn as an atom; what goes on from turn
to turn by a step is found by a walk before. Functions of the same file are followed into. The regions that turn a
tile's number into blocks give the blocks themselves.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from overweave.compiler.emit.kernel import Kernel
from overweave.compiler.frontend.directives import AccessDirective, TileIdDirective
from overweave.compiler.frontend.evaluate import Arguments, Expressions, operated
from overweave.compiler.frontend.polynomials import (
    ZERO,
    BlockOf,
    Polynomial,
    Result,
    TooLarge,
    Turn,
    number,
    one,
    rounded_up,
)
from overweave.compiler.frontend.values import (
    CARRIED,
    NUMBERED,
    Condition,
    Constant,
    Descriptor,
    Number,
    Several,
    Value,
    as_condition,
    both,
    comes_from,
    joined,
    unknown,
)

MOST_DEEP = 12
BUILTINS = {"min": "minimum", "max": "maximum", "range": "range", "int": "int"}
STORES = ("store", "scatter")


class Reached(Struct, frozen=True):
    """A load or store. said: its directive, if it has one. place: a pointer or descriptor. given: of the call.

    guard: what must hold for it to be reached. line: of the call.
    """

    said: AccessDirective | None
    kind: str
    place: Value
    given: Arguments
    guard: Condition
    line: int


class Followed(Struct, frozen=True):
    """Everything that a tile reaches, and the regions whose blocks are not those of the first: their lines."""

    reached: tuple[Reached, ...]
    other_blocks: tuple[int, ...]


def follow(kernel: Kernel, constants: Mapping[str, Any]) -> Followed:
    """What a tile reaches. constants: the arguments of a call that are no tensors, as far as they are known."""
    walk = _Walk(kernel)
    for name in kernel.source.parameters:
        walk.expressions.variables[name] = _argument(name, constants)
    walk.block(walk.function.body)
    return Followed(tuple(walk.found), tuple(walk.other_blocks))


def _argument(name: str, known: Mapping[str, Any]) -> Value:
    if name not in known:
        return Number(one(name))
    value = known[name]
    return Number(number(int(value))) if isinstance(value, int) else Constant(value)


class _Walk:
    """The state of a walk: variables, what was found, and where it stands."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        module = kernel.source.tree
        functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
        self.helpers = {one.name: one for one in functions}
        self.function = self.helpers[kernel.source.name]
        self.expressions = Expressions(self)
        self.found: list[Reached] = []
        self.other_blocks: list[int] = []
        self.guard = Condition(())
        self.is_probing = 0
        self.depth = 0
        self.returned: list[tuple[Value, Condition]] = []
        self.forms: dict[str, Value] = {}
        statements = [node for one in functions for node in ast.walk(one) if isinstance(node, ast.stmt)]
        self.said = _below(statements, [one.directive for one in (*kernel.loads, *kernel.stores)])
        self.streams = _below(statements, [one.directive for one in kernel.streams])
        tile_ids = [mark.directive for mark in kernel.source.of_kind(TileIdDirective) if kernel.loop is not None]
        self.tiles = next(iter(_below(statements, tile_ids)), -1)
        self.current: Sequence[Any] = ()

    # statements

    def block(self, statements: Sequence[ast.stmt]) -> bool:
        """Walks statements in order. Whether they certainly return."""
        at = 0
        while at < len(statements):
            region = self._region(statements, at)
            if region > at:
                self._dispatched(statements[at:region])
                at = region
            elif self._statement(statements[at]):
                return True
            else:
                at += 1
        return False

    def _region(self, statements: Sequence[ast.stmt], at: int) -> int:
        """Where the dispatch region that begins at a statement ends; `at` if none does."""
        for begin, end in self.kernel.regions:
            if begin < statements[at].lineno < end and (at == 0 or statements[at - 1].lineno < begin):
                return next((i for i, each in enumerate(statements) if each.lineno > end), len(statements))
        return at

    def _dispatched(self, statements: Sequence[ast.stmt]) -> None:
        """The blocks are those of the tile; a region behind the first must make the same of the number."""
        for statement in statements:
            self._statement(statement)
        variables = self.expressions.variables
        made = {name: variables[name] for name in self.kernel.blocks.values() if name in variables}
        if not self.is_probing:
            self.forms = self.forms or made
            self.other_blocks += [statements[0].lineno] if made != self.forms else []
        self._blocks()

    def _blocks(self) -> None:
        for axis, name in self.kernel.blocks.items():
            self.expressions.variables[name] = Number(one(BlockOf(axis)))

    def _statement(self, node: ast.stmt) -> bool:
        before, self.current = self.current, self.said.get(node.lineno, ())
        rule = getattr(self, f"_{type(node).__name__.lower()}", None)
        try:
            return bool(rule(node)) if rule else False
        except TooLarge:
            for name in _assigned([node]):
                self.expressions.variables[name] = unknown("a long expression", tags=frozenset({CARRIED}))
            return False
        finally:
            self.current = before

    def _assign(self, node: ast.Assign) -> None:
        value = self.expressions.value(node.value)
        for target in node.targets:
            self._set(target, value)
        is_number = len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
        if self.kernel.loop is None and not self.kernel.regions and is_number and not self.depth:
            if node.targets[0].id == self.kernel.number and NUMBERED in comes_from(value):  # type: ignore[attr-defined]
                self._blocks()

    def _annassign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._set(node.target, self.expressions.value(node.value))

    def _augassign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            old = self.expressions.value(node.target)
            self._set(node.target, operated(old, self.expressions.value(node.value), node.op))

    def _set(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            self.expressions.variables[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            values = value.values if isinstance(value, Several) else ()
            for at, element in enumerate(target.elts):
                fits = len(values) == len(target.elts)
                self._set(element, values[at] if fits else unknown(f"part {at}", value))

    def _expr(self, node: ast.Expr) -> None:
        self.expressions.value(node.value)

    def _return(self, node: ast.Return) -> bool:
        self.returned.append((self.expressions.value(node.value) if node.value else Constant(None), self.guard))
        return True

    def _if(self, node: ast.If) -> bool:
        test = as_condition(self.expressions.value(node.test))
        if test.truth is not None:
            return self.block(node.body if test.truth else node.orelse)
        start, guard = dict(self.expressions.variables), self.guard
        self.guard = both(guard, test)
        ends = self.block(node.body)
        taken, self.expressions.variables = self.expressions.variables, start
        self.guard = both(guard, Condition((), is_exact=False, tags=test.comes_from))
        other_ends = self.block(node.orelse)
        self.guard = guard
        other = self.expressions.variables
        if ends or other_ends:
            self.expressions.variables = other if ends else taken
        else:
            names = taken.keys() | other.keys()
            self.expressions.variables = {
                name: joined(taken.get(name), other.get(name), test) for name in sorted(names)
            }
        return ends and other_ends

    def _while(self, node: ast.While) -> None:
        for name in _assigned(node.body):
            self.expressions.variables[name] = unknown(name, tags=frozenset({CARRIED}))
        self.block(node.body)
        for name in _assigned(node.body):
            self.expressions.variables[name] = unknown(name, tags=frozenset({CARRIED}))

    def _for(self, node: ast.For) -> None:
        loop = _Loop(self, node)
        names = _assigned(node.body)
        before = {name: self.expressions.variables[name] for name in names if name in self.expressions.variables}
        steps = self._steps(node, loop, before)
        inside = {name: _after(before[name], steps[name], loop.turn) for name in before}
        self.expressions.variables |= inside
        self._enter(node, loop)
        self.block(node.body)
        for name in names:
            if name in before:
                self.expressions.variables[name] = _after(before[name], steps[name], loop.count)
            else:
                left = self.expressions.variables.get(name, Constant(None))
                self.expressions.variables[name] = unknown(name, left, tags=frozenset({CARRIED}))

    def _steps(self, node: ast.For, loop: _Loop, before: Mapping[str, Value]) -> dict[str, Any]:
        """By how much each variable goes on in a turn; None for what does so in another way."""
        marks = {name: _marked(name, value) for name, value in before.items()}
        kept, self.is_probing = dict(self.expressions.variables), self.is_probing + 1
        self.expressions.variables |= marks
        self._enter(node, loop)
        self.block(node.body)
        after = self.expressions.variables
        steps = {name: _step(marks[name], after.get(name, Constant(None)), loop) for name in before}
        self.expressions.variables, self.is_probing = kept, self.is_probing - 1
        return steps

    def _enter(self, node: ast.For, loop: _Loop) -> None:
        self._set(node.target, loop.variable)
        if loop.is_of_tiles and not self.kernel.regions:
            self._blocks()

    # what expressions ask

    def word(self, call: ast.Call) -> str:
        """The word of the language that is called, or Python's own of the same meaning."""
        language, name = self.kernel.source.language, _dotted(call.func)
        head, _, last = name.rpartition(".")
        if name in self.helpers:
            return ""
        if head in language.modules or head == "triton":
            return last
        return language.words.get(name, "") or BUILTINS.get(name, "")

    def called(self, call: ast.Call, arguments: Arguments) -> Value | None:
        """What a function of the file returns; None if it is none."""
        helper = self.helpers.get(_dotted(call.func))
        if helper is None or self.depth > MOST_DEEP:
            return None
        names = [one.arg for one in (*helper.args.posonlyargs, *helper.args.args, *helper.args.kwonlyargs)]
        defaults = dict(zip(reversed(helper.args.args), reversed(helper.args.defaults), strict=False))
        given: dict[str, Value] = {one.arg: self.expressions.value(value) for one, value in defaults.items()}
        given |= dict(zip(names, arguments[0], strict=False)) | arguments[1]
        outside, returned = self.expressions.variables, self.returned
        self.expressions.variables, self.returned = given, []
        self.depth += 1
        self.block(helper.body)
        self.depth -= 1
        values, self.expressions.variables, self.returned = self.returned, outside, returned
        if not values:
            return Constant(None)
        made, by = values[-1]
        for value, condition in reversed(values[:-1]):
            made = joined(value, made, both(by, condition))
        return made

    def reached(self, call: ast.Call, kind: str, place: Value, arguments: Arguments) -> None:
        """Sees a load or store."""
        if self.is_probing:
            return
        is_store = kind in STORES
        said = [each for each in self.current if each.is_store == is_store and not kind.startswith("atomic_")]
        self.found.append(Reached(said[0] if said else None, kind, place, arguments, self.guard, call.lineno))


class _Loop:
    """A loop over a range: its variable, the number of its turn, and how many turns there are."""

    def __init__(self, walk: _Walk, node: ast.For) -> None:
        self.turn: Polynomial | None = None
        self.count: Polynomial | None = None
        values = [walk.expressions.value(arg) for arg in node.iter.args] if isinstance(node.iter, ast.Call) else []
        polys = [value.poly for value in values if isinstance(value, Number)]
        self.variable: Value = unknown("a loop's variable", *values, tags=frozenset({CARRIED}))
        stream = walk.streams.get(node.lineno)
        self.is_of_tiles = node.lineno == walk.tiles
        if stream:
            self.variable = Number(one(BlockOf(stream[0].axis)))
        elif polys and len(polys) == len(values):
            low, high = (polys[0], polys[1]) if len(polys) > 1 else (ZERO, polys[0])
            step = polys[2] if len(polys) > 2 else number(1)
            self.count = rounded_up(high - low, step)
            numbered = Result("the tile's turn", (), frozenset({NUMBERED}))
            self.turn = one(numbered if self.is_of_tiles else Turn(node.lineno, self.count))
            self.variable = Number(low + self.turn * step)


def _marked(name: str, value: Value) -> Value:
    if isinstance(value, Number):
        return Number(unknown(name, tags=frozenset({CARRIED})).poly, value.rank)
    if isinstance(value, Descriptor):
        offsets = tuple(unknown(name, tags=frozenset({CARRIED})).poly for _ in value.offsets)
        return Descriptor(value.pointer, value.strides, value.block, offsets)
    return value


def _step(mark: Value, after: Value, loop: _Loop) -> Any:
    if mark == after:
        return ()
    if isinstance(mark, Number) and isinstance(after, Number) and mark.rank == after.rank:
        pairs = [(mark.poly, after.poly)]
    elif isinstance(mark, Descriptor) and isinstance(after, Descriptor):
        pairs = list(zip(mark.offsets, after.offsets, strict=False))
    else:
        return None
    steps = tuple(new - old for old, new in pairs)
    is_even = all(CARRIED not in comes_from(Number(one)) and not _turns(one, loop) for one in steps)
    return steps if is_even and loop.turn is not None else None


def _turns(step: Polynomial, loop: _Loop) -> bool:
    return loop.turn is not None and bool(step.atoms & loop.turn.atoms - loop.count.atoms if loop.count else True)


def _after(value: Value, step: Any, turns: Polynomial | None) -> Value:
    """A variable after so many turns."""
    if step == ():
        return value
    if step is None or turns is None:
        tags = comes_from(value) | {CARRIED}
        return Number(unknown("a sum", tags=tags).poly, value.rank if isinstance(value, Number) else 0)
    if isinstance(value, Descriptor):
        offsets = tuple(old + turns * by for old, by in zip(value.offsets, step, strict=True))
        return Descriptor(value.pointer, value.strides, value.block, offsets)
    assert isinstance(value, Number)
    return Number(value.poly + turns * step[0], value.rank)


def _below(statements: Sequence[ast.stmt], directives: Sequence[Any]) -> dict[int, list[Any]]:
    """The line of the statement below each directive -> the directives above it."""
    lines = sorted({one.lineno for one in statements})
    found: dict[int, list[Any]] = {}
    for said in dict.fromkeys(directives):
        below = next((line for line in lines if line > said.place.line), None)
        if below is not None:
            found.setdefault(below, []).append(said)
    return found


def _assigned(statements: Sequence[ast.stmt]) -> list[str]:
    return list(dict.fromkeys(_names_set(statements)))


def _names_set(statements: Sequence[ast.stmt]) -> Iterator[str]:
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    left = _dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{left}.{node.attr}" if left and isinstance(node, ast.Attribute) else ""
