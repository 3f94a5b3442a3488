"""Follows every value from the inputs to the goals, and every access to the accesses that conflict with it.

One pass in launch order. Each element is written once, so a region's value is known once it is covered. A read is sound
if every writer of the region is in the reader's past: one test for coverage, order and races. In buffers that are
accumulated into, a fragment remembers its last writer and the readers since, and each next writer must have all of them
in its past. So must a Retire, after which there is nothing to read; whoever writes there next has it in its past.
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
    Operation,
    Put,
    Range,
    Reduce,
    ReducePut,
    Region,
    Retire,
    Schedule,
    overlap,
)
from overweave.ir.tensors import epilogue_applied, is_epilogue_applied
from overweave.ir.verify.rules.collectives import CollectiveExchange
from overweave.ir.verify.rules.contents import MOST_STEPS, MOST_STEPS_OF_A_REGION, Contents, Fragment, value_of
from overweave.ir.verify.rules.counted import Cells
from overweave.ir.verify.rules.form import terms_shown
from overweave.ir.verify.rules.graphs import Graph
from overweave.ir.verify.rules.happens_before import NONE, Bits, Past, lacks, union, without
from overweave.ir.verify.rules.rewritten import is_in_place, rewritten_buffers
from overweave.ir.verify.rules.values import (
    UNKNOWN,
    ZERO,
    Mismatch,
    RegionValue,
    Terms,
    ValuePiece,
    add,
    apply_epilogue,
    clip,
    is_retired,
    is_unknown,
    multiply,
    ordered_sum,
    retired,
    scale_mismatch,
    sort_terms,
    stack,
    unknown,
)
from overweave.ir.verify.rules.verdict import Findings, WorkBudget

GIVEN = -1  # the writer's position of what a buffer holds at the start


def check_coverage(graph: Graph, order: list[int], past: Past, findings: Findings) -> None:
    """Add refusals for races, gaps, double writes, values that do not fit, and goals that are not met."""
    follower = Follower(graph, past, findings)
    follower.take_given(graph.schedule)
    seen_labels: set[str] = set()
    for position in order:
        operation = graph.operations[position]
        if type(operation) is Collective:
            if operation.label not in seen_labels:
                seen_labels.add(operation.label)
                follower.follow_collective(graph.members[operation.label])
        else:
            FOLLOW[type(operation)](follower, position, operation)
    for goal in graph.schedule.goal:
        if not goal.region.is_empty:
            value = follower.read_at_end(goal.region)
            check_goal(goal, value, findings)


class Follower:
    """The contents of all buffers, and a cache of regions that are written once."""

    def __init__(self, graph: Graph, past: Past, findings: Findings) -> None:
        self.graph, self.past, self.findings = graph, past, findings
        self.contents: dict[tuple[str, int], Contents] = {}  # (buffer, rank) -> its contents
        regions = sum(len(operation.reads) + len(operation.writes) for operation in graph.operations)
        self.steps = WorkBudget(MOST_STEPS + MOST_STEPS_OF_A_REGION * regions, "its regions overlap too often")
        self.known: dict[Region, tuple[Bits, RegionValue]] = {}  # region -> (set of its writers, its value)
        self.accumulated, self.cells = rewritten_buffers(graph.operations), Cells(graph.schedule)

    def take_given(self, schedule: Schedule) -> None:
        """Write the values that buffers hold at the start."""
        for given in schedule.given:
            if not given.region.is_empty:
                piece = unknown(given.region.shape)[0]._replace(tensor=given.tensor, row=given.row, col=given.col)
                self.write(GIVEN, given.region, (piece,))

    def contents_of(self, region: Region) -> Contents:
        """Return the contents of a region's buffer on its rank."""
        instance = (region.buffer, region.rank)
        contents = self.contents.get(instance)
        if contents is None:
            contents = self.contents[instance] = Contents(self.steps)
        return contents

    def read(self, position: int, region: Region, is_replaced: bool = False, is_late: bool = False) -> RegionValue:
        """Return the value that the operation reads; unknown, with a refusal, if that is not certain.

        is_replaced: the operation itself updates the region next, which is not a race with its own read. is_late: it
        reads once its late waits are over.
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
        """Return the value of the region when the calls of its rank end."""
        end = self.past.ends[region.rank]
        entry = self.known.get(region) or self._look_up(region, NONE)
        if entry is not None and not lacks(end, entry[0]):
            return entry[1]
        report_read(self.graph, self.past, None, region, self.findings)
        return unknown(region.shape)

    def _look_up(self, region: Region, reader: Bits) -> tuple[Bits, RegionValue] | None:
        """Return (writers, value) of a region, or None if it is not covered. Caches it if nothing accumulates."""
        if region.is_empty:
            entry: tuple[Bits, RegionValue] = (NONE, ())
        else:
            accumulates = (region.buffer, region.rank) in self.accumulated
            contents = self.contents_of(region)
            fragments = contents.carve(region) if accumulates else contents.overlapping(region)
            value = value_of(fragments, region)
            if value is None or is_retired(value):
                return None
            entry = (self._writers(fragments), value)
            if accumulates:
                for fragment in fragments:
                    fragment.readers = union((fragment.readers, reader))
                return entry
        self.known[region] = entry
        return entry

    def _writers(self, fragments: list[Fragment]) -> Bits:
        """Return the set of operations that wrote or added to the fragments."""
        bit = self.past.bit
        if len(fragments) == 1 and not fragments[0].start:
            return NONE if fragments[0].writer is None else bit(fragments[0].writer)
        wrote = (bit(fragment.writer) for fragment in fragments if fragment.writer is not None)
        added = (one for fragment in fragments for one in (fragment.adders, fragment.start) if one)
        return union(chain(wrote, added))

    def write(self, position: int, region: Region, value: RegionValue) -> None:
        """Write a region for the first time: the only time, or before others add to it; or again, once retired."""
        if not value:
            return
        contents = self.contents_of(region)
        if other := contents.free(region, lambda at: self.past.has(self.past.before[position], at)):
            report_write(self.graph, position, region, other.writer, self.findings)
            return
        is_given = position == GIVEN
        contents.write(region, value, None if is_given else position)
        if not is_given:
            self.cells.check_stored(self.graph.operations[position], region, value, self.findings)
        if (region.buffer, region.rank) not in self.accumulated:
            self.known[region] = (NONE if is_given else self.past.bit(position), value)

    def update(self, position: int, region: Region, change: Callable[[RegionValue], RegionValue]) -> None:
        """Replace the region's value by `change(value)`. All earlier accesses must be in the operation's past."""
        if region.is_empty or (found := self._held(position, region)) is None:
            return
        fragments, old = found
        touched = union((self._writers(fragments), *(fragment.readers for fragment in fragments)))
        if lacks(self.past.before[position], touched):
            report_update(self.graph, self.past, position, region, touched, self.findings)
        new = self.attempt(position, region, lambda: change(old))
        self.cells.check_stored(self.graph.operations[position], region, new, self.findings)
        self._replace(position, region, fragments, new)

    def add(self, position: int, region: Region, value: RegionValue) -> None:
        """Add to the region's value in any order with other adders. All other accesses must be in the operation's
        past."""
        if region.is_empty or (found := self._held(position, region)) is None:
            return
        fragments, old = found
        # Other adders need not be in the past, but all that had to precede them must be.
        first = (one.start if one.adders else self._writers([one]) for one in fragments)
        start = union(chain(first, (one.readers for one in fragments)))
        adders = union((self.past.bit(position), *(one.adders for one in fragments)))
        if lacks(self.past.before[position], start):
            report_update(self.graph, self.past, position, region, start, self.findings)
        self.note_operand(region, old)
        new = self.attempt(position, region, lambda: sort_terms(add(old, value)))
        self._replace(position, region, fragments, new)
        for fragment in self.contents_of(region).carve(region):
            fragment.start, fragment.adders = start, adders

    def _held(self, position: int, region: Region) -> tuple[list[Fragment], RegionValue] | None:
        """Return the fragments of a region and their value; None, with a refusal, if there is no value to change."""
        fragments = self.contents_of(region).carve(region)
        old = value_of(fragments, region)
        if old is None or is_retired(old):
            report_read(self.graph, self.past, position, region, self.findings)
            return None
        return fragments, old

    def _replace(self, position: int, region: Region, fragments: list[Fragment], value: RegionValue) -> None:
        contents = self.contents_of(region)
        for fragment in fragments:
            contents.remove(fragment)
        contents.write(region, value, position)

    def note_operand(self, region: Region, value: RegionValue) -> None:
        """Remember the buffer of an operand if it holds a sum of several parts already."""
        if any(len(piece.terms) > 1 for piece in value):
            self.findings.added_to.add(region.buffer)

    def attempt(self, position: int, region: Region, compute: Callable[[], RegionValue]) -> RegionValue:
        """Return compute(), or unknown with a refusal if operands do not fit."""
        try:
            return compute()
        except Mismatch as mismatch:
            self.findings.add("value", self.graph.operations[position], str(mismatch), region)
            return unknown(region.shape)

    def follow_collective(self, members: list[int]) -> None:
        """Read the sources of every part; then write the destinations of every part."""
        parts = [part for part in (self.graph.operations[at] for at in members) if type(part) is Collective]
        read = [
            tuple([self.read(at, one, is_in_place(part)) for one in part.sources])
            for at, part in zip(members, parts, strict=True)
        ]
        exchange = CollectiveExchange(parts, read)
        for index, (position, part) in enumerate(zip(members, parts, strict=True)):
            if part.function in ("all_gather", "all_to_all"):
                for value, landing in exchange.received(index):
                    self.write(position, landing, value)
                continue
            for at, out in enumerate(part.destinations):
                if len(members) > 2:  # NCCL adds one rank's part after the other
                    self.findings.added_to.add(out.buffer)
                total = partial(self.sum, part, out, partial(exchange.total, index, at))
                if is_in_place(part):
                    self.update(position, out, _replacing(total))
                else:
                    self.write(position, out, self.attempt(position, out, total))

    def sum(self, operation: Compute | Reduce | Collective, out: Region, add: Callable[[], RegionValue]) -> RegionValue:
        """Return the ordered sum that goes to `out`, with the epilogue if the operation finishes sums. Raises Mismatch.
        The epilogue's tensors are read at the rows and columns of `out`, as they lie in the rank's result."""
        total = add()
        if not operation.finishes or out.is_empty:
            return total
        if any(has_place_for(goal, out) for goal in self.graph.schedule.goal):
            return self._epilogue_applied(total, out, out)
        finished: RegionValue = ()  # the result lies in several rectangles: each by itself
        for one in total:
            rows, cols = (
                (origin + lo, origin + hi) for origin, lo, hi in ((out.rows[0], *one[:2]), (out.cols[0], *one[2:4]))
            )
            finished += self._epilogue_applied((one,), Region(out.buffer, out.rank, rows, cols), out)
        return finished

    def _epilogue_applied(self, value: RegionValue, place: Region, out: Region) -> RegionValue:
        """Return a part of the sums that go to `out`, with the epilogue of its place in the result. Raises Mismatch if
        it has no place there."""
        goal = next((goal for goal in self.graph.schedule.goal if has_place_for(goal, place)), None)
        if goal is None:
            raise Mismatch("it finishes sums that have no place in the result of its rank")
        (row, _), (col, _) = goal.region.rows, goal.region.cols
        return apply_epilogue(value, (goal.row - row + out.rows[0], goal.col - col + out.cols[0]))


def _adding(follower: Follower, region: Region, value: RegionValue) -> Callable[[RegionValue], RegionValue]:
    """Return the change of an update that adds to the old value."""

    def change(old: RegionValue) -> RegionValue:
        follower.note_operand(region, old)
        return add(old, value)

    return change


def _replacing(total: Callable[[], RegionValue]) -> Callable[[RegionValue], RegionValue]:
    """Return the change of an update whose operands hold the old value."""
    return lambda old: total()


def _follow_move(follower: Follower, position: int, move: Put | Get | Copy) -> None:
    for source, destination in zip(move.sources, move.destinations, strict=True):
        follower.write(position, destination, follower.read(position, source))


def _follow_clear(follower: Follower, position: int, clear: Clear) -> None:
    for region in clear.destinations:
        rows, cols = region.shape
        follower.write(position, region, () if region.is_empty else (ValuePiece(0, rows, 0, cols, ZERO, 0, 0, ()),))


def _follow_retire(follower: Follower, position: int, retire: Retire) -> None:
    for region in retire.regions:
        follower.update(position, region, lambda _, shape=region.shape: retired(shape))  # type: ignore[misc]


def _follow_reduce_put(follower: Follower, position: int, move: ReducePut) -> None:
    """Add each source to its destination: in order, or beside others."""
    for source, destination in zip(move.sources, move.destinations, strict=True):
        value = follower.read(position, source)
        if move.unordered:
            follower.add(position, destination, value)
        else:
            follower.update(position, destination, _adding(follower, destination, value))


def _follow_compute(follower: Follower, position: int, compute: Compute) -> None:
    """Multiply the operands' values, add the addends, and write the result."""
    depth, width = compute.b.shape
    b = follower.read(position, compute.b)
    follower.cells.check_whole(compute, compute.b, b, follower.findings)
    if len(compute.a) == 1:
        height, a = compute.a[0].shape[0], follower.read(position, compute.a[0])
    else:
        parts = [(part.shape[0], follower.read(position, part)) for part in compute.a]
        height, a = sum(rows for rows, _ in parts), stack(parts, depth)
    if compute.scales:
        columns = stack([(part.shape[0], follower.read(position, part)) for part in compute.scales], 1)
        follower.cells.check_whole(compute, compute.scales[0], columns, follower.findings)
        if message := scale_mismatch(a, columns):
            follower.findings.add("value", compute, message, compute.scales[0])
    result = follower.attempt(position, compute.out[0], lambda: multiply(a, b, (height, depth, width)))
    if is_unknown(result):
        result = unknown((height, width))
    if compute.addends:
        values = [follower.read(position, addend, is_late=True) for addend in compute.addends]
        for addend, value in zip(compute.addends, values, strict=True):
            follower.note_operand(addend, value)
        values.insert(compute.place, result)
        result = follower.attempt(
            position, compute.out[0], lambda: follower.sum(compute, compute.out[0], partial(ordered_sum, values))
        )
    top = 0
    for out in compute.out:
        rows = out.shape[0]
        part = result if len(compute.out) == 1 else clip(result, (top, top + rows), (0, width))
        top += rows
        if compute.accumulate:
            follower.findings.added_to.add(out.buffer)  # the stored product is rounded before another is added
            follower.update(position, out, _adding(follower, out, part))
        else:
            follower.write(position, out, part)
    for copy in compute.copies:
        follower.write(position, copy, result)


