"""Integer polynomials: what directives say of extents, and the normal form of every address that a kernel reckons.

A polynomial is a sum of products of atoms. An atom is a name, or a value that is no polynomial of names: a quotient
that is rounded down, the block of a tile, a lane of a block of lanes, the turn of a loop, the result of anything else.
Two addresses are the same wherever the kernel runs if their polynomials are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from math import prod

from msgspec import Struct
from msgspec.structs import replace

MOST_TERMS = 400


class TooLarge(Exception):
    """A product of polynomials that no kernel's address is."""


class Polynomial(Struct, frozen=True):
    """terms: (atoms, coefficient), sorted, no coefficient zero; no atoms: the constant."""

    terms: tuple[tuple[Monomial, int], ...]

    def __add__(self, other: Polynomial) -> Polynomial:
        return summed([*self.terms, *other.terms])

    def __sub__(self, other: Polynomial) -> Polynomial:
        return summed([*self.terms, *((atoms, -factor) for atoms, factor in other.terms)])

    def __mul__(self, other: Polynomial) -> Polynomial:
        pairs = ((left, right) for left in self.terms for right in other.terms)
        return summed((tuple(sorted((*a[0], *b[0]), key=_order)), a[1] * b[1]) for a, b in pairs)

    def __str__(self) -> str:
        """Python text, written from the terms."""
        if not self.terms:
            return "0"
        text = " + ".join(_product(atoms, factor) for atoms, factor in self.terms)
        return text.replace("+ -", "- ")

    @property
    def constant(self) -> int | None:
        """Its value, if it has no atoms."""
        if not self.terms:
            return 0
        return self.terms[0][1] if len(self.terms) == 1 and not self.terms[0][0] else None

    @property
    def atoms(self) -> frozenset[Atom]:
        """The atoms of its terms, and those inside of these."""
        outer = {atom for monomial, _ in self.terms for atom in monomial}
        return frozenset(outer).union(*(inner.atoms for atom in outer for inner in _parts(atom)))

    @property
    def names(self) -> frozenset[str]:
        return frozenset(atom for atom in self.atoms if isinstance(atom, str))

    def value(self, bindings: Mapping[str, int]) -> int:
        """Its value. Raises KeyError for a name that is not bound, ZeroDivisionError."""
        return sum(factor * prod(_bound(atom, bindings) for atom in atoms) for atoms, factor in self.terms)

    def replaced(self, by: Callable[[Atom], Polynomial | None]) -> Polynomial:
        """With another polynomial in the place of some atoms, also inside of others. by: None for what stays."""
        if not self.terms:
            return self
        made = ZERO
        for atoms, factor in self.terms:
            term = number(factor)
            for atom in atoms:
                term = term * (by(atom) or _rebuilt(atom, by))
            made = made + term
        return made

    def of(self, atom: Atom) -> Polynomial:
        """What stands before an atom, which no term has twice. Raises TooLarge where one has."""
        found = []
        for atoms, factor in self.terms:
            if atom in atoms:
                rest = list(atoms)
                rest.remove(atom)
                if atom in rest:
                    raise TooLarge
                found.append((tuple(rest), factor))
        return summed(found)


class Quotient(Struct, frozen=True):
    """`over // by`, rounded down."""

    over: Polynomial
    by: Polynomial


class BlockOf(Struct, frozen=True):
    """A tile's block along an axis; of a streamed axis, the element at which a turn of its loop begins."""

    axis: str


class LaneIndex(Struct, frozen=True):
    """0 to `length` - 1 along one dimension of a tensor: an arange. place: that dimension."""

    length: Polynomial
    place: int


class LoopIndex(Struct, frozen=True):
    """The turn of a loop, 0 to `count` - 1. loop: the line in which it stands."""

    loop: int
    count: Polynomial


class OpaqueResult(Struct, frozen=True):
    """What `of` makes of its inputs: the same for the same inputs. tags: what it comes from, that no place may."""

    of: str
    inputs: tuple[Polynomial, ...] = ()
    tags: frozenset[str] = frozenset()


Atom = str | Quotient | BlockOf | LaneIndex | LoopIndex | OpaqueResult
Monomial = tuple[Atom, ...]


def number(value: int) -> Polynomial:
    """A constant."""
    return Polynomial((((), value),)) if value else ZERO


def one(atom: Atom) -> Polynomial:
    """An atom alone."""
    return Polynomial((((atom,), 1),))


