"""Symbolic values: the contents of a rectangle of a buffer, as rectangles of logical tensors.

A `ValuePiece` says that element `[i, j]` of a region, for `lo_i <= i < hi_i` and `lo_j <= j < hi_j`, is element
`[row + i - lo_i, col + j - lo_j]` of `tensor`, summed over `terms` in that order. No terms: moved, not computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from overweave.ir.dtype import Dtype
from overweave.ir.operators.forms import SCALE_DTYPE
from overweave.ir.plan import Plan
from overweave.ir.schedule import INPUT, Buffer, Compute, Range
from overweave.ir.tensors import epilogue_applied, is_epilogue_applied, product, scale_of
from overweave.ir.verify.rules.verdict import Findings

Terms = tuple[Range, ...]

UNKNOWN = "?"  # not a valid name of a tensor: the value after a refusal
ZERO = "0"  # the product over an empty range
RETIRED = "-"  # the value of what a Retire has ended, until somebody writes there again
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
    """The values of an operation's operands do not fit together."""


def unknown(shape: tuple[int, int]) -> RegionValue:
    return (ValuePiece(0, shape[0], 0, shape[1], UNKNOWN, 0, 0, ()),)


def is_unknown(value: RegionValue) -> bool:
    return UNKNOWN in [piece.tensor for piece in value]


def retired(shape: tuple[int, int]) -> RegionValue:
    return tuple(piece._replace(tensor=RETIRED) for piece in unknown(shape))


def is_retired(value: RegionValue) -> bool:
    """Whether the life of any part of it is over."""
    return RETIRED in [piece.tensor for piece in value]


def merge_pieces(pieces: list[ValuePiece], shape: tuple[int, int]) -> RegionValue:
    """Return pieces that tile a region as one if all continue the same part of a tensor."""
    first = pieces[0]
    tensor, terms = first.tensor, first.terms
    row, col = first.row - first.lo_i, first.col - first.lo_j
    for lo_i, _, lo_j, _, its_tensor, its_row, its_col, its_terms in pieces:
        if its_row - lo_i != row or its_col - lo_j != col or its_tensor != tensor or its_terms != terms:
            return tuple(pieces)
    return (ValuePiece(0, shape[0], 0, shape[1], tensor, row, col, terms),)


def clip(value: RegionValue, rows: Range, cols: Range) -> RegionValue:
    """Return the part of a value in a sub-rectangle, relative to that rectangle's corner."""
    (top, bottom), (left, right) = rows, cols
    inside = []
    for lo_i, hi_i, lo_j, hi_j, tensor, row, col, terms in value:
        i0, i1, j0, j1 = max(lo_i, top), min(hi_i, bottom), max(lo_j, left), min(hi_j, right)
        if i0 < i1 and j0 < j1:
            inside.append(
                ValuePiece(i0 - top, i1 - top, j0 - left, j1 - left, tensor, row + i0 - lo_i, col + j0 - lo_j, terms)
            )
    return tuple(inside)


def stack(values: Iterable[tuple[int, RegionValue]], cols: int) -> RegionValue:
    """Return values of the given heights, one below the other."""
    pieces: list[ValuePiece] = []
    top = 0
    for height, value in values:
        pieces += [
            ValuePiece(lo_i + top, hi_i + top, lo_j, hi_j, tensor, row, col, terms)
            for lo_i, hi_i, lo_j, hi_j, tensor, row, col, terms in value
        ]
        top += height
    return merge_pieces(pieces, (top, cols)) if pieces else ()


def multiply(a: RegionValue, b: RegionValue, shape: tuple[int, int, int]) -> RegionValue:
    """Return `a [m, k] @ b [k, n]` for shape (m, k, n). The reduced range is where `a`'s columns and `b`'s rows lie.
    Raises Mismatch if they lie differently, or if an operand is itself a sum."""
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


def add(left: RegionValue, right: RegionValue) -> RegionValue:
    """Return the element-wise sum: the same element of the same product, `right`'s terms behind `left`'s. Raises
    Mismatch."""
    pieces = []
    are_cut_alike = [piece[:4] for piece in left] == [piece[:4] for piece in right]
    if not are_cut_alike and len(left) * len(right) > MOST_PAIRS:
        raise Mismatch(f"it adds operands of {len(left)} and {len(right)} pieces that are cut differently")
    for index, left_piece in enumerate(left):
        for right_piece in right[index : index + 1] if are_cut_alike else right:
            i0, i1 = max(left_piece.lo_i, right_piece.lo_i), min(left_piece.hi_i, right_piece.hi_i)
            j0, j1 = max(left_piece.lo_j, right_piece.lo_j), min(left_piece.hi_j, right_piece.hi_j)
            if i0 < i1 and j0 < j1:
                left_at = (left_piece.row + i0 - left_piece.lo_i, left_piece.col + j0 - left_piece.lo_j)
                right_at = (right_piece.row + i0 - right_piece.lo_i, right_piece.col + j0 - right_piece.lo_j)
                tensor, terms = _sum(left_piece, left_at, right_piece, right_at)
                row, col = right_at if left_piece.tensor == ZERO else left_at
                pieces.append(ValuePiece(i0, i1, j0, j1, tensor, row, col, terms))
    return tuple(pieces)


def ordered_sum(values: list[RegionValue]) -> RegionValue:
    """Return the sum in order. Raises Mismatch."""
    total = values[0]
    if len(values) == 1 or not total:
        return total
    uniform = _sum_of_uniform(values)
    if uniform:
        return uniform
    for value in values[1:]:
        total = add(total, value)
    return total


