"""The indices of an access, one for each dimension, held against what a directive says of that dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import ceil, floor, gcd
from typing import Protocol

from msgspec import Struct

from overweave.compiler.frontend.places.bounds import Bounds
from overweave.compiler.frontend.places.dimensions import (
    Dimension,
    beside,
    flat,
    grouped,
)
from overweave.compiler.frontend.symbols.directives import AccessDirective
from overweave.compiler.frontend.symbols.polynomials import (
    ZERO,
    Atom,
    BlockOf,
    LaneIndex,
    LoopIndex,
    Monomial,
    Polynomial,
    divided,
    number,
    one,
    tags_of,
)
from overweave.compiler.frontend.symbols.values import (
    CALLERS,
    CARRIED,
    LOADED,
    Condition,
    differs,
)
from overweave.errors import DirectiveError
from overweave.ir.schedule import LIMIT


class MaskedRange(Struct, frozen=True):
    """The elements `[low, high)` of a dimension, which are what a mask leaves of it."""

    low: int = 0
    high: int = LIMIT

    def leaves(self, extent: int) -> bool:
        """Whether all of a dimension is left."""
        return self.low <= 0 and self.high >= extent

    def and_(self, other: MaskedRange) -> MaskedRange:
        """What both leave."""
        return MaskedRange(max(self.low, other.low), min(self.high, other.high))


class AccessContext(Protocol):
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
    def sides(self, said: AccessDirective) -> list[Dimension]: ...


class CheckedAccess(Protocol):
    """What is known of an access: see AccessCheck."""

    check: AccessContext
    said: AccessDirective
    limits: list[Polynomial]

    def conditions(self) -> list[Condition]: ...
    def placed(self, condition: Condition) -> list[Polynomial]: ...
    def unclear(self, found: str) -> DirectiveError: ...
    def beside(self, side: Dimension, found: str) -> DirectiveError: ...
    def refuse_block(self, axis: str, rest: Polynomial) -> None: ...
    def chosen(self, by: str) -> DirectiveError: ...


class Open(Exception):
    """What only the numbers of a call decide."""


class Judged:
    """The indices of an access, one for each dimension, held against them."""

    def __init__(self, access: CheckedAccess, sides: Sequence[Dimension], found: Sequence[Polynomial]) -> None:
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

    def _inside(self, side: Dimension, index: Polynomial) -> Polynomial:
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

    def _check_step(self, side: Dimension, found: Polynomial) -> None:
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

    def _check_own(self, side: Dimension, inside: Polynomial) -> None:
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

    def _is_beside(self, side: Dimension, low: Polynomial | None, high: Polynomial | None) -> bool:
        """Before a call: whether it reaches beside its block whatever the numbers are."""
        before = low is not None and self.check.bounds.is_natural(ZERO - low) and low != ZERO
        behind = None if high is None else high + number(1) - side.size
        return before or (behind is not None and self.check.bounds.is_natural(behind) and behind != ZERO)

    def _check_within(self, side: Dimension, inside: Polynomial) -> None:
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

    def _check_trusted(self, side: Dimension, inside: Polynomial) -> None:
        """What is loaded to say which element, such as a label, is trusted; how often a loop turns is not."""
        low, high = self.check.bounds.of(inside)
        loose = [atom for atoms in grouped(self.check.known(inside)) for atom in atoms if self._is_loose(atom)]
        turns = [atom for atom in loose if isinstance(atom, LoopIndex) or CARRIED in tags_of(one(atom))]
        if turns:
            tags = sorted(tags_of(one(turns[0])))
            raise self.access.beside(side, f"as many as {tags[0] if tags else one(turns[0])} says")
        if not loose or any(LOADED not in tags_of(one(atom)) for atom in loose):
            raise self.access.beside(side, _reach(low, high))

    def _is_loose(self, atom: Atom) -> bool:
        return None in self.check.bounds.numbers(one(atom))

    def _check_told(self, side: Dimension, inside: Polynomial) -> None:
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

    def _cuts(self) -> list[MaskedRange]:
        """What conditions leave of each dimension. Raises DirectiveError where they leave out anything else."""
        cuts = [MaskedRange() for _ in self.sides]
        for condition in self.access.conditions():
            if condition.tags - {CALLERS}:
                raise self.access.chosen(sorted(condition.tags)[0])
        for part in self.held:
            self._cut(part, cuts)
        return cuts

    def _cut(self, part: Polynomial, cuts: list[MaskedRange]) -> None:
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

    def _stored(self, side: Dimension, inside: Polynomial, cut: MaskedRange) -> range:
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

    def _refuse_definite(self, side: Dimension, inside: Polynomial) -> None:
        """Before a call: what no numbers make true."""
        if side.axis is not None:
            low, high = self.check.bounds.of(inside)
            self._check_told(side, inside)
            if self._is_beside(side, low, high):
                raise self.access.beside(side, _reach(low, high))

    def _count(self, side: Dimension, atoms: Monomial) -> int | None:
        """How many values it has, each one more than the last."""
        atom = atoms[0]
        if len(atoms) == 1 and isinstance(atom, LaneIndex | LoopIndex):
            count = self.check.known(atom.length if isinstance(atom, LaneIndex) else atom.count)
            if count.constant is not None or not self.check.is_call:
                return count.constant
        if not self.check.is_call and not tags_of(Polynomial(((atoms, 1),))):
            return None
        tags = sorted(tags_of(Polynomial(((atoms, 1),))))
        if CALLERS in tags and not self.check.is_call:
            return None
        raise self.access.beside(side, f"what {tags[0] if tags else Polynomial(((atoms, 1),))} says")


def _whole(sides: Sequence[Dimension], found: Sequence[Polynomial]) -> Polynomial:
    made = ZERO
    for side, index in zip(sides, found, strict=True):
        made = made + index * side.stride
    return made


def _reach(low: Polynomial | None, high: Polynomial | None) -> str:
    if low is not None and high is None:
        return f"{low} and more"
    return f"{'?' if low is None else low} to {'?' if high is None else high}"


def _cut_by(part: Polynomial, index: Polynomial) -> MaskedRange | None:
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
    return MaskedRange(high=ceil(at)) if slope < 0 else MaskedRange(low=floor(at) + 1)


def _end(part: Polynomial, index: Polynomial, extent: Polynomial) -> MaskedRange | None:
    """The same before a call, as far as a condition is the end of a dimension by its names."""
    over, whole = (part - extent + index).constant, (part - number(1) - index).constant
    return MaskedRange() if max(-1 if over is None else over, -1 if whole is None else whole) >= 0 else None


def _is_even(moving: Sequence[tuple[int, int]]) -> bool:
    """Whether lanes and turns together reach every element of their range."""
    reached = 1
    for count, step in sorted(moving, key=lambda pair: pair[1]):
        if step > reached and count > 1:
            return False
        reached += step * (count - 1)
    return True
