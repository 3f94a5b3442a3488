"""The directives of a kernel put together: its axes, its tile loop or program id, what each tile loads and stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import libcst as cst
from msgspec import Struct

from overweave.compiler.frontend.source.author import KernelSource, PlacedDirective, Statement
from overweave.compiler.frontend.source.language import Language, assigned_names, callee_name, calls_in
from overweave.compiler.frontend.symbols.directives import (
    BLOCKS,
    SHAPE,
    AccessDirective,
    AxisDirective,
    DispatchDirective,
    ExpressionError,
    PidMapDirective,
    SourceLine,
    StreamDirective,
    TileIdDirective,
    affine_in,
    can_be_positive,
    is_of_blocks,
)
from overweave.compiler.frontend.symbols.polynomials import Polynomial
from overweave.ir.footprint import Axis, Dim, Operand, TileSpace


class AnnotatedAccess(Struct, frozen=True):
    """An annotated load or store. index: of its statement, or of the one around it, in the body of a tile.

    helper: the function of the file that holds it, called by that statement; empty for the kernel itself.
    """

    directive: AccessDirective
    statement: Statement
    index: int
    helper: str = ""


class StreamedLoop(Struct, frozen=True):
    """The loop that walks a streamed axis. index: of the loop in the body of a tile."""

    directive: StreamDirective
    loop: cst.For
    index: int


class AnnotatedKernel(Struct, frozen=True, kw_only=True):
    """A kernel and its directives, checked against each other. Indices are those of statements.

    tile_loop: index of the loop over tiles, None for one tile per program. body: the statements of a tile.
    tile_variable: the variable that holds the tile's number, if there is one. tile_start: index of the statement that
    reads the program id, or of the tile loop. dispatch: the range `[lo, hi)` of the body that computes the blocks from
    the tile's number; repeated_dispatch: ranges that do so again. dispatch_lines: (begin, end) lines of each range.
    block_variables: axis -> the variable of its block index.
    """

    source: KernelSource
    axes: tuple[AxisDirective, ...]
    tile_loop: int | None
    tile_variable: str | None
    tile_start: int
    dispatch: tuple[int, int] | None
    repeated_dispatch: tuple[tuple[int, int], ...]
    dispatch_lines: tuple[tuple[int, int], ...]
    block_variables: Mapping[str, str]
    loads: tuple[AnnotatedAccess, ...]
    stores: tuple[AnnotatedAccess, ...]
    streams: tuple[StreamedLoop, ...]

    @property
    def body(self) -> Sequence[Statement]:
        return _body(self.source, () if self.tile_loop is None else (self.tile_loop,))

    @property
    def symbols(self) -> frozenset[str]:
        """The names in the directives' expressions."""
        expressions = [one for axis in self.axes for one in (axis.extent, axis.block)]
        expressions += [dim for access in (*self.loads, *self.stores) for dim in access.directive.dims]
        return frozenset[str]().union(*(one.names for one in expressions))

    @property
    def grid(self) -> tuple[AxisDirective, ...]:
        return tuple(axis for axis in self.axes if not axis.is_streamed)

    def space(self, int_args: Mapping[str, int]) -> TileSpace:
        """Return the tiles of a call. int_args: the kernel's integer arguments by name; a missing one has its default.

        Raises DirectiveError for an argument that is missing and for a dimension that is not affine in one axis.
        """
        int_args = {**self.source.default_ints, **int_args}
        axes = tuple(
            Axis(a.name, _value(a.loc, a.extent, int_args), _value(a.loc, a.block, int_args, 1), a.is_streamed)
            for a in self.axes
        )
        return TileSpace(
            kernel=self.source.name,
            axes=axes,
            loads=_operands(self.loads, axes, int_args),
            stores=_operands(self.stores, axes, int_args),
        )


def _operands(
    accesses: tuple[AnnotatedAccess, ...], axes: tuple[Axis, ...], int_args: Mapping[str, int]
) -> tuple[Operand, ...]:
    """Return one operand for each tensor; a tensor has the same dimensions in all of its accesses."""
    by_tensor: dict[str, Operand] = {}
    for access in accesses:
        directive = access.directive
        dims = tuple(_dim(directive.loc, dim, axes, int_args) for dim in directive.dims)
        by_tensor.setdefault(directive.tensor, Operand(directive.tensor, directive.parameter, dims))
    return tuple(by_tensor.values())


