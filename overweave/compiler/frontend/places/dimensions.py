"""The dimensions of a tensor, and an address as one index for each of them.

An address is a sum of indices, each times the stride of its dimension. Names stay names while it is taken apart: what
an extent of 1 or two equal extents make the same number are still two dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

from msgspec import Struct
from msgspec.structs import replace

from overweave.compiler.frontend.symbols.polynomials import (
    ZERO,
    Atom,
    BlockOf,
    LaneIndex,
    Monomial,
    Polynomial,
    Quotient,
    divided,
    number,
    one,
    quotient,
)
from overweave.compiler.frontend.symbols.values import differs

Substitution = Callable[[Polynomial], Polynomial]  # numbers in the place of names that are known
SplitLanes = dict[Atom, tuple[LaneIndex, LaneIndex]]
HIGH, LOW = 100, 200  # dimensions of the two parts of a lane that is taken apart


class Dimension(Struct, frozen=True):
    """A dimension. step: how far the blocks of its axis are apart, 0 of an extent; size: what one tile may touch;
    stride: in elements; shift: of a tile's first element behind its block's."""

    extent: Polynomial
    stride: Polynomial
    size: Polynomial
    axis: str | None = None
    step: Polynomial = ZERO
    shift: Polynomial = ZERO

    def start(self) -> Polynomial:
        """Where a tile's own elements begin."""
        return self.step * one(BlockOf(self.axis)) + self.shift if self.axis else ZERO


def moves(atom: Atom) -> bool:
    """Whether an atom is another number in other tiles, turns or lanes."""
    return not isinstance(atom, str) and differs(one(atom))


def grouped(poly: Polynomial) -> dict[Monomial, Polynomial]:
    """What moves -> what it is multiplied by, which is the same throughout a call."""
    groups: dict[Monomial, Polynomial] = {}
    for atoms, factor in poly.terms:
        moving = tuple(atom for atom in atoms if moves(atom))
        rest = Polynomial(((tuple(atom for atom in atoms if not moves(atom)), factor),))
        groups[moving] = groups.get(moving, ZERO) + rest
    return {moving: coefficient for moving, coefficient in groups.items() if coefficient != ZERO}


def indices(offset: Polynomial, sides: Sequence[Dimension]) -> Iterator[list[Polynomial]]:
    """The indices that make an offset. What is the same everywhere, such as `N - 1`, may be counted along a dimension
    or as a whole turn of the next: so there is more than one way."""
    made = [ZERO for _ in sides]
    for moving, coefficient in grouped(offset).items():
        rest, term = coefficient, Polynomial(((moving, 1),))
        for at, side in enumerate(sides):
            found, rest = divided(rest, side.stride)
            made[at] = made[at] + found * term
    steady = [grouped(each).get((), ZERO) for each in made]
    choices = [(False, True) if each != ZERO and at + 1 < len(made) else (False,) for at, each in enumerate(steady)]
    for pushed in product(*choices):
        moved, carried = list(made), ZERO
        for at, is_pushed in enumerate(pushed):
            moved[at], here = moved[at] + carried, steady[at] + carried
            carried = here * sides[at + 1].extent if is_pushed else ZERO
            moved[at] = moved[at] - here if is_pushed else moved[at]
        yield moved


class Strides:
    """Which dimension each parameter that is a stride belongs to.

    names: those that may be strides. known: numbers for names; in a call, of all.
    """

    def __init__(self, sides: Sequence[Dimension], names: frozenset[str], known: Substitution, is_call: bool) -> None:
        self._sides, self._names, self._known, self._is_call = sides, names, known, is_call
        self.assumed: list[str] = []  # names that only a call can tell of

    def resolved(self, offset: Polynomial) -> Polynomial:
        """With the strides of the contiguous tensor in the place of their names, where they are the same number."""
        groups = grouped(offset)
        factors = {atom for moving, each in groups.items() if moving for atoms, _ in each.terms for atom in atoms}
        names = sorted(name for name in self._names if name in factors)
        left = dict(enumerate(self._sides))
        found: dict[str, Polynomial] = {}
        for at, side in enumerate(self._sides):
            apart = groups.get((BlockOf(side.axis),), ZERO) if side.axis else ZERO
            name = next((name for name in names if apart == side.step * one(name) and self._fits(name, side)), None)
            if name is not None and name not in found:
                found[name] = left.pop(at).stride
        for name in names:
            if name in found:
                continue
            fitting = [at for at, side in left.items() if self._fits(name, side)]
            if not fitting or (len(fitting) > 1 and not self._is_call):
                continue
            at = max(fitting, key=lambda at: (self._is_equal(name, left[at]), left[at].axis is None, at))
            found[name] = left.pop(at).stride
            self.assumed += [] if self._is_call else [name]
        made = ZERO
        for atoms, factor in offset.terms:
            term = Polynomial(((tuple(atom for atom in atoms if atom not in found), factor),))
            for atom in atoms:
                term = term * found[atom] if isinstance(atom, str) and atom in found else term
            made = made + term
        return made

    def _fits(self, name: str, side: Dimension) -> bool:
        """Whether a name may be a dimension's stride: one of a single element has any."""
        return not self._is_call or self._known(side.extent).constant == 1 or self._is_equal(name, side)

    def _is_equal(self, name: str, side: Dimension) -> bool:
        return self._known(one(name)) == self._known(side.stride)