def _follow_reduce(follower: Follower, position: int, reduce: Reduce) -> None:
    """Add the operands' values in order; `out` may be one of them."""
    out = reduce.out
    if out.is_empty:
        return
    values = [None if operand == out else follower.read(position, operand) for operand in reduce.operands]

    def total(old: RegionValue = ()) -> RegionValue:
        operands = [old if value is None else value for value in values]
        if len(operands) > 1:
            for operand, value in zip(reduce.operands, operands, strict=True):
                follower.note_operand(operand, value)
        return follower.sum(reduce, out, partial(ordered_sum, operands))

    if None in values:
        follower.update(position, out, total)
    else:
        follower.write(position, out, follower.attempt(position, out, total))


def _follow_apply(follower: Follower, position: int, apply: Apply) -> None:
    """Check what an Apply needs; then take what it makes as its author says."""
    for need in apply.needs:
        _expect(follower, position, need, follower.read(position, need.region))
    for need in apply.late_needs:
        _expect(follower, position, need, follower.read(position, need.region, is_late=True))
    for output in apply.makes:
        if not output.region.is_empty:
            piece = unknown(output.region.shape)[0]
            output_piece = piece._replace(tensor=output.tensor, row=output.row, col=output.col, terms=output.terms)
            follower.write(position, output.region, (output_piece,))


