"""Whether a kernel is what its directives say it is, as far as its source can tell. All refusals name file and line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import libcst as cst
import libcst.matchers as m

from overweave.compiler.author import Source
from overweave.compiler.directives import RESERVED, AccessDirective
from overweave.compiler.expressions import ExpressionError, parse_expression
from overweave.compiler.kernel import Access, Kernel, check_names
from overweave.compiler.module import jit_decorators
from overweave.compiler.names import (
    Origins,
    assigned_names,
    called,
    calls_in,
    memory_calls,
    place_of,
    used_names,
)


def check_kernel(kernel: Kernel) -> None:
    """Raises DirectiveError for the first thing that the compiler could not keep its word on."""
    source = kernel.source
    origins = Origins(source.function, source.parameters)
    _check_reserved(source)
    jit_decorators(source)
    if not kernel.stores:
        raise source.place().error("no store is annotated", "Put `# @overweave.store C=c_ptr[M, N]` above it")
    for access in (*kernel.loads, *kernel.stores):
        _check_access(kernel, access, origins)
    _check_twins((*kernel.loads, *kernel.stores))
    _check_others(kernel, origins)
    _check_dispatch(kernel)
    _check_program_ids(kernel)
    _check_jumps(kernel)
    _check_stream(kernel)


def _check_reserved(source: Source) -> None:
    names = used_names(source.function) | set(source.parameters)
    taken = sorted(name for name in names if name.startswith(RESERVED))
    if taken:
        raise source.place().error(
            f"it uses the name {taken[0]}", f"Names that begin with {RESERVED} are the compiler's"
        )


def _check_access(kernel: Kernel, access: Access, origins: Origins) -> None:
    said, source = access.directive, kernel.source
    kind = "store" if said.is_store else "load"
    if said.parameter not in source.parameters:
        raise said.place.error(
            f"the kernel has no parameter {said.parameter}", f"Parameters: {', '.join(source.parameters)}"
        )
    axes = {axis.name: axis for axis in kernel.axes}
    for dim in said.dims:
        check_names(said.place, dim, source, frozenset(axes))
        try:
            axis, _, _ = dim.affine_in(axes)
        except ExpressionError as error:
            cure = "Write an axis, `2 * M + 1` blocks along one, or an extent without axes"
            raise said.place.error(str(error), cure) from None
        if axis is not None and axes[axis].is_streamed:
            inside = any(stream.directive.axis == axis and stream.index == access.index for stream in kernel.streams)
            if said.is_store or not inside:
                raise said.place.error(
                    f"it is outside of the loop that walks {axis}", "Only loads inside it can be part by part"
                )
    calls = memory_calls(access.statement, kind) if isinstance(access.statement, cst.SimpleStatementLine) else []
    if len(calls) != 1:
        found = f"the statement below it has {len(calls)} {kind}s"
        raise said.place.error(
            found, f"Put it right above a statement with one `tl.{kind}(...)` or `descriptor.{kind}(...)`"
        )
    if said.parameter not in origins.of(place_of(calls[0])):
        made = ", ".join(sorted(origins.of(place_of(calls[0])))) or "no parameter"
        raise said.place.error(
            f"the {kind} below it is not made from {said.parameter}, but from {made}", "Name its parameter"
        )


def _check_twins(accesses: Iterable[Access]) -> None:
    """A tensor that is read in several places is the same one everywhere, and no parameter holds two."""
    known: dict[tuple[bool, str], AccessDirective] = {}
    holders: dict[str, str] = {}
    for access in accesses:
        said = access.directive
        other = known.setdefault((said.is_store, said.tensor), said)
        if (other.parameter, other.dims) != (said.parameter, said.dims):
            raise said.place.error(
                f"{said.tensor} is another tensor in line {other.place.line}", "Give it a name of its own"
            )
        holder = holders.setdefault(said.parameter, said.tensor)
        if holder != said.tensor:
            raise said.place.error(f"{said.parameter} already holds {holder}", "Give a parameter one tensor")


def _check_others(kernel: Kernel, origins: Origins) -> None:
    """Every load and store of a parameter that a directive names has a directive itself."""
    for kind, accesses in (("load", kernel.loads), ("store", kernel.stores)):
        annotated = [call for access in accesses for call in memory_calls(access.statement, kind)]
        named = {access.directive.parameter: access.directive for access in accesses}
        for call in memory_calls(kernel.source.function, kind):
            held = sorted(origins.of(place_of(call)) & named.keys())
            if held and not any(call is one for one in annotated):
                found = f"another {kind} of {held[0]} has no directive"
                raise named[held[0]].place.error(found, "Annotate every load and store of a tensor that is annotated")


def _check_dispatch(kernel: Kernel) -> None:
    """Nothing that the dispatch region makes is used later, but for the blocks."""
    if kernel.dispatch is None:
        return
    lo, hi = kernel.dispatch
    made = assigned_names(kernel.body[lo:hi]) - set(kernel.blocks.values())
    later = {name for statement in kernel.body[hi:] for name in used_names(statement)}
    lost = sorted(made & later - {kernel.number})
    if lost:
        found = f"{lost[0]} is made in the dispatch region and used behind it"
        raise kernel.source.place().error(found, "Move it above `dispatch begin`: the compiler replaces the region")


def _check_program_ids(kernel: Kernel) -> None:
    if kernel.loop is not None:
        return
    lo, hi = kernel.dispatch or (0, 0)
    for index, statement in enumerate(kernel.body):
        if index == kernel.first or lo <= index < hi:
            continue
        if any(called(call) in ("program_id", "num_programs") for call in calls_in(statement)):
            found = "a program's number is used outside of the tile id and the dispatch region"
            raise kernel.source.place().error(found, "Move it between `dispatch begin` and `dispatch end`")


def _check_jumps(kernel: Kernel) -> None:
    """A tile that ends early would never announce what it stored."""
    if any(m.findall(statement, m.Return()) for statement in kernel.source.function.body.body):
        raise kernel.source.place().error("it returns early", "Mask its loads and stores instead")
    if kernel.loop is not None and any(_jumps(list(kernel.body))):
        raise kernel.source.place().error("a tile ends by `continue` or `break`", "Mask its loads and stores instead")


def _jumps(statements: Iterable[cst.CSTNode]) -> Iterator[bool]:
    """Jumps that leave the loop around these statements, not one inside them."""
    for statement in statements:
        if not isinstance(statement, cst.For | cst.While):
            simple = statement.body if isinstance(statement, cst.SimpleStatementLine) else ()
            if any(isinstance(part, cst.Continue | cst.Break) for part in simple):
                yield True
            if isinstance(statement, cst.If):
                inner = [statement.body, statement.orelse.body if statement.orelse else None]
                for block in inner:
                    yield from _jumps(block.body if isinstance(block, cst.IndentedBlock) else ())


def _check_stream(kernel: Kernel) -> None:
    """The loop's step is the block of its axis, so that no turn reads beyond a part."""
    axes = {axis.name: axis for axis in kernel.axes}
    for stream in kernel.streams:
        place = stream.directive.place
        arguments = [arg for arg in stream.loop.iter.args if arg.keyword is None]  # type: ignore[attr-defined]
        if len(arguments) != 3:
            raise place.error("its loop names no step", "Write `for start in range(low, high, BLOCK):`")
        step = kernel.source.module.code_for_node(arguments[2].value)
        try:
            is_block = parse_expression(step) == axes[stream.directive.axis].block
        except ExpressionError:
            is_block = False
        if not is_block:
            found = f"its loop goes in steps of {step}, not of {axes[stream.directive.axis].block}"
            raise place.error(found, "Let the step be the block of the axis")