def divided_lanes(poly: Polynomial, known: Substitution) -> SplitLanes:
    """Lanes that are divided, and what takes their place: `lane // b` and `lane % b` are lanes of their own."""
    parts: SplitLanes = {}
    for atom in poly.atoms:
        lane = _alone(atom.over) if isinstance(atom, Quotient) else None
        if isinstance(atom, Quotient) and isinstance(lane, LaneIndex) and not differs(atom.by):
            length, by = known(lane.length).constant, known(atom.by).constant
            if length and by and length % by == 0:
                high = LaneIndex(quotient(lane.length, atom.by), HIGH + lane.place)
                parts.setdefault(lane, (high, LaneIndex(atom.by, LOW + lane.place)))
    return parts


def long_lanes(offset: Polynomial, sides: Sequence[Dimension], known: Substitution) -> SplitLanes:
    """Lanes that go on over the end of a dimension, by whole rows of it, and what takes their place."""
    parts: SplitLanes = {}
    for moving, coefficient in grouped(offset).items():
        lane = moving[0] if len(moving) == 1 else None
        if not isinstance(lane, LaneIndex):
            continue
        for side in sides:
            length, extent = known(lane.length).constant, known(side.extent).constant
            is_along = known(coefficient) == known(side.stride) and side.axis is None
            if is_along and length and extent and length > extent and length % extent == 0:
                high = LaneIndex(quotient(lane.length, side.extent), HIGH + lane.place)
                parts.setdefault(lane, (high, LaneIndex(side.extent, LOW + lane.place)))
    return parts


def taken_apart(poly: Polynomial, parts: SplitLanes) -> Polynomial:
    """With the parts of divided lanes in their place."""

    def by(atom: Atom) -> Polynomial | None:
        if atom in parts:
            high, low = parts[atom]
            return one(high) * low.length + one(low)
        lane = _alone(atom.over) if isinstance(atom, Quotient) else None
        if isinstance(atom, Quotient) and lane in parts and atom.by == parts[lane][1].length:
            return one(parts[lane][0])
        return None

    return poly.replaced(by) if parts else poly


def _alone(poly: Polynomial) -> Atom | None:
    """The atom that a polynomial is."""
    found = poly.terms[0][0][0] if len(poly.terms) == 1 and poly.terms[0][0] else None
    return found if found is not None and poly == one(found) else None


def beside(sides: Sequence[Dimension]) -> Iterator[tuple[int, int]]:
    """Dimensions that follow each other, from the first to the last of them: those that a flat index may count."""
    yield from ((lo, hi) for lo in range(len(sides)) for hi in range(lo + 1, len(sides) + 1))


def flat(sides: Sequence[Dimension], found: Sequence[Polynomial], lo: int, hi: int) -> tuple[Polynomial, Polynomial]:
    """(index, extent) of some dimensions as one."""
    index, extent = ZERO, number(1)
    for side, each in zip(sides[lo:hi], found[lo:hi], strict=True):
        index, extent = index * side.extent + each, extent * side.extent
    return index, extent


def in_numbers(side: Dimension, known: Substitution) -> Dimension:
    """A dimension of a call."""
    return replace(
        side,
        extent=known(side.extent),
        stride=known(side.stride),
        size=known(side.size),
        step=known(side.step),
        shift=known(side.shift),
    )
