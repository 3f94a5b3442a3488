"""One load or store, held against the rectangle that its directive declares.

The address is one index for each dimension, times the strides of a row-major tensor. Along an axis the index is the
tile's block times its size, and lanes within that block. Along an extent a load keeps inside of the dimension, or the
next rows would be read unseen, and a store reaches what its mask leaves.
"""

from __future__ import annotations

from collections.abc import Sequence

from overweave.compiler.frontend.places.dimensions import (
    Dimension,
    SplitLanes,
    Strides,
    divided_lanes,
    in_numbers,
    indices,
    long_lanes,
    taken_apart,
)
from overweave.compiler.frontend.places.judged import AccessContext, Judged, Open
from overweave.compiler.frontend.symbols.directives import AccessDirective
from overweave.compiler.frontend.symbols.polynomials import (
    ZERO,
    Atom,
    BlockOf,
    LaneIndex,
    OpaqueResult,
    Polynomial,
    Quotient,
    number,
    one,
    tags_of,
)
from overweave.compiler.frontend.symbols.values import (
    CALLERS,
    CASTS,
    CLAMP,
    Condition,
    Constant,
    Descriptor,
    Number,
    Several,
    as_condition,
    broadcast,
)
from overweave.compiler.frontend.walk.follow import STORES
from overweave.compiler.frontend.walk.reached import Reached
from overweave.errors import DirectiveError


