"""One load or store, held against the rectangle that its directive declares.

The address is the sum, over dimensions, of an index times the stride of a row-major tensor. Along an axis the index is
the tile's block times its size, and lanes within that block; along an extent it is anything (a store must cover it).
What is left over belongs to the dimension whose stride it reaches: so a shifted, mirrored or stepped row is seen, and
a row that a condition or memory chooses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Protocol

from msgspec import Struct

from overweave.compiler.frontend.directives import AccessDirective
from overweave.compiler.frontend.follow import STORES, Reached
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
    number,
    one,
    tags_of,
)
from overweave.compiler.frontend.values import (
    CALLERS,
    CLAMP,
    Condition,
    Constant,
    Descriptor,
    Number,
    Several,
    as_condition,
    differs,
)
from overweave.ir.schedule import Range


class Open(Exception):
    """What only the numbers of a call decide."""


class Side(Struct, frozen=True):
    """A dimension in numbers. step: how far the blocks of its axis are apart, 0 of an extent; size: of what one tile
    touches; stride: in elements; shift: of its first element behind the block's."""

    extent: int
    stride: int
    size: int
    axis: str | None = None
    step: int = 0
    shift: int = 0


class Known(Protocol):
    """What is known around an access. variables: axis -> the variable of its block. is_call: nothing may stay open."""

    @property
    def is_call(self) -> bool: ...
    @property
    def variables(self) -> Mapping[str, str]: ...
    def known(self, poly: Polynomial) -> Polynomial: ...
    def sides(self, said: AccessDirective) -> list[Side]: ...