def _expect(follower: Follower, position: int, need: InitialContents, value: RegionValue) -> None:
    """Refuse a value that is not what an Apply needs."""
    follower.cells.check_whole(follower.graph.operations[position], need.region, value, follower.findings)
    for piece in () if is_unknown(value) else value:
        expected = (need.tensor, need.row + piece.lo_i, need.col + piece.lo_j, ())
        if (piece.tensor, piece.row, piece.col, piece.terms) != expected:
            actual = f"{'a sum of ' if piece.terms else ''}{piece.tensor}[{piece.row},{piece.col}]"
            message = f"finds {actual} where it needs {expected[0]}[{expected[1]},{expected[2]}]"
            follower.findings.add("value", follower.graph.operations[position], message, need.region)
            return


FOLLOW: dict[type, Callable[[Follower, int, Any], None]] = {
    Put: _follow_move,
    Get: _follow_move,
    Copy: _follow_move,
    ReducePut: _follow_reduce_put,
    Retire: _follow_retire,
    Clear: _follow_clear,
    Compute: _follow_compute,
    Reduce: _follow_reduce,
    Apply: _follow_apply,
}


def check_goal(goal: Goal, value: RegionValue, findings: Findings) -> None:
    """Add a refusal for every part of the goal's region that has another value. Empty ranges contribute nothing."""
    terms = tuple([term for term in goal.terms if term[0] < term[1]])
    if goal.unordered:
        terms, value = tuple(sorted(terms)), sort_terms(value)
    nothing = bool(goal.terms) and not terms
    zero = epilogue_applied(ZERO) if is_epilogue_applied(goal.tensor) else ZERO
    for piece in value:
        if piece.tensor == UNKNOWN or (nothing and piece.tensor == zero):
            continue
        expected = (goal.tensor, goal.row + piece.lo_i, goal.col + piece.lo_j)
        is_place = (piece.tensor, piece.row, piece.col) == expected
        if is_place and piece.terms == terms and not nothing:
            continue
        part = _part(goal.region, piece)
        if not is_place:
            message = f"begins with {_shown(piece)}, not with {expected[0]}[{expected[1]},{expected[2]}]"
            findings.add("value", None, message, part)
        else:
            _report_terms(terms, piece.terms, part, findings)