def _dim(loc: SourceLine, expression: Polynomial, axes: tuple[Axis, ...], int_args: Mapping[str, int]) -> Dim:
    """Return a dimension of a call: an extent, or an affine function of one axis."""
    by_name = {axis.name: axis for axis in axes}
    name, scale, shift = _affine(loc, expression, by_name)
    if name is None:
        return Dim(_value(loc, expression, int_args))
    counts = is_of_blocks(expression)
    return Dim(by_name[name].count if counts else by_name[name].extent, name, scale, shift, counts)


def _affine(loc: SourceLine, expression: Polynomial, axes: Mapping[str, object]) -> tuple[str | None, int, int]:
    """Return (axis, scale, shift) as `affine_in` does. Raises DirectiveError for an expression that is not affine."""
    try:
        return affine_in(expression, axes)
    except ExpressionError as error:
        raise loc.error(str(error), "Write an axis, `2 * M + 1` blocks along one, or an extent without axes") from None


def _value(loc: SourceLine, expression: Polynomial, int_args: Mapping[str, int], least: int = 0) -> int:
    """Evaluate an expression. Raises DirectiveError for a missing argument or a value below `least`."""
    missing = sorted(expression.names - int_args.keys())
    if missing:
        raise loc.error(f"{missing[0]} is no whole number in this call", "Pass an int for it")
    try:
        value = expression.value(int_args)
    except ZeroDivisionError:
        raise loc.error(f"{expression} divides by zero", "Pass another number") from None
    if not least <= value < 2**31:
        raise loc.error(f"{expression} is {value}", f"It must be at least {least} and fit 31 bits")
    return value


def read_kernel(source: KernelSource) -> AnnotatedKernel:
    """Combine the directives of a source. Raises DirectiveError if they contradict each other."""
    axes = _axes(source)
    tile_loop, tile_variable, tile_start = _tile_position(source)
    path = () if tile_loop is None else (tile_loop,)
    (dispatch, *repeated), block_variables = _dispatch(source, path, axes, tile_variable)
    lines = [mark.directive.loc.line for mark in source.directives_of(DispatchDirective)]
    marks = source.directives_of(AccessDirective)
    for stray in (mark for mark in source.marks if mark.helper and not isinstance(mark.directive, AccessDirective)):
        raise stray.directive.loc.error(f"it stands in {stray.helper}", "Put it into the kernel itself")
    accesses = [AnnotatedAccess(mark.directive, mark.statement, _index(mark, path), mark.helper) for mark in marks]
    return AnnotatedKernel(
        source=source,
        axes=axes,
        tile_loop=tile_loop,
        tile_variable=tile_variable,
        tile_start=tile_start,
        dispatch=dispatch,
        repeated_dispatch=tuple(one for one in repeated if one),
        dispatch_lines=tuple(zip(lines[::2], lines[1::2], strict=True)),
        block_variables=block_variables,
        loads=tuple(access for access in accesses if not access.directive.is_store),
        stores=tuple(access for access in accesses if access.directive.is_store),
        streams=_streams(source, path, axes),
    )


def _axes(source: KernelSource) -> tuple[AxisDirective, ...]:
    """Return the axes. Raises DirectiveError for a duplicate name, or if all axes are streamed."""
    axes = [mark.directive for mark in source.directives_of(AxisDirective)]
    names: set[str] = set()
    for axis in axes:
        if axis.name in names:
            raise axis.loc.error(f"axis {axis.name} stands twice", "Name every axis once")
        names.add(axis.name)
        for expression in (axis.extent, axis.block):
            check_names(axis.loc, expression, source)
    if all(axis.is_streamed for axis in axes):
        raise source.loc().error("it names no axis that tells tiles apart", "Add `# @overweave.axis M block=BLOCK_M`")
    return tuple(axes)


