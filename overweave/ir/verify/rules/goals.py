"""Whether an output holds at the end what its goal says, and how it differs if not."""

from __future__ import annotations

from overweave.ir.schedule import Goal, Range, Region
from overweave.ir.tensors import finished, is_finished
from overweave.ir.verify.rules.form import terms_shown
from overweave.ir.verify.rules.values import UNKNOWN, ZERO, Piece, Terms, Value, in_any_order
from overweave.ir.verify.verdict import Findings


def check_goal(goal: Goal, value: Value, findings: Findings) -> None:
    """Adds a refusal for every part of the goal's region that holds something else. Empty ranges contribute nothing."""
    terms = tuple([term for term in goal.terms if term[0] < term[1]])
    if goal.unordered:
        terms, value = tuple(sorted(terms)), in_any_order(value)
    nothing = bool(goal.terms) and not terms
    zero = finished(ZERO) if is_finished(goal.tensor) else ZERO
    for piece in value:
        if piece.tensor == UNKNOWN or (nothing and piece.tensor == zero):
            continue
        wanted = (goal.tensor, goal.row + piece.lo_i, goal.col + piece.lo_j)
        is_place = (piece.tensor, piece.row, piece.col) == wanted
        if is_place and piece.terms == terms and not nothing:
            continue
        part = _part(goal.region, piece)
        if not is_place:
            said = f"begins with {_shown(piece)}, not with {wanted[0]}[{wanted[1]},{wanted[2]}]"
            findings.add("value", None, said, part)
        else:
            _report_terms(terms, piece.terms, part, findings)


def has_place_for(goal: Goal, out: Region) -> bool:
    """Whether a result has the rows and columns of a region of its rank."""
    (r0, r1), (c0, c1), whole = out.rows, out.cols, goal.region
    is_inside = whole.rows[0] <= r0 and r1 <= whole.rows[1] and whole.cols[0] <= c0 and c1 <= whole.cols[1]
    return whole.rank == out.rank and is_inside


def _report_terms(wanted: Terms, found: Terms, part: Region, findings: Findings) -> None:
    said = f"sums {terms_shown(found)}, not {terms_shown(wanted)}"
    if sorted(wanted) == sorted(found):
        findings.add("contribution_order", None, said, part)
        return
    missing, extra = _without(wanted, found), _without(found, wanted)
    details = [f"lacks {terms_shown(missing)}"] if missing else []
    details += [f"has {terms_shown(extra)} too often"] if extra else []
    findings.add("contributions", None, f"{said}: {' and '.join(details)}", part)


def _without(terms: Terms, others: Terms) -> tuple[Range, ...]:
    left = list(others)
    missing = []
    for term in terms:
        if term in left:
            left.remove(term)
        else:
            missing.append(term)
    return tuple(missing)


def _part(region: Region, piece: Piece) -> Region:
    r0, c0 = region.rows[0], region.cols[0]
    rows, cols = (r0 + piece.lo_i, r0 + piece.hi_i), (c0 + piece.lo_j, c0 + piece.hi_j)
    return Region(region.buffer, region.rank, rows, cols)


def _shown(piece: Piece) -> str:
    return "zeros" if piece.tensor == ZERO else f"{piece.tensor}[{piece.row},{piece.col}]"
