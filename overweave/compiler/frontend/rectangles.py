"""Checks that each annotated load and store touches the rectangle that its directive declares, and nothing else.

Addresses are compared by their names, before a call and in it. A call adds the number of each name, and so decides the
rest: a stride that is a parameter, an offset, the end of a loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from math import prod
from typing import Any

from overweave.compiler.frontend.addresses.access import AccessCheck
from overweave.compiler.frontend.addresses.dimensions import Bounds, Dimension, Extents
from overweave.compiler.frontend.addresses.index_check import NeedsCallArguments
from overweave.compiler.frontend.loop_carried import OVERWRITES
from overweave.compiler.frontend.source.kernel import AnnotatedKernel
from overweave.compiler.frontend.source.language import ATOMIC
from overweave.compiler.frontend.symbols.directives import AccessDirective, SourceLine, affine_in, is_of_blocks
from overweave.compiler.frontend.symbols.polynomials import (
    ZERO,
    BlockOf,
    OpaqueResult,
    Polynomial,
    TooLarge,
    ceil_div,
    const_poly,
    divide,
)
from overweave.compiler.frontend.symbols.values import (
    LOOP_CARRIED,
    MAXIMUM,
    MINIMUM,
    PROGRAM_ID,
    UNSEEN_FUNCTION,
    Descriptor,
    Number,
    value_tags,
)
from overweave.compiler.frontend.walk.evaluate import AccessTrace, StreamStart, TracedAccess
from overweave.compiler.frontend.walk.follow import STORES, trace_accesses
from overweave.compiler.frontend.walk.loops import TILES
from overweave.compiler.frontend.walk.tl_functions import substitute_ints

COMMUTATIVE_ATOMICS = tuple(f"atomic_{name}" for name in ("add", "max", "min", "and", "or", "xor"))


def check_addresses(kernel: AnnotatedKernel, arguments: Mapping[str, Any] | None = None) -> None:
    """Raise DirectiveError for the first load or store outside the rectangle that its directive declares.

    arguments: those of a call that are not tensors, and `NAME.shape[0]`, `NAME.block_shape[0]` of those that are;
    None before a call.
    """
    int_args = {name: int(value) for name, value in (arguments or {}).items() if isinstance(value, int)}
    _Check(kernel, kernel.source.file_ints | int_args, arguments is not None).check(trace_accesses(kernel, arguments))


class _Check:
    """The check of a kernel. variables: axis -> the variable of its block, or of the loop that walks it.

    symbols: the names in the expressions of directives. strides: the parameters that may be strides.
    """

    def __init__(self, kernel: AnnotatedKernel, int_args: Mapping[str, int], has_call_args: bool) -> None:
        self.kernel, self.int_args, self.has_call_args = kernel, int_args, has_call_args
        loops = {one.directive.axis: kernel.source.module.code_for_node(one.loop.target) for one in kernel.streams}
        self.variables = dict(kernel.block_variables) | loops
        self.lines = kernel.source.text.splitlines()
        self.symbols = kernel.symbols
        self.strides = frozenset(kernel.source.parameters) - kernel.symbols - kernel.source.constants
        axes = {axis.name: Extents(axis.extent, axis.block, axis.is_streamed) for axis in kernel.axes}
        self.bounds = Bounds(axes, self.substitute, kernel.symbols)

    def check(self, followed: AccessTrace) -> None:
        """Raise DirectiveError for the first access that breaks a rule."""
        for line in followed.mismatches:
            raise self._at(line).error("the blocks are not those of the first region", "Compute them from one tile id")
        stored_ranges: dict[AccessDirective, list[tuple[range, ...]]] = {}
        undecided: set[str] = set()
        for loop_start in followed.loop_starts if self.has_call_args else ():
            self._check_loop_start(loop_start)
        for loop in sorted(frozenset[str]().union(*(one.reordered_loops for one in followed.accesses))):
            self._check_memory_dependence(loop, [one for one in followed.accesses if loop in one.reordered_loops])
        for access in followed.accesses:
            self._check_no_program_id(access)
            if access.directive is None:
                self._check_undirected(access)
                continue
            try:
                ranges = AccessCheck(self, access, access.directive).stored_ranges()
            except (NeedsCallArguments, TooLarge):
                undecided.add(access.directive.tensor)
                continue
            if access.directive.is_store:
                stored_ranges.setdefault(access.directive, []).append(ranges)
        missing = {one.directive for one in self.kernel.stores} - stored_ranges.keys()
        for directive in sorted(missing, key=lambda one: one.loc.line):
            if self.has_call_args and directive.tensor not in undecided | {one.tensor for one in stored_ranges}:
                raise directive.loc.error(
                    "no tile comes to it in this call", "Leave its directive out, or store in every tile"
                )
        self._check_coverage(stored_ranges, undecided)

    def _check_undirected(self, access: TracedAccess) -> None:
        """Raise for a load in a helper function without a directive, of a tensor that has a directive there."""
        for load in self.kernel.loads:
            if load.helper and isinstance(access.address, Number) and access.kind not in STORES:
                if load.directive.parameter in access.address.poly.atoms:
                    found = f"{load.helper} loads {load.directive.parameter} at another place, without a directive"
                    raise self._at(access.line).error(found, "Annotate every load of a tensor that is annotated")

    def _check_coverage(self, stored: Mapping[AccessDirective, list[tuple[range, ...]]], undecided: set[str]) -> None:
        """Raise if the stores of a tensor do not together cover the tile's rectangle. undecided: tensors to skip."""
        by_tensor: dict[str, list[tuple[AccessDirective, tuple[range, ...]]]] = {}
        for directive, ranges in stored.items():
            by_tensor.setdefault(directive.tensor, []).extend((directive, each) for each in ranges)
        for tensor, stores in by_tensor.items():
            sizes = [self.substitute(dim.size).constant for dim in self.dims(stores[0][0])]
            if tensor in undecided or None in sizes:
                continue
            rectangles = list(dict.fromkeys(ranges for _, ranges in stores))
            if not _is_covered([size or 0 for size in sizes], rectangles):
                directive, ranges_of_store = stores[0]
                range_texts = ", ".join(_range_text(each) for each in ranges_of_store)
                raise directive.loc.error(
                    f"a tile stores {range_texts} of its {' x '.join(map(str, sizes))} elements", "Store the whole tile"
                )

    def _check_memory_dependence(self, loop: str, accesses: list[TracedAccess]) -> None:
        """Raise if tiles, or iterations of a streamed loop, pass a value to each other through memory.

        They do if one may load what another stores, or if all iterations store to the same address.
        """
        own_axes = {loop} if loop != TILES else {axis.name for axis in self.kernel.grid}
        stores = [one for one in accesses if one.kind in STORES or one.kind.startswith(ATOMIC)]
        for load in (one for one in accesses if one.kind not in STORES):
            for store in stores:
                shared = self._pointers(load) & self._pointers(store)
                is_private = self._is_private(load, store, own_axes)
                if shared and not is_private and not (load is store and load.kind in COMMUTATIVE_ATOMICS):
                    what = "by tiles" if loop == TILES else f"in a loop over parts of {loop}"
                    found = f"{sorted(shared)[0]} is loaded and stored {what}, which come in another order"
                    own = "Load and store each tile's own: give both a directive with the same dimensions, all axes"
                    cure = own if loop == TILES else "Carry it in a variable as a sum or a maximum"
                    raise self._at(store.line).error(found, cure)
        for store in stores if loop != TILES else ():
            values = [store.address, *store.arguments[0][1:], *store.arguments[1].values()]
            is_carried = LOOP_CARRIED in frozenset[str]().union(*map(value_tags, values))
            is_own_place = BlockOf(loop) in _address(store).atoms or store.kind in COMMUTATIVE_ATOMICS
            if store.is_in_helper and (is_carried or not is_own_place):  # others: see loop_carried.py
                raise self._at(store.line).error(*OVERWRITES)

    def _is_private(self, load: TracedAccess, store: TracedAccess, own_axes: set[str]) -> bool:
        """Whether no tile, or no iteration, loads what another stores."""
        dims = load.directive.dims if load.directive else ()
        if store.directive and dims == store.directive.dims:
            return own_axes <= frozenset[str]().union(*(dim.names for dim in dims))
        is_same = _address(load) == _address(store)
        return is_same and all(BlockOf(axis) in _address(load).atoms for axis in own_axes)

    def _pointers(self, access: TracedAccess) -> frozenset[str]:
        """Return the parameters that may be the pointer of an access; none if that is ambiguous before a call."""
        if access.directive:
            return frozenset({access.directive.parameter})
        address = _address(access)
        alone = frozenset(str(atoms[0]) for atoms, _ in address.terms if len(atoms) == 1 and isinstance(atoms[0], str))
        names = (alone or address.names) & frozenset(self.kernel.source.parameters)
        pointers = names - self.kernel.symbols - self.kernel.source.constants - self.int_args.keys()
        return pointers if self.has_call_args or len(pointers) == 1 else frozenset()

    def _check_no_program_id(self, access: TracedAccess) -> None:
        """Raise if an address, or a stored value, depends on the program id: the schedule renumbers tiles."""
        values = [access.address, *access.arguments[0], *access.arguments[1].values(), access.guard]
        tags = frozenset[str]().union(*map(value_tags, values))
        what = "its address, or what it stores," if access.kind in STORES else "its address"
        loc = access.directive.loc if access.directive else self._at(access.line)
        if PROGRAM_ID in tags:
            blocks = ", ".join(sorted(self.kernel.block_variables.values()))
            found = f"{what} is computed from a program id, and the schedule numbers tiles anew"
            raise loc.error(found, f"Compute it from the blocks, {blocks}, alone")
        if UNSEEN_FUNCTION in tags:
            found = f"{what} comes from {UNSEEN_FUNCTION}: it may read a program id"
            raise loc.error(found, "Define it in this file, or in one that this file imports from")

    def _check_loop_start(self, start: StreamStart) -> None:
        """Raise if a streamed loop may begin within a block: its iterations would read on into the next part."""
        axis = next(axis for axis in self.kernel.axes if axis.name == start.directive.axis)
        block = self.substitute(axis.block)
        if not _is_multiple(self.substitute(start.low), block):
            found = f"its loop begins at {self.substitute(start.low)}, which is not always a whole block of {block}"
            raise start.directive.loc.error(found, "Begin at a multiple of the block, and mask loaded data")

    def _at(self, line: int) -> SourceLine:
        """Return a source location in the kernel's file."""
        return SourceLine(self.kernel.source.path.name, line, self.lines[line - 1].strip())

    def substitute(self, poly: Polynomial) -> Polynomial:
        """Replace names by the integers of the call, or of the file."""
        return substitute_ints(poly, self.int_args)

    def dims(self, directive: AccessDirective) -> list[Dimension]:
        """Return the dimensions of a row-major tensor, as a directive declares them."""
        axes = {axis.name: axis for axis in self.kernel.axes}
        dims: list[Dimension] = []
        stride = const_poly(1)
        for expression in reversed(directive.dims):
            name, scale, shift = affine_in(expression, axes)
            extent = axes[name].extent if name else expression
            dim = Dimension(extent, stride, extent)
            if name:
                axis, counts_blocks = axes[name], is_of_blocks(expression)
                block = const_poly(1) if counts_blocks else axis.block
                extent = ceil_div(axis.extent, axis.block) if counts_blocks else extent
                step = const_poly(1) if axis.is_streamed else const_poly(scale) * block
                dim = Dimension(extent, stride, block, name, step, const_poly(shift) * block)
            dims.insert(0, dim)
            stride = stride * extent
        return dims