def has_place_for(goal: Goal, out: Region) -> bool:
    """Whether a goal's region contains the rows and columns of a region of its rank."""
    (r0, r1), (c0, c1), whole = out.rows, out.cols, goal.region
    is_inside = whole.rows[0] <= r0 and r1 <= whole.rows[1] and whole.cols[0] <= c0 and c1 <= whole.cols[1]
    return whole.rank == out.rank and is_inside


def _report_terms(expected: Terms, actual: Terms, part: Region, findings: Findings) -> None:
    """Add a refusal that says how the terms of a sum differ from the expected ones."""
    message = f"sums {terms_shown(actual)}, not {terms_shown(expected)}"
    if sorted(expected) == sorted(actual):
        findings.add("contribution_order", None, message, part)
        return
    missing, extra = _terms_without(expected, actual), _terms_without(actual, expected)
    details = [f"lacks {terms_shown(missing)}"] if missing else []
    details += [f"has {terms_shown(extra)} too often"] if extra else []
    findings.add("contributions", None, f"{message}: {' and '.join(details)}", part)


def _terms_without(terms: Terms, others: Terms) -> tuple[Range, ...]:
    """Return the terms that are not among the others, each as often as it is in excess."""
    rest = list(others)
    missing = []
    for term in terms:
        if term in rest:
            rest.remove(term)
        else:
            missing.append(term)
    return tuple(missing)