def check_names(
    loc: SourceLine, expression: Polynomial, source: KernelSource, others: frozenset[str] = frozenset()
) -> None:
    """Raise DirectiveError for a name that is neither a parameter of the kernel nor one of `others`."""
    if not can_be_positive(expression):
        raise loc.error(f"{expression} is never more than 0", "Write a number of elements")
    shapes = {name: SHAPE.fullmatch(name) or BLOCKS.fullmatch(name) for name in expression.names}
    names = {match[1] if match else name for name, match in shapes.items()}
    unknown = sorted(names - set(source.parameters) - others)
    if unknown:
        known = ", ".join(sorted({*source.parameters, *others}))
        raise loc.error(f"{unknown[0]} is unknown", f"Use parameters of the kernel or axes: {known[:160]}")


def _tile_position(source: KernelSource) -> tuple[int | None, str | None, int]:
    """Return (tile_loop, tile_variable, tile_start) of AnnotatedKernel."""
    marks = source.directives_of(TileIdDirective)
    begins = [mark for mark in source.directives_of(DispatchDirective) if mark.directive.begins]
    if not marks and len(begins) == 1 and len(begins[0].path) == 1:
        return None, None, begins[0].path[0]
    if len(marks) != 1:
        loc = marks[1].directive.loc if marks else source.loc()
        raise loc.error(f"{len(marks)} tile ids", "Put one `# @overweave.tile_id` above the statement that makes it")
    mark = marks[0]
    directive = mark.directive
    if len(mark.path) != 1:
        raise directive.loc.error("it stands inside another block", "Put the tile id at the top level of the kernel")
    if directive.is_persistent:
        return mark.path[0], _loop_variable(directive.loc, mark.statement), mark.path[0]
    return None, _program_variable(directive.loc, mark.statement, source.language), mark.path[0]


def _loop_variable(loc: SourceLine, statement: Statement) -> str:
    """Return the variable of `for NAME in tl.range(...):`. Raises DirectiveError for any other statement."""
    if isinstance(statement, cst.For) and isinstance(statement.iter, cst.Call) and statement.orelse is None:
        target, is_block = statement.target, isinstance(statement.body, cst.IndentedBlock)
        if callee_name(statement.iter) == "range" and is_block and isinstance(target, cst.Name):
            return str(target.value)
    raise loc.error("no loop over a range follows it", "Put it above `for NAME in tl.range(...):`")


def _program_variable(loc: SourceLine, statement: Statement, language: Language) -> str:
    """Return the variable of `NAME = tl.program_id(0)`. Raises DirectiveError for any other statement."""
    statements = statement.body if isinstance(statement, cst.SimpleStatementLine) else ()
    statement_part = statements[0] if len(statements) == 1 else None
    if (
        isinstance(statement_part, cst.Assign)
        and len(statement_part.targets) == 1
        and isinstance(statement_part.targets[0].target, cst.Name)
    ):
        calls = calls_in(statement_part.value)
        names = [language.tl_name(call) or language.method_name(call) for call in calls]
        if (
            sorted(names) in (["program_id"], ["program_id", "to"], ["cast", "program_id"])
            and calls[0] is statement_part.value
        ):
            return statement_part.targets[0].target.value
    raise loc.error(
        "no `pid = tl.program_id(0)` follows it", "Put it above that statement, or above the loop over tiles"
    )


