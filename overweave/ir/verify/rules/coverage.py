"""Follows every value from the given inputs to the goals, and every access to the accesses it conflicts with.

One pass in launch order. Each element is written once, so a region's value is known once it is covered, and a read is
sound if every writer of the region is in the reader's past: that it is covered, in time and without a race is one test.
Where operations accumulate, a fragment remembers its last writer and the readers since, and each next writer must have
all of them in its past.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

from overweave.ir.schedule import (
    Apply,
    Clear,
    Collective,
    Compute,
    Copy,
    Get,
    Goal,
    InitialContents,
    Put,
    Range,
    Reduce,
    ReducePut,
    Region,
    Schedule,
)
from overweave.ir.tensors import finished, is_finished
from overweave.ir.verify.rules.collectives import CollectiveExchange
from overweave.ir.verify.rules.contents import MOST_STEPS, MOST_STEPS_OF_A_REGION, Contents, Fragment, value_of
from overweave.ir.verify.rules.counted import Cells
from overweave.ir.verify.rules.form import terms_shown
from overweave.ir.verify.rules.graphs import Graph
from overweave.ir.verify.rules.happens_before import NONE, Bits, Past, lacks, union
from overweave.ir.verify.rules.races import report_read, report_update, report_write
from overweave.ir.verify.rules.scales import mismatch
from overweave.ir.verify.rules.values import (
    UNKNOWN,
    ZERO,
    Mismatch,
    RegionValue,
    Terms,
    ValuePiece,
    added,
    clipped,
    ended,
    in_any_order,
    is_unknown,
    multiplied,
    stacked,
    summed,
    unknown,
)
from overweave.ir.verify.rules.verdict import Findings, WorkBudget

GIVEN_BY = -1  # stands for the writer of what is given


def check_coverage(graph: Graph, order: list[int], past: Past, findings: Findings) -> None:
    """Adds refusals for races, gaps, double writes, values that do not fit, and goals that are not met."""
    follower = Follower(graph, past, findings)
    follower.take_given(graph.schedule)
    met: set[str] = set()
    for position in order:
        operation = graph.operations[position]
        if type(operation) is Collective:
            if operation.label not in met:
                met.add(operation.label)
                follower.follow_collective(graph.members[operation.label])
        else:
            FOLLOW[type(operation)](follower, position, operation)
    for goal in graph.schedule.goal:
        if not goal.region.is_empty:
            value = follower.read_at_end(goal.region)
            check_goal(goal, value, findings)


class Follower:
    """The contents of all buffers, and what is known of regions that are written once."""

    def __init__(self, graph: Graph, past: Past, findings: Findings) -> None:
        self.graph, self.past, self.findings = graph, past, findings
        self.contents: dict[tuple[str, int], Contents] = {}
        regions = sum(len(operation.reads) + len(operation.writes) for operation in graph.operations)
        self.steps = WorkBudget(MOST_STEPS + MOST_STEPS_OF_A_REGION * regions, "its regions overlap too often")
        # Region to the set of its writers, and its value.
        self.known: dict[Region, tuple[Bits, RegionValue]] = {}
        self.accumulated, self.cells = accumulated(graph), Cells(graph.schedule)

    def take_given(self, schedule: Schedule) -> None:
        for given in schedule.given:
            if not given.region.is_empty:
                piece = unknown(given.region.shape)[0]._replace(tensor=given.tensor, row=given.row, col=given.col)
                self.write(GIVEN_BY, given.region, (piece,))

    def of(self, region: Region) -> Contents:
        instance = (region.buffer, region.rank)
        found = self.contents.get(instance)
        if found is None:
            found = self.contents[instance] = Contents(self.steps)
        return found

    def read(self, position: int, region: Region, is_replaced: bool = False, is_late: bool = False) -> RegionValue:
        """What the operation finds there; unknown, and a refusal, if that is not certain.

        is_replaced: the operation itself updates the region next, which is no race with its own read.
        is_late: it reads there once its late waits are over.
        """
        before = self.past.before[position]
        if is_late:
            before = self.past.late.get(position, before)
        entry = self.known.get(region)
        if entry is None:
            entry = self._look_up(region, NONE if is_replaced else self.past.bit(position))
        if entry is not None and not lacks(before, entry[0]):
            return entry[1]
        report_read(self.graph, self.past, position, region, self.findings)
        return unknown(region.shape)

    def read_at_end(self, region: Region) -> RegionValue:
        """What the region holds when the calls of its rank end."""
        end = self.past.ends[region.rank]
        entry = self.known.get(region) or self._look_up(region, NONE)
        if entry is not None and not lacks(end, entry[0]):
            return entry[1]
        report_read(self.graph, self.past, None, region, self.findings)
        return unknown(region.shape)

    def _look_up(self, region: Region, reader: Bits) -> tuple[Bits, RegionValue] | None:
        """(writers, value) of a region, or None if it is not covered. Remembers it where nothing accumulates."""
        if region.is_empty:
            entry: tuple[Bits, RegionValue] = (NONE, ())
        else:
            accumulates = (region.buffer, region.rank) in self.accumulated
            contents = self.of(region)
            fragments = contents.carve(region) if accumulates else contents.overlapping(region)
            value = value_of(fragments, region)
            if value is None:
                return None
            entry = (self._writers(fragments), value)
            if accumulates:
                for fragment in fragments:
                    fragment.readers = union((fragment.readers, reader))
                return entry
        self.known[region] = entry
        return entry

    def _writers(self, fragments: list[Fragment]) -> Bits:
        bit = self.past.bit
        if len(fragments) == 1 and not fragments[0].start:
            return NONE if fragments[0].writer is None else bit(fragments[0].writer)
        wrote = (bit(fragment.writer) for fragment in fragments if fragment.writer is not None)
        added = (one for fragment in fragments for one in (fragment.adders, fragment.start) if one)
        return union(chain(wrote, added))

    def write(self, position: int, region: Region, value: RegionValue) -> None:
        """The first and only write to a region, or the first before others add to it."""
        if not value:
            return
        contents = self.of(region)
        others = contents.overlapping(region)
        if others:
            report_write(self.graph, position, region, others[0].writer, self.findings)
            return
        is_given = position == GIVEN_BY
        contents.write(region, value, None if is_given else position)
        if not is_given:
            self.cells.check_stored(self.graph.operations[position], region, value, self.findings)
        if (region.buffer, region.rank) not in self.accumulated:
            self.known[region] = (NONE if is_given else self.past.bit(position), value)

    def update(self, position: int, region: Region, change: Callable[[RegionValue], RegionValue]) -> None:
        """Replaces what the region holds by `change` of it. All who touched it before must be in the past."""
        if region.is_empty:
            return
        contents = self.of(region)
        fragments = contents.carve(region)
        old = value_of(fragments, region)
        if old is None:
            report_read(self.graph, self.past, position, region, self.findings)
            return
        touched = union((self._writers(fragments), *(fragment.readers for fragment in fragments)))
        if lacks(self.past.before[position], touched):
            report_update(self.graph, self.past, position, region, touched, self.findings)
        new = self.attempt(position, region, lambda: change(old))
        self.cells.check_stored(self.graph.operations[position], region, new, self.findings)
        for fragment in fragments:
            contents.remove(fragment)
        contents.write(region, new, position)

    def add(self, position: int, region: Region, value: RegionValue) -> None:
        """Adds to what the region holds, beside others that do so in any order: all but these must be in the past."""
        if region.is_empty:
            return
        contents = self.of(region)
        fragments = contents.carve(region)
        old = value_of(fragments, region)
        if old is None:
            report_read(self.graph, self.past, position, region, self.findings)
            return
        first = (one.start if one.adders else self._writers([one]) for one in fragments)
        start = union(chain(first, (one.readers for one in fragments)))
        adders = union((self.past.bit(position), *(one.adders for one in fragments)))
        if lacks(self.past.before[position], start):
            report_update(self.graph, self.past, position, region, start, self.findings)
        self.note_operand(region, old)
        new = self.attempt(position, region, lambda: in_any_order(added(old, value)))
        for fragment in fragments:
            contents.remove(fragment)
        contents.write(region, new, position)
        for fragment in contents.carve(region):
            fragment.start, fragment.adders = start, adders

    def note_operand(self, region: Region, value: RegionValue) -> None:
        """Remembers the buffer of what is added to, if that is a sum of several parts already."""
        if any(len(piece.terms) > 1 for piece in value):
            self.findings.added_to.add(region.buffer)

    def attempt(self, position: int, region: Region, compute: Callable[[], RegionValue]) -> RegionValue:
        """The value computed, or unknown and a refusal if operands do not fit."""
        try:
            return compute()
        except Mismatch as mismatch:
            self.findings.add("value", self.graph.operations[position], str(mismatch), region)
            return unknown(region.shape)

    def follow_collective(self, members: list[int]) -> None:
        """Every part reads its own sources; then every part writes its own destinations."""
        parts = [part for part in (self.graph.operations[at] for at in members) if type(part) is Collective]
        read = [
            tuple([self.read(at, one, is_in_place(part)) for one in part.sources])
            for at, part in zip(members, parts, strict=True)
        ]
        exchange = CollectiveExchange(parts, read)
        for index, (position, part) in enumerate(zip(members, parts, strict=True)):
            if part.function in ("all_gather", "all_to_all"):
                for value, landing in exchange.landings(index):
                    self.write(position, landing, value)
                continue
            for at, out in enumerate(part.destinations):
                if len(members) > 2:  # the library adds one rank's part after the other
                    self.findings.added_to.add(out.buffer)
                total = partial(self.sum, part, out, partial(exchange.total, index, at))
                if is_in_place(part):
                    self.update(position, out, _replacing(total))
                else:
                    self.write(position, out, self.attempt(position, out, total))

    def sum(self, operation: Compute | Reduce | Collective, out: Region, add: Callable[[], RegionValue]) -> RegionValue:
        """The ordered sum that goes to `out`, and what becomes of it if it is finished. Raises Mismatch.

        What finishes reads the epilogue's tensors at the rows and columns of `out`, as they lie in the rank's result.
        """
        total = add()
        if not operation.finishes or out.is_empty:
            return total
        if any(has_place_for(goal, out) for goal in self.graph.schedule.goal):
            return self._ended(total, out, out)
        found: RegionValue = ()  # the result is several stretches: each by itself
        for one in total:
            rows, cols = ((at + lo, at + hi) for at, lo, hi in ((out.rows[0], *one[:2]), (out.cols[0], *one[2:4])))
            found += self._ended((one,), Region(out.buffer, out.rank, rows, cols), out)
        return found

    def _ended(self, value: RegionValue, place: Region, out: Region) -> RegionValue:
        """A part of the sums that go to `out`, finished in its place in the result. Raises Mismatch if it has none."""
        goal = next((goal for goal in self.graph.schedule.goal if has_place_for(goal, place)), None)
        if goal is None:
            raise Mismatch("it finishes sums that have no place in the result of its rank")
        (row, _), (col, _) = goal.region.rows, goal.region.cols
        return ended(value, (goal.row - row + out.rows[0], goal.col - col + out.cols[0]))


def _appending(follower: Follower, region: Region, value: RegionValue) -> Callable[[RegionValue], RegionValue]:
    """For an update that adds to what was there before."""

    def change(old: RegionValue) -> RegionValue:
        follower.note_operand(region, old)
        return added(old, value)

    return change


def _replacing(total: Callable[[], RegionValue]) -> Callable[[RegionValue], RegionValue]:
    """For an update whose operands hold what was there before."""
    return lambda old: total()


def _follow_move(follower: Follower, position: int, move: Put | Get | Copy) -> None:
    for source, destination in zip(move.sources, move.destinations, strict=True):
        follower.write(position, destination, follower.read(position, source))


def _follow_clear(follower: Follower, position: int, clear: Clear) -> None:
    for region in clear.destinations:
        rows, cols = region.shape
        follower.write(position, region, () if region.is_empty else (ValuePiece(0, rows, 0, cols, ZERO, 0, 0, ()),))


def _follow_reduce_put(follower: Follower, position: int, move: ReducePut) -> None:
    for source, destination in zip(move.sources, move.destinations, strict=True):
        value = follower.read(position, source)
        if move.unordered:
            follower.add(position, destination, value)
        else:
            follower.update(position, destination, _appending(follower, destination, value))


def _follow_compute(follower: Follower, position: int, compute: Compute) -> None:
    depth, width = compute.b.shape
    b = follower.read(position, compute.b)
    follower.cells.check_whole(compute, compute.b, b, follower.findings)
    if len(compute.a) == 1:
        height, a = compute.a[0].shape[0], follower.read(position, compute.a[0])
    else:
        parts = [(part.shape[0], follower.read(position, part)) for part in compute.a]
        height, a = sum(rows for rows, _ in parts), stacked(parts, depth)
    if compute.scales:
        columns = stacked([(part.shape[0], follower.read(position, part)) for part in compute.scales], 1)
        follower.cells.check_whole(compute, compute.scales[0], columns, follower.findings)
        if said := mismatch(a, columns):
            follower.findings.add("value", compute, said, compute.scales[0])
    result = follower.attempt(position, compute.out[0], lambda: multiplied(a, b, (height, depth, width)))
    if is_unknown(result):
        result = unknown((height, width))
    if compute.addends:
        values = [follower.read(position, addend, is_late=True) for addend in compute.addends]
        for addend, value in zip(compute.addends, values, strict=True):
            follower.note_operand(addend, value)
        values.insert(compute.place, result)
        result = follower.attempt(
            position, compute.out[0], lambda: follower.sum(compute, compute.out[0], partial(summed, values))
        )
    top = 0
    for out in compute.out:
        rows = out.shape[0]
        part = result if len(compute.out) == 1 else clipped(result, (top, top + rows), (0, width))
        top += rows
        if compute.accumulate:
            follower.findings.added_to.add(out.buffer)  # even a single product is rounded before another is added
            follower.update(position, out, _appending(follower, out, part))
        else:
            follower.write(position, out, part)
    for copy in compute.copies:
        follower.write(position, copy, result)


def _follow_reduce(follower: Follower, position: int, reduce: Reduce) -> None:
    out = reduce.out
    if out.is_empty:
        return
    values = [None if operand == out else follower.read(position, operand) for operand in reduce.operands]

    def total(old: RegionValue = ()) -> RegionValue:
        known = [old if value is None else value for value in values]
        if len(known) > 1:
            for operand, value in zip(reduce.operands, known, strict=True):
                follower.note_operand(operand, value)
        return follower.sum(reduce, out, partial(summed, known))

    if None in values:
        follower.update(position, out, total)
    else:
        follower.write(position, out, follower.attempt(position, out, total))


def _follow_apply(follower: Follower, position: int, apply: Apply) -> None:
    """What it needs must be there; then what it makes is taken on its word."""
    for need in apply.needs:
        _expect(follower, position, need, follower.read(position, need.region))
    for need in apply.late_needs:
        _expect(follower, position, need, follower.read(position, need.region, is_late=True))
    for made in apply.makes:
        if not made.region.is_empty:
            piece = unknown(made.region.shape)[0]
            made_piece = piece._replace(tensor=made.tensor, row=made.row, col=made.col, terms=made.terms)
            follower.write(position, made.region, (made_piece,))


def _expect(follower: Follower, position: int, need: InitialContents, value: RegionValue) -> None:
    follower.cells.check_whole(follower.graph.operations[position], need.region, value, follower.findings)
    for piece in () if is_unknown(value) else value:
        wanted = (need.tensor, need.row + piece.lo_i, need.col + piece.lo_j, ())
        if (piece.tensor, piece.row, piece.col, piece.terms) != wanted:
            found = f"{'a sum of ' if piece.terms else ''}{piece.tensor}[{piece.row},{piece.col}]"
            said = f"finds {found} where it needs {wanted[0]}[{wanted[1]},{wanted[2]}]"
            follower.findings.add("value", follower.graph.operations[position], said, need.region)
            return


FOLLOW: dict[type, Callable[[Follower, int, Any], None]] = {
    Put: _follow_move,
    Get: _follow_move,
    Copy: _follow_move,
    ReducePut: _follow_reduce_put,
    Clear: _follow_clear,
    Compute: _follow_compute,
    Reduce: _follow_reduce,
    Apply: _follow_apply,
}


# Which buffers are added to: their elements are written more than once.


def accumulated(graph: Graph) -> set[tuple[str, int]]:
    """The instances of buffers that some operation adds to."""
    added_to: list[Region] = []
    for operation in graph.operations:
        if isinstance(operation, ReducePut):
            added_to += operation.destinations
        elif isinstance(operation, Compute) and operation.accumulate:
            added_to += operation.out
        elif isinstance(operation, Reduce) and operation.out in operation.operands:
            added_to.append(operation.out)
        elif isinstance(operation, Collective) and is_in_place(operation):
            added_to += operation.destinations
    return {(region.buffer, region.rank) for region in added_to}


def is_in_place(part: Collective) -> bool:
    """Whether an all-reduce replaces what it reads."""
    return part.function == "all_reduce" and part.sources == part.destinations


# Whether an output holds at the end what its goal says, and how it differs if not.


def check_goal(goal: Goal, value: RegionValue, findings: Findings) -> None:
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


def _part(region: Region, piece: ValuePiece) -> Region:
    r0, c0 = region.rows[0], region.cols[0]
    rows, cols = (r0 + piece.lo_i, r0 + piece.hi_i), (c0 + piece.lo_j, c0 + piece.hi_j)
    return Region(region.buffer, region.rank, rows, cols)


def _shown(piece: ValuePiece) -> str:
    return "zeros" if piece.tensor == ZERO else f"{piece.tensor}[{piece.row},{piece.col}]"