class AccessCheck:
    """One load or store, held against its directive."""

    def __init__(self, check: AccessContext, reached: Reached, said: AccessDirective) -> None:
        self.check, self.reached, self.said = check, reached, said
        self.sides = check.sides(said)
        self.limits: list[Polynomial] = []  # above zero where a descriptor reaches memory
        self.rank = 0
        self.parts: SplitLanes = {}

    def touched(self) -> tuple[range, ...]:
        """What a tile stores of each dimension, from where its own elements begin; of a load nothing.

        Raises Open, DirectiveError.
        """
        offset = self._offset()
        strides = Strides(self.sides, self.check.strides, self.check.known, self.check.is_call)
        offset = self._unwrapped(strides.resolved(offset))
        readings = [divided_lanes(offset, self.check.known)]
        if not readings[0] and (long := long_lanes(offset, self.sides, self.check.known)):
            readings.insert(0, long)  # such a lane goes on over the end of a dimension, or a mask cuts it there
        refused: list[DirectiveError] = []
        for reading in readings:
            self.parts = reading
            try:
                return self._in_numbers(taken_apart(offset, self.parts))
            except DirectiveError as error:
                refused.append(error)
        if strides.assumed:
            raise Open
        raise refused[0]

    def _in_numbers(self, offset: Polynomial) -> tuple[range, ...]:
        """By the names that stand in it, or by the numbers of a call."""
        ways = [(offset, self.sides)]
        if self.check.is_call:  # what the kernel has as a number, and the directive as a name
            numbers = [in_numbers(side, self.check.known) for side in self.sides]
            ways.append((self.check.known(offset), numbers))
        refused: list[DirectiveError] = []
        for place, sides in ways:
            try:
                return self._first(place, sides)
            except DirectiveError as error:
                refused.append(error)
        raise refused[-1]

    def _first(self, offset: Polynomial, sides: Sequence[Dimension]) -> tuple[range, ...]:
        """By the first way to count it along the dimensions that its directive allows."""
        refused: list[Exception] = []
        for found in indices(offset, sides):
            try:
                return Judged(self, sides, found).touched()
            except DirectiveError as error:
                refused.append(error)
        raise refused[0]

    def conditions(self) -> list[Condition]:
        """What must hold where it reaches memory: its guard, and its mask."""
        given, named = self.reached.given
        at = 2 if self.reached.kind in STORES else 1
        place = self.reached.place
        is_masked = not isinstance(place, Descriptor) and not (given and isinstance(given[0], Several))
        mask = named.get("mask", given[at] if len(given) > at and is_masked else Constant(value=True))
        is_none = isinstance(mask, Constant) and mask.value is None
        return [self.reached.guard, Condition(()) if is_none else as_condition(mask)]

    def placed(self, condition: Condition) -> list[Polynomial]:
        """The parts of a condition, with their lanes along the dimensions that those of the place have."""
        parts = [broadcast(Number(part, condition.rank), self.rank) for part in condition.parts]
        return [taken_apart(self._plain(part), self.parts) for part in parts]

    # where it is

    def _offset(self) -> Polynomial:
        """The elements between the first of the tensor and what is reached."""
        place, given = self.reached.place, self.reached.given[0]
        if isinstance(place, Number) and given and isinstance(given[0], Several):
            place = self._described(place, given[0])
        elif isinstance(place, Descriptor):
            place = self._of_descriptor(place)
        if not isinstance(place, Number):
            raise self.unclear("it is no pointer")
        self.rank = place.rank
        poly, pointer = self._plain(place.poly), one(self.said.parameter)
        if CALLERS in tags_of(poly) and not self.check.is_call:
            raise Open
        if poly.of(self.said.parameter) != number(1):
            tags = sorted(tags_of(poly)) or [f"another pointer than {self.said.parameter}"]
            raise self.unclear(f"its place is made from {tags[0]}")
        return poly - pointer

    def _of_descriptor(self, place: Descriptor) -> Number:
        given, named = self.reached.given
        offsets = next((one for one in (*given, named.get("offsets")) if isinstance(one, Several)), None)
        polys = [one.poly for one in offsets.values if isinstance(one, Number)] if offsets else list(place.offsets)
        if len(polys) != len(place.strides):
            raise self.unclear("its offsets are not those of its descriptor")
        checked = named.get("boundary_check")
        at = range(len(polys))
        if isinstance(checked, Several):
            at = [each.poly.constant for each in checked.values if isinstance(each, Number)]  # type: ignore[assignment]
        elif not offsets:
            at = range(0)  # a block pointer
        ends = [(place.shape[each], polys[each], place.block[each], each) for each in at if place.shape]
        for extent, offset, length, each in ends:
            element = offset + (ZERO if length.constant == 1 else one(LaneIndex(length, each)))
            self.limits += [self._plain(extent - element), self._plain(element + number(1))]
        return place.place(polys)

    def _described(self, place: Number, offsets: Several) -> Number:
        """Through a descriptor that is a parameter, whose block only a call knows."""
        polys = [one.poly for one in offsets.values if isinstance(one, Number)]
        name, dims = self.said.parameter, len(offsets.values)
        if len(polys) != dims:
            raise self.unclear("its offsets are no list of numbers")
        if place.poly != one(name):
            return place
        lengths = tuple(one(f"{name}.block_shape[{at}]") for at in range(dims))
        shape = tuple(side.extent for side in self.sides)
        strides = tuple(side.stride for side in self.sides)
        if dims != len(self.sides):
            shape = tuple(one(f"{name}.shape[{at}]") for at in range(dims))
            strides = tuple(_product(shape[at + 1 :]) for at in range(dims))
        return self._of_descriptor(Descriptor(place.poly, strides, self._known(lengths), (), shape))

    def _known(self, values: tuple[Polynomial, ...]) -> tuple[Polynomial, ...]:
        return tuple(map(self.check.known, values))

    def _plain(self, poly: Polynomial) -> Polynomial:
        """Without casts of numbers that keep what they are. Raises DirectiveError for those that do not."""

        def inner(atom: Atom) -> Polynomial | None:
            if not isinstance(atom, OpaqueResult) or atom.of not in CASTS:
                return None
            made = self._plain(atom.inputs[0])
            low, high = self.check.bounds.numbers(made)
            least_held, most_held = CASTS[atom.of]
            if self.check.is_call and (low is None or high is None or low < least_held or high > most_held):
                reached = f"{'' if low is None else low} to {'' if high is None else high}".strip()
                raise self.unclear(f"its place is made from numbers, {reached}, that {atom.of} does not hold")
            return made

        return poly.replaced(inner)

    def _unwrapped(self, offset: Polynomial) -> Polynomial:
        """Without what brings rows beyond the end back into the tensor: nothing keeps what comes of them."""
        axes = [side for side in self.sides if side.axis is not None]

        def is_end(poly: Polynomial, side: Dimension) -> bool:
            return poly == side.extent or (self.check.is_call and self.check.known(poly - side.extent) == ZERO)

        def inner(atom: Atom) -> Polynomial | None:
            if isinstance(atom, OpaqueResult) and atom.of == CLAMP:
                value, bound = atom.inputs
                if any(is_end(bound, side) and BlockOf(str(side.axis)) in value.atoms for side in axes):
                    return value
            return None

        made = offset.replaced(inner)
        for atom in [each for each in made.atoms if isinstance(each, Quotient)]:
            for side in axes:
                if is_end(atom.by, side) and BlockOf(str(side.axis)) in atom.over.atoms and not self.said.is_store:
                    before, block = made.of(atom), made.of(BlockOf(str(side.axis)))
                    wrapped = before * side.step + block * side.extent
                    if ZERO in (wrapped, self.check.known(wrapped)):
                        made = made - before * one(atom)
        return made

    # what is said of it

    def unclear(self, found: str) -> DirectiveError:
        cure = "Make it from the blocks of the tile, arange, loop variables and the numbers of a call"
        return self.said.place.error(found, cure)

    def beside(self, side: Dimension, found: str) -> DirectiveError:
        if side.axis is None and self.said.is_store:
            why = f"of {side.extent} elements of a dimension it stores {found}"
            return self.said.place.error(why, "Store all of a dimension that is no axis, or make it one")
        if side.axis is None:
            why = f"along a dimension of {side.extent} elements it reaches {found}: those behind are of other rows"
            return self.said.place.error(why, f"Mask it by the extent: `index < {self._said(side)}`")
        why = f"along {side.axis} it reaches elements {found} of a block of {side.size}"
        variable = self.check.variables[side.axis]
        cure = f"Let it reach the tile's own block alone, {variable}; where it reaches others too, name an extent"
        return self.said.place.error(why, cure)

    def _said(self, side: Dimension) -> str:
        """A dimension as its directive has it."""
        known = self.check.known
        dims = zip(self.sides, self.said.dims, strict=True)
        return next((str(dim) for each, dim in dims if known(each.stride) == known(side.stride)), str(side.extent))

    def refuse_block(self, axis: str, rest: Polynomial) -> None:
        """The block of an axis stands nowhere, or where it tells no index."""
        variable = self.check.variables[axis]
        if BlockOf(axis) in rest.atoms:
            made = (each for each in rest.atoms if isinstance(each, OpaqueResult | Quotient))
            inside = next((each for each in made if BlockOf(axis) in one(each).atoms), BlockOf(axis))
            tags = sorted(tags_of(one(inside)))
            raise self.unclear(f"{variable} stands inside of {tags[0] if tags else one(inside)} in its place")
        if CALLERS in tags_of(rest) and not self.check.is_call:
            raise Open
        named = {axis: name for axis, name in self.check.variables.items() if BlockOf(axis) in rest.atoms}
        found = f"its place is not made from {variable}, which is the block along {axis}"
        listed = ", ".join(named) or "none"
        cure = f"Name the axes that it is made from ({listed}), or an extent where every tile reaches all"
        raise self.said.place.error(found, cure)

    def chosen(self, by: str) -> DirectiveError:
        found = f"which elements it stores is told by {by}"
        return self.said.place.error(found, "Mask what lies beyond the tensor, and store every other element")


def _product(values: Sequence[Polynomial]) -> Polynomial:
    made = number(1)
    for value in values:
        made = made * value
    return made
