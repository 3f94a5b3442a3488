"""Checks a kernel's source against its directives, without arguments of a call. Errors name file and line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import libcst as cst
import libcst.matchers as m

from overweave.compiler.frontend.loop_carried import check_loop_carried
from overweave.compiler.frontend.rectangles import check_addresses
from overweave.compiler.frontend.source.author import KernelSource
from overweave.compiler.frontend.source.kernel import AnnotatedAccess, AnnotatedKernel, check_names
from overweave.compiler.frontend.source.language import (
    Origins,
    accesses_in,
    assigned_names,
    assignments,
    calls_in,
    dotted,
    used_names,
    walk,
)
from overweave.compiler.frontend.source.module import Callees, ParameterAccess, jit_decorators
from overweave.compiler.frontend.symbols.directives import (
    RESERVED,
    AccessDirective,
    ExpressionError,
    affine_in,
    is_of_blocks,
    parse_expression,
)
from overweave.compiler.frontend.symbols.polynomials import Polynomial, const_poly

VALUE_PRESERVING = (
    "multiple_of",
    "max_contiguous",
    "max_constancy",
    "cast",
    "to",
)  # functions that return the integer that they get
POINTER_KEYWORDS = (
    "mask",
    "boundary_check",
    "cache_modifier",
    "eviction_policy",
)  # keywords that only a store through a pointer has


def check_kernel(kernel: AnnotatedKernel) -> None:
    """Raise DirectiveError for the first violation that would make the fused kernel wrong."""
    source = kernel.source
    origins = Origins(assignments(source.function.body), source.parameters, source.language)
    callees = Callees(source)
    _check_reserved(source)
    jit_decorators(source)
    if not kernel.stores:
        raise source.loc().error("no store is annotated", "Put `# @overweave.store C=c_ptr[M, N]` above it")
    for access in (*kernel.loads, *kernel.stores):
        _check_access(kernel, access, origins)
    _check_consistent_names((*kernel.loads, *kernel.stores))
    _check_unannotated(kernel, callees, origins)
    _check_locks(kernel)
    _check_dispatch(kernel)
    _check_extents(kernel)
    _check_jumps(kernel)
    _check_stream(kernel)
    check_addresses(kernel)


def check_exchanged(kernel: AnnotatedKernel, gathered: Iterable[str], sent: Iterable[str]) -> None:
    """Raise DirectiveError if the kernel stores to a gathered tensor, or loads from one that is sent to peers.

    Both lie in workspace memory that the caller does not see. gathered, sent: names of tensors.
    """
    source = kernel.source
    origins = Origins(assignments(source.function.body), source.parameters, source.language)
    loads = {one.directive.parameter: one.directive for one in kernel.loads if one.directive.tensor in set(gathered)}
    stores = {one.directive.parameter: one.directive for one in kernel.stores if one.directive.tensor in set(sent)}
    for access in Callees(source).parameter_accesses(source.function, origins):
        if access.kind != "load" and access.parameter in loads:
            directive = loads[access.parameter]
            found = f"{directive.tensor} is gathered from peers, and {directive.parameter} is stored to"
            raise directive.loc.error(found, "Store to a parameter of its own")
        if access.kind != "store" and access.parameter in stores:
            directive = stores[access.parameter]
            found = (
                f"{directive.tensor} goes to peers, and {directive.parameter} is loaded from, which holds nothing then"
            )
            raise directive.loc.error(found, "Load what it held from a parameter of its own")


def _check_reserved(source: KernelSource) -> None:
    """Raise for names that the compiler uses itself, and for `*args`, `**kwargs` and keyword-only parameters."""
    names = used_names(source.function) | set(source.parameters)
    reserved = sorted(name for name in names if name.startswith(RESERVED))
    if reserved:
        raise source.loc().error(
            f"it uses the name {reserved[0]}", f"Names that begin with {RESERVED} are the compiler's"
        )
    params = source.function.params
    if params.kwonly_params or params.star_kwarg or isinstance(params.star_arg, cst.Param):
        cure = "List them all without `*`: calls may name them in any case"
        raise source.loc().error("some parameters can only be named, or are any number, which no launch passes", cure)
    if "group" in source.parameters:
        raise source.loc().error("a parameter is called group", "Rename it: `group=` of a call names the ranks")


def _check_access(kernel: AnnotatedKernel, access: AnnotatedAccess, origins: Origins) -> None:
    """Raise for a directive whose parameter or dimensions are unknown, or that is misplaced."""
    directive, source, loc = access.directive, kernel.source, access.directive.loc
    if directive.parameter not in source.parameters:
        raise loc.error(
            f"the kernel has no parameter {directive.parameter}", f"Parameters: {', '.join(source.parameters)}"
        )
    if kernel.tile_loop is None and access.index < kernel.tile_start:
        raise loc.error("it stands above the tile's number", "Put the tile id, or the dispatch region, above it")
    axes = {axis.name: axis for axis in kernel.axes}
    for dim in directive.dims:
        check_names(loc, dim, source, frozenset(axes))
        try:
            axis, _, _ = affine_in(dim, axes)
        except ExpressionError as error:
            cure = "Write an axis, `2 * M + 1` blocks along one, or an extent without axes"
            raise loc.error(str(error), cure) from None
        if axis is not None and axes[axis].is_streamed and is_of_blocks(dim):
            raise loc.error(f"{axis} is streamed: its blocks are iterations of a loop, not tiles", "Name an extent")
        if axis is not None and axes[axis].is_streamed:
            is_in_loop = any(
                stream.directive.axis == axis and stream.index == access.index for stream in kernel.streams
            )
            if directive.is_store or not is_in_loop:
                raise loc.error(
                    f"it is outside of the loop that walks {axis}", "Only loads inside it can be part by part"
                )
    _check_call(kernel, access, origins)


def _check_call(kernel: AnnotatedKernel, access: AnnotatedAccess, origins: Origins) -> None:
    """Raise unless the statement below a directive has one load or store, of the directive's parameter."""
    directive, loc, language = access.directive, access.directive.loc, kernel.source.language
    kind = "store" if directive.is_store else "load"
    is_simple = isinstance(access.statement, cst.SimpleStatementLine)
    for call in calls_in(access.statement) if is_simple else ():
        if language.memory_kind(call) == "atomic":
            text = kernel.source.module.code_for_node(call).split("\n")[0][:60]
            raise loc.error(*_unannotated_error(ParameterAccess(directive.parameter, "atomic", call), text))
    calls = accesses_in(access.statement, kind, language) if is_simple else []
    if len(calls) != 1:
        found = f"the statement below it has {len(calls)} {kind}s"
        raise loc.error(found, f"Put it right above a statement with one `tl.{kind}(...)` or `descriptor.{kind}(...)`")
    (call,) = calls
    if access.helper and directive.is_store:
        raise loc.error(f"it stands in {access.helper}", "Let it return the value, and store it in the kernel")
    parameters = origins.parameters_of(language.address_of(call))
    if directive.parameter not in parameters and not access.helper:
        parameter_names = ", ".join(sorted(parameters)) or "no parameter"
        raise loc.error(
            f"the {kind} below it is not computed from {directive.parameter}, but from {parameter_names}",
            "Name its parameter",
        )
    keywords = {arg.keyword.value for arg in call.args if arg.keyword}
    if (
        directive.is_store
        and language.method_name(call)
        and (len(call.args) < 2 or keywords.intersection(POINTER_KEYWORDS))
    ):
        raise loc.error("the store below it is a method of a pointer", "Write `tl.store(pointer, value)`")


