"""One load or store, held against the rectangle that its directive declares.

The address is one index for each dimension, times the strides of a row-major tensor. Along an axis the index is the
tile's block times its size, and lanes within that block. Along an extent a load keeps inside of the dimension, or the
next rows would be read unseen, and a store reaches what its mask leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import ceil, floor, gcd
from typing import Protocol

from msgspec import Struct

from overweave.compiler.frontend.directives import AccessDirective
from overweave.compiler.frontend.follow import STORES, Reached
from overweave.compiler.frontend.places.bounds import Bounds
from overweave.compiler.frontend.places.dimensions import (
    Parts,
    Side,
    Strides,
    beside,
    divided_lanes,
    flat,
    grouped,
    in_numbers,
    indices,
    long_lanes,
    taken_apart,
)
from overweave.compiler.frontend.polynomials import (
    ZERO,
    Atom,
    BlockOf,
    Lane,
    Monomial,
    Polynomial,
    Quotient,
    Result,
    Turn,
    divided,
    number,
    one,
    tags_of,
)
from overweave.compiler.frontend.values import (
    CALLERS,
    CARRIED,
    CASTS,
    CLAMP,
    LOADED,
    Condition,
    Constant,
    Descriptor,
    Number,
    Several,
    as_condition,
    broadcast,
    differs,
)
from overweave.errors import DirectiveError
from overweave.ir.schedule import LIMIT


class Open(Exception):
    """What only the numbers of a call decide."""


class Known(Protocol):
    """What is known around an access. variables: axis -> the variable of its block. symbols: names of directives;
    strides: those that may be strides. is_call: nothing may stay open."""

    bounds: Bounds
    symbols: frozenset[str]
    strides: frozenset[str]

    @property
    def is_call(self) -> bool: ...
    @property
    def variables(self) -> Mapping[str, str]: ...
    def known(self, poly: Polynomial) -> Polynomial: ...
    def sides(self, said: AccessDirective) -> list[Side]: ...


class Cut(Struct, frozen=True):
    """The elements `[low, high)` of a dimension, which are what a mask leaves of it."""

    low: int = 0
    high: int = LIMIT

    def leaves(self, extent: int) -> bool:
        """Whether all of a dimension is left."""
        return self.low <= 0 and self.high >= extent

    def and_(self, other: Cut) -> Cut:
        """What both leave."""
        return Cut(max(self.low, other.low), min(self.high, other.high))


class AccessCheck:
    """One load or store, held against its directive."""

    def __init__(self, check: Known, reached: Reached, said: AccessDirective) -> None:
        self.check, self.reached, self.said = check, reached, said
        self.sides = check.sides(said)
        self.limits: list[Polynomial] = []  # above zero where a descriptor reaches memory
        self.rank = 0
        self.parts: Parts = {}

    def touched(self) -> tuple[range, ...]:
        """What a tile stores of each dimension, from where its own elements begin; of a load nothing.

        Raises Open, DirectiveError.
        """
        offset = self._offset()
        strides = Strides(self.sides, self.check.strides, self.check.known, self.check.is_call)
        offset = self._unwrapped(strides.resolved(offset))
        self.parts = divided_lanes(offset, self.check.known) or long_lanes(offset, self.sides, self.check.known)
        ways = [(taken_apart(offset, self.parts), self.sides)]
        if self.check.is_call:  # what the kernel has as a number, and the directive as a name
            numbers = [in_numbers(side, self.check.known) for side in self.sides]
            ways.append((self.check.known(ways[0][0]), numbers))
        refused: list[Exception] = []
        for place, sides in ways:
            try:
                return self._first(place, sides)
            except DirectiveError as error:
                refused.append(error)
        if strides.assumed:
            raise Open
        raise refused[-1]

    def _first(self, offset: Polynomial, sides: Sequence[Side]) -> tuple[range, ...]:
        """By the first way to count it along the dimensions that its directive allows."""
        refused: list[Exception] = []
        for found in indices(offset, sides):
            try:
                return _Judged(self, sides, found).touched()
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
            element = offset + (ZERO if length.constant == 1 else one(Lane(length, each)))
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
            if not isinstance(atom, Result) or atom.of not in CASTS:
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

        def is_end(poly: Polynomial, side: Side) -> bool:
            return poly == side.extent or (self.check.is_call and self.check.known(poly - side.extent) == ZERO)

        def inner(atom: Atom) -> Polynomial | None:
            if isinstance(atom, Result) and atom.of == CLAMP:
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

    def beside(self, side: Side, found: str) -> DirectiveError:
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

    def _said(self, side: Side) -> str:
        """A dimension as its directive has it."""
        known = self.check.known
        dims = zip(self.sides, self.said.dims, strict=True)
        return next((str(dim) for each, dim in dims if known(each.stride) == known(side.stride)), str(side.extent))

    def refuse_block(self, axis: str, rest: Polynomial) -> None:
        """The block of an axis stands nowhere, or where it tells no index."""
        variable = self.check.variables[axis]
        if BlockOf(axis) in rest.atoms:
            made = (each for each in rest.atoms if isinstance(each, Result | Quotient))
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


class _Judged:
    """The indices of an access, one for each dimension, held against them."""

    def __init__(self, access: AccessCheck, sides: Sequence[Side], found: Sequence[Polynomial]) -> None:
        self.access, self.check, self.said = access, access.check, access.said
        self.sides, self.found = sides, found
        self.whole = _whole(sides, found)
        for axis in [side.axis for side in sides if side.axis]:
            if (BlockOf(axis),) not in grouped(self.whole) and not self._is_one(axis):
                access.refuse_block(axis, self.whole)
        self.inside = [self._inside(side, index) for side, index in zip(sides, found, strict=True)]
        self.held = [*access.limits]
        for condition in access.conditions():
            self.held += access.placed(condition)

    def touched(self) -> tuple[range, ...]:
        if self.said.is_store:
            cuts = self._cuts()
            self._check_apart()
            return tuple(self._stored(*one) for one in zip(self.sides, self.inside, cuts, strict=True))
        for at, (side, inside) in enumerate(zip(self.sides, self.inside, strict=True)):
            if side.axis is not None:
                self._check_own(side, inside)
            elif any(before.axis is not None for before in self.sides[:at]):
                self._check_within(side, inside)
        return ()

    def _inside(self, side: Side, index: Polynomial) -> Polynomial:
        """An index from where the tile's own elements begin."""
        if side.axis is None:
            return index
        block = (BlockOf(side.axis),)
        found = grouped(index).get(block, ZERO)
        if found != side.step and not self._is_one(side.axis):
            self._check_step(side, found)
        return index - (found * one(block[0])) - side.shift

    def _is_one(self, axis: str) -> bool:
        """Whether there is one block of an axis in this call."""
        return self.check.is_call and self.check.bounds.numbers(one(BlockOf(axis)))[1] == 0

    def _check_step(self, side: Side, found: Polynomial) -> None:
        """The blocks of an axis are as far apart as its directive says."""
        known, difference = self.check.known, self.check.known(found - side.step)
        if difference == ZERO:
            return
        whole = grouped(self.whole)[BlockOf(str(side.axis)),]
        is_told = difference.constant is not None or self._is_definite(difference)
        if not self.check.is_call and (whole.names - self.check.symbols or not is_told):
            raise Open
        blocks, rest = divided(known(whole), known(side.stride))
        apart = f"{blocks}" if rest == ZERO else f"{known(whole)} elements"
        raise self.said.place.error(
            f"the blocks of {side.axis} are {apart} apart in its place, and {known(side.step)} in its directive",
            "Let `block=` be the kernel's block, and dimensions those of the contiguous tensor, in their order",
        )

    def _is_definite(self, poly: Polynomial) -> bool:
        """Whether no numbers make it 0, but perhaps all of 1."""
        return self.check.bounds.is_natural(poly) or self.check.bounds.is_natural(ZERO - poly)

    # loads

    def _check_own(self, side: Side, inside: Polynomial) -> None:
        """Along an axis: within the tile's own block."""
        low, high = self.check.bounds.of(inside)
        self._check_told(side, inside)
        if (
            self.check.bounds.is_natural(low)
            and high is not None
            and self.check.bounds.is_natural(side.size - number(1) - high)
        ):
            return
        size = self.check.known(side.size)
        if self._keeps(inside) and self._keeps(size - number(1) - inside):
            return
        if not self.check.is_call and not self._is_beside(side, low, high):
            raise Open
        raise self.access.beside(side, _reach(low, high))

    def _is_beside(self, side: Side, low: Polynomial | None, high: Polynomial | None) -> bool:
        """Before a call: whether it reaches beside its block whatever the numbers are."""
        before = low is not None and self.check.bounds.is_natural(ZERO - low) and low != ZERO
        behind = None if high is None else high + number(1) - side.size
        return before or (behind is not None and self.check.bounds.is_natural(behind) and behind != ZERO)

    def _check_within(self, side: Side, inside: Polynomial) -> None:
        """Along an extent: no other rows, as far as they might be others than the tile's."""
        extent = self.check.known(side.extent)
        low, high = self.check.bounds.of(inside)
        if low is not None and self.check.bounds.is_natural(low - extent):
            raise self.access.beside(side, _reach(low, high))
        if not self.check.is_call:
            return
        for end in (inside, extent - number(1) - inside):
            if not self._keeps(end):
                self._check_trusted(side, inside)

    def _keeps(self, poly: Polynomial) -> bool:
        """Whether it is at least 0 wherever the access reaches memory."""
        for by in (ZERO, *(number(1) - each for each in self.held)):
            low, _high = self.check.bounds.of(poly + by)
            if self.check.bounds.is_natural(low):
                return True
        return False

    def _check_trusted(self, side: Side, inside: Polynomial) -> None:
        """What is loaded to say which element, such as a label, is trusted; how often a loop turns is not."""
        low, high = self.check.bounds.of(inside)
        loose = [atom for atoms in grouped(self.check.known(inside)) for atom in atoms if self._is_loose(atom)]
        turns = [atom for atom in loose if isinstance(atom, Turn) or CARRIED in tags_of(one(atom))]
        if turns:
            tags = sorted(tags_of(one(turns[0])))
            raise self.access.beside(side, f"as many as {tags[0] if tags else one(turns[0])} says")
        if not loose or any(LOADED not in tags_of(one(atom)) for atom in loose):
            raise self.access.beside(side, _reach(low, high))

    def _is_loose(self, atom: Atom) -> bool:
        return None in self.check.bounds.numbers(one(atom))

    def _check_told(self, side: Side, inside: Polynomial) -> None:
        """Nothing that has no bounds says which elements of a block are reached."""
        for atoms in grouped(self.check.known(inside)):
            if any(None in self.check.bounds.of(one(atom)) for atom in atoms):
                value = Polynomial(((atoms, 1),))
                tags = sorted(tags_of(value))
                if not self.check.is_call and (CALLERS in tags or not tags):
                    raise Open
                if self._keeps(inside):
                    continue
                raise self.access.beside(side, f"what {tags[0] if tags else value} says")

    # stores

    def _cuts(self) -> list[Cut]:
        """What conditions leave of each dimension. Raises DirectiveError where they leave out anything else."""
        cuts = [Cut() for _ in self.sides]
        for condition in self.access.conditions():
            if condition.tags - {CALLERS}:
                raise self.access.chosen(sorted(condition.tags)[0])
        for part in self.held:
            self._cut(part, cuts)
        return cuts

    def _cut(self, part: Polynomial, cuts: list[Cut]) -> None:
        """Takes account of one condition, which holds where `part` is above zero."""
        part = self.check.known(part)
        low, _ = self.check.bounds.of(part)
        if not differs(part) or (low is not None and self.check.bounds.is_natural(low - number(1))):
            return
        for lo, hi in beside(self.sides):
            index, extent = (self.check.known(each) for each in flat(self.sides, self.found, lo, hi))
            cut = _cut_by(part, index) if self.check.is_call else _end(part, index, extent)
            is_extent = hi == lo + 1 and self.sides[lo].axis is None
            if cut is not None and is_extent and self.check.is_call:
                cuts[lo] = cuts[lo].and_(cut)
            if cut is not None and (cut.leaves(extent.constant or 0) or is_extent):
                return
        if part.names and not self.check.is_call:
            raise Open
        raise self.access.chosen("a condition that is not the end of a dimension")

    def _check_apart(self) -> None:
        """No lane or turn moves along two dimensions at once: what is stored is a rectangle."""
        seen: set[Atom] = set()
        for inside in self.inside:
            moving = {atom for atoms in grouped(self.check.known(inside)) for atom in atoms}
            for atom in sorted(moving & seen, key=str):
                raise self.access.unclear(f"{one(atom)} moves along two dimensions of what it stores")
            seen |= {atom for atom in moving if not isinstance(atom, BlockOf)}

    def _stored(self, side: Side, inside: Polynomial, cut: Cut) -> range:
        """The elements of one dimension."""
        groups = {atoms: self.check.known(each) for atoms, each in grouped(self.check.known(inside)).items()}
        low, size = groups.pop((), ZERO).constant, self.check.known(side.size).constant
        moving = [(self._count(side, atoms), each.constant) for atoms, each in groups.items()]
        moving = [(count, step) for count, step in moving if count != 1]
        if low is None or size is None or any(count is None or step is None for count, step in moving):
            self._refuse_definite(side, inside)
            raise Open
        steps = [(count, step) for count, step in moving if count is not None and step is not None]
        first = low + sum(min(0, step * (count - 1)) for count, step in steps)
        by = gcd(*(step for _, step in steps)) if steps else 1
        last = low + sum(max(0, step * (count - 1)) for count, step in steps)
        if not _is_even([(count, abs(step) // by) for count, step in steps]):
            raise self.access.beside(side, f"not every one of {first} to {last}")
        found = range(first, last + 1, by)
        if side.axis is not None:
            if first < 0 or last >= size:
                raise self.access.beside(side, f"{first} to {last}")
            return found
        behind = first + max(0, -(-(cut.low - first) // by)) * by
        kept = range(behind, min(last + 1, cut.high), by)
        if kept and ((kept[0] < 0 and not self._keeps(inside)) or kept[-1] >= size):
            raise self.access.beside(side, f"{first} to {last}")
        return kept

    def _refuse_definite(self, side: Side, inside: Polynomial) -> None:
        """Before a call: what no numbers make true."""
        if side.axis is not None:
            low, high = self.check.bounds.of(inside)
            self._check_told(side, inside)
            if self._is_beside(side, low, high):
                raise self.access.beside(side, _reach(low, high))

    def _count(self, side: Side, atoms: Monomial) -> int | None:
        """How many values it has, each one more than the last."""
        atom = atoms[0]
        if len(atoms) == 1 and isinstance(atom, Lane | Turn):
            count = self.check.known(atom.length if isinstance(atom, Lane) else atom.count)
            if count.constant is not None or not self.check.is_call:
                return count.constant
        if not self.check.is_call and not tags_of(Polynomial(((atoms, 1),))):
            return None
        tags = sorted(tags_of(Polynomial(((atoms, 1),))))
        if CALLERS in tags and not self.check.is_call:
            return None
        raise self.access.beside(side, f"what {tags[0] if tags else Polynomial(((atoms, 1),))} says")


def _whole(sides: Sequence[Side], found: Sequence[Polynomial]) -> Polynomial:
    made = ZERO
    for side, index in zip(sides, found, strict=True):
        made = made + index * side.stride
    return made


def _reach(low: Polynomial | None, high: Polynomial | None) -> str:
    if low is not None and high is None:
        return f"{low} and more"
    return f"{'?' if low is None else low} to {'?' if high is None else high}"


def _product(values: Sequence[Polynomial]) -> Polynomial:
    made = number(1)
    for value in values:
        made = made * value
    return made


def _cut_by(part: Polynomial, index: Polynomial) -> Cut | None:
    """What `part > 0` leaves of a dimension, where it is made from the index alone, in whatever measure."""
    mine, others = grouped(index), grouped(part)
    first, start = mine.pop((), ZERO).constant, others.pop((), ZERO).constant
    if first is None or start is None or not mine or mine.keys() != others.keys():
        return None
    pairs = [(others[atoms].constant, mine[atoms].constant) for atoms in mine]
    slopes = {Fraction(over, by) for over, by in pairs if over and by}
    if len(slopes) != 1 or any(not over or not by for over, by in pairs):
        return None
    (slope,) = slopes
    at = first - start / slope  # where it is zero
    return Cut(high=ceil(at)) if slope < 0 else Cut(low=floor(at) + 1)


def _end(part: Polynomial, index: Polynomial, extent: Polynomial) -> Cut | None:
    """The same before a call, as far as a condition is the end of a dimension by its names."""
    over, whole = (part - extent + index).constant, (part - number(1) - index).constant
    return Cut() if max(-1 if over is None else over, -1 if whole is None else whole) >= 0 else None


def _is_even(moving: Sequence[tuple[int, int]]) -> bool:
    """Whether lanes and turns together reach every element of their range."""
    reached = 1
    for count, step in sorted(moving, key=lambda pair: pair[1]):
        if step > reached and count > 1:
            return False
        reached += step * (count - 1)
    return True
