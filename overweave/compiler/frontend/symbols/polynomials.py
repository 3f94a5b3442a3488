"""Integer polynomials: the extents of directives, and the normal form of every address that a kernel computes.

A polynomial is a sum of products of atoms. An atom is a name, or a value that is not a polynomial of names: a floor
division, the block of a tile, a lane of an arange, the iteration of a loop, the result of any other operation.
Two addresses are equal wherever the kernel runs if their polynomials are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from math import prod

from msgspec import Struct
from msgspec.structs import replace

MOST_TERMS = 400


class TooLarge(Exception):
    """Raised for a polynomial with more terms than any kernel's address has."""


class Polynomial(Struct, frozen=True):
    """A sum. terms: (atoms, coefficient), sorted, no coefficient zero; the constant term has no atoms."""

    terms: tuple[tuple[Monomial, int], ...]

    def __add__(self, other: Polynomial) -> Polynomial:
        return sum_terms([*self.terms, *other.terms])

    def __sub__(self, other: Polynomial) -> Polynomial:
        return sum_terms([*self.terms, *((atoms, -factor) for atoms, factor in other.terms)])

    def __mul__(self, other: Polynomial) -> Polynomial:
        pairs = ((left, right) for left in self.terms for right in other.terms)
        return sum_terms((tuple(sorted((*a[0], *b[0]), key=_sort_key)), a[1] * b[1]) for a, b in pairs)

    def __str__(self) -> str:
        """Return the polynomial as a Python expression."""
        if not self.terms:
            return "0"
        text = " + ".join(_term_text(atoms, factor) for atoms, factor in self.terms)
        return text.replace("+ -", "- ")

    @property
    def constant(self) -> int | None:
        """The value of a polynomial without atoms, else None."""
        if not self.terms:
            return 0
        return self.terms[0][1] if len(self.terms) == 1 and not self.terms[0][0] else None

    @property
    def atoms(self) -> frozenset[Atom]:
        """The atoms of all terms, and the atoms nested inside them."""
        outer = {atom for monomial, _ in self.terms for atom in monomial}
        return frozenset(outer).union(*(inner.atoms for atom in outer for inner in _inner_polynomials(atom)))

    @property
    def names(self) -> frozenset[str]:
        return frozenset(atom for atom in self.atoms if isinstance(atom, str))

    def value(self, bindings: Mapping[str, int]) -> int:
        """Evaluate. bindings: name -> integer. Raises KeyError for a name without one, and ZeroDivisionError."""
        return sum(factor * prod(_atom_value(atom, bindings) for atom in atoms) for atoms, factor in self.terms)

    def substitute(self, by: Callable[[Atom], Polynomial | None]) -> Polynomial:
        """Replace atoms by polynomials, also inside other atoms. by: returns None for an atom that stays."""
        if not self.terms:
            return self
        total = ZERO
        for atoms, factor in self.terms:
            term = const_poly(factor)
            for atom in atoms:
                term = term * (by(atom) or _substitute_inside(atom, by))
            total = total + term
        return total

    def coefficient(self, atom: Atom) -> Polynomial:
        """Return the coefficient of an atom: a polynomial. Raises TooLarge for a term with a power of the atom."""
        rest_terms = []
        for atoms, factor in self.terms:
            if atom in atoms:
                rest = list(atoms)
                rest.remove(atom)
                if atom in rest:
                    raise TooLarge
                rest_terms.append((tuple(rest), factor))
        return sum_terms(rest_terms)


class Quotient(Struct, frozen=True):
    """`over // by`, rounded down."""

    over: Polynomial
    by: Polynomial


class BlockOf(Struct, frozen=True):
    """A tile's block index along an axis; along a streamed axis, the element at which an iteration begins."""

    axis: str


class LaneIndex(Struct, frozen=True):
    """0 to `length` - 1 along one dimension of a tensor: an arange. dim: that dimension."""

    length: Polynomial
    dim: int


class LoopIndex(Struct, frozen=True):
    """The iteration of a loop, 0 to `count` - 1. line: of the loop in the source."""

    line: int
    count: Polynomial


class OpaqueResult(Struct, frozen=True):
    """The result of an operation that is no polynomial; equal for equal inputs. tags: see `values.py`."""

    operation: str
    inputs: tuple[Polynomial, ...] = ()
    tags: frozenset[str] = frozenset()


Atom = str | Quotient | BlockOf | LaneIndex | LoopIndex | OpaqueResult
Monomial = tuple[Atom, ...]


def const_poly(value: int) -> Polynomial:
    """Return the polynomial of an integer constant."""
    return Polynomial((((), value),)) if value else ZERO


def atom_poly(atom: Atom) -> Polynomial:
    """Return the polynomial that is one atom."""
    return Polynomial((((atom,), 1),))