def _dispatch(
    source: KernelSource, path: tuple[int, ...], axes: tuple[AxisDirective, ...], tile_variable: str | None
) -> tuple[list[tuple[int, int] | None], dict[str, str]]:
    """Return (dispatch regions `[lo, hi)`, block variables by axis); the regions must set the same variables."""
    marks = source.directives_of(DispatchDirective)
    maps = source.directives_of(PidMapDirective)
    grid = [axis.name for axis in axes if not axis.is_streamed]
    if not marks and not maps and len(grid) == 1 and tile_variable is not None:
        return [None], {grid[0]: tile_variable}
    begins = [mark.directive.begins for mark in marks]
    if begins != [True, False] * len(maps) or not maps:
        places = [*(mark.directive.loc for mark in marks), *(mark.directive.loc for mark in maps)]
        loc = places[0] if places else source.loc()
        found = f"{begins.count(True)} `dispatch begin`, {begins.count(False)} `dispatch end`, {len(maps)} `pid_map`"
        raise loc.error(found, "Put one `dispatch begin`, one `pid_map` and one `dispatch end` there, in this order")
    block_variables = dict(maps[0].directive.variables)
    regions = [
        _dispatch_region(source, path, (begin, end), pid_map)
        for begin, end, pid_map in zip(marks[::2], marks[1::2], maps, strict=True)
    ]
    for pid_map in maps:
        if dict(pid_map.directive.variables) != block_variables or set(block_variables) != set(grid):
            found = f"it maps {', '.join(f'{axis}={name}' for axis, name in pid_map.directive.variables)}"
            cure = f"Map every axis, {', '.join(grid)}, to the same variables in every region"
            raise pid_map.directive.loc.error(found, cure)
    return [*regions], block_variables


def _dispatch_region(
    source: KernelSource,
    path: tuple[int, ...],
    marks: tuple[PlacedDirective[DispatchDirective], PlacedDirective[DispatchDirective]],
    pid_map: PlacedDirective[PidMapDirective],
) -> tuple[int, int]:
    """Return the statements `[lo, hi)` of a dispatch region. Raises DirectiveError if its directives do not fit."""
    for mark in marks:
        if mark.path[:-1] != path:
            raise mark.directive.loc.error("it is not in the body of the tile", "Put it beside the tile id")
    lo, hi = (mark.path[-1] for mark in marks)
    if pid_map.path[: len(path)] != path or not lo <= pid_map.path[len(path)] < hi:
        raise pid_map.directive.loc.error(
            "it is outside of the dispatch region", "Put it between `dispatch begin` and `dispatch end`"
        )
    assigned = assigned_names(_body(source, path)[lo:hi])
    for axis, variable in pid_map.directive.variables:
        if variable not in assigned:
            found = f"{variable}, the block of {axis}, is not assigned in the dispatch region"
            raise pid_map.directive.loc.error(found, "Assign it between `dispatch begin` and `dispatch end`")
    return lo, hi


def _streams(source: KernelSource, path: tuple[int, ...], axes: tuple[AxisDirective, ...]) -> tuple[StreamedLoop, ...]:
    """Return the loops that walk streamed axes, one for each. Raises DirectiveError."""
    streamed = {axis.name: axis for axis in axes if axis.is_streamed}
    streams: list[StreamedLoop] = []
    for mark in source.directives_of(StreamDirective):
        directive = mark.directive
        if directive.axis not in streamed:
            known = ", ".join(streamed) or "none"
            raise directive.loc.error(f"no streamed axis is called {directive.axis}", f"Streamed axes: {known}")
        _loop_variable(directive.loc, mark.statement)
        if mark.path[:-1] != path:
            raise directive.loc.error("its loop stands inside another block", "Put the loop into the body of the tile")
        assert isinstance(mark.statement, cst.For)
        streams.append(StreamedLoop(directive, mark.statement, mark.path[-1]))
    missing = set(streamed) - {stream.directive.axis for stream in streams}
    if streamed and (missing or len(streams) != 1):
        loc = streamed[min(missing, default=next(iter(streamed)))].loc
        raise loc.error("no loop, or more than one, walks it", "Put `# @overweave.stream` above its one loop")
    return tuple(streams)


def _index(mark: PlacedDirective[AccessDirective], path: tuple[int, ...]) -> int:
    """Return the index, in the body of a tile, of the statement that holds a directive. path: of that body."""
    if mark.path[: len(path)] != path or len(mark.path) <= len(path):
        raise mark.directive.loc.error("it is outside of the loop over tiles", "Put it where each tile loads or stores")
    return mark.path[len(path)]


def _body(source: KernelSource, path: tuple[int, ...]) -> Sequence[Statement]:
    statements = source.function.body.body
    for index in path:
        statements = statements[index].body.body  # type: ignore[union-attr]
    return statements  # type: ignore[return-value]