def _address(access: TracedAccess) -> Polynomial:
    address = access.address
    return address.poly if isinstance(address, Number) else address.pointer if isinstance(address, Descriptor) else ZERO


def _is_multiple(low: Polynomial, block: Polynomial) -> bool:
    """Whether `low` is a multiple of `block` for all values of its names."""
    _, rest = divide(low, block)
    atoms = [atom for atoms, _ in rest.terms for atom in atoms]
    if len(rest.terms) != 1 or len(atoms) != 1:
        return rest == ZERO
    atom = atoms[0]
    is_extremum = isinstance(atom, OpaqueResult) and atom.operation in (MINIMUM, MAXIMUM)
    return is_extremum and all(_is_multiple(value, block) for value in atom.inputs)  # type: ignore[union-attr]


def _is_covered(sizes: list[int], rectangles: list[tuple[range, ...]]) -> bool:
    """Whether rectangles together contain every element of a tile with these sizes."""
    for ranges in rectangles:
        if all(
            set(range(size)) <= set(each) if len(each) >= size else False
            for size, each in zip(sizes, ranges, strict=True)
        ):
            return True
    if prod(sizes) > sum(prod(map(len, ranges)) for ranges in rectangles):
        return False
    covers = [list(_distinct_covers(size, [ranges[at] for ranges in rectangles])) for at, size in enumerate(sizes)]
    return all(frozenset.intersection(*each) for each in product(*covers))


def _distinct_covers(size: int, ranges: list[range]) -> Iterator[frozenset[int]]:
    """Yield each distinct set of ranges that contain an element of the dimension."""
    covering: list[frozenset[int]] = [frozenset()] * size
    for at, each in enumerate(ranges):
        for element in each:
            covering[element] |= {at}
    yield from set(covering)


def _range_text(span: range) -> str:
    return f"[{span.start}:{span.stop}]" if span.step == 1 else f"[{span.start}:{span.stop}:{span.step}]"