def quotient(over: Polynomial, by: Polynomial) -> Polynomial:
    """`over // by`, as a number where both are."""
    if by.constant == 1:
        return over
    if over.constant is not None and by.constant:
        return number(over.constant // by.constant)
    return one(Quotient(over, by))


def rounded_up(over: Polynomial, by: Polynomial) -> Polynomial:
    """How many blocks of `by` cover `over`."""
    return quotient(over + by - number(1), by)


def summed(parts: Iterable[tuple[Monomial, int]]) -> Polynomial:
    """The sum of terms. Raises TooLarge."""
    terms: dict[Monomial, int] = {}
    for atoms, factor in parts:
        terms[atoms] = terms.get(atoms, 0) + factor
    if len(terms) > MOST_TERMS:
        raise TooLarge
    kept = (item for item in terms.items() if item[1])
    return Polynomial(tuple(sorted(kept, key=lambda item: (-len(item[0]), [_order(atom) for atom in item[0]]))))


def divided(over: Polynomial, by: Polynomial) -> tuple[Polynomial, Polynomial]:
    """(quotient, rest), where `quotient * by + rest` is `over`; terms that `by` does not divide are the rest."""
    if by.constant == 1:
        return over, ZERO
    lead, factor = by.terms[0]
    made, rest = ZERO, over
    for _ in range(MOST_TERMS):
        parts = ((_without(atoms, lead), each) for atoms, each in rest.terms if abs(each) >= abs(factor))
        atoms, each = next(((left, each) for left, each in parts if left is not None), ((), 0))
        if not each:
            return made, rest
        times = abs(each) // abs(factor)
        step = Polynomial(((atoms, times if (each > 0) == (factor > 0) else -times),))
        made, rest = made + step, rest - step * by
    raise TooLarge


def _without(atoms: Monomial, taken: Monomial) -> Monomial | None:
    rest = list(atoms)
    for atom in taken:
        if atom not in rest:
            return None
        rest.remove(atom)
    return tuple(rest)


def least(poly: Polynomial, positive: frozenset[str]) -> int | None:
    """The least value that terms tell, where `positive` names are at least 1 and all but names at least 0."""
    made = poly.replaced(lambda atom: one(atom) + number(1) if atom in positive else None)
    unknown = [atom for atoms, _ in made.terms for atom in atoms if isinstance(atom, str) and atom not in positive]
    if unknown or any(factor < 0 for atoms, factor in made.terms if atoms):
        return None
    return sum(factor for atoms, factor in made.terms if not atoms)


def tags_of(*values: Polynomial) -> frozenset[str]:
    """What values come from."""
    results = (atom for value in values for atom in value.atoms if isinstance(atom, OpaqueResult))
    return frozenset[str]().union(*(result.tags for result in results))


ZERO = Polynomial(())


@cache
def _order(atom: Atom) -> tuple[int, str]:
    return (0, atom) if isinstance(atom, str) else (1, repr(atom))


def _parts(atom: Atom) -> tuple[Polynomial, ...]:
    """The polynomials inside of an atom."""
    if isinstance(atom, Quotient):
        return atom.over, atom.by
    if isinstance(atom, LaneIndex):
        return (atom.length,)
    if isinstance(atom, LoopIndex):
        return (atom.count,)
    return atom.inputs if isinstance(atom, OpaqueResult) else ()


def _rebuilt(atom: Atom, by: Callable[[Atom], Polynomial | None]) -> Polynomial:
    if isinstance(atom, Quotient):
        return quotient(atom.over.replaced(by), atom.by.replaced(by))
    if isinstance(atom, LaneIndex):
        return one(replace(atom, length=atom.length.replaced(by)))
    if isinstance(atom, LoopIndex):
        return one(replace(atom, count=atom.count.replaced(by)))
    if isinstance(atom, OpaqueResult):
        return one(replace(atom, inputs=tuple(value.replaced(by) for value in atom.inputs)))
    return one(atom)


def _bound(atom: Atom, bindings: Mapping[str, int]) -> int:
    if isinstance(atom, Quotient):
        return atom.over.value(bindings) // atom.by.value(bindings)
    return bindings[atom]  # type: ignore[index]


def _product(atoms: Monomial, factor: int) -> str:
    text = " * ".join(map(_text, atoms))
    if not atoms:
        return str(factor)
    return text if factor == 1 else f"-{text}" if factor == -1 else f"{factor} * {text}"


def _text(atom: Atom) -> str:
    if isinstance(atom, str):
        return atom
    if isinstance(atom, Quotient):
        over = str(atom.over) if len(atom.over.terms) == 1 else f"({atom.over})"
        return f"({over} // {atom.by})" if len(atom.by.terms) == 1 else f"({over} // ({atom.by}))"
    if isinstance(atom, BlockOf):
        return f"block of {atom.axis}"
    return (
        f"arange({atom.length})"
        if isinstance(atom, LaneIndex)
        else "turn"
        if isinstance(atom, LoopIndex)
        else f"{atom.of}()"
    )
