"""The least and the greatest value of a polynomial over all tiles, turns and lanes.

In a call every bound is a number. Before one it is a polynomial of the caller's numbers, where their names tell it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from overweave.compiler.frontend.symbols.polynomials import (
    ZERO,
    Atom,
    BlockOf,
    LaneIndex,
    LoopIndex,
    OpaqueResult,
    Polynomial,
    Quotient,
    least,
    number,
    one,
    rounded_up,
)
from overweave.compiler.frontend.symbols.values import CASTS, CLAMP, GREATEST, LEAST, differs

SymbolicInterval = tuple[Polynomial | None, Polynomial | None]  # None: nothing tells it
NOTHING: SymbolicInterval = (None, None)


class Extents(Struct, frozen=True):
    """An axis as bounds see it."""

    extent: Polynomial
    block: Polynomial
    is_streamed: bool

    @property
    def highest(self) -> Polynomial:
        """The greatest block, or the greatest element at which a turn of a streamed loop begins."""
        last = rounded_up(self.extent, self.block) - number(1)
        return last * self.block if self.is_streamed else last


class Bounds:
    """Bounds over a kernel's axes. known: puts numbers in the place of names; what is left stays a name.

    positive: the names of numbers that are at least 1.
    """

    def __init__(
        self, axes: Mapping[str, Extents], known: Callable[[Polynomial], Polynomial], positive: frozenset[str]
    ) -> None:
        self._axes, self._known, self._positive = axes, known, positive
        self._found: dict[Polynomial, SymbolicInterval] = {}

    def of(self, poly: Polynomial) -> SymbolicInterval:
        """(least, greatest)."""
        poly = self._known(poly)
        if poly not in self._found:
            self._found[poly] = NOTHING  # what stands inside itself has no bounds
            self._found[poly] = self._of(poly)
        return self._found[poly]

    def numbers(self, poly: Polynomial) -> tuple[int | None, int | None]:
        """The same where they are numbers."""
        low, high = self.of(poly)
        return None if low is None else low.constant, None if high is None else high.constant

    def is_natural(self, poly: Polynomial | None) -> bool:
        """Whether it is at least 0, whatever the numbers of a call are."""
        found = None if poly is None else least(poly, self._positive)
        return found is not None and found >= 0

    def _times(self, left: SymbolicInterval, right: SymbolicInterval) -> SymbolicInterval:
        """The bounds of a product."""
        ends = [None if one is None else one.constant for one in (*left, *right)]
        if all(one is not None for one in ends):
            a, b, c, d = (one for one in ends if one is not None)
            corners = (a * c, a * d, b * c, b * d)
            return number(min(corners)), number(max(corners))
        if left[0] is not None and left[0] == left[1]:
            return self._scaled(left[0], right)
        if right[0] is not None and right[0] == right[1]:
            return self._scaled(right[0], left)
        if self.is_natural(left[0]) and self.is_natural(right[0]):
            low, high = (None if a is None or b is None else a * b for a, b in zip(left, right, strict=True))
            return low, high
        return NOTHING

    def _scaled(self, factor: Polynomial, by: SymbolicInterval) -> SymbolicInterval:
        if factor == ZERO:
            return ZERO, ZERO
        low, high = (None if end is None else end * factor for end in by)
        if self.is_natural(factor):
            return low, high
        return (high, low) if self.is_natural(ZERO - factor) else NOTHING

    def _of(self, poly: Polynomial) -> SymbolicInterval:
        for atoms, factor in poly.terms:
            if len(atoms) == 1 and isinstance(atoms[0], Quotient):
                made = self._without_remainder(poly, atoms[0], factor)
                if made is not None:
                    return made
        low: Polynomial | None = ZERO
        high: Polynomial | None = ZERO
        for atoms, factor in poly.terms:
            part = self._times((number(factor), number(factor)), self._product(atoms))
            low = low + part[0] if low is not None and part[0] is not None else None
            high = high + part[1] if high is not None and part[1] is not None else None
        return low, high

    def _without_remainder(self, poly: Polynomial, atom: Quotient, factor: int) -> SymbolicInterval | None:
        """`f * (over - by * (over // by))`, which is from 0 to `f * (by - 1)`, and the rest."""
        by = atom.by.constant
        if not by or by < 0 or factor % by or not differs(atom.over):
            return None
        scale = number(-factor // by)
        rest = poly - scale * (atom.over - number(by) * one(atom))
        if len(rest.terms) >= len(poly.terms):
            return None
        return _sum(self._times((scale, scale), (ZERO, number(by - 1))), self.of(rest))

    def _product(self, atoms: tuple[Atom, ...]) -> SymbolicInterval:
        made: SymbolicInterval = (number(1), number(1))
        for atom in atoms:
            made = self._times(made, self._atom(atom))
        return made

    def _atom(self, atom: Atom) -> SymbolicInterval:
        if isinstance(atom, str):
            return one(atom), one(atom)
        if isinstance(atom, BlockOf):
            return ZERO, self._known(self._axes[atom.axis].highest)
        if isinstance(atom, LaneIndex | LoopIndex):
            high = self.of(atom.length if isinstance(atom, LaneIndex) else atom.count)[1]
            return ZERO, None if high is None else high - number(1)
        if isinstance(atom, Quotient):
            return self._quotient(atom)
        return self._result(atom)

    def _quotient(self, atom: Quotient) -> SymbolicInterval:
        by = self._known(atom.by).constant
        if by is None or by <= 0:
            return (one(atom), one(atom)) if not differs(one(atom)) else NOTHING
        low, high = self.of(atom.over)
        return _floored(low, by), _floored(high, by)

    def _result(self, atom: OpaqueResult) -> SymbolicInterval:
        each = [self.of(value) for value in atom.inputs]
        if atom.of == CLAMP:
            (low, high), (_, bound) = each
            limit = None if bound is None else bound - number(1)
            return _extreme([low, ZERO], least_of=True), _extreme([high, limit], least_of=True, any_of=True)
        if atom.of in (LEAST, GREATEST):
            is_least = atom.of == LEAST
            return (
                _extreme([low for low, _ in each], least_of=is_least, any_of=not is_least),
                _extreme([high for _, high in each], least_of=is_least, any_of=is_least),
            )
        if atom.of in CASTS:
            return each[0]
        return NOTHING


def _floored(value: Polynomial | None, by: int) -> Polynomial | None:
    constant = None if value is None else value.constant
    return None if constant is None else number(constant // by)


def _extreme(values: list[Polynomial | None], least_of: bool, any_of: bool = False) -> Polynomial | None:
    """The least, or the greatest. any_of: one that is known bounds it, be others unknown."""
    known = [value for value in values if value is not None]
    if not known or (len(known) < len(values) and not any_of):
        return None
    numbers = [value.constant for value in known]
    if all(value is not None for value in numbers):
        found = sorted(value for value in numbers if value is not None)
        return number(found[0] if least_of else found[-1])
    return known[0] if all(value == known[0] for value in known) or any_of else None


def _sum(left: SymbolicInterval, right: SymbolicInterval) -> SymbolicInterval:
    low, high = (None if a is None or b is None else a + b for a, b in zip(left, right, strict=True))
    return low, high
