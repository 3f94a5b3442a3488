"""Whether a kernel is what its directives say it is, as far as its source can tell. All refusals name file and line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import libcst as cst
import libcst.matchers as m

from overweave.compiler.frontend.carried import check_carried
from overweave.compiler.frontend.rectangles import check_places
from overweave.compiler.frontend.source.author import KernelSource
from overweave.compiler.frontend.source.callees import Callees, Touch
from overweave.compiler.frontend.source.kernel import AnnotatedAccess, AnnotatedKernel, check_names
from overweave.compiler.frontend.source.language import dotted
from overweave.compiler.frontend.source.module import jit_decorators
from overweave.compiler.frontend.source.names import (
    Origins,
    accesses_in,
    assigned_names,
    assignments,
    calls_in,
    used_names,
    walk,
)
from overweave.compiler.frontend.symbols.directives import RESERVED, AccessDirective
from overweave.compiler.frontend.symbols.expressions import ExpressionError, affine_in, is_of_blocks, parse_expression
from overweave.compiler.frontend.symbols.polynomials import Polynomial, number

KEPT = ("multiple_of", "max_contiguous", "max_constancy", "cast", "to")  # words that leave a number what it is
OF_POINTERS = ("mask", "boundary_check", "cache_modifier", "eviction_policy")  # what no descriptor's store is given


def check_kernel(kernel: AnnotatedKernel) -> None:
    """Raises DirectiveError for the first thing that the compiler could not keep its word on."""
    source = kernel.source
    origins = Origins(assignments(source.function.body), source.parameters, source.language)
    callees = Callees(source)
    _check_reserved(source)
    jit_decorators(source)
    if not kernel.stores:
        raise source.place().error("no store is annotated", "Put `# @overweave.store C=c_ptr[M, N]` above it")
    for access in (*kernel.loads, *kernel.stores):
        _check_access(kernel, access, origins)
    _check_twins((*kernel.loads, *kernel.stores))
    _check_touches(kernel, callees, origins)
    _check_locks(kernel)
    _check_dispatch(kernel)
    _check_extents(kernel)
    _check_jumps(kernel)
    _check_stream(kernel)
    check_places(kernel)


def check_exchanged(kernel: AnnotatedKernel, read: Iterable[str], written: Iterable[str]) -> None:
    """What arrives from peers is only read, and what goes to them only written: both lie where the caller cannot see.

    read, written: the tensors that are exchanged. Raises DirectiveError.
    """
    source = kernel.source
    origins = Origins(assignments(source.function.body), source.parameters, source.language)
    reads = {one.directive.parameter: one.directive for one in kernel.loads if one.directive.tensor in set(read)}
    writes = {one.directive.parameter: one.directive for one in kernel.stores if one.directive.tensor in set(written)}
    for touch in Callees(source).touches(source.function, origins):
        if touch.kind != "load" and touch.parameter in reads:
            said = reads[touch.parameter]
            found = f"{said.tensor} is gathered from peers, and {said.parameter} is stored to"
            raise said.place.error(found, "Store to a parameter of its own")
        if touch.kind != "store" and touch.parameter in writes:
            said = writes[touch.parameter]
            found = f"{said.tensor} goes to peers, and {said.parameter} is loaded from, which holds nothing then"
            raise said.place.error(found, "Load what it held from a parameter of its own")


def _check_reserved(source: KernelSource) -> None:
    names = used_names(source.function) | set(source.parameters)
    taken = sorted(name for name in names if name.startswith(RESERVED))
    if taken:
        raise source.place().error(
            f"it uses the name {taken[0]}", f"Names that begin with {RESERVED} are the compiler's"
        )
    params = source.function.params
    if params.kwonly_params or params.star_kwarg or isinstance(params.star_arg, cst.Param):
        cure = "List them all without `*`: calls may name them in any case"
        raise source.place().error("some parameters can only be named, or are any number, which no launch passes", cure)
    if "group" in source.parameters:
        raise source.place().error("a parameter is called group", "Rename it: `group=` of a call names the ranks")


def _check_access(kernel: AnnotatedKernel, access: AnnotatedAccess, origins: Origins) -> None:
    said, source = access.directive, kernel.source
    if said.parameter not in source.parameters:
        raise said.place.error(
            f"the kernel has no parameter {said.parameter}", f"Parameters: {', '.join(source.parameters)}"
        )
    if kernel.loop is None and access.index < kernel.first:
        raise said.place.error("it stands above the tile's number", "Put the tile id, or the dispatch region, above it")
    axes = {axis.name: axis for axis in kernel.axes}
    for dim in said.dims:
        check_names(said.place, dim, source, frozenset(axes))
        try:
            axis, _, _ = affine_in(dim, axes)
        except ExpressionError as error:
            cure = "Write an axis, `2 * M + 1` blocks along one, or an extent without axes"
            raise said.place.error(str(error), cure) from None
        if axis is not None and axes[axis].is_streamed and is_of_blocks(dim):
            raise said.place.error(f"{axis} is streamed: its blocks are turns of a loop, not tiles", "Name an extent")
        if axis is not None and axes[axis].is_streamed:
            inside = any(stream.directive.axis == axis and stream.index == access.index for stream in kernel.streams)
            if said.is_store or not inside:
                raise said.place.error(
                    f"it is outside of the loop that walks {axis}", "Only loads inside it can be part by part"
                )
    _check_call(kernel, access, origins)


def _check_call(kernel: AnnotatedKernel, access: AnnotatedAccess, origins: Origins) -> None:
    """Below a directive stands one load or store, and of its parameter."""
    said, language = access.directive, kernel.source.language
    kind = "store" if said.is_store else "load"
    is_simple = isinstance(access.statement, cst.SimpleStatementLine)
    calls = accesses_in(access.statement, kind, language) if is_simple else []
    if len(calls) != 1:
        found = f"the statement below it has {len(calls)} {kind}s"
        raise said.place.error(
            found, f"Put it right above a statement with one `tl.{kind}(...)` or `descriptor.{kind}(...)`"
        )
    (call,) = calls
    if access.helper and said.is_store:
        raise said.place.error(f"it stands in {access.helper}", "Let it return the value, and store it in the kernel")
    made = origins.of(language.place(call))
    if said.parameter not in made and not access.helper:
        listed = ", ".join(sorted(made)) or "no parameter"
        raise said.place.error(
            f"the {kind} below it is not made from {said.parameter}, but from {listed}", "Name its parameter"
        )
    words = {arg.keyword.value for arg in call.args if arg.keyword}
    if said.is_store and language.method(call) and (len(call.args) < 2 or words.intersection(OF_POINTERS)):
        raise said.place.error("the store below it is a method of a pointer", "Write `tl.store(pointer, value)`")


def _check_twins(accesses: Iterable[AnnotatedAccess]) -> None:
    """A tensor that is read in several places is the same one everywhere, and no parameter holds two."""
    known: dict[tuple[bool, str], AccessDirective] = {}
    names: dict[str, AccessDirective] = {}
    holders: dict[str, str] = {}
    for access in accesses:
        said = access.directive
        named = names.setdefault(said.tensor, said)
        if named.parameter != said.parameter:
            raise said.place.error(
                f"{said.tensor} is another tensor in line {named.place.line}", "Give it a name of its own"
            )
        other = known.setdefault((said.is_store, said.tensor), said)
        if other.dims != said.dims:
            cure = (
                "Where a tile reads at two places, name an extent, not an axis: it then waits for all of that dimension"
            )
            raise said.place.error(f"{said.tensor} has other dimensions in line {other.place.line}", cure)
        holder = holders.setdefault(said.parameter, said.tensor)
        if holder != said.tensor:
            raise said.place.error(f"{said.parameter} already holds {holder}", "Give a parameter one tensor")


def _check_touches(kernel: AnnotatedKernel, callees: Callees, origins: Origins) -> None:
    """Every load and store of a parameter that a directive names has a directive itself."""
    source = kernel.source
    loads = {access.directive.parameter: access.directive for access in kernel.loads}
    stores = {access.directive.parameter: access.directive for access in kernel.stores}
    by_kind = {"load": loads, "store": stores}
    annotated = [
        call
        for kind, accesses in (("load", kernel.loads), ("store", kernel.stores))
        for access in accesses
        for call in accesses_in(access.statement, kind, source.language)
    ]
    helpers = {(access.helper, access.directive.parameter) for access in kernel.loads if access.helper}
    for touch in callees.touches(source.function, origins):
        if touch.kind == "load" and (touch.by, touch.parameter) in helpers:
            continue  # frontend/rectangles.py sees each of them
        said = by_kind.get(touch.kind or "", {**loads, **stores}).get(touch.parameter)
        if said is not None and not any(touch.call is call for call in annotated):
            raise said.place.error(*_unseen(touch, source.module.code_for_node(touch.call).split("\n")[0][:60]))


def _unseen(touch: Touch, text: str) -> tuple[str, str]:
    """What is wrong with a load or store that no directive names, and the cure."""
    if touch.kind is None:
        found = f"`{text}` gets {touch.parameter}, and what it loads or stores stands elsewhere"
        return found, "Define it in this file, or pass it no pointer to an annotated tensor"
    if touch.by:
        what = "an atomic" if touch.kind == "atomic" else f"a {touch.kind}"
        found = f"`{text}` reaches {touch.parameter} by {what} of its own, which no directive can name"
        return found, f"Let {touch.by} make the pointers, and load or store in the kernel itself"
    if touch.kind == "atomic":
        found = f"`{text}` changes {touch.parameter} by atomics: no tile's store is the last, so none can be announced"
        return found, "Let each tile store a part of its own, such as C[SPLIT, M, N] or C[blocks(K), N], and add these"
    found = f"another {touch.kind} of {touch.parameter} has no directive: `{text}`"
    return found, "Annotate every load and store of a tensor that is annotated"


def _check_dispatch(kernel: AnnotatedKernel) -> None:
    """Nothing that the dispatch region makes is used later, but for the blocks."""
    if kernel.dispatch is None:
        return
    lo, hi = kernel.dispatch
    for access in (*kernel.loads, *kernel.stores):
        if lo <= access.index < hi:
            raise access.directive.place.error("it stands in the dispatch region", "Move it behind `dispatch end`")
    kinds = {kernel.source.language.kind(call) for one in kernel.body[lo:hi] for call in calls_in(one)}
    if kinds & {"store", "atomic"}:
        raise kernel.source.place().error("the dispatch region stores", "Move it out: the compiler replaces the region")
    made = assigned_names(kernel.body[lo:hi]) - set(kernel.blocks.values())
    later = {name for statement in kernel.body[hi:] for name in used_names(statement)}
    lost = sorted(made & later - {kernel.number})
    if lost:
        found = f"{lost[0]} is made in the dispatch region and used behind it"
        raise kernel.source.place().error(found, "Move it above `dispatch begin`: the compiler replaces the region")


def _check_locks(kernel: AnnotatedKernel) -> None:
    """Programs that wait for each other, as in stream-K, have an order that no schedule may change."""
    source = kernel.source
    for call in calls_in(source.function.body):
        word = source.language.word(call)
        if word == "atomic_cas" or (word == "atomic_xchg" and _is_waited(source, call)):
            text = source.module.code_for_node(call).split("\n")[0][:60]
            found = f"`{text}` lets programs wait for each other (a lock, stream-K), and tiles come in another order"
            raise source.place().error(
                found, "Split K into blocks of an axis, and store each part to a slab of its own"
            )


def _is_waited(source: KernelSource, call: cst.Call) -> bool:
    loops = [one for one in walk(source.function.body) if isinstance(one, cst.While)]
    return any(call is each for loop in loops for each in calls_in(loop.test))


def _check_extents(kernel: AnnotatedKernel) -> None:
    """The numbers that directives name are the caller's wherever they are used."""
    said = [one for axis in kernel.axes for one in (axis.extent, axis.block)]
    said += [dim for access in (*kernel.loads, *kernel.stores) for dim in access.directive.dims]
    named = {name for one in said for name in one.names}
    for name, value in assignments(kernel.source.function.body):
        is_kept = isinstance(value, cst.Call) and _last(value) in KEPT and name in used_names(value)
        if name in named and not is_kept:
            found = f"{name} is assigned, and directives mean the number that the caller passes"
            raise kernel.source.place().error(found, "Give what the kernel makes of it another name")


def _stepped(text: str, source: KernelSource) -> Polynomial:
    numbers = source.file_numbers
    return parse_expression(text).replaced(lambda atom: number(numbers[atom]) if atom in numbers else None)


def _last(call: cst.Call) -> str:
    return dotted(call.func).split(".")[-1]


def _check_jumps(kernel: AnnotatedKernel) -> None:
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


def _check_stream(kernel: AnnotatedKernel) -> None:
    """The loop's step is the block of its axis, so that no turn reads beyond a part."""
    axes = {axis.name: axis for axis in kernel.axes}
    for stream in kernel.streams:
        place = stream.directive.place
        arguments = [arg for arg in stream.loop.iter.args if arg.keyword is None]  # type: ignore[attr-defined]
        if len(arguments) != 3:
            raise place.error("its loop names no step", "Write `for start in range(low, high, BLOCK):`")
        step = kernel.source.module.code_for_node(arguments[2].value)
        try:
            is_block = _stepped(step, kernel.source) == axes[stream.directive.axis].block
        except ExpressionError:
            is_block = False
        if not is_block:
            found = f"its loop goes in steps of {step}, not of {axes[stream.directive.axis].block}"
            raise place.error(found, "Let the step be the block of the axis")
        check_carried(kernel, stream)
