"""Whether each annotated load and store reaches the rectangle that its directive declares, and nothing beside it.

Addresses are compared by the names that stand in them, before a call and in it. A call adds the number of each, and
leaves nothing open: a stride that is a parameter, an offset, what a loop counts up to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from math import prod
from typing import Any

from overweave.compiler.frontend.places.access import AccessCheck
from overweave.compiler.frontend.places.bounds import Bounds, Extents
from overweave.compiler.frontend.places.dimensions import Dimension
from overweave.compiler.frontend.places.judged import Open
from overweave.compiler.frontend.source.kernel import AnnotatedKernel
from overweave.compiler.frontend.source.language import ATOMIC
from overweave.compiler.frontend.symbols.directives import AccessDirective, SourceLine
from overweave.compiler.frontend.symbols.expressions import affine_in, is_of_blocks
from overweave.compiler.frontend.symbols.polynomials import (
    ZERO,
    BlockOf,
    OpaqueResult,
    Polynomial,
    TooLarge,
    divided,
    number,
    rounded_up,
)
from overweave.compiler.frontend.symbols.values import (
    ELSEWHERE,
    GREATEST,
    LEAST,
    NUMBERED,
    Descriptor,
    Number,
    comes_from,
)
from overweave.compiler.frontend.walk.follow import STORES, follow
from overweave.compiler.frontend.walk.loops import TILES
from overweave.compiler.frontend.walk.reached import Begun, Followed, Reached
from overweave.compiler.frontend.walk.words import folded

ADDING = ("atomic_add", "atomic_max", "atomic_min", "atomic_and", "atomic_or", "atomic_xor")  # in any order


def check_places(kernel: AnnotatedKernel, given: Mapping[str, Any] | None = None) -> None:
    """Raises DirectiveError for the first load or store that is not where its directive says.

    given: the arguments of a call that are no tensors, and `NAME.shape[0]`, `NAME.block_shape[0]` of those that are;
    None before a call.
    """
    numbers = {name: int(value) for name, value in (given or {}).items() if isinstance(value, int)}
    _Check(kernel, kernel.source.file_numbers | numbers, given is not None).all(follow(kernel, given))


class _Check:
    def __init__(self, kernel: AnnotatedKernel, numbers: Mapping[str, int], is_call: bool) -> None:
        self.kernel, self.numbers, self.is_call = kernel, numbers, is_call
        walked = {one.directive.axis: kernel.source.module.code_for_node(one.loop.target) for one in kernel.streams}
        self.variables = dict(kernel.blocks) | walked
        self.lines = kernel.source.text.splitlines()
        self.symbols = kernel.symbols
        self.strides = frozenset(kernel.source.parameters) - kernel.symbols - kernel.source.constants
        axes = {axis.name: Extents(axis.extent, axis.block, axis.is_streamed) for axis in kernel.axes}
        self.bounds = Bounds(axes, self.known, kernel.symbols)

    def all(self, followed: Followed) -> None:
        for line in followed.other_blocks:
            raise self._at(line).error("the blocks are not those of the first region", "Reckon them from one number")
        stored: dict[AccessDirective, list[tuple[range, ...]]] = {}
        opened: set[str] = set()
        for begun in followed.begun if self.is_call else ():
            self._check_begun(begun)
        for loop in sorted(frozenset[str]().union(*(one.within for one in followed.reached))):
            self._check_memory(loop, [one for one in followed.reached if loop in one.within])
        for reached in followed.reached:
            self._check_number(reached)
            if reached.said is None:
                self._check_unsaid(reached)
                continue
            try:
                touched = AccessCheck(self, reached, reached.said).touched()
            except (Open, TooLarge):
                opened.add(reached.said.tensor)
                continue
            if reached.said.is_store:
                stored.setdefault(reached.said, []).append(touched)
        missing = {one.directive for one in self.kernel.stores} - stored.keys()
        for said in sorted(missing, key=lambda one: one.place.line):
            if self.is_call and said.tensor not in opened | {one.tensor for one in stored}:
                raise said.place.error(
                    "no tile comes to it in this call", "Leave its directive out, or store in every tile"
                )
        self._check_whole(stored, opened)

    def _check_unsaid(self, reached: Reached) -> None:
        """What a function of the file loads of a tensor that it has a directive for has one too."""
        for access in self.kernel.loads:
            if access.helper and isinstance(reached.place, Number) and reached.kind not in STORES:
                if access.directive.parameter in reached.place.poly.atoms:
                    found = f"{access.helper} loads {access.directive.parameter} at another place, without a directive"
                    raise self._at(reached.line).error(found, "Annotate every load of a tensor that is annotated")

    def _check_whole(self, stored: Mapping[AccessDirective, list[tuple[range, ...]]], opened: set[str]) -> None:
        """What several statements store of a tensor is all of the tile's rectangle."""
        by_tensor: dict[str, list[tuple[AccessDirective, tuple[range, ...]]]] = {}
        for said, ranges in stored.items():
            by_tensor.setdefault(said.tensor, []).extend((said, each) for each in ranges)
        for tensor, found in by_tensor.items():
            sizes = [self.known(side.size).constant for side in self.sides(found[0][0])]
            if tensor in opened or None in sizes:
                continue
            parts = list(dict.fromkeys(ranges for _, ranges in found))
            if not _is_covered([size or 0 for size in sizes], parts):
                said, touched = found[0]
                named = ", ".join(_named(each) for each in touched)
                raise said.place.error(
                    f"a tile stores {named} of its {' x '.join(map(str, sizes))} elements", "Store the whole tile"
                )

    def _check_memory(self, loop: str, inside: list[Reached]) -> None:
        """Memory carries nothing from turn to turn of a loop whose turns come in another order: what is loaded in it is
        not stored in it, but at a place of the turn's own."""
        own = {loop} if loop != TILES else {axis.name for axis in self.kernel.grid}
        stores = [one for one in inside if one.kind in STORES or one.kind.startswith(ATOMIC)]
        for load in (one for one in inside if one.kind not in STORES):
            for store in stores:
                shared = _pointers(load, self.kernel) & _pointers(store, self.kernel)
                places = {_poly(load), _poly(store)}
                is_own = len(places) == 1 and all(BlockOf(axis) in _poly(load).atoms for axis in own)
                if shared and not is_own and not (load is store and load.kind in ADDING):
                    what = "tiles" if loop == TILES else f"parts of {loop}"
                    found = (
                        f"{sorted(shared)[0]} is loaded and stored in a loop over {what}, which come in another order"
                    )
                    cure = "Carry it in a variable as a sum or a maximum, or give each turn a place of its own"
                    raise self._at(store.line).error(found, cure)

    def _check_number(self, reached: Reached) -> None:
        """Nothing that is loaded or stored depends on which program it is, or on the number that its tile had."""
        values = [reached.place, *reached.given[0], *reached.given[1].values(), reached.guard]
        made = frozenset[str]().union(*map(comes_from, values))
        what = "its place, or what it stores," if reached.kind in STORES else "its place"
        place = reached.said.place if reached.said else self._at(reached.line)
        if NUMBERED in made:
            blocks = ", ".join(sorted(self.kernel.blocks.values()))
            found = f"{what} is made from a program's number, and the schedule numbers tiles anew"
            raise place.error(found, f"Reckon it from the blocks, {blocks}, alone")
        if ELSEWHERE in made:
            found = f"{what} is made by {ELSEWHERE}: it may ask for a program's number"
            raise place.error(found, "Define it in this file, or in one that this file imports from")

    def _check_begun(self, begun: Begun) -> None:
        """A streamed loop begins at a whole block: a turn that begins inside of one reads on into the next part."""
        axis = next(axis for axis in self.kernel.axes if axis.name == begun.said.axis)
        block = self.known(axis.block)
        if not _is_multiple(self.known(begun.low), block):
            found = f"its loop begins at {self.known(begun.low)}, which is not always a whole block of {block}"
            raise begun.said.place.error(found, "Begin at a multiple of the block, and mask what is loaded")

    def _at(self, line: int) -> SourceLine:
        return SourceLine(self.kernel.source.path.name, line, self.lines[line - 1].strip())

    def known(self, poly: Polynomial) -> Polynomial:
        """With the numbers in the place of their names."""
        return folded(poly, self.numbers)

    def sides(self, said: AccessDirective) -> list[Dimension]:
        """The dimensions of a tensor."""
        axes = {axis.name: axis for axis in self.kernel.axes}
        found: list[Dimension] = []
        stride = number(1)
        for dim in reversed(said.dims):
            name, scale, shift = affine_in(dim, axes)
            extent = axes[name].extent if name else dim
            side = Dimension(extent, stride, extent)
            if name:
                axis, counts = axes[name], is_of_blocks(dim)
                block = number(1) if counts else axis.block
                extent = rounded_up(axis.extent, axis.block) if counts else extent
                step = number(1) if axis.is_streamed else number(scale) * block
                side = Dimension(extent, stride, block, name, step, number(shift) * block)
            found.insert(0, side)
            stride = stride * extent
        return found


