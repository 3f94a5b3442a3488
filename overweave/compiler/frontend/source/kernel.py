"""What the directives of a kernel say together: its axes, where its tiles begin, what each tile reads and writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import libcst as cst
from msgspec import Struct

from overweave.compiler.frontend.source.author import KernelSource, Marked, Statement
from overweave.compiler.frontend.source.language import Language
from overweave.compiler.frontend.source.names import assigned_names, called, calls_in
from overweave.compiler.frontend.symbols.directives import (
    AccessDirective,
    AxisDirective,
    DispatchDirective,
    PidMapDirective,
    SourceLine,
    StreamDirective,
    TileIdDirective,
)
from overweave.compiler.frontend.symbols.expressions import (
    BLOCKS,
    SHAPE,
    ExpressionError,
    affine_in,
    can_be_positive,
    is_of_blocks,
)
from overweave.compiler.frontend.symbols.polynomials import Polynomial
from overweave.ir.footprint import Axis, Dim, Operand, TileSpace


class AnnotatedAccess(Struct, frozen=True):
    """An annotated load or store. index: of its statement, or the one around it, in the body of a tile.

    helper: the function of the file that it stands in, which that statement calls; empty for the kernel itself.
    """

    directive: AccessDirective
    statement: Statement
    index: int
    helper: str = ""


class StreamedLoop(Struct, frozen=True):
    """The loop that walks a streamed axis. index: as in Access; it stands in the body of a tile itself."""

    directive: StreamDirective
    loop: cst.For
    index: int


class AnnotatedKernel(Struct, frozen=True, kw_only=True):
    """A source whose directives fit together.

    loop: index of the loop over tiles; None for one tile per program. body: the statements of a tile. number: the
    variable that holds the tile's number, if the author has one. first: index of the statement that a program's number
    comes from. dispatch: the statements `[lo, hi)` of the body that turn it into blocks; again: others that do so once
    more. regions: the lines of their directives. blocks: axis -> variable.
    """

    source: KernelSource
    axes: tuple[AxisDirective, ...]
    loop: int | None
    number: str | None
    first: int
    dispatch: tuple[int, int] | None
    again: tuple[tuple[int, int], ...]
    regions: tuple[tuple[int, int], ...]
    blocks: Mapping[str, str]
    loads: tuple[AnnotatedAccess, ...]
    stores: tuple[AnnotatedAccess, ...]
    streams: tuple[StreamedLoop, ...]

    @property
    def body(self) -> Sequence[Statement]:
        return _body(self.source, () if self.loop is None else (self.loop,))

    @property
    def symbols(self) -> frozenset[str]:
        """The names that directives use for numbers."""
        said = [one for axis in self.axes for one in (axis.extent, axis.block)]
        said += [dim for access in (*self.loads, *self.stores) for dim in access.directive.dims]
        return frozenset[str]().union(*(one.names for one in said))

    @property
    def grid(self) -> tuple[AxisDirective, ...]:
        return tuple(axis for axis in self.axes if not axis.is_streamed)

    def space(self, numbers: Mapping[str, int]) -> TileSpace:
        """The tiles of a call. numbers: the kernel's integer arguments by name; defaults stand for those it lacks.

        Raises DirectiveError for an argument that is missing and for a dimension that is not affine in one axis.
        """
        numbers = {**self.source.default_numbers, **numbers}
        axes = tuple(
            Axis(a.name, _value(a.place, a.extent, numbers), _value(a.place, a.block, numbers, 1), a.is_streamed)
            for a in self.axes
        )
        return TileSpace(
            kernel=self.source.name,
            axes=axes,
            loads=_operands(self.loads, axes, numbers),
            stores=_operands(self.stores, axes, numbers),
        )


def _operands(
    accesses: tuple[AnnotatedAccess, ...], axes: tuple[Axis, ...], numbers: Mapping[str, int]
) -> tuple[Operand, ...]:
    found: dict[str, Operand] = {}
    for access in accesses:
        said = access.directive
        dims = tuple(_dim(said.place, dim, axes, numbers) for dim in said.dims)
        found.setdefault(said.tensor, Operand(said.tensor, said.parameter, dims))
    return tuple(found.values())


def _dim(place: SourceLine, said: Polynomial, axes: tuple[Axis, ...], numbers: Mapping[str, int]) -> Dim:
    by_name = {axis.name: axis for axis in axes}
    name, scale, shift = _affine(place, said, by_name)
    if name is None:
        return Dim(_value(place, said, numbers))
    counts = is_of_blocks(said)
    return Dim(by_name[name].count if counts else by_name[name].extent, name, scale, shift, counts)


def _affine(place: SourceLine, said: Polynomial, axes: Mapping[str, object]) -> tuple[str | None, int, int]:
    try:
        return affine_in(said, axes)
    except ExpressionError as error:
        raise place.error(
            str(error), "Write an axis, `2 * M + 1` blocks along one, or an extent without axes"
        ) from None


def _value(place: SourceLine, said: Polynomial, numbers: Mapping[str, int], least: int = 0) -> int:
    missing = sorted(said.names - numbers.keys())
    if missing:
        raise place.error(f"{missing[0]} is no whole number in this call", "Pass an int for it")
    try:
        value = said.value(numbers)
    except ZeroDivisionError:
        raise place.error(f"{said} divides by zero", "Pass another number") from None
    if not least <= value < 2**31:
        raise place.error(f"{said} is {value}", f"It must be at least {least} and fit 31 bits")
    return value


def read_kernel(source: KernelSource) -> AnnotatedKernel:
    """What the directives of a source say. Raises DirectiveError where they do not fit together."""
    axes = _axes(source)
    loop, number, first = _tile(source)
    path = () if loop is None else (loop,)
    (dispatch, *again), blocks = _dispatch(source, path, axes, number)
    lines = [mark.directive.place.line for mark in source.of_kind(DispatchDirective)]
    marks = source.of_kind(AccessDirective)
    for stray in (mark for mark in source.marks if mark.helper and not isinstance(mark.directive, AccessDirective)):
        raise stray.directive.place.error(f"it stands in {stray.helper}", "Put it into the kernel itself")
    accesses = [AnnotatedAccess(mark.directive, mark.statement, _index(mark, path), mark.helper) for mark in marks]
    return AnnotatedKernel(
        source=source,
        axes=axes,
        loop=loop,
        number=number,
        first=first,
        dispatch=dispatch,
        again=tuple(one for one in again if one),
        regions=tuple(zip(lines[::2], lines[1::2], strict=True)),
        blocks=blocks,
        loads=tuple(access for access in accesses if not access.directive.is_store),
        stores=tuple(access for access in accesses if access.directive.is_store),
        streams=_streams(source, path, axes),
    )


def _axes(source: KernelSource) -> tuple[AxisDirective, ...]:
    axes = [mark.directive for mark in source.of_kind(AxisDirective)]
    names: set[str] = set()
    for axis in axes:
        if axis.name in names:
            raise axis.place.error(f"axis {axis.name} stands twice", "Name every axis once")
        names.add(axis.name)
        for said in (axis.extent, axis.block):
            check_names(axis.place, said, source)
    if all(axis.is_streamed for axis in axes):
        raise source.place().error("it names no axis that tells tiles apart", "Add `# @overweave.axis M block=BLOCK_M`")
    return tuple(axes)


def check_names(
    place: SourceLine, said: Polynomial, source: KernelSource, others: frozenset[str] = frozenset()
) -> None:
    """Raises DirectiveError for a name that is neither a parameter of the kernel nor one of `others`."""
    if not can_be_positive(said):
        raise place.error(f"{said} is never more than 0", "Write a number of elements")
    shapes = {name: SHAPE.fullmatch(name) or BLOCKS.fullmatch(name) for name in said.names}
    names = {match[1] if match else name for name, match in shapes.items()}
    unknown = sorted(names - set(source.parameters) - others)
    if unknown:
        known = ", ".join(sorted({*source.parameters, *others}))
        raise place.error(f"{unknown[0]} is unknown", f"Use parameters of the kernel or axes: {known[:160]}")


def _tile(source: KernelSource) -> tuple[int | None, str | None, int]:
    """(index of the loop over tiles, variable of the tile's number, index of the statement it comes from)."""
    marks = source.of_kind(TileIdDirective)
    begins = [mark for mark in source.of_kind(DispatchDirective) if mark.directive.begins]
    if not marks and len(begins) == 1 and len(begins[0].path) == 1:
        return None, None, begins[0].path[0]
    if len(marks) != 1:
        place = marks[1].directive.place if marks else source.place()
        raise place.error(f"{len(marks)} tile ids", "Put one `# @overweave.tile_id` above the statement that makes it")
    mark = marks[0]
    directive = mark.directive
    if len(mark.path) != 1:
        raise directive.place.error("it stands inside another block", "Put the tile id at the top level of the kernel")
    if directive.is_persistent:
        return mark.path[0], _loop_variable(directive.place, mark.statement), mark.path[0]
    return None, _program_variable(directive.place, mark.statement, source.language), mark.path[0]


def _loop_variable(place: SourceLine, statement: Statement) -> str:
    if isinstance(statement, cst.For) and isinstance(statement.iter, cst.Call) and statement.orelse is None:
        target, is_block = statement.target, isinstance(statement.body, cst.IndentedBlock)
        if called(statement.iter) == "range" and is_block and isinstance(target, cst.Name):
            return str(target.value)
    raise place.error("no loop over a range follows it", "Put it above `for NAME in tl.range(...):`")


def _program_variable(place: SourceLine, statement: Statement, language: Language) -> str:
    parts = statement.body if isinstance(statement, cst.SimpleStatementLine) else ()
    part = parts[0] if len(parts) == 1 else None
    if isinstance(part, cst.Assign) and len(part.targets) == 1 and isinstance(part.targets[0].target, cst.Name):
        calls = calls_in(part.value)
        words = [language.word(call) or language.method(call) for call in calls]
        if sorted(words) in (["program_id"], ["program_id", "to"], ["cast", "program_id"]) and calls[0] is part.value:
            return part.targets[0].target.value
    raise place.error(
        "no `pid = tl.program_id(0)` follows it", "Put it above that statement, or above the loop over tiles"
    )


def _dispatch(
    source: KernelSource, path: tuple[int, ...], axes: tuple[AxisDirective, ...], number: str | None
) -> tuple[list[tuple[int, int] | None], dict[str, str]]:
    """The regions that turn a number into blocks, the same in each, and the variable of every axis' block."""
    marks = source.of_kind(DispatchDirective)
    maps = source.of_kind(PidMapDirective)
    grid = [axis.name for axis in axes if not axis.is_streamed]
    if not marks and not maps and len(grid) == 1 and number is not None:
        return [None], {grid[0]: number}
    turns = [mark.directive.begins for mark in marks]
    if turns != [True, False] * len(maps) or not maps:
        places = [*(mark.directive.place for mark in marks), *(mark.directive.place for mark in maps)]
        place = places[0] if places else source.place()
        found = f"{turns.count(True)} `dispatch begin`, {turns.count(False)} `dispatch end`, {len(maps)} `pid_map`"
        raise place.error(found, "Put one `dispatch begin`, one `pid_map` and one `dispatch end` there, in this order")
    blocks = dict(maps[0].directive.variables)
    regions = [
        _region(source, path, (begin, end), named)
        for begin, end, named in zip(marks[::2], marks[1::2], maps, strict=True)
    ]
    for named in maps:
        if dict(named.directive.variables) != blocks or set(blocks) != set(grid):
            found = f"it maps {', '.join(f'{axis}={name}' for axis, name in named.directive.variables)}"
            cure = f"Map every axis, {', '.join(grid)}, to the same variables in every region"
            raise named.directive.place.error(found, cure)
    return [*regions], blocks


def _region(
    source: KernelSource,
    path: tuple[int, ...],
    ends: tuple[Marked[DispatchDirective], Marked[DispatchDirective]],
    named: Marked[PidMapDirective],
) -> tuple[int, int]:
    for mark in ends:
        if mark.path[:-1] != path:
            raise mark.directive.place.error("it is not in the body of the tile", "Put it beside the tile id")
    lo, hi = (mark.path[-1] for mark in ends)
    if named.path[: len(path)] != path or not lo <= named.path[len(path)] < hi:
        raise named.directive.place.error(
            "it is outside of the dispatch region", "Put it between `dispatch begin` and `dispatch end`"
        )
    made = assigned_names(_body(source, path)[lo:hi])
    for axis, variable in named.directive.variables:
        if variable not in made:
            found = f"{variable}, the block of {axis}, is not assigned in the dispatch region"
            raise named.directive.place.error(found, "Assign it between `dispatch begin` and `dispatch end`")
    return lo, hi


def _streams(source: KernelSource, path: tuple[int, ...], axes: tuple[AxisDirective, ...]) -> tuple[StreamedLoop, ...]:
    streamed = {axis.name: axis for axis in axes if axis.is_streamed}
    streams: list[StreamedLoop] = []
    for mark in source.of_kind(StreamDirective):
        directive = mark.directive
        if directive.axis not in streamed:
            known = ", ".join(streamed) or "none"
            raise directive.place.error(f"no streamed axis is called {directive.axis}", f"Streamed axes: {known}")
        _loop_variable(directive.place, mark.statement)
        if mark.path[:-1] != path:
            raise directive.place.error(
                "its loop stands inside another block", "Put the loop into the body of the tile"
            )
        assert isinstance(mark.statement, cst.For)
        streams.append(StreamedLoop(directive, mark.statement, mark.path[-1]))
    missing = set(streamed) - {stream.directive.axis for stream in streams}
    if streamed and (missing or len(streams) != 1):
        place = streamed[min(missing, default=next(iter(streamed)))].place
        raise place.error("no loop, or more than one, walks it", "Put `# @overweave.stream` above its one loop")
    return tuple(streams)


def _index(mark: Marked[AccessDirective], path: tuple[int, ...]) -> int:
    if mark.path[: len(path)] != path or len(mark.path) <= len(path):
        raise mark.directive.place.error(
            "it is outside of the loop over tiles", "Put it where each tile loads or stores"
        )
    return mark.path[len(path)]


def _body(source: KernelSource, path: tuple[int, ...]) -> Sequence[Statement]:
    statements = source.function.body.body
    for index in path:
        statements = statements[index].body.body  # type: ignore[union-attr]
    return statements  # type: ignore[return-value]
