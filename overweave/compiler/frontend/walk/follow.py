"""Interprets an author's kernel symbolically for one tile: the addresses of its loads and stores, as polynomials.

The kernel is never run. A loop body is walked twice: a probing walk finds induction variables and their steps, a second
one records accesses, with the iteration as an atom. Calls of the author's functions are walked into. After a dispatch
region, which turns the tile's number into blocks, the block variables are the atoms `BlockOf(axis)`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from overweave.compiler.frontend.source.files import int_value
from overweave.compiler.frontend.source.kernel import AnnotatedKernel
from overweave.compiler.frontend.symbols.directives import TileIdDirective
from overweave.compiler.frontend.symbols.polynomials import (
    ZERO,
    BlockOf,
    LoopIndex,
    OpaqueResult,
    Polynomial,
    TooLarge,
    atom_poly,
    ceil_div,
    const_poly,
    lower_bound,
    tags_of,
)
from overweave.compiler.frontend.symbols.values import (
    CONDITIONAL,
    LOOP_CARRIED,
    MINIMUM,
    PROGRAM_ID,
    UNSEEN_FUNCTION,
    Condition,
    Constant,
    Number,
    SymbolicValue,
    TupleValue,
    as_condition,
    compare,
    logical_and,
    merge_branches,
    opaque,
    unknown,
    value_tags,
    varies,
)
from overweave.compiler.frontend.walk.evaluate import (
    AccessTrace,
    Arguments,
    Expressions,
    StreamStart,
    TracedAccess,
    binary_op,
    dotted,
)
from overweave.compiler.frontend.walk.loops import TILES, Loop, after_iterations, loop_marker, step_per_iteration
from overweave.compiler.frontend.walk.tl_functions import substitute_ints


def defaults(helper: ast.FunctionDef) -> dict[str, ast.expr]:
    """Map each parameter that has a default to that default."""
    positional, keyword_only = [*helper.args.posonlyargs, *helper.args.args], helper.args.kwonlyargs
    values = dict(zip(reversed(positional), reversed(helper.args.defaults), strict=False))
    values |= {
        name: value for name, value in zip(keyword_only, helper.args.kw_defaults, strict=True) if value is not None
    }
    return {name.arg: value for name, value in values.items()}


def directives_by_line(statements: Sequence[ast.stmt], directives: Sequence[Any]) -> dict[int, list[Any]]:
    """Map the line of each statement to the directives right above it."""
    lines = sorted({statement.lineno for statement in statements})
    by_line: dict[int, list[Any]] = {}
    for directive in dict.fromkeys(directives):
        line_below = next((line for line in lines if line > directive.loc.line), None)
        if line_below is not None:
            by_line.setdefault(line_below, []).append(directive)
    return by_line


def names_in(node: ast.expr) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def assigned_in(statements: Sequence[ast.stmt]) -> list[str]:
    """Return the names that statements assign, in the order of the text."""
    return list(dict.fromkeys(_stored_names(statements)))


def _stored_names(statements: Sequence[ast.stmt]) -> Iterator[str]:
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


MAX_CALL_DEPTH = 12
BUILTINS = {"min": "minimum", "max": "maximum", "range": "range", "int": "int"}
STORES = ("store", "scatter")


def trace_accesses(kernel: AnnotatedKernel, arguments: Mapping[str, Any] | None = None) -> AccessTrace:
    """Interpret a kernel for one tile. arguments: those of a call that are not tensors; None before a call."""
    walk = _Walk(kernel, arguments)
    walk.block(walk.function.body)
    return AccessTrace(tuple(walk.accesses), tuple(walk.mismatches), tuple(walk.loop_starts))


class _Walk:
    """The state of a walk. One method a statement type, `_for` for ast.For, which returns whether it certainly returns.

    guard: the condition under which the current statement runs. access_directives, streams: line -> the directives
    above it. directives: of the current statement. region_blocks: block variable -> its value in the first dispatch
    region. returns: the (value, guard) of each return of the function that is walked.
    """

    def __init__(self, kernel: AnnotatedKernel, arguments: Mapping[str, Any] | None) -> None:
        self.kernel, self.has_call_args = kernel, arguments is not None
        self.file = kernel.source.file
        functions = list(self.file.functions.values())
        self.function = self.file.functions[kernel.source.name]
        integers = {name: value for name, value in (arguments or {}).items() if isinstance(value, int)}
        self.int_args = {name: int(value) for name, value in integers.items()}
        self.expressions = Expressions(self)
        for name in kernel.source.parameters:
            self.expressions.variables[name] = self._argument(name, arguments or {})
        self.accesses: list[TracedAccess] = []
        self.mismatches: list[int] = []
        self.loop_starts: list[StreamStart] = []
        self.guard = Condition(())
        self.reordered_loops = frozenset({TILES})
        self.line = 0
        self.probe_depth = 0
        self.is_deciding = False
        self.call_depth = 0
        self.returns: list[tuple[SymbolicValue, Condition]] = []
        self.region_blocks: dict[str, SymbolicValue] = {}
        statements = [node for one in functions for node in ast.walk(one) if isinstance(node, ast.stmt)]
        self.access_directives = directives_by_line(
            statements, [one.directive for one in (*kernel.loads, *kernel.stores)]
        )
        self.streams = directives_by_line(statements, [one.directive for one in kernel.streams])
        tile_ids = [
            marker.directive for marker in kernel.source.directives_of(TileIdDirective) if kernel.tile_loop is not None
        ]
        self.tile_loop_line = next(iter(directives_by_line(statements, tile_ids)), -1)
        self.directives: Sequence[Any] = ()

    def _argument(self, name: str, arguments: Mapping[str, Any]) -> SymbolicValue:
        """Return a parameter's value: constants as such; integers that directives name, or that may be strides, stay
        symbolic even if a call passes them."""
        kernel, value = self.kernel, arguments.get(name)
        default = kernel.source.default_of(name)
        if name not in arguments and self.has_call_args and default is not None:
            return self.expressions.value(default)
        if name not in arguments or (type(value) is int and name in kernel.symbols):
            return Number(atom_poly(name))
        if type(value) is int and name not in kernel.source.constants:
            return Number(atom_poly(name))
        return Number(const_poly(int(value))) if isinstance(value, int) else Constant(value)

    # statements

    def block(self, statements: Sequence[ast.stmt]) -> bool:
        """Walk statements in order. Return whether they certainly return."""
        at = 0
        while at < len(statements):
            region = self._region_end(statements, at)
            if region > at:
                self._dispatch_region(statements[at:region])
                at = region
            elif self._statement(statements[at]):
                return True
            else:
                at += 1
        return False

    def _region_end(self, statements: Sequence[ast.stmt], at: int) -> int:
        """Return the end index of the dispatch region that begins at a statement; `at` if none does."""
        for begin, end in self.kernel.dispatch_lines:
            if begin < statements[at].lineno < end and (at == 0 or statements[at - 1].lineno < begin):
                return next((i for i, each in enumerate(statements) if each.lineno > end), len(statements))
        return at

    def _dispatch_region(self, statements: Sequence[ast.stmt]) -> None:
        """Walk a dispatch region, then set block variables. A later region must compute what the first one does."""
        for statement in statements:
            self._statement(statement)
        variables = self.expressions.variables
        blocks = {name: variables[name] for name in self.kernel.block_variables.values() if name in variables}
        if not self.probe_depth:
            self.region_blocks = self.region_blocks or blocks
            self.mismatches += [statements[0].lineno] if blocks != self.region_blocks else []
        self._set_block_variables()

    def _set_block_variables(self) -> None:
        for axis, name in self.kernel.block_variables.items():
            self.expressions.variables[name] = Number(atom_poly(BlockOf(axis)))

    def _statement(self, node: ast.stmt) -> bool:
        """Walk a statement. Return whether it certainly returns. Values that are TooLarge become opaque."""
        if self.file is self.kernel.source.file:
            self.line = node.lineno
        before, self.directives = self.directives, self.access_directives.get(node.lineno, ())
        rule = getattr(self, f"_{type(node).__name__.lower()}", None)
        try:
            return bool(rule(node)) if rule else False
        except TooLarge:
            for name in assigned_in([node]):
                self.expressions.variables[name] = opaque("a long expression", tags=frozenset({LOOP_CARRIED}))
            return False
        finally:
            self.directives = before

    def _assign(self, node: ast.Assign) -> None:
        """Assign; `pid = tl.program_id(0)` without a dispatch region also sets the block variables."""
        value = self.expressions.value(node.value)
        for target in node.targets:
            self._set(target, value)
        is_single_name = len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
        if self.kernel.tile_loop is None and not self.kernel.dispatch_lines and is_single_name and not self.call_depth:
            if node.targets[0].id == self.kernel.tile_variable and PROGRAM_ID in value_tags(value):  # type: ignore[attr-defined]
                self._set_block_variables()

    def _annassign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._set(node.target, self.expressions.value(node.value))

    def _augassign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            old = self.expressions.value(node.target)
            self._set(node.target, binary_op(old, self.expressions.value(node.value), node.op))

    def _set(self, target: ast.expr, value: SymbolicValue) -> None:
        """Assign a value to a name, or to the names of a tuple."""
        if isinstance(target, ast.Name):
            self.expressions.variables[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            values = value.values if isinstance(value, TupleValue) else ()
            for at, element in enumerate(target.elts):
                fits = len(values) == len(target.elts)
                self._set(element, values[at] if fits else opaque(f"part {at}", value))

    def _expr(self, node: ast.Expr) -> None:
        self.expressions.value(node.value)

    def _return(self, node: ast.Return) -> bool:
        self.returns.append((self.expressions.value(node.value) if node.value else Constant(None), self.guard))
        return True

    def _if(self, node: ast.If) -> bool:
        """Walk the branch that is taken; if unknown, walk both, each under its guard, and merge their variables."""
        test = as_condition(self.expressions.value(node.test))
        truth = self.truth(node.test, test)
        if truth is not None:
            return self.block(node.body if truth else node.orelse)
        start, guard = dict(self.expressions.variables), self.guard
        self.guard = logical_and(guard, test)
        then_returns = self.block(node.body)
        then_variables, self.expressions.variables = self.expressions.variables, start
        self.guard = logical_and(guard, Condition((), is_exact=False, tags=test.all_tags))
        else_returns = self.block(node.orelse)
        self.guard = guard
        else_variables = self.expressions.variables
        if then_returns or else_returns:
            self.expressions.variables = else_variables if then_returns else then_variables
        else:
            names = then_variables.keys() | else_variables.keys()
            self.expressions.variables = {
                name: merge_branches(then_variables.get(name), else_variables.get(name), test) for name in sorted(names)
            }
        return then_returns and else_returns

    def truth(self, test: ast.expr, condition: Condition) -> bool | None:
        """Return whether a condition holds, given the integers of the call; None if that differs or is unknown."""
        if condition.truth is not None or not self.has_call_args or self.is_deciding:
            return condition.truth
        variables, directives = self.expressions.variables, self.directives
        names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
        int_args = {name: with_ints(variables[name], self.int_args) for name in names & variables.keys()}
        self.expressions.variables, self.directives = {**variables, **int_args}, ()
        self.probe_depth, self.is_deciding = self.probe_depth + 1, True
        truth = as_condition(self.expressions.value(test)).truth
        self.probe_depth, self.is_deciding = self.probe_depth - 1, False
        self.expressions.variables, self.directives = variables, directives
        return truth

    def _with(self, node: ast.With) -> bool:
        for item in node.items:
            value = self.expressions.value(item.context_expr)
            self._set(item.optional_vars or ast.Name("", ast.Store()), value)
        return self.block(node.body)

    def _while(self, node: ast.While) -> None:
        """Walk a loop whose iteration count is unknown unless `_while_count` finds it."""
        test, before = as_condition(self.expressions.value(node.test)), self._values_before(node)
        loop = Loop(node.lineno, atom_poly(OpaqueResult("iterations", (), test.all_tags | {LOOP_CARRIED})))
        steps = self._steps_per_iteration(node, loop, before)
        counted = self._while_count(node, loop, steps, before)
        changed = frozenset[str]().union(
            *(steps[name] for name in names_in(node.test) if isinstance(steps.get(name), frozenset))
        )
        tags = test.all_tags | changed | {LOOP_CARRIED}
        loop = Loop(
            node.lineno,
            atom_poly(OpaqueResult(f"the iterations of line {node.lineno}", (), tags)),
            test=replace(test, is_exact=False, tags=tags | {CONDITIONAL}),
        )
        self._walk_counted(node, loop if counted is None else Loop(node.lineno, counted, is_guard=True))

    def _while_count(
        self, node: ast.While, loop: Loop, steps: Mapping[str, Any], before: Mapping[str, SymbolicValue]
    ) -> Polynomial | None:
        """Return the iteration count of a `while` whose test falls by a constant in every iteration; else None."""
        variables, self.probe_depth = dict(self.expressions.variables), self.probe_depth + 1
        at_iteration = {name: after_iterations(before[name], steps[name], loop, loop.iteration) for name in before}
        self.expressions.variables |= at_iteration
        test = as_condition(self.expressions.value(node.test))
        self.expressions.variables, self.probe_depth = variables, self.probe_depth - 1
        (iteration,) = loop.iteration.atoms - loop.count.atoms
        if not test.is_exact or len(test.parts) != 1:
            return None
        step = test.parts[0].coefficient(iteration)
        first = test.parts[0] - step * loop.iteration
        fall = lower_bound(ZERO - step, self.kernel.symbols | self.kernel.source.constants)
        return ceil_div(first, ZERO - step) if (fall or 0) > 0 and iteration not in first.atoms else None

    def _for(self, node: ast.For) -> None:
        self._walk_counted(node, self._range_loop(node))

    def _walk_counted(self, node: ast.For | ast.While, loop: Loop) -> None:
        """Walk a loop, unless the call leaves it no iteration."""
        count = substitute_ints(loop.count, self.int_args).constant if self.has_call_args else None
        if count is None or count > 0:
            self._walk_loop(node, loop, self._values_before(node))

    def _values_before(self, node: ast.For | ast.While) -> dict[str, SymbolicValue]:
        variables = self.expressions.variables
        return {name: variables[name] for name in assigned_in(node.body) if name in variables}

    def _walk_loop(self, node: ast.For | ast.While, loop: Loop, before: Mapping[str, SymbolicValue]) -> None:
        """Walk a loop body once, for all iterations, and set the variables to their values after the loop."""
        steps, guard = self._steps_per_iteration(node, loop, before), self.guard
        iteration_values = {name: after_iterations(before[name], steps[name], loop, loop.iteration) for name in before}
        self.expressions.variables |= iteration_values
        if loop.is_guard:
            self.guard = logical_and(guard, compare(Number(loop.count), Number(ZERO), ">"))
        if loop.test is not None:
            self.guard = logical_and(guard, loop.test)
        self._enter_iteration(node, loop)
        outer_loops, self.reordered_loops = self.reordered_loops, self.reordered_loops | loop.reordered_loops
        self.block(node.body)
        self.guard, self.reordered_loops = guard, outer_loops
        for name in assigned_in(node.body):
            if name in before:
                step = steps[name]
                if loop.test is not None and isinstance(step, tuple) and step:  # it may leave before `count`
                    step = tags_of(*step)
                self.expressions.variables[name] = after_iterations(before[name], step, loop, loop.count)
            else:
                last_value = self.expressions.variables.get(name, Constant(None))
                self.expressions.variables[name] = opaque(name, last_value, tags=loop.tags)

    def _steps_per_iteration(
        self, node: ast.For | ast.While, loop: Loop, before: Mapping[str, SymbolicValue]
    ) -> dict[str, Any]:
        """Map each variable to its step per iteration (see `step_per_iteration`), by a probing walk."""
        markers = {name: loop_marker(name, value) for name, value in before.items()}
        variables, self.probe_depth = dict(self.expressions.variables), self.probe_depth + 1
        self.expressions.variables |= markers
        self._enter_iteration(node, loop)
        self.block(node.body)
        after = self.expressions.variables
        new_values = {name: after.get(name, Constant(None)) for name in before}
        steps = {
            name: () if new_values[name] == before[name] else step_per_iteration(markers[name], new_values[name], loop)
            for name in before
        }
        self.expressions.variables, self.probe_depth = variables, self.probe_depth - 1
        return steps

    def _enter_iteration(self, node: ast.For | ast.While, loop: Loop) -> None:
        """Set the loop variable, and in the loop over tiles the block variables."""
        if isinstance(node, ast.For):
            self._set(node.target, loop.variable)
        if loop.is_tile_loop and not self.kernel.dispatch_lines:
            self._set_block_variables()

    def _range_loop(self, node: ast.For) -> Loop:
        """Return the Loop of a `for` over a range, over tiles or over a streamed axis."""
        values = list(map(self.expressions.value, _range_arguments(node.iter)))
        polys = [value.poly for value in values if isinstance(value, Number)]
        tags = frozenset[str]().union(*map(value_tags, values))
        end = atom_poly(OpaqueResult(f"the iterations of line {node.lineno}", (), tags | {LOOP_CARRIED}))
        low, step = ZERO, const_poly(1)
        if polys and len(polys) == len(values):
            low, high = (polys[0], polys[1]) if len(polys) > 1 else (ZERO, polys[0])
            step = polys[2] if len(polys) > 2 else const_poly(1)
            end = ceil_div(high - low, step)
        stream = self.streams.get(node.lineno)
        if stream and not self.call_depth:
            loop_start = StreamStart(stream[0], low)
            self.loop_starts += [loop_start] if not self.probe_depth and loop_start not in self.loop_starts else []
            iteration = opaque("iteration", tags=frozenset({LOOP_CARRIED})).poly
            start = Number(atom_poly(BlockOf(stream[0].axis)))
            return Loop(node.lineno, end, variable=start, iteration=iteration, is_streamed=True)
        if node.lineno == self.tile_loop_line and not self.call_depth:
            iteration = atom_poly(OpaqueResult("the tile's iteration", (), frozenset({PROGRAM_ID})))
            return Loop(
                node.lineno, end, is_tile_loop=True, variable=Number(low + iteration * step), iteration=iteration
            )
        ends = next((ends for poly in polys[1:2] for ends in _ends(poly, low)), None)
        end = ceil_div(ends[0] - low, step) if ends else end
        iteration = atom_poly(LoopIndex(node.lineno, end))
        variable = Number(low + iteration * step)
        test = compare(variable, Number(ends[1]), "<") if ends else None
        return Loop(node.lineno, end, variable=variable, is_guard=True, test=test)

    # methods of evaluate.py: Walker

    def global_value(self, name: str) -> SymbolicValue:
        """Return a constant of the file, the result of a function that is passed as a value, else an unknown value.

        A name of `tl`, such as `tl.float16`, is a Constant of its last part.
        """
        if self.file.is_of_triton(name) and "." in name:
            return Constant(name.split(".")[-1])
        if self.file.function(name) is not None:
            returned = self.call_helper(ast.Call(ast.parse(name, mode="eval").body, [], []), ([], {}))
            return opaque(name, returned or Constant(None))
        node = self.file.constant(name)
        integer = None if node is None else int_value(node, self.file)
        if node is None or integer is not None:
            return unknown(name) if integer is None else Number(const_poly(integer))
        value = node.args[0] if isinstance(node, ast.Call) and len(node.args) == 1 else node
        if isinstance(value, ast.Attribute) and self.file.is_of_triton(dotted(value)):
            return Constant(value.attr)
        return Constant(value.value) if isinstance(value, ast.Constant) else unknown(name)

    def tl_name(self, call: ast.Call) -> str:
        """Return the function of `tl` that is called, or that a builtin stands for; empty for any other call."""
        language, name = self.file.language, dotted(call.func)
        head, _, last = name.rpartition(".")
        if name in self.file.functions:
            return ""
        if head in language.modules or head == "triton":
            return last
        python = "" if self.file.shadows_builtin(name) else BUILTINS.get(name, "")
        return language.tl_names.get(name, "") or python

    def call_helper(self, call: ast.Call, arguments: Arguments) -> SymbolicValue | None:
        """Interpret a function whose source is known; opaque for any other, None for one of Triton or Python."""
        name = dotted(call.func)
        resolved = self.file.function(name) if name else None
        values = (*arguments[0], *arguments[1].values())
        if resolved is None or self.call_depth > MAX_CALL_DEPTH:
            called = self.expressions.variables.get(name)
            if isinstance(called, Number):  # a function that the caller passed
                return opaque(name, called, *values)
            is_method = "." in name and name.split(".")[0] in self.expressions.variables
            if not name or is_method or (called is None and self.file.is_of_triton(name)):
                return None
            return opaque(name, *values, tags=frozenset({UNSEEN_FUNCTION}))
        helper, file = resolved
        caller_variables, caller_returns, caller_file = self.expressions.variables, self.returns, self.file
        default_values = defaults(helper)
        self.file = file
        bound: dict[str, SymbolicValue] = {one: self.expressions.value(value) for one, value in default_values.items()}
        positional = [one.arg for one in (*helper.args.posonlyargs, *helper.args.args)]
        bound |= dict(zip(positional, arguments[0], strict=False)) | arguments[1]
        others = [one.arg for one in (*helper.args.kwonlyargs, helper.args.kwarg) if one]
        bound |= {one: opaque(one, *values) for one in (*positional, *others) if one not in bound}
        if helper.args.vararg:
            bound[helper.args.vararg.arg] = TupleValue(tuple(arguments[0][len(positional) :]))
        self.expressions.variables, self.returns = bound, []
        self.call_depth += 1
        self.block(helper.body)
        self.call_depth -= 1
        returned, self.expressions.variables, self.returns = self.returns, caller_variables, caller_returns
        self.file = caller_file
        return _merged_return(returned)

    def record_access(self, call: ast.Call, kind: str, address: SymbolicValue, arguments: Arguments) -> None:
        """Record a load, store or atomic, with its directive, unless this is a probing walk."""
        if self.probe_depth:
            return
        is_store = kind in STORES
        directives = [
            directive
            for directive in self.directives
            if directive.is_store == is_store and not kind.startswith("atomic_")
        ]
        self.accesses.append(
            TracedAccess(
                directives[0] if directives else None,
                kind,
                address,
                arguments,
                self.guard,
                call.lineno if self.file is self.kernel.source.file else self.line,
                self.reordered_loops,
                self.call_depth > 0,
            )
        )


def _ends(high: Polynomial, low: Polynomial) -> Iterator[tuple[Polynomial, Polynomial]]:
    """Yield (a, b) of a range that ends at min(a, b), where `a - low` is the same in every tile."""
    for atom in high.atoms:
        if high == atom_poly(atom) and isinstance(atom, OpaqueResult) and atom.operation == MINIMUM:
            left, right = atom.inputs
            yield from ((a, b) for a, b in ((left, right), (right, left)) if varies(b - low) and not varies(a - low))


def _range_arguments(node: ast.expr) -> list[ast.expr]:
    """Return (low, high, step) of a range, or fewer: `tl.range` takes the last two by name, too."""
    if not isinstance(node, ast.Call):
        return []
    named = {word.arg: word.value for word in node.keywords}
    return [*node.args, *(named[name] for name in ("arg1", "arg2", "step")[len(node.args) :] if name in named)]


def _merged_return(values: Sequence[tuple[SymbolicValue, Condition]]) -> SymbolicValue:
    if not values:
        return Constant(None)
    merged, by = values[-1]
    for value, condition in reversed(values[:-1]):
        merged = merge_branches(value, merged, logical_and(by, condition))
    return merged


def with_ints(value: SymbolicValue, int_args: Mapping[str, int]) -> SymbolicValue:
    """Replace names by the integers of a call."""
    if isinstance(value, Number):
        return Number(substitute_ints(value.poly, int_args), value.rank)
    if isinstance(value, Condition):
        return replace(value, parts=tuple(substitute_ints(part, int_args) for part in value.parts))
    return (
        TupleValue(tuple(with_ints(each, int_args) for each in value.values))
        if isinstance(value, TupleValue)
        else value
    )