def _sum_of_uniform(values: list[RegionValue]) -> RegionValue:
    """Return the sum in the common case that every operand is one part of one product; () in any other case."""
    if any(len(value) != 1 for value in values):
        return ()
    first = values[0][0]
    if is_epilogue_applied(first.tensor):  # `add` says what is wrong
        return ()
    terms: list[Range] = []
    for (piece,) in values:
        if piece[:7] != first[:7] or not piece.terms:
            return ()
        terms += piece.terms
    return (first._replace(terms=tuple(terms)),)


def apply_epilogue(value: RegionValue, result_at: tuple[int, int]) -> RegionValue:
    """Return sums with the epilogue whose tensors are read from element `result_at` of the result on. Raises Mismatch
    if the sums are other elements of the result."""
    for piece in value:
        piece_at = piece.row - piece.lo_i, piece.col - piece.lo_j
        if piece.tensor not in (UNKNOWN, ZERO) and piece_at != result_at:
            raise Mismatch(f"it finishes {piece.tensor}{list(piece_at)} as if that were element {list(result_at)}")
    named = (UNKNOWN if piece.tensor == UNKNOWN else epilogue_applied(piece.tensor) for piece in value)
    return tuple(piece._replace(tensor=name) for piece, name in zip(value, named, strict=True))


def sort_terms(value: RegionValue) -> RegionValue:
    """Return a sum whose parts came in any order with its terms sorted by range."""
    return tuple(piece._replace(terms=tuple(sorted(piece.terms))) for piece in value)


def _sum(left: ValuePiece, left_at: tuple[int, int], right: ValuePiece, right_at: tuple[int, int]) -> tuple[str, Terms]:
    """Return tensor and terms of the sum of two pieces at these elements. Raises Mismatch."""
    if UNKNOWN in (left.tensor, right.tensor):
        return UNKNOWN, ()
    for piece in (left, right):
        if is_epilogue_applied(piece.tensor):
            raise Mismatch(f"it adds {piece.tensor}{list(left_at)}, a sum that is finished")
        if not piece.terms and piece.tensor != ZERO:
            raise Mismatch(f"it adds elements of {piece.tensor}, which are moved, not products")
    if ZERO in (left.tensor, right.tensor):
        return (right.tensor if left.tensor == ZERO else left.tensor), left.terms + right.terms
    if left.tensor != right.tensor or left_at != right_at:
        raise Mismatch(f"it adds {left.tensor}{list(left_at)} and {right.tensor}{list(right_at)}")
    return left.tensor, left.terms + right.terms


# Whether the rows of a product are multiplied by their own scales: in the schedule, and where the
# kernel reads them.


def check_shapes(compute: Compute, findings: Findings) -> None:
    """Check that each part of `a` has one column of scales, on its own rank."""
    if compute.scales and len(compute.scales) != len(compute.a):
        message = f"{len(compute.scales)} columns of scales for {len(compute.a)} parts of `a`"
        findings.add("form", compute, message, compute.scales[0])
        return
    for part, scales in zip(compute.a if compute.scales else (), compute.scales, strict=True):
        if scales.rank != compute.rank:
            findings.add("ownership", compute, "its scales must lie on its own rank", scales)
        if scales.shape != (part.shape[0], 1):
            findings.add("form", compute, f"{scales} does not hold one scale for each row of {part}", scales)


def scale_mismatch(a: RegionValue, scales: RegionValue) -> str:
    """Return why a column does not hold the scales of the rows of `a`; "" if it does, or if either is unknown. A rank
    with a range of `a`'s columns has scales of its own: element `[i, j]` of them is of row i, from column j on."""
    if any(piece.tensor == UNKNOWN for piece in (*a, *scales)):
        return ""
    for piece in a:
        for scale in clip(scales, (piece.lo_i, piece.hi_i), (0, 1)):
            expected = (scale_of(piece.tensor), piece.row + scale.lo_i, piece.col - piece.lo_j, ())
            if (scale.tensor, scale.row, scale.col, scale.terms) != expected:
                actual = f"{'a sum of ' if scale.terms else ''}{scale.tensor}[{scale.row},{scale.col}]"
                return f"scales by {actual} where it needs {expected[0]}[{expected[1]},{expected[2]}]"
    return ""


def check_scaling(plan: Plan, findings: Findings) -> None:
    """Check that every Compute has scales of its rows if the epilogue multiplies by them, and none otherwise."""
    needs_scales = plan.problem.epilogue.scaling == "rows"
    for operation in plan.schedule.operations:
        if isinstance(operation, Compute) and needs_scales != bool(operation.scales):
            message = (
                "has no scales of its rows" if needs_scales else "has scales of its rows, which no epilogue applies"
            )
            findings.add("form", operation, message)


def check_scale_rows(compute: Compute, buffers: Mapping[str, Buffer], dtype: Dtype, findings: Findings) -> None:
    """Check that fp32 scales lie beside the rows of `a`: of the own shard, or in the workspace, at the same row."""
    for part, scales in zip(compute.a if compute.scales else (), compute.scales, strict=True):
        buffer = buffers[scales.buffer]
        if (buffer.home == INPUT) != (buffers[part.buffer].home == INPUT) or scales.rows != part.rows:
            findings.add("lowering", compute, f"the kernel looks for scales beside {part}", scales)
        if (buffer.dtype or dtype, buffer.cols) != (SCALE_DTYPE, 1):
            message = (
                f"scales are {buffer.cols} columns of {buffer.dtype or dtype}; the kernel reads one of {SCALE_DTYPE}"
            )
            findings.add("lowering", compute, message, scales)
