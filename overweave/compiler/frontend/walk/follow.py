"""Follows an author's kernel through one tile: where its loads and stores reach, as polynomials.

The kernel is walked, never run. Loops are walked once, with the number of the turn as an atom; what goes on from turn
to turn by a step is found by a walk before. Functions of the same file are followed into. The regions that turn a
tile's number into blocks give the blocks themselves.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from overweave.compiler.frontend.source.files import number_of
from overweave.compiler.frontend.source.kernel import AnnotatedKernel
from overweave.compiler.frontend.symbols.directives import TileIdDirective
from overweave.compiler.frontend.symbols.polynomials import (
    ZERO,
    BlockOf,
    LoopIndex,
    OpaqueResult,
    Polynomial,
    TooLarge,
    number,
    one,
    rounded_up,
)
from overweave.compiler.frontend.symbols.values import (
    CARRIED,
    ELSEWHERE,
    NUMBERED,
    Condition,
    Constant,
    Number,
    Several,
    SymbolicValue,
    as_condition,
    both,
    comes_from,
    compared,
    joined,
    unknown,
)
from overweave.compiler.frontend.walk.evaluate import Arguments, Expressions, operated
from overweave.compiler.frontend.walk.loops import Loop, after_turns, marked, step_of
from overweave.compiler.frontend.walk.reached import Begun, Followed, Reached
from overweave.compiler.frontend.walk.tree import assigned, below, defaults, dotted, names_in
from overweave.compiler.frontend.walk.words import folded

MOST_DEEP = 12
BUILTINS = {"min": "minimum", "max": "maximum", "range": "range", "int": "int"}
STORES = ("store", "scatter")


def follow(kernel: AnnotatedKernel, given: Mapping[str, Any] | None = None) -> Followed:
    """What a tile reaches. given: the arguments of a call that are no tensors; None before one."""
    walk = _Walk(kernel, given)
    walk.block(walk.function.body)
    return Followed(tuple(walk.found), tuple(walk.other_blocks), tuple(walk.begun))


class _Walk:
    """The state of a walk: variables, what was found, and where it stands."""

    def __init__(self, kernel: AnnotatedKernel, given: Mapping[str, Any] | None) -> None:
        self.kernel, self.is_call = kernel, given is not None
        self.file = kernel.source.file
        functions = list(self.file.functions.values())
        self.function = self.file.functions[kernel.source.name]
        whole = {name: value for name, value in (given or {}).items() if isinstance(value, int)}
        self.numbers = {name: int(value) for name, value in whole.items()}
        self.expressions = Expressions(self)
        for name in kernel.source.parameters:
            self.expressions.variables[name] = self._argument(name, given or {})
        self.found: list[Reached] = []
        self.other_blocks: list[int] = []
        self.begun: list[Begun] = []
        self.guard = Condition(())
        self.within: frozenset[str] = frozenset()
        self.is_probing = 0
        self.depth = 0
        self.returned: list[tuple[SymbolicValue, Condition]] = []
        self.forms: dict[str, SymbolicValue] = {}
        statements = [node for one in functions for node in ast.walk(one) if isinstance(node, ast.stmt)]
        self.said = below(statements, [one.directive for one in (*kernel.loads, *kernel.stores)])
        self.streams = below(statements, [one.directive for one in kernel.streams])
        tile_ids = [mark.directive for mark in kernel.source.of_kind(TileIdDirective) if kernel.loop is not None]
        self.tiles = next(iter(below(statements, tile_ids)), -1)
        self.current: Sequence[Any] = ()

    def _argument(self, name: str, given: Mapping[str, Any]) -> SymbolicValue:
        """A parameter: what directives name, and what may be a stride, keeps its name in a call, too."""
        kernel, value = self.kernel, given.get(name)
        default = kernel.source.default_of(name)
        if name not in given and self.is_call and default is not None:
            return self.expressions.value(default)
        if name not in given or (type(value) is int and name in kernel.symbols):
            return Number(one(name))
        if type(value) is int and name not in kernel.source.constants:
            return Number(one(name))
        return Number(number(int(value))) if isinstance(value, int) else Constant(value)

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
            for name in assigned([node]):
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

    def _set(self, target: ast.expr, value: SymbolicValue) -> None:
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
        truth = self.truth(node.test, test)
        if truth is not None:
            return self.block(node.body if truth else node.orelse)
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

    def truth(self, test: ast.expr, condition: Condition) -> bool | None:
        """Whether a condition holds wherever it is asked, by its names or their numbers; None if it depends."""
        if condition.truth is not None or not self.is_call:
            return condition.truth
        kept, before = self.expressions.variables, self.current
        names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
        known = {name: in_numbers(kept[name], self.numbers) for name in names & kept.keys()}
        self.expressions.variables, self.current, self.is_probing = {**kept, **known}, (), self.is_probing + 1
        made = as_condition(self.expressions.value(test)).truth
        self.expressions.variables, self.current, self.is_probing = kept, before, self.is_probing - 1
        return made

    def _while(self, node: ast.While) -> None:
        tags = comes_from(self.expressions.value(node.test)) | {CARRIED}
        loop = Loop(node.lineno, one(OpaqueResult(f"the turns of line {node.lineno}", (), tags)))
        before = self._before(node)
        counted = self._counted(node, self._steps(node, loop, before), before)
        self._turn(node, loop if counted is None else Loop(node.lineno, counted), before)

    def _counted(
        self, node: ast.While, steps: Mapping[str, Any], before: Mapping[str, SymbolicValue]
    ) -> Polynomial | None:
        """How many turns `while n < end` has, where n goes on by a number and the end stays."""
        test = node.test
        if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Lt)):
            return None
        name, end = ast.unparse(test.left), self.expressions.value(test.comparators[0])
        begun, step = before.get(name), steps.get(name)
        is_steady = not names_in(test.comparators[0]) & set(assigned(node.body))
        if not (is_steady and isinstance(begun, Number) and isinstance(end, Number) and step):
            return None
        return rounded_up(end.poly - begun.poly, step[0]) if (step[0].constant or 0) > 0 else None

    def _for(self, node: ast.For) -> None:
        loop = self._loop(node)
        count = folded(loop.count, self.numbers).constant if self.is_call else None
        if count is not None and count <= 0:
            return
        self._turn(node, loop, self._before(node))

    def _before(self, node: ast.For | ast.While) -> dict[str, SymbolicValue]:
        known = self.expressions.variables
        return {name: known[name] for name in assigned(node.body) if name in known}

    def _turn(self, node: ast.For | ast.While, loop: Loop, before: Mapping[str, SymbolicValue]) -> None:
        """Walks a loop once, for all of its turns."""
        steps, guard = self._steps(node, loop, before), self.guard
        inside = {name: after_turns(before[name], steps[name], loop, loop.turn) for name in before}
        self.expressions.variables |= inside
        if loop.is_guard:
            self.guard = both(guard, compared(Number(loop.count), Number(ZERO), ">"))
        self._enter(node, loop)
        within, self.within = self.within, self.within | loop.reordered
        self.block(node.body)
        self.guard, self.within = guard, within
        for name in assigned(node.body):
            if name in before:
                self.expressions.variables[name] = after_turns(before[name], steps[name], loop, loop.count)
            else:
                left = self.expressions.variables.get(name, Constant(None))
                self.expressions.variables[name] = unknown(name, left, tags=loop.tags)

    def _steps(self, node: ast.For | ast.While, loop: Loop, before: Mapping[str, SymbolicValue]) -> dict[str, Any]:
        """By how much each variable goes on in a turn; None for what does so in another way."""
        marks = {name: marked(name, value) for name, value in before.items()}
        kept, self.is_probing = dict(self.expressions.variables), self.is_probing + 1
        self.expressions.variables |= marks
        self._enter(node, loop)
        self.block(node.body)
        after = self.expressions.variables
        made = {name: after.get(name, Constant(None)) for name in before}
        steps = {name: () if made[name] == before[name] else step_of(marks[name], made[name], loop) for name in before}
        self.expressions.variables, self.is_probing = kept, self.is_probing - 1
        return steps

    def _enter(self, node: ast.For | ast.While, loop: Loop) -> None:
        if isinstance(node, ast.For):
            self._set(node.target, loop.variable)
        if loop.is_of_tiles and not self.kernel.regions:
            self._blocks()

    def _loop(self, node: ast.For) -> Loop:
        """A loop over a range."""
        values = [self.expressions.value(arg) for arg in node.iter.args] if isinstance(node.iter, ast.Call) else []
        polys = [value.poly for value in values if isinstance(value, Number)]
        tags = frozenset[str]().union(*map(comes_from, values))
        end = one(OpaqueResult(f"the turns of line {node.lineno}", (), tags | {CARRIED}))
        low, step = ZERO, number(1)
        if polys and len(polys) == len(values):
            low, high = (polys[0], polys[1]) if len(polys) > 1 else (ZERO, polys[0])
            step = polys[2] if len(polys) > 2 else number(1)
            end = rounded_up(high - low, step)
        stream = self.streams.get(node.lineno)
        if stream and not self.depth:
            begun = Begun(stream[0], low)
            self.begun += [begun] if not self.is_probing and begun not in self.begun else []
            return Loop(node.lineno, end, variable=Number(one(BlockOf(stream[0].axis))), is_streamed=True)
        if node.lineno == self.tiles and not self.depth:
            turn = one(OpaqueResult("the tile's turn", (), frozenset({NUMBERED})))
            return Loop(node.lineno, end, is_of_tiles=True, variable=Number(low + turn * step), turn=turn)
        turn = one(LoopIndex(node.lineno, end))
        return Loop(node.lineno, end, variable=Number(low + turn * step), is_guard=True)

    # what expressions ask

    def named(self, name: str) -> SymbolicValue:
        """A constant of the file, or what nobody knows."""
        node = self.file.constant(name)
        if node is None:
            return Constant(name)
        whole = number_of(node, self.file)
        if whole is not None:
            return Number(number(whole))
        value = node.args[0] if isinstance(node, ast.Call) and len(node.args) == 1 else node
        return Constant(value.value if isinstance(value, ast.Constant) else name)

    def word(self, call: ast.Call) -> str:
        """The word of the language that is called, or Python's own of the same meaning."""
        language, name = self.file.language, dotted(call.func)
        head, _, last = name.rpartition(".")
        if name in self.file.functions:
            return ""
        if head in language.modules or head == "triton":
            return last
        python = "" if self.file.rebinds(name) else BUILTINS.get(name, "")
        return language.words.get(name, "") or python

    def called(self, call: ast.Call, arguments: Arguments) -> SymbolicValue | None:
        """What a function returns that can be read, here or in another file; None for one of Triton or Python."""
        name = dotted(call.func)
        found = self.file.function(name) if name else None
        if found is None or self.depth > MOST_DEEP:
            is_known = self.file.is_of_triton(name) or name.split(".")[0] in self.expressions.variables
            if is_known or not name:
                return None
            values = (*arguments[0], *arguments[1].values())
            return unknown(name, *values, tags=frozenset({ELSEWHERE}))
        helper, file = found
        outside, returned, before = self.expressions.variables, self.returned, self.file
        listed = defaults(helper)
        self.file = file
        given: dict[str, SymbolicValue] = {one: self.expressions.value(value) for one, value in listed.items()}
        names = [one.arg for one in (*helper.args.posonlyargs, *helper.args.args, *helper.args.kwonlyargs)]
        given |= dict(zip(names, arguments[0], strict=False)) | arguments[1]
        self.expressions.variables, self.returned = given, []
        self.depth += 1
        self.block(helper.body)
        self.depth -= 1
        values_of, self.expressions.variables, self.returned = self.returned, outside, returned
        self.file = before
        return _returned(values_of)

    def reached(self, call: ast.Call, kind: str, place: SymbolicValue, arguments: Arguments) -> None:
        """Sees a load or store."""
        if self.is_probing:
            return
        is_store = kind in STORES
        said = [each for each in self.current if each.is_store == is_store and not kind.startswith("atomic_")]
        self.found.append(
            Reached(said[0] if said else None, kind, place, arguments, self.guard, call.lineno, self.within)
        )


def _returned(values: Sequence[tuple[SymbolicValue, Condition]]) -> SymbolicValue:
    """What a function returns that does so in several places."""
    if not values:
        return Constant(None)
    made, by = values[-1]
    for value, condition in reversed(values[:-1]):
        made = joined(value, made, both(by, condition))
    return made


def in_numbers(value: SymbolicValue, numbers: Mapping[str, int]) -> SymbolicValue:
    """A value with the numbers of a call in the place of their names."""
    if isinstance(value, Number):
        return Number(folded(value.poly, numbers), value.rank)
    if isinstance(value, Condition):
        return replace(value, parts=tuple(folded(part, numbers) for part in value.parts))
    return Several(tuple(in_numbers(each, numbers) for each in value.values)) if isinstance(value, Several) else value