def _check_consistent_names(accesses: Iterable[AnnotatedAccess]) -> None:
    """Raise unless a tensor has one parameter and the same dimensions in all directives, and a parameter one tensor."""
    by_kind_and_tensor: dict[tuple[bool, str], AccessDirective] = {}
    by_tensor: dict[str, AccessDirective] = {}
    tensor_of_parameter: dict[str, str] = {}
    for access in accesses:
        directive, loc = access.directive, access.directive.loc
        first_of_tensor = by_tensor.setdefault(directive.tensor, directive)
        if first_of_tensor.parameter != directive.parameter:
            raise loc.error(
                f"{directive.tensor} is another tensor in line {first_of_tensor.loc.line}",
                "Give it a name of its own",
            )
        first_of_kind = by_kind_and_tensor.setdefault((directive.is_store, directive.tensor), directive)
        if first_of_kind.dims != directive.dims:
            cure = (
                "Where a tile reads at two places, name an extent, not an axis: it then waits for all of that dimension"
            )
            raise loc.error(f"{directive.tensor} has other dimensions in line {first_of_kind.loc.line}", cure)
        tensor = tensor_of_parameter.setdefault(directive.parameter, directive.tensor)
        if tensor != directive.tensor:
            raise loc.error(f"{directive.parameter} already holds {tensor}", "Give a parameter one tensor")


