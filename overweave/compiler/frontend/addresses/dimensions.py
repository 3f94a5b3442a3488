"""The dimensions of a tensor, and an address as one index for each of them.

An address is a sum of indices, each times the stride of its dimension. Strides are compared by name, not by number:
two dimensions stay apart even where an extent of 1, or two equal extents, give them equal strides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

from msgspec import Struct
from msgspec.structs import replace

from overweave.compiler.frontend.symbols.polynomials import (
    ZERO,
    Atom,
    BlockOf,
    LaneIndex,
    LoopIndex,
    Monomial,
    OpaqueResult,
    Polynomial,
    Quotient,
    atom_poly,
    ceil_div,
    const_poly,
    divide,
    floor_div,
    lower_bound,
)
from overweave.compiler.frontend.symbols.values import CASTS, CLAMP, MAXIMUM, MINIMUM, varies

Substitution = Callable[[Polynomial], Polynomial]  # replaces names by integers, if these are known
SplitLanes = dict[Atom, tuple[LaneIndex, LaneIndex]]  # lane -> (high, low): lane = high * low.length + low
HIGH, LOW = 100, 200  # added to the dimension of a lane that is split, for its two parts


class Dimension(Struct, frozen=True):
    """A dimension of a tensor, in elements. size: how many one tile may touch. axis: None for an extent.

    A tile's elements begin at `step * block + shift` along an axis.
    """

    extent: Polynomial
    stride: Polynomial
    size: Polynomial
    axis: str | None = None
    step: Polynomial = ZERO
    shift: Polynomial = ZERO

    def start(self) -> Polynomial:
        """Return the index at which a tile's own elements begin."""
        return self.step * atom_poly(BlockOf(self.axis)) + self.shift if self.axis else ZERO


def is_moving(atom: Atom) -> bool:
    """Whether an atom varies between tiles, iterations or lanes."""
    return not isinstance(atom, str) and varies(atom_poly(atom))


def group_by_moving(poly: Polynomial) -> dict[Monomial, Polynomial]:
    """Map each product of moving atoms to its coefficient, which is constant in a call; () -> the constant part."""
    coefficients: dict[Monomial, Polynomial] = {}
    for atoms, factor in poly.terms:
        moving = tuple(atom for atom in atoms if is_moving(atom))
        coefficient = Polynomial(((tuple(atom for atom in atoms if not is_moving(atom)), factor),))
        coefficients[moving] = coefficients.get(moving, ZERO) + coefficient
    return {moving: coefficient for moving, coefficient in coefficients.items() if coefficient != ZERO}


def index_splits(offset: Polynomial, dims: Sequence[Dimension]) -> Iterator[list[Polynomial]]:
    """Yield each decomposition of an offset into one index per dimension.

    A constant part such as `N - 1` may stay in its dimension or be carried, times the extent, into the next faster one.
    """
    indices = [ZERO for _ in dims]
    for moving, coefficient in group_by_moving(offset).items():
        rest, term = coefficient, Polynomial(((moving, 1),))
        for at, dim in enumerate(dims):
            quotient, rest = divide(rest, dim.stride)
            indices[at] = indices[at] + quotient * term
    constants = [group_by_moving(index).get((), ZERO) for index in indices]
    choices = [
        (False, True) if index != ZERO and at + 1 < len(indices) else (False,) for at, index in enumerate(constants)
    ]
    for carries in product(*choices):
        shifted, carry = list(indices), ZERO
        for at, has_carry in enumerate(carries):
            shifted[at], constant = shifted[at] + carry, constants[at] + carry
            carry = constant * dims[at + 1].extent if has_carry else ZERO
            shifted[at] = shifted[at] - constant if has_carry else shifted[at]
        yield shifted


