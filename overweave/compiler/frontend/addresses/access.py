"""Checks one load or store against the rectangle that its directive declares.

The address is one index for each dimension, times the strides of a row-major tensor. Along an axis the index is the
tile's block times its size, and lanes within that block. Along an extent a load must stay inside the dimension, or it
would read the next row without a wait; a store touches what its mask selects.
"""

from __future__ import annotations

from collections.abc import Sequence

from overweave.compiler.frontend.addresses.dimensions import (
    Dimension,
    SplitLanes,
    Strides,
    index_splits,
    split_divided_lanes,
    split_long_lanes,
    substitute_dimension,
    substitute_lanes,
)
from overweave.compiler.frontend.addresses.index_check import AccessContext, IndexCheck, NeedsCallArguments
from overweave.compiler.frontend.symbols.directives import AccessDirective
from overweave.compiler.frontend.symbols.polynomials import (
    ZERO,
    Atom,
    BlockOf,
    LaneIndex,
    OpaqueResult,
    Polynomial,
    Quotient,
    atom_poly,
    const_poly,
    tags_of,
)
from overweave.compiler.frontend.symbols.values import (
    CALLER_CHOICE,
    CASTS,
    CLAMP,
    Condition,
    Constant,
    Descriptor,
    Number,
    TupleValue,
    as_condition,
    broadcast,
)
from overweave.compiler.frontend.walk.evaluate import TracedAccess
from overweave.compiler.frontend.walk.follow import STORES
from overweave.errors import DirectiveError