class AccessCheck:
    """One load or store, held against its directive."""

    def __init__(self, check: Known, reached: Reached, said: AccessDirective) -> None:
        self.check, self.reached, self.said = check, reached, said
        self.sides = check.sides(said)
        self.inside: list[list[tuple[Monomial, int]]] = [[] for _ in self.sides]

    def touched(self) -> tuple[Range, ...]:
        """What a tile touches of each dimension, from where the tile's own begins. Raises Open, DirectiveError."""
        rest = self._unwrapped(self._offset())
        for side in self.sides:
            if side.axis is not None and not rest.of(BlockOf(side.axis)).terms:
                self._refuse_block(side.axis, rest)
        for side in self.sides:
            if side.axis is not None:
                rest = self._without_block(rest, side.axis, side)
        for atoms, factor in rest.terms:
            self._assign(atoms, factor)
        ranges = tuple(self._range(at, side) for at, side in enumerate(self.sides))
        if self.said.is_store:
            self._check_condition(self.reached.guard)
            self._check_condition(self._mask())
        return ranges

    def _offset(self) -> Polynomial:
        """The elements between the first of the tensor and what is reached."""
        place, given = self.reached.place, self.reached.given[0]
        if isinstance(place, Number) and given and isinstance(given[0], Several):
            place = self._described(place, given[0])
        elif isinstance(place, Descriptor):
            offsets = next((one for one in given if isinstance(one, Several)), None)
            polys = [one.poly for one in offsets.values if isinstance(one, Number)] if offsets else list(place.offsets)
            if len(polys) != len(place.strides):
                raise self._unclear("its offsets are not those of its descriptor")
            place = place.place(polys)
        if not isinstance(place, Number):
            raise self._unclear("it is no pointer")
        poly, pointer = self.check.known(place.poly), one(self.said.parameter)
        if CALLERS in tags_of(poly) and not self.check.is_call:
            raise Open
        if poly.of(self.said.parameter) != number(1):
            tags = sorted(tags_of(poly)) or [f"another pointer than {self.said.parameter}"]
            raise self._unclear(f"its place is made from {tags[0]}")
        return poly - pointer

    def _described(self, place: Number, offsets: Several) -> Number:
        """Through a descriptor that is a parameter, whose block only a call knows."""
        polys = [one.poly for one in offsets.values if isinstance(one, Number)]
        name, dims = self.said.parameter, len(offsets.values)
        if len(polys) != dims:
            raise self._unclear("its offsets are no list of numbers")
        if place.poly != one(name):
            return place
        lengths = tuple(one(f"{name}.block_shape[{at}]") for at in range(dims))
        strides = [number(side.stride) for side in self.sides]
        if dims != len(self.sides):
            shape = [one(f"{name}.shape[{at}]") for at in range(dims)]
            strides = [_product(shape[at + 1 :]) for at in range(dims)]
        return Descriptor(place.poly, tuple(strides), self._known(lengths), ()).place(polys)

    def _known(self, values: tuple[Polynomial, ...]) -> tuple[Polynomial, ...]:
        return tuple(map(self.check.known, values))

    def _unwrapped(self, offset: Polynomial) -> Polynomial:
        """Without what brings rows beyond the end back into the tensor: nothing keeps what comes of them."""
        extents = {side.extent: side for side in self.sides if side.axis is not None}

        def inner(atom: Atom) -> Polynomial | None:
            if isinstance(atom, Result) and atom.of == CLAMP and atom.inputs[1].constant in extents:
                return atom.inputs[0]
            return None

        made = offset.replaced(inner)
        for atom in [each for each in made.atoms if isinstance(each, Quotient)]:
            side = extents.get(atom.by.constant or 0)
            if side is not None and BlockOf(str(side.axis)) in atom.over.atoms:
                before, block = made.of(atom), made.of(BlockOf(str(side.axis)))
                if before * number(side.step) + block * number(side.extent) == ZERO:
                    made = made - before * one(atom)
        return made

    def _without_block(self, rest: Polynomial, axis: str, side: Side) -> Polynomial:
        atom, wanted = BlockOf(axis), side.step * side.stride
        found = rest.of(atom)
        known = found.constant
        if known is None:
            rest = self._solved(rest, found, wanted)
            known = rest.of(atom).constant
        if known != wanted:
            apart = f"{known} elements" if known is None or known % side.stride else f"{known // side.stride}"
            raise self.said.place.error(
                f"the blocks of {axis} are {apart} apart in its place, and {side.step} in its directive",
                "Let `block=` be the kernel's block, and dimensions those of the contiguous tensor, in their order",
            )
        return rest - one(atom) * number(wanted) - number(side.shift * side.stride)

    def _refuse_block(self, axis: str, rest: Polynomial) -> None:
        variable = self.check.variables[axis]
        if BlockOf(axis) in rest.atoms:
            inside = next(
                each for each in rest.atoms if isinstance(each, Result | Quotient) and BlockOf(axis) in one(each).atoms
            )
            tags = sorted(tags_of(one(inside)))
            raise self._unclear(f"{variable} stands inside of {tags[0] if tags else one(inside)} in its place")
        if tags := sorted(tags_of(rest)):
            if CALLERS in tags and not self.check.is_call:
                raise Open
        named = {axis: name for axis, name in self.check.variables.items() if BlockOf(axis) in rest.atoms}
        found = f"its place is not made from {variable}, which is the block along {axis}"
        listed = ", ".join(named) or "none"
        cure = f"Name the axes that it is made from ({listed}), or an extent where every tile reaches all"
        raise self.said.place.error(found, cure)

    def _solved(self, rest: Polynomial, found: Polynomial, wanted: int) -> Polynomial:
        """With the number that a stride, which is a parameter, must have."""
        if self.check.is_call or len(found.terms) != 1 or len(found.terms[0][0]) != 1:
            if self.check.is_call and not found.names:
                raise self._unclear(f"its blocks are {found} apart")
            raise Open
        ((name,), factor) = found.terms[0]
        if not isinstance(name, str):
            raise self._unclear(f"its blocks are {found} apart")
        if wanted % factor:
            raise self.said.place.error(
                f"its blocks are {factor} strides apart, and {wanted} elements in its directive",
                "Let `block=` be the block of the kernel",
            )
        return rest.replaced(lambda atom: number(wanted // factor) if atom == name else None)

    def _assign(self, atoms: Monomial, factor: int) -> None:
        """Gives what is left over to the dimension that it moves along."""
        if any(isinstance(atom, str) for atom in atoms):
            names = ", ".join(atom for atom in atoms if isinstance(atom, str))
            if self.check.is_call:
                raise self._unclear(f"its place is made from {names}")
            if all(side.axis is not None for side in self.sides):
                raise Open
            return
        counts = [_count(atom) for atom in atoms]
        if counts and all(each in (0, 1) for each in counts):
            return
        at = next((at for at, side in enumerate(self.sides) if abs(factor) >= side.stride), len(self.sides) - 1)
        self.inside[at].append((atoms, factor))

    def _range(self, at: int, side: Side) -> Range:
        parts = self.inside[at]
        if side.axis is None and not self.said.is_store:
            return 0, side.extent
        if any(factor % side.stride for _, factor in parts):
            raise self._beside(side, "elements that are no whole rows of it")
        steps = [(atoms, factor // side.stride) for atoms, factor in parts]
        low = sum(step for atoms, step in steps if not atoms)
        if side.axis is not None and low >= side.size and all(step >= 0 for _, step in steps):
            raise self._beside(side, f"{low} and more")
        moving = [(self._lanes(atoms, side), step) for atoms, step in steps if atoms]
        lowest = low + sum(min(0, step * (each - 1)) for each, step in moving)
        highest = low + sum(max(0, step * (each - 1)) for each, step in moving)
        if side.axis is None and low == 0 and lowest == 0 and _is_even(moving):
            return 0, min(highest + 1, side.extent)
        if lowest < 0 or highest >= side.size:
            raise self._beside(side, f"{lowest} to {highest}")
        if self.said.is_store and not _is_even(moving):
            raise self._beside(side, f"not every one of {lowest} to {highest}")
        return lowest, highest + 1

    def _lanes(self, atoms: Monomial, side: Side) -> int:
        """How many values it has, each one more than the last."""
        counted = _count(atoms[0]) if len(atoms) == 1 else None
        if counted is not None:
            return counted
        if len(atoms) == 1 and isinstance(atoms[0], Lane | Turn) and not self.check.is_call:
            raise Open
        value = ZERO + Polynomial(((atoms, 1),))
        tags = sorted(tags_of(value))
        if CALLERS in tags and not self.check.is_call:
            raise Open
        raise self._beside(side, f"what {tags[0] if tags else value} says")

    def _beside(self, side: Side, found: str) -> Exception:
        if side.axis is None:
            why = f"of {side.extent} elements of a dimension it stores {found}"
            return self.said.place.error(why, "Store all of a dimension that is no axis, or make it one")
        why = f"along {side.axis} it reaches elements {found} of a block of {side.size}"
        variable = self.check.variables[side.axis]
        cure = f"Let it reach the tile's own block alone, {variable}; where it reaches others too, name an extent"
        return self.said.place.error(why, cure)

    def _unclear(self, found: str) -> Exception:
        cure = "Make it from the blocks of the tile, arange, loop variables and the numbers of a call"
        return self.said.place.error(found, cure)

    def _mask(self) -> Condition:
        """What a store is masked by."""
        given, named = self.reached.given
        at = 2 if self.reached.kind in STORES and len(given) > 2 else None
        mask = named.get("mask", given[at] if at else Constant(value=True))
        return Condition(()) if isinstance(mask, Constant) and mask.value is None else as_condition(mask)

    def _check_condition(self, condition: Condition) -> None:
        """A store leaves nothing out but what lies beyond the tensor."""
        if condition.tags - {CALLERS}:
            raise self._chosen(sorted(condition.tags)[0])
        rows = [self._index(at, side) for at, side in enumerate(self.sides)]
        flat = ZERO
        for side, row in zip(self.sides, rows, strict=True):
            flat = flat + row * number(side.stride)
        bounds = [(side.extent, row) for side, row in zip(self.sides, rows, strict=True)]
        bounds.append((prod(side.extent for side in self.sides), flat))
        for part in condition.parts:
            part = self._unplaced(self.check.known(part))
            if not differs(part) or (part.names and not self.check.is_call):
                continue
            over = [(part - number(extent) + self._unplaced(row)).constant for extent, row in bounds]
            whole = [(part - number(1) - self._unplaced(row)).constant for _, row in bounds]
            if not any(each is not None and each >= 0 for each in (*over, *whole)):
                raise self._chosen("a condition that is not the end of a dimension")

    def _index(self, at: int, side: Side) -> Polynomial:
        terms = [(atoms, factor // side.stride) for atoms, factor in self.inside[at]]
        made = ZERO
        for atoms, factor in terms:
            made = made + Polynomial(((atoms, factor),))
        if side.axis is not None:
            made = made + one(BlockOf(side.axis)) * number(side.step) + number(side.shift)
        return made

    def _unplaced(self, poly: Polynomial) -> Polynomial:
        """Lanes by their lengths alone: a mask has those of fewer dimensions."""
        return poly.replaced(lambda atom: one(Lane(atom.length, 0)) if isinstance(atom, Lane) else None)

    def _chosen(self, by: str) -> Exception:
        found = f"which elements it stores is told by {by}"
        return self.said.place.error(found, "Mask what lies beyond the tensor, and store every other element")


def _product(values: Sequence[Polynomial]) -> Polynomial:
    made = number(1)
    for value in values:
        made = made * value
    return made


def _count(atom: Atom) -> int | None:
    """How many values an atom has, if that is known: 0, 1, ... up to it."""
    if isinstance(atom, Lane):
        return atom.length.constant
    return atom.count.constant if isinstance(atom, Turn) else None


def _is_even(moving: Sequence[tuple[int, int]]) -> bool:
    """Whether lanes and turns together reach every element of their range."""
    reached = 1
    for each, step in sorted(moving, key=lambda pair: pair[1]):
        if step != reached and each > 1:
            return False
        reached *= each
    return True
