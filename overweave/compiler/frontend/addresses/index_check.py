"""Checks the indices of an access, one for each dimension, against the rectangle that its directive declares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import ceil, floor, gcd
from typing import Protocol

from msgspec import Struct

from overweave.compiler.frontend.addresses.dimensions import Bounds, Dimension, dimension_runs, flatten, group_by_moving
from overweave.compiler.frontend.symbols.directives import AccessDirective
from overweave.compiler.frontend.symbols.polynomials import (
    ZERO,
    Atom,
    BlockOf,
    LaneIndex,
    LoopIndex,
    Monomial,
    Polynomial,
    atom_poly,
    const_poly,
    divide,
    tags_of,
)
from overweave.compiler.frontend.symbols.values import CALLER_CHOICE, LOADED, LOOP_CARRIED, Condition, varies
from overweave.errors import DirectiveError
from overweave.ir.schedule import LIMIT


class MaskedRange(Struct, frozen=True):
    """The elements `[low, high)` of a dimension that a mask selects."""

    low: int = 0
    high: int = LIMIT

    def leaves(self, extent: int) -> bool:
        """Whether the mask selects all of a dimension."""
        return self.low <= 0 and self.high >= extent

    def and_(self, other: MaskedRange) -> MaskedRange:
        """Return the intersection."""
        return MaskedRange(max(self.low, other.low), min(self.high, other.high))


class AccessContext(Protocol):
    """The kernel around an access. variables: axis -> the variable of its block. symbols: the names in directives.

    strides: the parameters that may be strides. has_call_args: the integers of a call are known, so that the check must
    decide.
    """

    bounds: Bounds
    symbols: frozenset[str]
    strides: frozenset[str]

    @property
    def has_call_args(self) -> bool: ...
    @property
    def variables(self) -> Mapping[str, str]: ...
    def substitute(self, poly: Polynomial) -> Polynomial: ...
    def dims(self, directive: AccessDirective) -> list[Dimension]: ...


class CheckedAccess(Protocol):
    """What `IndexCheck` needs of an access: see AccessCheck."""

    kernel: AccessContext
    directive: AccessDirective
    descriptor_limits: list[Polynomial]

    def conditions(self) -> list[Condition]: ...
    def aligned_parts(self, condition: Condition) -> list[Polynomial]: ...
    def unclear_error(self, found: str) -> DirectiveError: ...
    def outside_error(self, dim: Dimension, found: str) -> DirectiveError: ...
    def refuse_block(self, axis: str, rest: Polynomial) -> None: ...
    def mask_error(self, by: str) -> DirectiveError: ...


class NeedsCallArguments(Exception):
    """Raised before a call for a check that only the arguments of a call can decide."""


class IndexCheck:
    """The check of an access.

    indices: one for each dimension. local_indices: the same, from where the tile's own elements begin. inequalities:
    polynomials that are above 0 wherever the access touches memory.
    """

    def __init__(self, access: CheckedAccess, dims: Sequence[Dimension], indices: Sequence[Polynomial]) -> None:
        self.access, self.kernel, self.directive = access, access.kernel, access.directive
        self.dims, self.indices = dims, indices
        self.offset = _linear_offset(dims, indices)
        for axis in [dim.axis for dim in dims if dim.axis]:
            if (BlockOf(axis),) not in group_by_moving(self.offset) and not self._has_one_block(axis):
                access.refuse_block(axis, self.offset)
        self.local_indices = [self._local_index(dim, index) for dim, index in zip(dims, indices, strict=True)]
        self.inequalities = [*access.descriptor_limits]
        for condition in access.conditions():
            self.inequalities += access.aligned_parts(condition)

    def stored_ranges(self) -> tuple[range, ...]:
        """Check the access; return the elements of each dimension that a store writes, () for a load.

        Raises DirectiveError, and NeedsCallArguments if only a call can decide.
        """
        if self.directive.is_store:
            highest = [self.kernel.bounds.constant_interval(part)[1] for part in self.inequalities]
            if any(high is not None and high <= 0 for high in highest):  # the mask selects nothing
                return tuple(range(0) for _ in self.dims)
            masks = self._masks()
            self._check_apart()
            return tuple(self._stored_range(*one) for one in zip(self.dims, self.local_indices, masks, strict=True))
        for at, (dim, local_index) in enumerate(zip(self.dims, self.local_indices, strict=True)):
            if dim.axis is not None:
                self._check_within_block(dim, local_index)
            elif any(outer.axis is not None for outer in self.dims[:at]):
                self._check_within_extent(dim, local_index)
        return ()

    def _local_index(self, dim: Dimension, index: Polynomial) -> Polynomial:
        """Return an index relative to where the tile's own elements begin."""
        if dim.axis is None:
            return index
        block = (BlockOf(dim.axis),)
        step = group_by_moving(index).get(block, ZERO)
        if step != dim.step and not self._has_one_block(dim.axis):
            self._check_step(dim, step)
        return index - (step * atom_poly(block[0])) - dim.shift

    def _has_one_block(self, axis: str) -> bool:
        return self.kernel.has_call_args and self.kernel.bounds.constant_interval(atom_poly(BlockOf(axis)))[1] == 0

    def _check_step(self, dim: Dimension, step: Polynomial) -> None:
        """Raise if consecutive blocks of an axis are not `block=` elements apart."""
        substitute, difference = self.kernel.substitute, self.kernel.substitute(step - dim.step)
        if difference == ZERO:
            return
        block_coefficient = group_by_moving(self.offset)[BlockOf(str(dim.axis)),]
        is_certain = difference.constant is not None or self._is_definite(difference)
        if not self.kernel.has_call_args and (block_coefficient.names - self.kernel.symbols or not is_certain):
            raise NeedsCallArguments
        blocks, rest = divide(substitute(block_coefficient), substitute(dim.stride))
        distance = f"{blocks}" if rest == ZERO else f"{substitute(block_coefficient)} elements"
        raise self.directive.loc.error(
            f"the blocks of {dim.axis} are {distance} apart in its address, {substitute(dim.step)} in its directive",
            "Let `block=` be the kernel's block, and dimensions those of the contiguous tensor, in their order",
        )

    def _is_definite(self, poly: Polynomial) -> bool:
        """Whether a polynomial has one sign for all values of its names of at least 1; it may be 0 where all are 1."""
        return self.kernel.bounds.is_nonnegative(poly) or self.kernel.bounds.is_nonnegative(ZERO - poly)

    # loads

    def _check_within_block(self, dim: Dimension, local_index: Polynomial) -> None:
        """Raise if a load along an axis may leave the tile's own block."""
        low, high = self.kernel.bounds.interval(local_index)
        self._check_bounded(dim, local_index)
        if (
            self.kernel.bounds.is_nonnegative(low)
            and high is not None
            and self.kernel.bounds.is_nonnegative(dim.size - const_poly(1) - high)
        ):
            return
        size = self.kernel.substitute(dim.size)
        if self._is_never_negative(local_index) and self._is_never_negative(size - const_poly(1) - local_index):
            return
        if not self.kernel.has_call_args and not self._is_surely_outside(dim, low, high):
            raise NeedsCallArguments
        raise self.access.outside_error(dim, _interval_text(low, high))

    def _is_surely_outside(self, dim: Dimension, low: Polynomial | None, high: Polynomial | None) -> bool:
        """Whether an access leaves its block whatever integers a call passes."""
        before = low is not None and self.kernel.bounds.is_nonnegative(ZERO - low) and low != ZERO
        excess = None if high is None else high + const_poly(1) - dim.size
        return before or (excess is not None and self.kernel.bounds.is_nonnegative(excess) and excess != ZERO)

    def _check_within_extent(self, dim: Dimension, local_index: Polynomial) -> None:
        """Raise if a load along an extent may run into another row, which may be another tile's."""
        extent = self.kernel.substitute(dim.extent)
        low, high = self.kernel.bounds.interval(local_index)
        if low is not None and self.kernel.bounds.is_nonnegative(low - extent):
            raise self.access.outside_error(dim, _interval_text(low, high))
        if not self.kernel.has_call_args:
            return
        for end in (local_index, extent - const_poly(1) - local_index):
            if not self._is_never_negative(end):
                self._check_unbounded(dim, local_index)

    def _is_never_negative(self, poly: Polynomial) -> bool:
        """Whether a polynomial is at least 0 wherever the access touches memory."""
        for slack in (ZERO, *(const_poly(1) - inequality for inequality in self.inequalities)):
            low, _high = self.kernel.bounds.interval(poly + slack)
            if self.kernel.bounds.is_nonnegative(low):
                return True
        return False

    def _check_unbounded(self, dim: Dimension, local_index: Polynomial) -> None:
        """Raise for an index without bounds, unless it is loaded data, such as a label, which is trusted."""
        low, high = self.kernel.bounds.interval(local_index)
        unbounded = [
            atom
            for atoms in group_by_moving(self.kernel.substitute(local_index))
            for atom in atoms
            if self._is_unbounded(atom)
        ]
        counts = [atom for atom in unbounded if isinstance(atom, LoopIndex) or LOOP_CARRIED in tags_of(atom_poly(atom))]
        if counts:
            tags = sorted(tags_of(atom_poly(counts[0])))
            raise self.access.outside_error(dim, f"as many as {tags[0] if tags else atom_poly(counts[0])} says")
        if not unbounded or any(LOADED not in tags_of(atom_poly(atom)) for atom in unbounded):
            raise self.access.outside_error(dim, _interval_text(low, high))

    def _is_unbounded(self, atom: Atom) -> bool:
        return None in self.kernel.bounds.constant_interval(atom_poly(atom))

    def _check_bounded(self, dim: Dimension, local_index: Polynomial) -> None:
        """Raise if an index within a block depends on a value without bounds."""
        for atoms in group_by_moving(self.kernel.substitute(local_index)):
            if any(None in self.kernel.bounds.interval(atom_poly(atom)) for atom in atoms):
                value = Polynomial(((atoms, 1),))
                tags = sorted(tags_of(value))
                if not self.kernel.has_call_args and (CALLER_CHOICE in tags or not tags):
                    raise NeedsCallArguments
                if self._is_never_negative(local_index):
                    continue
                raise self.access.outside_error(dim, f"what {tags[0] if tags else value} says")

    # stores

    def _masks(self) -> list[MaskedRange]:
        """Return what masks select of each dimension. Raises DirectiveError for a mask that is not a range of one."""
        masks = [MaskedRange() for _ in self.dims]
        for condition in self.access.conditions():
            if condition.tags - {CALLER_CHOICE}:
                raise self.access.mask_error(sorted(condition.tags)[0])
        for part in self.inequalities:
            self._apply_mask(part, masks)
        return masks

    def _apply_mask(self, part: Polynomial, masks: list[MaskedRange]) -> None:
        """Intersect the mask of the dimension that the condition `part > 0` is about."""
        part = self.kernel.substitute(part)
        low, _ = self.kernel.bounds.interval(part)
        if not varies(part) or (low is not None and self.kernel.bounds.is_nonnegative(low - const_poly(1))):
            return
        for lo, hi in dimension_runs(self.dims):
            index, extent = (self.kernel.substitute(poly) for poly in flatten(self.dims, self.indices, lo, hi))
            mask = _mask_of_index(part, index) if self.kernel.has_call_args else _is_extent_mask(part, index, extent)
            is_extent = hi == lo + 1 and self.dims[lo].axis is None
            if mask is not None and is_extent and self.kernel.has_call_args:
                masks[lo] = masks[lo].and_(mask)
            if mask is not None and (mask.leaves(extent.constant or 0) or is_extent):
                return
        if part.names and not self.kernel.has_call_args:
            raise NeedsCallArguments
        raise self.access.mask_error("a condition that is not the end of a dimension")

    def _check_apart(self) -> None:
        """Raise if a lane or iteration moves along two dimensions at once: a store must be a rectangle."""
        seen: set[Atom] = set()
        for local_index in self.local_indices:
            moving = {atom for atoms in group_by_moving(self.kernel.substitute(local_index)) for atom in atoms}
            for atom in sorted(moving & seen, key=str):
                raise self.access.unclear_error(f"{atom_poly(atom)} moves along two dimensions of what it stores")
            seen |= {atom for atom in moving if not isinstance(atom, BlockOf)}

    def _stored_range(self, dim: Dimension, local_index: Polynomial, mask: MaskedRange) -> range:
        """Return the elements of a dimension that a store writes. Raises DirectiveError if some lie outside."""
        groups = {
            atoms: self.kernel.substitute(step)
            for atoms, step in group_by_moving(self.kernel.substitute(local_index)).items()
        }
        low, size = groups.pop((), ZERO).constant, self.kernel.substitute(dim.size).constant
        moving = [(self._lane_count(dim, atoms), step.constant) for atoms, step in groups.items()]
        moving = [(count, step) for count, step in moving if count != 1]
        if low is None or size is None or any(count is None or step is None for count, step in moving):
            self._refuse_surely_outside(dim, local_index)
            raise NeedsCallArguments
        steps = [(count, step) for count, step in moving if count is not None and step is not None]
        first = low + sum(min(0, step * (count - 1)) for count, step in steps)
        gcd_step = gcd(*(step for _, step in steps)) if steps else 1
        last = low + sum(max(0, step * (count - 1)) for count, step in steps)
        if not _is_gapless([(count, abs(step) // gcd_step) for count, step in steps]):
            raise self.access.outside_error(dim, f"not every one of {first} to {last}")
        elements = range(first, last + 1, gcd_step)
        if dim.axis is not None:
            if first < 0 or last >= size:
                raise self.access.outside_error(dim, f"{first} to {last}")
            return elements
        first_kept = first + max(0, -(-(mask.low - first) // gcd_step)) * gcd_step
        left = range(first_kept, min(last + 1, mask.high), gcd_step)
        if left and ((left[0] < 0 and not self._is_never_negative(local_index)) or left[-1] >= size):
            raise self.access.outside_error(dim, f"{first} to {last}")
        return left

    def _refuse_surely_outside(self, dim: Dimension, local_index: Polynomial) -> None:
        """Raise if a store along an axis leaves its block whatever integers a call passes."""
        if dim.axis is not None:
            low, high = self.kernel.bounds.interval(local_index)
            self._check_bounded(dim, local_index)
            if self._is_surely_outside(dim, low, high):
                raise self.access.outside_error(dim, _interval_text(low, high))

    def _lane_count(self, dim: Dimension, atoms: Monomial) -> int | None:
        """Return how many values a lane or loop index has; None if unknown before a call."""
        atom = atoms[0]
        if len(atoms) == 1 and isinstance(atom, LaneIndex | LoopIndex):
            count = self.kernel.substitute(atom.length if isinstance(atom, LaneIndex) else atom.count)
            if count.constant is not None or not self.kernel.has_call_args:
                return count.constant
        if not self.kernel.has_call_args and not tags_of(Polynomial(((atoms, 1),))):
            return None
        tags = sorted(tags_of(Polynomial(((atoms, 1),))))
        if CALLER_CHOICE in tags and not self.kernel.has_call_args:
            return None
        raise self.access.outside_error(dim, f"what {tags[0] if tags else Polynomial(((atoms, 1),))} says")


def _linear_offset(dims: Sequence[Dimension], indices: Sequence[Polynomial]) -> Polynomial:
    """Return the sum of each index times its stride."""
    offset = ZERO
    for dim, index in zip(dims, indices, strict=True):
        offset = offset + index * dim.stride
    return offset


def _interval_text(low: Polynomial | None, high: Polynomial | None) -> str:
    if low is not None and high is None:
        return f"{low} and more"
    return f"{'?' if low is None else low} to {'?' if high is None else high}"


def _mask_of_index(part: Polynomial, index: Polynomial) -> MaskedRange | None:
    """Return the elements of a dimension with `part > 0`, if `part` is a linear function of its index; else None."""
    index_terms, part_terms = group_by_moving(index), group_by_moving(part)
    first, start = index_terms.pop((), ZERO).constant, part_terms.pop((), ZERO).constant
    if first is None or start is None or not index_terms or index_terms.keys() != part_terms.keys():
        return None
    pairs = [(part_terms[atoms].constant, index_terms[atoms].constant) for atoms in index_terms]
    slopes = {Fraction(factor, divisor) for factor, divisor in pairs if factor and divisor}
    if len(slopes) != 1 or any(not factor or not divisor for factor, divisor in pairs):
        return None
    (slope,) = slopes
    zero = first - start / slope  # where it is zero
    return MaskedRange(high=ceil(zero)) if slope < 0 else MaskedRange(low=floor(zero) + 1)


def _is_extent_mask(part: Polynomial, index: Polynomial, extent: Polynomial) -> MaskedRange | None:
    """Return a full mask if, before a call, `part > 0` follows from `0 <= index < extent` by the names; else None."""
    extra, lead = (part - extent + index).constant, (part - const_poly(1) - index).constant
    return MaskedRange() if max(-1 if extra is None else extra, -1 if lead is None else lead) >= 0 else None


def _is_gapless(moving: Sequence[tuple[int, int]]) -> bool:
    """Whether lanes and iterations, (count, step) each, together reach every element of their range."""
    covered = 1
    for count, step in sorted(moving, key=lambda pair: pair[1]):
        if step > covered and count > 1:
            return False
        covered += step * (count - 1)
    return True
