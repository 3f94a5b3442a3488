"""Symbolic values: what a rectangle of a buffer holds, told as rectangles of logical tensors.

A `ValuePiece` says that element `[i, j]` of a region, for `lo_i <= i < hi_i` and `lo_j <= j < hi_j`, is element
`[row + i - lo_i, col + j - lo_j]` of `tensor`, summed over `terms` in that order. No terms: moved, not computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from overweave.ir.schedule import Range
from overweave.ir.tensors import finished, is_finished, product

Terms = tuple[Range, ...]

UNKNOWN = "?"  # no tensor can be called so; whatever it touches was refused already
ZERO = "0"  # the product over an empty range
MOST_PAIRS = 1 << 18


class ValuePiece(NamedTuple):
    lo_i: int
    hi_i: int
    lo_j: int
    hi_j: int
    tensor: str
    row: int
    col: int
    terms: Terms


RegionValue = tuple[ValuePiece, ...]


class Mismatch(Exception):
    """The values of an operation's operands do not fit together. The message says why."""


def unknown(shape: tuple[int, int]) -> RegionValue:
    return (ValuePiece(0, shape[0], 0, shape[1], UNKNOWN, 0, 0, ()),)


def is_unknown(value: RegionValue) -> bool:
    return UNKNOWN in [piece.tensor for piece in value]


def joined(pieces: list[ValuePiece], shape: tuple[int, int]) -> RegionValue:
    """Pieces that tile a region, as one if all continue the same part of a tensor."""
    first = pieces[0]
    tensor, terms = first.tensor, first.terms
    row, col = first.row - first.lo_i, first.col - first.lo_j
    for lo_i, _, lo_j, _, its_tensor, its_row, its_col, its_terms in pieces:
        if its_row - lo_i != row or its_col - lo_j != col or its_tensor != tensor or its_terms != terms:
            return tuple(pieces)
    return (ValuePiece(0, shape[0], 0, shape[1], tensor, row, col, terms),)


def clipped(value: RegionValue, rows: Range, cols: Range) -> RegionValue:
    """The part of a value in a sub-rectangle, told from that rectangle's corner."""
    (top, bottom), (left, right) = rows, cols
    inside = []
    for lo_i, hi_i, lo_j, hi_j, tensor, row, col, terms in value:
        i0, i1, j0, j1 = max(lo_i, top), min(hi_i, bottom), max(lo_j, left), min(hi_j, right)
        if i0 < i1 and j0 < j1:
            inside.append(
                ValuePiece(i0 - top, i1 - top, j0 - left, j1 - left, tensor, row + i0 - lo_i, col + j0 - lo_j, terms)
            )
    return tuple(inside)


def stacked(values: Iterable[tuple[int, RegionValue]], cols: int) -> RegionValue:
    """Values of the given heights, one below the other."""
    pieces: list[ValuePiece] = []
    top = 0
    for height, value in values:
        pieces += [
            ValuePiece(lo_i + top, hi_i + top, lo_j, hi_j, tensor, row, col, terms)
            for lo_i, hi_i, lo_j, hi_j, tensor, row, col, terms in value
        ]
        top += height
    return joined(pieces, (top, cols)) if pieces else ()


def multiplied(a: RegionValue, b: RegionValue, shape: tuple[int, int, int]) -> RegionValue:
    """`a [m, k] @ b [k, n]` for shape (m, k, n). The reduced range is where `a`'s columns and `b`'s rows lie.

    Raises Mismatch if they lie differently, or if an operand is itself a sum.
    """
    m, k, n = shape
    if not m or not n:
        return ()
    if not k:
        return (ValuePiece(0, m, 0, n, ZERO, 0, 0, ()),)
    if is_unknown(a) or is_unknown(b):
        return unknown((m, n))
    if len(a) * len(b) > MOST_PAIRS:
        raise Mismatch(f"the matmul's operands lie in {len(a)} and {len(b)} pieces")
    pieces = []
    for i0, i1, a_lo, a_hi, a_tensor, a_row, a_col, a_terms in a:
        for b_lo, b_hi, j0, j1, b_tensor, b_row, b_col, b_terms in b:
            if a_terms or b_terms:
                raise Mismatch("an operand of the matmul is a sum")
            if a_hi - a_lo != k or b_hi - b_lo != k:
                raise Mismatch(f"an operand of the matmul mixes parts of {a_tensor} or {b_tensor} along the axis")
            if a_col != b_row:
                ranges = f"columns [{a_col}:{a_col + k}] of {a_tensor} meet rows [{b_row}:{b_row + k}] of {b_tensor}"
                raise Mismatch(ranges)
            terms = ((a_col, a_col + k),)
            pieces.append(ValuePiece(i0, i1, j0, j1, product(a_tensor, b_tensor), a_row, b_col, terms))
    return tuple(pieces)