class Strides:
    """Assigns parameters that are strides to dimensions.

    names: the parameters that may be strides. substitute: in a call it replaces every name by a number.
    """

    def __init__(
        self, dims: Sequence[Dimension], names: frozenset[str], substitute: Substitution, has_call_args: bool
    ) -> None:
        self._dims, self._candidates, self._substitute, self._has_call_args = dims, names, substitute, has_call_args
        self.guesses: list[str] = []  # names whose dimension only a call can confirm

    def resolved(self, offset: Polynomial) -> Polynomial:
        """Replace names of strides in an offset by the strides of the contiguous tensor, where they are equal."""
        groups = group_by_moving(offset)
        factors = {atom for moving, each in groups.items() if moving for atoms, _ in each.terms for atom in atoms}
        names = sorted(name for name in self._candidates if name in factors)
        free_dims = dict(enumerate(self._dims))
        stride_of: dict[str, Polynomial] = {}
        for at, dim in enumerate(self._dims):
            block = groups.get((BlockOf(dim.axis),), ZERO) if dim.axis else ZERO
            name = next((name for name in names if block == dim.step * atom_poly(name) and self._fits(name, dim)), None)
            if name is not None and name not in stride_of:
                stride_of[name] = free_dims.pop(at).stride
        for name in names:
            if name in stride_of:
                continue
            fitting = [at for at, dim in free_dims.items() if self._fits(name, dim)]
            if not fitting or (len(fitting) > 1 and not self._has_call_args):
                continue
            at = max(fitting, key=lambda at: (self._is_equal(name, free_dims[at]), free_dims[at].axis is None, at))
            stride_of[name] = free_dims.pop(at).stride
            self.guesses += [] if self._has_call_args else [name]
        resolved = ZERO
        for atoms, factor in offset.terms:
            term = Polynomial(((tuple(atom for atom in atoms if atom not in stride_of), factor),))
            for atom in atoms:
                term = term * stride_of[atom] if isinstance(atom, str) and atom in stride_of else term
            resolved = resolved + term
        return resolved

    def _fits(self, name: str, dim: Dimension) -> bool:
        """Whether a name may be a dimension's stride: a dimension of one element may have any."""
        return not self._has_call_args or self._substitute(dim.extent).constant == 1 or self._is_equal(name, dim)

    def _is_equal(self, name: str, dim: Dimension) -> bool:
        return self._substitute(atom_poly(name)) == self._substitute(dim.stride)


def split_divided_lanes(poly: Polynomial, substitute: Substitution) -> SplitLanes:
    """Split lanes that an address divides by b: `lane // b` and `lane % b` become lanes of their own."""
    parts: SplitLanes = {}
    for atom in poly.atoms:
        lane = _sole_atom(atom.over) if isinstance(atom, Quotient) else None
        if isinstance(atom, Quotient) and isinstance(lane, LaneIndex) and not varies(atom.by):
            length, by = substitute(lane.length).constant, substitute(atom.by).constant
            if length and by and length % by == 0:
                high = LaneIndex(floor_div(lane.length, atom.by), HIGH + lane.dim)
                parts.setdefault(lane, (high, LaneIndex(atom.by, LOW + lane.dim)))
    return parts


def split_long_lanes(offset: Polynomial, dims: Sequence[Dimension], substitute: Substitution) -> SplitLanes:
    """Split lanes that are longer than their dimension, by a multiple of its extent, at that extent."""
    parts: SplitLanes = {}
    for moving, coefficient in group_by_moving(offset).items():
        lane = moving[0] if len(moving) == 1 else None
        if not isinstance(lane, LaneIndex):
            continue
        for dim in dims:
            length, extent = substitute(lane.length).constant, substitute(dim.extent).constant
            is_along = substitute(coefficient) == substitute(dim.stride) and dim.axis is None
            if is_along and length and extent and length > extent and length % extent == 0:
                high = LaneIndex(floor_div(lane.length, dim.extent), HIGH + lane.dim)
                parts.setdefault(lane, (high, LaneIndex(dim.extent, LOW + lane.dim)))
    return parts


def substitute_lanes(poly: Polynomial, parts: SplitLanes) -> Polynomial:
    """Replace lanes by the parts that they are split into."""

    def by(atom: Atom) -> Polynomial | None:
        if atom in parts:
            high, low = parts[atom]
            return atom_poly(high) * low.length + atom_poly(low)
        lane = _sole_atom(atom.over) if isinstance(atom, Quotient) else None
        if isinstance(atom, Quotient) and lane in parts and atom.by == parts[lane][1].length:
            return atom_poly(parts[lane][0])
        return None

    return poly.substitute(by) if parts else poly