def _part(region: Region, piece: ValuePiece) -> Region:
    r0, c0 = region.rows[0], region.cols[0]
    rows, cols = (r0 + piece.lo_i, r0 + piece.hi_i), (c0 + piece.lo_j, c0 + piece.hi_j)
    return Region(region.buffer, region.rank, rows, cols)


def _shown(piece: ValuePiece) -> str:
    return "zeros" if piece.tensor == ZERO else f"{piece.tensor}[{piece.row},{piece.col}]"


# Refusals for two accesses that conflict: which operations, where, and the path that is missing between them.


def report_read(graph: Graph, past: Past, position: int | None, region: Region, findings: Findings) -> None:
    """Add a refusal for a read of `region` whose value is not certain. position: None for the caller's read at the
    end."""
    reader = None if position is None else graph.operations[position]
    reader_name = "the caller" if reader is None else reader.name
    before = past.ends[region.rank] if position is None else _past_of_read(graph, past, position, region)
    writers = [at for at in _writers(graph, region) if at != position]
    concurrent = [at for at in writers if not past.has(before, at)]
    if not concurrent:
        reason = "is held at the start or written only in part" if writers else "no input or operation writes it"
        if retirer := _retirer(graph, region):
            reason = f"{retirer.name} has ended its life"
        findings.add("unwritten", reader, f"{reader_name} needs {region}, but {reason}", region)
        return
    writer = graph.operations[concurrent[0]]
    if position is not None and past.has(past.before[concurrent[0]], position):
        message = f"reads what {writer.name} on rank {writer.rank} writes only after it"
        findings.add("stale_read", reader, message, region)
        return
    message = (
        f"{reader_name} reads what {writer.name} on rank {writer.rank} writes, and no path leads from one to the other"
    )
    findings.add("race", reader, f"{message}: {_missing_path(writer, reader)}", region)