def added(left: RegionValue, right: RegionValue) -> RegionValue:
    """The element-wise sum: the same element of the same product, `right`'s terms behind `left`'s. Raises Mismatch."""
    pieces = []
    are_cut_alike = [piece[:4] for piece in left] == [piece[:4] for piece in right]
    if not are_cut_alike and len(left) * len(right) > MOST_PAIRS:
        raise Mismatch(f"it adds operands of {len(left)} and {len(right)} pieces that are cut differently")
    for at, one in enumerate(left):
        for other in right[at : at + 1] if are_cut_alike else right:
            i0, i1 = max(one.lo_i, other.lo_i), min(one.hi_i, other.hi_i)
            j0, j1 = max(one.lo_j, other.lo_j), min(one.hi_j, other.hi_j)
            if i0 < i1 and j0 < j1:
                here = (one.row + i0 - one.lo_i, one.col + j0 - one.lo_j)
                there = (other.row + i0 - other.lo_i, other.col + j0 - other.lo_j)
                tensor, terms = _sum(one, here, other, there)
                row, col = there if one.tensor == ZERO else here
                pieces.append(ValuePiece(i0, i1, j0, j1, tensor, row, col, terms))
    return tuple(pieces)


def summed(values: list[RegionValue]) -> RegionValue:
    """The ordered sum. Raises Mismatch."""
    total = values[0]
    if len(values) == 1 or not total:
        return total
    uniform = _sum_of_uniform(values)
    if uniform:
        return uniform
    for value in values[1:]:
        total = added(total, value)
    return total


def _sum_of_uniform(values: list[RegionValue]) -> RegionValue:
    """The common case: every operand is one part of one product. Empty if it is not so."""
    if any(len(value) != 1 for value in values):
        return ()
    first = values[0][0]
    if is_finished(first.tensor):  # `added` says what is wrong
        return ()
    terms: list[Range] = []
    for (piece,) in values:
        if piece[:7] != first[:7] or not piece.terms:
            return ()
        terms += piece.terms
    return (first._replace(terms=tuple(terms)),)


def ended(value: RegionValue, beside: tuple[int, int]) -> RegionValue:
    """What becomes of sums that are finished with what the epilogue reads from element `beside` of the result on.

    Raises Mismatch if they are others of its elements."""
    for piece in value:
        found = piece.row - piece.lo_i, piece.col - piece.lo_j
        if piece.tensor not in (UNKNOWN, ZERO) and found != beside:
            raise Mismatch(f"it finishes {piece.tensor}{list(found)} as if that were element {list(beside)}")
    return tuple(piece if piece.tensor == UNKNOWN else piece._replace(tensor=finished(piece.tensor)) for piece in value)


def in_any_order(value: RegionValue) -> RegionValue:
    """A sum whose parts came in any order, told as if they had come by their ranges."""
    return tuple(piece._replace(terms=tuple(sorted(piece.terms))) for piece in value)


def _sum(one: ValuePiece, here: tuple[int, int], other: ValuePiece, there: tuple[int, int]) -> tuple[str, Terms]:
    if UNKNOWN in (one.tensor, other.tensor):
        return UNKNOWN, ()
    for piece in (one, other):
        if is_finished(piece.tensor):
            raise Mismatch(f"it adds {piece.tensor}{list(here)}, a sum that is finished")
        if not piece.terms and piece.tensor != ZERO:
            raise Mismatch(f"it adds elements of {piece.tensor}, which are moved, not products")
    if ZERO in (one.tensor, other.tensor):
        return (other.tensor if one.tensor == ZERO else one.tensor), one.terms + other.terms
    if one.tensor != other.tensor or here != there:
        raise Mismatch(f"it adds {one.tensor}{list(here)} and {other.tensor}{list(there)}")
    return one.tensor, one.terms + other.terms