def _sole_atom(poly: Polynomial) -> Atom | None:
    atom = poly.terms[0][0][0] if len(poly.terms) == 1 and poly.terms[0][0] else None
    return atom if atom is not None and poly == atom_poly(atom) else None


def dimension_runs(dims: Sequence[Dimension]) -> Iterator[tuple[int, int]]:
    """Yield each range `[lo, hi)` of adjacent dimensions, which a flat index may walk."""
    yield from ((lo, hi) for lo in range(len(dims)) for hi in range(lo + 1, len(dims) + 1))


def flatten(
    dims: Sequence[Dimension], indices: Sequence[Polynomial], lo: int, hi: int
) -> tuple[Polynomial, Polynomial]:
    """Return (index, extent) of the dimensions `[lo, hi)` flattened into one."""
    index, extent = ZERO, const_poly(1)
    for dim, dim_index in zip(dims[lo:hi], indices[lo:hi], strict=True):
        index, extent = index * dim.extent + dim_index, extent * dim.extent
    return index, extent


def substitute_dimension(dim: Dimension, substitute: Substitution) -> Dimension:
    """Replace the names in a dimension's expressions."""
    return replace(
        dim,
        extent=substitute(dim.extent),
        stride=substitute(dim.stride),
        size=substitute(dim.size),
        step=substitute(dim.step),
        shift=substitute(dim.shift),
    )


# In a call every bound is an integer. Before a call a bound may be a polynomial of the caller's integer arguments.

SymbolicInterval = tuple[Polynomial | None, Polynomial | None]  # (minimum, maximum); None: unknown
UNBOUNDED: SymbolicInterval = (None, None)


class Extents(Struct, frozen=True):
    """The extent and block of an axis."""

    extent: Polynomial
    block: Polynomial
    is_streamed: bool

    @property
    def highest(self) -> Polynomial:
        """The last block, or the last element at which an iteration of a streamed loop begins."""
        last = ceil_div(self.extent, self.block) - const_poly(1)
        return last * self.block if self.is_streamed else last