def _past_of_read(graph: Graph, past: Past, position: int, region: Region) -> Bits:
    """Return what has completed when the operation reads the region; an addend is read late."""
    operation = graph.operations[position]
    is_late = isinstance(operation, Compute) and region in operation.addends
    is_late |= isinstance(operation, Apply) and any(region == need.region for need in operation.late_needs)
    return past.late.get(position, past.before[position]) if is_late else past.before[position]


def report_write(graph: Graph, position: int, region: Region, other: int | None, findings: Findings) -> None:
    """Add a refusal for a second write. position: below zero for what the buffer holds at the start. other: the first
    writer."""
    operation = graph.operations[position] if position >= 0 else None
    if other is None:
        findings.add("double_write", operation, "the buffer holds a value there at the start", region)
        return
    writer = graph.operations[other]
    if isinstance(writer, Retire) and operation is not None:
        message = f"writes where {writer.name} ends a life, and no path leads from one to the other"
        findings.add("race", operation, f"{message}: {_missing_path(writer, operation)}", region)
        return
    message = f"{writer.name} on rank {writer.rank} writes there in the same call"
    findings.add("double_write", operation, message, region)


def report_update(graph: Graph, past: Past, position: int, region: Region, touched: Bits, findings: Findings) -> None:
    """Add a refusal for an accumulation that is not ordered behind an earlier access. touched: the set of these
    accesses."""
    operation = graph.operations[position]
    concurrent = without(touched, past.before[position])
    other = next(at for at in range(len(graph.operations)) if past.has(concurrent, at))
    if other == position:
        findings.add("race", operation, "its own tiles read what others of its tiles add to", region)
        return
    toucher = graph.operations[other]
    verb = "ends the life of" if isinstance(operation, Retire) else "adds to"
    message = f"{verb} what {toucher.name} on rank {toucher.rank} reads or writes"
    message += ", and no path leads from one to the other"
    findings.add("race", operation, f"{message}: {_missing_path(toucher, operation)}", region)


def _writers(graph: Graph, region: Region) -> list[int]:
    """Return the operations that write a part of the region."""
    return [
        position
        for position, operation in enumerate(graph.operations)
        if any(overlap(region, written) for written in operation.writes)
    ]


def _retirer(graph: Graph, region: Region) -> Retire | None:
    """Return the last operation that retires a part of the region."""
    retiring = (each for each in reversed(graph.operations) if isinstance(each, Retire))
    return next((each for each in retiring if any(overlap(region, one) for one in each.regions)), None)


def _missing_path(first: Operation, second: Operation | None) -> str:
    """Return what the first notifies and what the second waits for, and that an `issue` queue does not order them."""
    notifies = ", ".join(str(notify) for notify in first.notifies[:4]) or "nothing"
    if second is None:
        return f"{first.name} notifies {notifies}, and no operation of the caller's rank waits for that"
    waits = ", ".join(f"{wait.pad}@{second.rank}[{wait.signals[0]}:{wait.signals[1]}]" for wait in second.all_waits[:4])
    message = f"{first.name} notifies {notifies}, {second.name} waits for {waits or 'nothing'}"
    if first.rank == second.rank and first.queue == second.queue:
        return f"{message}, and queue {first.queue} orders by issue, not by completion"
    return message