def _check_unannotated(kernel: AnnotatedKernel, callees: Callees, origins: Origins) -> None:
    """Raise for a load or store without a directive, of a parameter that a directive names."""
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
    annotated_helpers = {(access.helper, access.directive.parameter) for access in kernel.loads if access.helper}
    for access in callees.parameter_accesses(source.function, origins):
        if access.kind == "load" and (access.helper, access.parameter) in annotated_helpers:
            continue  # frontend/rectangles.py sees each of them
        directive = by_kind.get(access.kind or "", {**loads, **stores}).get(access.parameter)
        if directive is not None and not any(access.call is call for call in annotated):
            raise directive.loc.error(
                *_unannotated_error(access, source.module.code_for_node(access.call).split("\n")[0][:60])
            )


def _unannotated_error(access: ParameterAccess, text: str) -> tuple[str, str]:
    """Return (problem, cure) for an access without a directive."""
    if access.kind is None:
        found = f"`{text}` gets {access.parameter}, and what it loads or stores stands elsewhere"
        return found, "Define it in this file, or pass it no pointer to an annotated tensor"
    if access.helper:
        what = "an atomic" if access.kind == "atomic" else f"a {access.kind}"
        found = f"`{text}` reaches {access.parameter} by {what} of its own, which no directive can name"
        return found, f"Let {access.helper} make the pointers, and load or store in the kernel itself"
    if access.kind == "atomic":
        found = f"`{text}` changes {access.parameter} by atomics: no tile's store is the last, so none can be announced"
        return found, "Let each tile store a part of its own, such as C[SPLIT, M, N] or C[blocks(K), N], and add these"
    found = f"another {access.kind} of {access.parameter} has no directive: `{text}`"
    return found, "Annotate every load and store of a tensor that is annotated"


def _check_dispatch(kernel: AnnotatedKernel) -> None:
    """Raise if later code uses a variable of the dispatch region, blocks aside, or if the region stores."""
    if kernel.dispatch is None:
        return
    lo, hi = kernel.dispatch
    for access in (*kernel.loads, *kernel.stores):
        if lo <= access.index < hi:
            raise access.directive.loc.error("it stands in the dispatch region", "Move it after `dispatch end`")
    kinds = {kernel.source.language.memory_kind(call) for one in kernel.body[lo:hi] for call in calls_in(one)}
    if kinds & {"store", "atomic"}:
        raise kernel.source.loc().error("the dispatch region stores", "Move it out: the compiler replaces the region")
    assigned = assigned_names(kernel.body[lo:hi]) - set(kernel.block_variables.values())
    later = {name for statement in kernel.body[hi:] for name in used_names(statement)}
    lost = sorted(assigned & later - {kernel.tile_variable})
    if lost:
        found = f"{lost[0]} is assigned in the dispatch region and used after it"
        raise kernel.source.loc().error(found, "Move it above `dispatch begin`: the compiler replaces the region")