def _poly(reached: Reached) -> Polynomial:
    """Where it reaches, or begins to."""
    place = reached.place
    return place.poly if isinstance(place, Number) else place.pointer if isinstance(place, Descriptor) else ZERO


def _pointers(reached: Reached, kernel: AnnotatedKernel) -> frozenset[str]:
    """The parameters that it reaches memory through."""
    return _poly(reached).names & frozenset(kernel.source.parameters) - kernel.symbols - kernel.source.constants


def _is_multiple(low: Polynomial, block: Polynomial) -> bool:
    """Whether a number is blocks of a size, whatever stands in it."""
    _, rest = divided(low, block)
    inside = [atom for atoms, _ in rest.terms for atom in atoms]
    if len(rest.terms) != 1 or len(inside) != 1:
        return rest == ZERO
    chosen = inside[0]
    is_chosen = isinstance(chosen, OpaqueResult) and chosen.of in (LEAST, GREATEST)
    return is_chosen and all(_is_multiple(value, block) for value in chosen.inputs)  # type: ignore[union-attr]


def _is_covered(sizes: list[int], parts: list[tuple[range, ...]]) -> bool:
    """Whether rectangles together are all elements of a box."""
    for ranges in parts:
        if all(
            set(range(size)) <= set(each) if len(each) >= size else False
            for size, each in zip(sizes, ranges, strict=True)
        ):
            return True
    if prod(sizes) > sum(prod(map(len, ranges)) for ranges in parts):
        return False
    kinds = [list(_kinds(size, [ranges[at] for ranges in parts])) for at, size in enumerate(sizes)]
    return all(frozenset.intersection(*each) for each in product(*kinds))


def _kinds(size: int, ranges: list[range]) -> Iterator[frozenset[int]]:
    """Which of the parts have an element of a dimension, for all that differ in it."""
    have: list[frozenset[int]] = [frozenset()] * size
    for at, each in enumerate(ranges):
        for element in each:
            have[element] |= {at}
    yield from set(have)


def _named(found: range) -> str:
    return f"[{found.start}:{found.stop}]" if found.step == 1 else f"[{found.start}:{found.stop}:{found.step}]"