def floor_div(over: Polynomial, by: Polynomial) -> Polynomial:
    """Return `over // by`: a constant if both are constants."""
    if by.constant == 1:
        return over
    if over.constant is not None and by.constant:
        return const_poly(over.constant // by.constant)
    return atom_poly(Quotient(over, by))


def ceil_div(over: Polynomial, by: Polynomial) -> Polynomial:
    """Return `cdiv(over, by)`: how many blocks of `by` cover `over`."""
    return floor_div(over + by - const_poly(1), by)


def sum_terms(terms: Iterable[tuple[Monomial, int]]) -> Polynomial:
    """Add terms, and drop those that cancel. Raises TooLarge."""
    coefficients: dict[Monomial, int] = {}
    for atoms, factor in terms:
        coefficients[atoms] = coefficients.get(atoms, 0) + factor
    if len(coefficients) > MOST_TERMS:
        raise TooLarge
    nonzero = (item for item in coefficients.items() if item[1])
    return Polynomial(tuple(sorted(nonzero, key=lambda item: (-len(item[0]), [_sort_key(atom) for atom in item[0]]))))


def divide(over: Polynomial, by: Polynomial) -> tuple[Polynomial, Polynomial]:
    """Return (quotient, rest) with `quotient * by + rest == over`; the first term of `by` divides no term of rest.

    Raises TooLarge if the division does not end.
    """
    if by.constant == 1:
        return over, ZERO
    lead, factor = by.terms[0]
    quotient, rest = ZERO, over
    for _ in range(MOST_TERMS):
        candidates = ((_remove_atoms(atoms, lead), value) for atoms, value in rest.terms if abs(value) >= abs(factor))
        atoms, value = next(((left, value) for left, value in candidates if left is not None), ((), 0))
        if not value:
            return quotient, rest
        multiple = abs(value) // abs(factor)
        step = Polynomial(((atoms, multiple if (value > 0) == (factor > 0) else -multiple),))
        quotient, rest = quotient + step, rest - step * by
    raise TooLarge


def _remove_atoms(atoms: Monomial, removed: Monomial) -> Monomial | None:
    """Divide a monomial by another; None if it is not divisible."""
    rest = list(atoms)
    for atom in removed:
        if atom not in rest:
            return None
        rest.remove(atom)
    return tuple(rest)


def lower_bound(poly: Polynomial, positive: frozenset[str]) -> int | None:
    """Return a lower bound, None if unknown. `positive` names are at least 1, atoms that are not names at least 0."""
    shifted = poly.substitute(lambda atom: atom_poly(atom) + const_poly(1) if atom in positive else None)
    unknown = [atom for atoms, _ in shifted.terms for atom in atoms if isinstance(atom, str) and atom not in positive]
    if unknown or any(factor < 0 for atoms, factor in shifted.terms if atoms):
        return None
    return sum(factor for atoms, factor in shifted.terms if not atoms)


def tags_of(*values: Polynomial) -> frozenset[str]:
    """Return the tags of all operations that the values are computed from."""
    results = (atom for value in values for atom in value.atoms if isinstance(atom, OpaqueResult))
    return frozenset[str]().union(*(result.tags for result in results))


ZERO = Polynomial(())


@cache
def _sort_key(atom: Atom) -> tuple[int, str]:
    """Order names before other atoms."""
    return (0, atom) if isinstance(atom, str) else (1, repr(atom))


def _inner_polynomials(atom: Atom) -> tuple[Polynomial, ...]:
    if isinstance(atom, Quotient):
        return atom.over, atom.by
    if isinstance(atom, LaneIndex):
        return (atom.length,)
    if isinstance(atom, LoopIndex):
        return (atom.count,)
    return atom.inputs if isinstance(atom, OpaqueResult) else ()


def _substitute_inside(atom: Atom, by: Callable[[Atom], Polynomial | None]) -> Polynomial:
    """Substitute in the polynomials that an atom is built from."""
    if isinstance(atom, Quotient):
        return floor_div(atom.over.substitute(by), atom.by.substitute(by))
    if isinstance(atom, LaneIndex):
        return atom_poly(replace(atom, length=atom.length.substitute(by)))
    if isinstance(atom, LoopIndex):
        return atom_poly(replace(atom, count=atom.count.substitute(by)))
    if isinstance(atom, OpaqueResult):
        return atom_poly(replace(atom, inputs=tuple(value.substitute(by) for value in atom.inputs)))
    return atom_poly(atom)


def _atom_value(atom: Atom, bindings: Mapping[str, int]) -> int:
    """Evaluate a name or a floor division."""
    if isinstance(atom, Quotient):
        return atom.over.value(bindings) // atom.by.value(bindings)
    return bindings[atom]  # type: ignore[index]


def _term_text(atoms: Monomial, factor: int) -> str:
    text = " * ".join(map(_atom_text, atoms))
    if not atoms:
        return str(factor)
    return text if factor == 1 else f"-{text}" if factor == -1 else f"{factor} * {text}"


def _atom_text(atom: Atom) -> str:
    """Return the text of an atom: Python for names and divisions, words for others."""
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
        else "iteration"
        if isinstance(atom, LoopIndex)
        else f"{atom.operation}()"
    )