def _check_locks(kernel: AnnotatedKernel) -> None:
    """Raise for a lock: programs that wait for each other, as in stream-K, must not be reordered."""
    source = kernel.source
    for call in calls_in(source.function.body):
        word = source.language.tl_name(call)
        if word == "atomic_cas" or (word == "atomic_xchg" and _is_spin_condition(source, call)):
            text = source.module.code_for_node(call).split("\n")[0][:60]
            found = f"`{text}` lets programs wait for each other (a lock, stream-K), and tiles come in another order"
            raise source.loc().error(found, "Split K into blocks of an axis, and store each part to a slab of its own")


def _is_spin_condition(source: KernelSource, call: cst.Call) -> bool:
    loops = [one for one in walk(source.function.body) if isinstance(one, cst.While)]
    return any(call is each for loop in loops for each in calls_in(loop.test))


def _check_extents(kernel: AnnotatedKernel) -> None:
    """Raise if the kernel assigns to a name that directives use: they mean the caller's number."""
    expressions = [one for axis in kernel.axes for one in (axis.extent, axis.block)]
    expressions += [dim for access in (*kernel.loads, *kernel.stores) for dim in access.directive.dims]
    directive_names = {name for one in expressions for name in one.names}
    for name, value in assignments(kernel.source.function.body):
        is_hint = isinstance(value, cst.Call) and _callee_name(value) in VALUE_PRESERVING and name in used_names(value)
        if name in directive_names and not is_hint:
            found = f"{name} is assigned, and directives mean the number that the caller passes"
            raise kernel.source.loc().error(found, "Give what the kernel makes of it another name")


def _step_expression(text: str, source: KernelSource) -> Polynomial:
    constants = source.file_ints
    return parse_expression(text).substitute(lambda atom: const_poly(constants[atom]) if atom in constants else None)


def _callee_name(call: cst.Call) -> str:
    return dotted(call.func).split(".")[-1]


def _check_jumps(kernel: AnnotatedKernel) -> None:
    """Raise for a `return`, `continue` or `break` that ends a tile before it notifies."""
    if any(m.findall(statement, m.Return()) for statement in kernel.source.function.body.body):
        raise kernel.source.loc().error("it returns early", "Mask its loads and stores instead")
    if kernel.tile_loop is not None and any(_exits_of(list(kernel.body))):
        raise kernel.source.loc().error("a tile ends by `continue` or `break`", "Mask its loads and stores instead")


def _exits_of(statements: Iterable[cst.CSTNode]) -> Iterator[bool]:
    """Yield True for each `continue` or `break` of the loop around these statements."""
    for statement in statements:
        if not isinstance(statement, cst.For | cst.While):
            simple = statement.body if isinstance(statement, cst.SimpleStatementLine) else ()
            if any(isinstance(part, cst.Continue | cst.Break) for part in simple):
                yield True
            if isinstance(statement, cst.If):
                inner = [statement.body, statement.orelse.body if statement.orelse else None]
                for block in inner:
                    yield from _exits_of(block.body if isinstance(block, cst.IndentedBlock) else ())


def _check_stream(kernel: AnnotatedKernel) -> None:
    """Raise unless the step of a streamed loop is the block of its axis, so that no iteration reads beyond a part."""
    axes = {axis.name: axis for axis in kernel.axes}
    for stream in kernel.streams:
        loc = stream.directive.loc
        arguments = [arg for arg in stream.loop.iter.args if arg.keyword is None]  # type: ignore[attr-defined]
        if len(arguments) != 3:
            raise loc.error("its loop names no step", "Write `for start in range(low, high, BLOCK):`")
        step = kernel.source.module.code_for_node(arguments[2].value)
        try:
            is_block = _step_expression(step, kernel.source) == axes[stream.directive.axis].block
        except ExpressionError:
            is_block = False
        if not is_block:
            found = f"its loop goes in steps of {step}, not of {axes[stream.directive.axis].block}"
            raise loc.error(found, "Let the step be the block of the axis")
        check_loop_carried(kernel, stream)