class Bounds:
    """Bounds over a kernel's axes. substitute: replaces names by integers, if these are known.

    positive: names whose value is at least 1.
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
            self._cache[poly] = UNBOUNDED  # a polynomial that is nested in itself has no bounds
            self._cache[poly] = self._sum_interval(poly)
        return self._cache[poly]

    def constant_interval(self, poly: Polynomial) -> tuple[int | None, int | None]:
        """Return (minimum, maximum) as ints, None where one is not a number."""
        low, high = self.interval(poly)
        return None if low is None else low.constant, None if high is None else high.constant

    def is_nonnegative(self, poly: Polynomial | None) -> bool:
        """Whether a polynomial is known to be at least 0, whatever integers a call passes."""
        bound = None if poly is None else lower_bound(poly, self._positive)
        return bound is not None and bound >= 0

    def _multiply(self, left: SymbolicInterval, right: SymbolicInterval) -> SymbolicInterval:
        """Multiply two intervals; UNBOUNDED unless both are numbers, one is a single value, or both are nonnegative."""
        constants = [None if end is None else end.constant for end in (*left, *right)]
        if all(end is not None for end in constants):
            a, b, c, d = (end for end in constants if end is not None)
            corners = (a * c, a * d, b * c, b * d)
            return const_poly(min(corners)), const_poly(max(corners))
        if left[0] is not None and left[0] == left[1]:
            return self._scale(left[0], right)
        if right[0] is not None and right[0] == right[1]:
            return self._scale(right[0], left)
        if self.is_nonnegative(left[0]) and self.is_nonnegative(right[0]):
            low, high = (None if a is None or b is None else a * b for a, b in zip(left, right, strict=True))
            return low, high
        return UNBOUNDED

    def _scale(self, factor: Polynomial, interval: SymbolicInterval) -> SymbolicInterval:
        """Multiply an interval by a polynomial; UNBOUNDED unless the polynomial's sign is known."""
        if factor == ZERO:
            return ZERO, ZERO
        low, high = (None if end is None else end * factor for end in interval)
        if self.is_nonnegative(factor):
            return low, high
        return (high, low) if self.is_nonnegative(ZERO - factor) else UNBOUNDED

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
            term_interval = self._multiply((const_poly(factor), const_poly(factor)), self._product_interval(atoms))
            low = low + term_interval[0] if low is not None and term_interval[0] is not None else None
            high = high + term_interval[1] if high is not None and term_interval[1] is not None else None
        return low, high

    def _remainder_interval(self, poly: Polynomial, atom: Quotient, factor: int) -> SymbolicInterval | None:
        """Bound a polynomial with `f * (x - d * (x // d))` in it, which lies in `[0, f * (d - 1)]`; else None."""
        divisor = atom.by.constant
        if not divisor or divisor < 0 or factor % divisor or not varies(atom.over):
            return None
        scale = const_poly(-factor // divisor)
        rest = poly - scale * (atom.over - const_poly(divisor) * atom_poly(atom))
        if len(rest.terms) >= len(poly.terms):
            return None
        return _add_intervals(self._multiply((scale, scale), (ZERO, const_poly(divisor - 1))), self.interval(rest))

    def _product_interval(self, atoms: tuple[Atom, ...]) -> SymbolicInterval:
        interval: SymbolicInterval = (const_poly(1), const_poly(1))
        for atom in atoms:
            interval = self._multiply(interval, self._atom_interval(atom))
        return interval

    def _atom_interval(self, atom: Atom) -> SymbolicInterval:
        """Bound an atom: a name by itself, a block, lane or iteration by its count."""
        if isinstance(atom, str):
            return atom_poly(atom), atom_poly(atom)
        if isinstance(atom, BlockOf):
            return ZERO, self._substitute(self._axes[atom.axis].highest)
        if isinstance(atom, LaneIndex | LoopIndex):
            high = self.interval(atom.length if isinstance(atom, LaneIndex) else atom.count)[1]
            return ZERO, None if high is None else high - const_poly(1)
        if isinstance(atom, Quotient):
            return self._quotient_interval(atom)
        return self._result_interval(atom)

    def _quotient_interval(self, atom: Quotient) -> SymbolicInterval:
        """Bound a floor division by a positive constant."""
        divisor = self._substitute(atom.by).constant
        if divisor is None or divisor <= 0:
            return (atom_poly(atom), atom_poly(atom)) if not varies(atom_poly(atom)) else UNBOUNDED
        low, high = self.interval(atom.over)
        return _floor_div_constant(low, divisor), _floor_div_constant(high, divisor)

    def _result_interval(self, atom: OpaqueResult) -> SymbolicInterval:
        """Bound a clamp, a minimum or maximum, or a cast; any other operation is unknown."""
        inputs = [self.interval(value) for value in atom.inputs]
        if atom.operation == CLAMP:
            (low, high), (_, bound) = inputs
            last = None if bound is None else bound - const_poly(1)
            return _min_or_max([low, ZERO], is_min=True), _min_or_max([high, last], is_min=True, needs_one=True)
        if atom.operation in (MINIMUM, MAXIMUM):
            is_min = atom.operation == MINIMUM
            return (
                _min_or_max([low for low, _ in inputs], is_min=is_min, needs_one=not is_min),
                _min_or_max([high for _, high in inputs], is_min=is_min, needs_one=is_min),
            )
        if atom.operation in CASTS:
            return inputs[0]
        return UNBOUNDED


def _floor_div_constant(value: Polynomial | None, by: int) -> Polynomial | None:
    constant = None if value is None else value.constant
    return None if constant is None else const_poly(constant // by)


def _min_or_max(values: list[Polynomial | None], is_min: bool, needs_one: bool = False) -> Polynomial | None:
    """Return the minimum or maximum of bounds. needs_one: a single known value is a valid bound."""
    known_values = [value for value in values if value is not None]
    if not known_values or (len(known_values) < len(values) and not needs_one):
        return None
    numbers = [value.constant for value in known_values]
    if all(value is not None for value in numbers):
        constants = sorted(value for value in numbers if value is not None)
        return const_poly(constants[0] if is_min else constants[-1])
    return known_values[0] if all(value == known_values[0] for value in known_values) or needs_one else None


def _add_intervals(left: SymbolicInterval, right: SymbolicInterval) -> SymbolicInterval:
    low, high = (None if a is None or b is None else a + b for a, b in zip(left, right, strict=True))
    return low, high
