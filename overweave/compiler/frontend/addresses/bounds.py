"""Interval arithmetic: the minimum and maximum of a polynomial over all tiles, iterations and lanes.

In a call every bound is a number. Before a call a bound may be a polynomial of the caller's numbers.
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
    atom_poly,
    ceil_div,
    lower_bound,
    number,
)
from overweave.compiler.frontend.symbols.values import CASTS, CLAMP, MAXIMUM, MINIMUM, varies

SymbolicInterval = tuple[Polynomial | None, Polynomial | None]  # (minimum, maximum); None: unknown
NOTHING: SymbolicInterval = (None, None)


class Extents(Struct, frozen=True):
    """The extent and block of an axis."""

    extent: Polynomial
    block: Polynomial
    is_streamed: bool

    @property
    def highest(self) -> Polynomial:
        """The last block, or the last element at which an iteration of a streamed loop begins."""
        last = ceil_div(self.extent, self.block) - number(1)
        return last * self.block if self.is_streamed else last


class Bounds:
    """Bounds over a kernel's axes. substitute: replaces names by their numbers, where these are known.

    positive: the names of numbers that are at least 1.
    """

    def __init__(
        self, axes: Mapping[str, Extents], substitute: Callable[[Polynomial], Polynomial], positive: frozenset[str]
    ) -> None:
        self._axes, self._substitute, self._positive = axes, substitute, positive
        self._cache: dict[Polynomial, SymbolicInterval] = {}

    def interval(self, poly: Polynomial) -> SymbolicInterval:
        """Return (minimum, maximum)."""
        poly = self._substitute(poly)
        if poly not in self._cache:
            self._cache[poly] = NOTHING  # a polynomial that is nested in itself has no bounds
            self._cache[poly] = self._sum_interval(poly)
        return self._cache[poly]

    def constant_interval(self, poly: Polynomial) -> tuple[int | None, int | None]:
        """Return (minimum, maximum) as ints, None where one is not a number."""
        low, high = self.interval(poly)
        return None if low is None else low.constant, None if high is None else high.constant

    def is_natural(self, poly: Polynomial | None) -> bool:
        """Whether a polynomial is at least 0 for all numbers of a call."""
        bound = None if poly is None else lower_bound(poly, self._positive)
        return bound is not None and bound >= 0

    def _multiply(self, left: SymbolicInterval, right: SymbolicInterval) -> SymbolicInterval:
        """Multiply two intervals."""
        constants = [None if end is None else end.constant for end in (*left, *right)]
        if all(end is not None for end in constants):
            a, b, c, d = (end for end in constants if end is not None)
            corners = (a * c, a * d, b * c, b * d)
            return number(min(corners)), number(max(corners))
        if left[0] is not None and left[0] == left[1]:
            return self._scale(left[0], right)
        if right[0] is not None and right[0] == right[1]:
            return self._scale(right[0], left)
        if self.is_natural(left[0]) and self.is_natural(right[0]):
            low, high = (None if a is None or b is None else a * b for a, b in zip(left, right, strict=True))
            return low, high
        return NOTHING

    def _scale(self, factor: Polynomial, interval: SymbolicInterval) -> SymbolicInterval:
        """Multiply an interval by a polynomial of constant sign."""
        if factor == ZERO:
            return ZERO, ZERO
        low, high = (None if end is None else end * factor for end in interval)
        if self.is_natural(factor):
            return low, high
        return (high, low) if self.is_natural(ZERO - factor) else NOTHING

    def _sum_interval(self, poly: Polynomial) -> SymbolicInterval:
        """Add the intervals of the terms, but take `x % d` as a whole."""
        for atoms, factor in poly.terms:
            if len(atoms) == 1 and isinstance(atoms[0], Quotient):
                interval = self._remainder_interval(poly, atoms[0], factor)
                if interval is not None:
                    return interval
        low: Polynomial | None = ZERO
        high: Polynomial | None = ZERO
        for atoms, factor in poly.terms:
            term_interval = self._multiply((number(factor), number(factor)), self._product_interval(atoms))
            low = low + term_interval[0] if low is not None and term_interval[0] is not None else None
            high = high + term_interval[1] if high is not None and term_interval[1] is not None else None
        return low, high

    def _remainder_interval(self, poly: Polynomial, atom: Quotient, factor: int) -> SymbolicInterval | None:
        """Bound a polynomial with `f * (x - d * (x // d))` in it, which lies in `[0, f * (d - 1)]`; else None."""
        divisor = atom.by.constant
        if not divisor or divisor < 0 or factor % divisor or not varies(atom.over):
            return None
        scale = number(-factor // divisor)
        rest = poly - scale * (atom.over - number(divisor) * atom_poly(atom))
        if len(rest.terms) >= len(poly.terms):
            return None
        return _add_intervals(self._multiply((scale, scale), (ZERO, number(divisor - 1))), self.interval(rest))

    def _product_interval(self, atoms: tuple[Atom, ...]) -> SymbolicInterval:
        interval: SymbolicInterval = (number(1), number(1))
        for atom in atoms:
            interval = self._multiply(interval, self._atom_interval(atom))
        return interval

    def _atom_interval(self, atom: Atom) -> SymbolicInterval:
        """Bound an atom."""
        if isinstance(atom, str):
            return atom_poly(atom), atom_poly(atom)
        if isinstance(atom, BlockOf):
            return ZERO, self._substitute(self._axes[atom.axis].highest)
        if isinstance(atom, LaneIndex | LoopIndex):
            high = self.interval(atom.length if isinstance(atom, LaneIndex) else atom.count)[1]
            return ZERO, None if high is None else high - number(1)
        if isinstance(atom, Quotient):
            return self._quotient_interval(atom)
        return self._result_interval(atom)

    def _quotient_interval(self, atom: Quotient) -> SymbolicInterval:
        """Bound a floor division by a positive constant."""
        divisor = self._substitute(atom.by).constant
        if divisor is None or divisor <= 0:
            return (atom_poly(atom), atom_poly(atom)) if not varies(atom_poly(atom)) else NOTHING
        low, high = self.interval(atom.over)
        return _floor_div_constant(low, divisor), _floor_div_constant(high, divisor)

    def _result_interval(self, atom: OpaqueResult) -> SymbolicInterval:
        """Bound a clamp, a minimum or maximum, or a cast; any other operation is unknown."""
        inputs = [self.interval(value) for value in atom.inputs]
        if atom.operation == CLAMP:
            (low, high), (_, bound) = inputs
            last = None if bound is None else bound - number(1)
            return _min_or_max([low, ZERO], is_min=True), _min_or_max([high, last], is_min=True, needs_one=True)
        if atom.operation in (MINIMUM, MAXIMUM):
            is_min = atom.operation == MINIMUM
            return (
                _min_or_max([low for low, _ in inputs], is_min=is_min, needs_one=not is_min),
                _min_or_max([high for _, high in inputs], is_min=is_min, needs_one=is_min),
            )
        if atom.operation in CASTS:
            return inputs[0]
        return NOTHING


def _floor_div_constant(value: Polynomial | None, by: int) -> Polynomial | None:
    constant = None if value is None else value.constant
    return None if constant is None else number(constant // by)


def _min_or_max(values: list[Polynomial | None], is_min: bool, needs_one: bool = False) -> Polynomial | None:
    """Return the minimum or maximum of bounds. needs_one: a single known value is a valid bound."""
    known_values = [value for value in values if value is not None]
    if not known_values or (len(known_values) < len(values) and not needs_one):
        return None
    numbers = [value.constant for value in known_values]
    if all(value is not None for value in numbers):
        constants = sorted(value for value in numbers if value is not None)
        return number(constants[0] if is_min else constants[-1])
    return known_values[0] if all(value == known_values[0] for value in known_values) or needs_one else None


def _add_intervals(left: SymbolicInterval, right: SymbolicInterval) -> SymbolicInterval:
    low, high = (None if a is None or b is None else a + b for a, b in zip(left, right, strict=True))
    return low, high