class AccessCheck:
    """The check of one load or store.

    descriptor_limits: polynomials that are above 0 where a descriptor touches memory. split_lanes: each lane that the
    address divides, or that spans several rows of a dimension, as two lanes.
    """

    def __init__(self, kernel: AccessContext, access: TracedAccess, directive: AccessDirective) -> None:
        self.kernel, self.access, self.directive = kernel, access, directive
        self.dims = kernel.dims(directive)
        self.descriptor_limits: list[Polynomial] = []
        self.rank = 0
        self.split_lanes: SplitLanes = {}

    def stored_ranges(self) -> tuple[range, ...]:
        """Return the elements of each dimension that a store writes, relative to the tile's first; () for a load.

        Raises DirectiveError, and NeedsCallArguments if only a call can decide.
        """
        offset = self._offset()
        strides = Strides(self.dims, self.kernel.strides, self.kernel.substitute, self.kernel.has_call_args)
        offset = self._without_wraparound(strides.resolved(offset))
        splits = [split_divided_lanes(offset, self.kernel.substitute)]
        if not splits[0] and (long_split := split_long_lanes(offset, self.dims, self.kernel.substitute)):
            splits.insert(0, long_split)  # else a mask cuts the lane at the end of its dimension
        errors: list[DirectiveError] = []
        for split in splits:
            self.split_lanes = split
            try:
                return self._check_offset(substitute_lanes(offset, self.split_lanes))
            except DirectiveError as error:
                errors.append(error)
        if strides.guesses:
            raise NeedsCallArguments
        raise errors[0]

    def _check_offset(self, offset: Polynomial) -> tuple[range, ...]:
        """Check the offset symbolically; if that fails in a call, with the integers that the call passes for names."""
        attempts = [(offset, self.dims)]
        if self.kernel.has_call_args:  # the kernel may have a number where its directive has a name
            int_dims = [substitute_dimension(dim, self.kernel.substitute) for dim in self.dims]
            attempts.append((self.kernel.substitute(offset), int_dims))
        errors: list[DirectiveError] = []
        for attempt, dims in attempts:
            try:
                return self._check_splits(attempt, dims)
            except DirectiveError as error:
                errors.append(error)
        raise errors[-1]

    def _check_splits(self, offset: Polynomial, dims: Sequence[Dimension]) -> tuple[range, ...]:
        """Check each decomposition of the offset into indices, and return the result of the first that passes."""
        errors: list[Exception] = []
        for indices in index_splits(offset, dims):
            try:
                return IndexCheck(self, dims, indices).stored_ranges()
            except DirectiveError as error:
                errors.append(error)
        raise errors[0]

    def conditions(self) -> list[Condition]:
        """Return the conditions under which an element is accessed: the guard and the mask."""
        positional, keywords = self.access.arguments
        at = 2 if self.access.kind in STORES else 1
        address = self.access.address
        is_pointer = not isinstance(address, Descriptor) and not (positional and isinstance(positional[0], TupleValue))
        mask = keywords.get("mask", positional[at] if len(positional) > at and is_pointer else Constant(value=True))
        is_none = isinstance(mask, Constant) and mask.value is None
        return [self.access.guard, Condition(()) if is_none else as_condition(mask)]

    def aligned_parts(self, condition: Condition) -> list[Polynomial]:
        """Return the parts of a condition with their lanes aligned to those of the address."""
        parts = [broadcast(Number(part, condition.rank), self.rank) for part in condition.parts]
        return [substitute_lanes(self._without_casts(part), self.split_lanes) for part in parts]

    # the address

    def _offset(self) -> Polynomial:
        """Return the offset of the access from the tensor's base, in elements.

        Raises DirectiveError, and NeedsCallArguments if only a call can decide.
        """
        address, positional = self.access.address, self.access.arguments[0]
        if isinstance(address, Number) and positional and isinstance(positional[0], TupleValue):
            address = self._of_descriptor_parameter(address, positional[0])
        elif isinstance(address, Descriptor):
            address = self._of_descriptor(address)
        if not isinstance(address, Number):
            raise self.unclear_error("it is no pointer")
        self.rank = address.rank
        poly, pointer = self._without_casts(address.poly), atom_poly(self.directive.parameter)
        if CALLER_CHOICE in tags_of(poly) and not self.kernel.has_call_args:
            raise NeedsCallArguments
        if poly.coefficient(self.directive.parameter) != const_poly(1):
            tags = sorted(tags_of(poly)) or [f"another pointer than {self.directive.parameter}"]
            raise self.unclear_error(f"its address is computed from {tags[0]}")
        return poly - pointer

    def _of_descriptor(self, descriptor: Descriptor) -> Number:
        """Return the addresses of a descriptor's block, and add its limits to `descriptor_limits`."""
        positional, keywords = self.access.arguments
        offsets = next((one for one in (*positional, keywords.get("offsets")) if isinstance(one, TupleValue)), None)
        polys = [one.poly for one in offsets.values if isinstance(one, Number)] if offsets else list(descriptor.offsets)
        if len(polys) != len(descriptor.strides):
            raise self.unclear_error("its offsets are not those of its descriptor")
        boundary_check = keywords.get("boundary_check")
        checked_dims = range(len(polys))
        if isinstance(boundary_check, TupleValue):
            checked_dims = [dim.poly.constant for dim in boundary_check.values if isinstance(dim, Number)]  # type: ignore[assignment]
        elif not offsets:
            checked_dims = range(0)  # a block pointer
        ends = [
            (descriptor.shape[dim], polys[dim], descriptor.block[dim], dim) for dim in checked_dims if descriptor.shape
        ]
        for extent, offset, length, dim in ends:
            element = offset + (ZERO if length.constant == 1 else atom_poly(LaneIndex(length, dim)))
            self.descriptor_limits += [
                self._without_casts(extent - element),
                self._without_casts(element + const_poly(1)),
            ]
        return descriptor.address(polys)

    def _of_descriptor_parameter(self, pointer: Number, offsets: TupleValue) -> Number:
        """Return the addresses of a descriptor that is a parameter, whose block shape only a call knows."""
        polys = [offset.poly for offset in offsets.values if isinstance(offset, Number)]
        name, rank = self.directive.parameter, len(offsets.values)
        if len(polys) != rank:
            raise self.unclear_error("its offsets are no list of numbers")
        if pointer.poly != atom_poly(name):
            return pointer
        lengths = tuple(atom_poly(f"{name}.block_shape[{dim}]") for dim in range(rank))
        shape = tuple(dim.extent for dim in self.dims)
        strides = tuple(dim.stride for dim in self.dims)
        if rank != len(self.dims):
            shape = tuple(atom_poly(f"{name}.shape[{dim}]") for dim in range(rank))
            strides = tuple(_multiply_all(shape[dim + 1 :]) for dim in range(rank))
        return self._of_descriptor(Descriptor(pointer.poly, strides, self._substitute_all(lengths), (), shape))

    def _substitute_all(self, values: tuple[Polynomial, ...]) -> tuple[Polynomial, ...]:
        return tuple(map(self.kernel.substitute, values))

    def _without_casts(self, poly: Polynomial) -> Polynomial:
        """Remove casts that represent their input exactly. Raises DirectiveError for others."""

        def inner(atom: Atom) -> Polynomial | None:
            if not isinstance(atom, OpaqueResult) or atom.operation not in CASTS:
                return None
            value = self._without_casts(atom.inputs[0])
            low, high = self.kernel.bounds.constant_interval(value)
            lowest, highest = CASTS[atom.operation]
            if self.kernel.has_call_args and (low is None or high is None or low < lowest or high > highest):
                interval = f"{'' if low is None else low} to {'' if high is None else high}".strip()
                raise self.unclear_error(
                    f"its address is computed from numbers, {interval}, that {atom.operation} does not hold"
                )
            return value

        return poly.substitute(inner)

    def _without_wraparound(self, offset: Polynomial) -> Polynomial:
        """Remove `min(i, M - 1)` and `i % M` of an index: rows beyond the end give no results."""
        axes = [dim for dim in self.dims if dim.axis is not None]

        def is_end(poly: Polynomial, dim: Dimension) -> bool:
            return poly == dim.extent or (
                self.kernel.has_call_args and self.kernel.substitute(poly - dim.extent) == ZERO
            )

        def without_clamp(atom: Atom) -> Polynomial | None:
            if isinstance(atom, OpaqueResult) and atom.operation == CLAMP:
                value, bound = atom.inputs
                if any(is_end(bound, dim) and BlockOf(str(dim.axis)) in value.atoms for dim in axes):
                    return value
            return None

        unwrapped = offset.substitute(without_clamp)
        for atom in [each for each in unwrapped.atoms if isinstance(each, Quotient)]:
            for dim in axes:
                if is_end(atom.by, dim) and BlockOf(str(dim.axis)) in atom.over.atoms and not self.directive.is_store:
                    coefficient, block = unwrapped.coefficient(atom), unwrapped.coefficient(BlockOf(str(dim.axis)))
                    total = coefficient * dim.step + block * dim.extent
                    if ZERO in (total, self.kernel.substitute(total)):
                        unwrapped = unwrapped - coefficient * atom_poly(atom)
        return unwrapped

    # errors

    def unclear_error(self, found: str) -> DirectiveError:
        """Return the error for an address that is no polynomial."""
        cure = "Compute it from the blocks of the tile, arange, loop variables and the numbers of a call"
        return self.directive.loc.error(found, cure)

    def outside_error(self, dim: Dimension, found: str) -> DirectiveError:
        """Return the error for elements outside the declared rectangle."""
        if dim.axis is None and self.directive.is_store:
            why = f"of {dim.extent} elements of a dimension it stores {found}"
            return self.directive.loc.error(why, "Store all of a dimension that is no axis, or make it one")
        if dim.axis is None:
            why = f"along a dimension of {dim.extent} elements it reaches {found}: those after it belong to other rows"
            return self.directive.loc.error(why, f"Mask it by the extent: `index < {self._extent_text(dim)}`")
        why = f"along {dim.axis} it reaches elements {found} of a block of {dim.size}"
        variable = self.kernel.variables[dim.axis]
        cure = f"Let it reach the tile's own block alone, {variable}; where it reaches others too, name an extent"
        return self.directive.loc.error(why, cure)

    def _extent_text(self, dim: Dimension) -> str:
        """Return the extent of a dimension as its directive spells it."""
        stride, substitute = self.kernel.substitute(dim.stride), self.kernel.substitute
        pairs = zip(self.dims, self.directive.dims, strict=True)
        return next((str(text) for each, text in pairs if substitute(each.stride) == stride), str(dim.extent))

    def refuse_block(self, axis: str, rest: Polynomial) -> None:
        """Raise for an axis whose block index is missing in the offset, or nested in an operation."""
        variable = self.kernel.variables[axis]
        if BlockOf(axis) in rest.atoms:
            results = (each for each in rest.atoms if isinstance(each, OpaqueResult | Quotient))
            outer = next((each for each in results if BlockOf(axis) in atom_poly(each).atoms), BlockOf(axis))
            tags = sorted(tags_of(atom_poly(outer)))
            raise self.unclear_error(
                f"{variable} stands inside of {tags[0] if tags else atom_poly(outer)} in its address"
            )
        if CALLER_CHOICE in tags_of(rest) and not self.kernel.has_call_args:
            raise NeedsCallArguments
        used_axes = {axis: name for axis, name in self.kernel.variables.items() if BlockOf(axis) in rest.atoms}
        found = f"its address is not computed from {variable}, which is the block along {axis}"
        known_axes = ", ".join(used_axes) or "none"
        cure = f"Name the axes that it is computed from ({known_axes}), or an extent where every tile reaches all"
        raise self.directive.loc.error(found, cure)

    def mask_error(self, by: str) -> DirectiveError:
        """Return the error for a store whose mask is not the end of a dimension."""
        found = f"which elements it stores depends on {by}"
        return self.directive.loc.error(found, "Mask what lies beyond the tensor, and store every other element")


def _multiply_all(values: Sequence[Polynomial]) -> Polynomial:
    product = const_poly(1)
    for value in values:
        product = product * value
    return product
