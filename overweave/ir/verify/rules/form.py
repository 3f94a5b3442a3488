"""Well-formedness: names, bounds, shapes and ownership. All later passes rely on it.

Schedules come from files too, so every field is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from overweave.ir.blocks import CUT_BY_MEMBER
from overweave.ir.dtype import SUM_DTYPE
from overweave.ir.schedule import (
    INPUT,
    LIMIT,
    LOCAL,
    OUTPUT,
    SYMMETRIC,
    Apply,
    Clear,
    Collective,
    Compute,
    Copy,
    Get,
    Operation,
    Put,
    Range,
    Reduce,
    ReducePut,
    Region,
    Retire,
    Schedule,
)
from overweave.ir.verify.rules.blocks import check_blocks, check_sides
from overweave.ir.verify.rules.collectives import fold
from overweave.ir.verify.rules.values import check_shapes
from overweave.ir.verify.rules.verdict import Findings

MOST_RANKS = 1024
MOST_OPERATIONS = 1 << 17
MOST_REGIONS = 1 << 21
MOST_BOUNDARIES = 1 << 20  # pairs of an operation and a queue that its own queue is after


def check_form(schedule: Schedule, findings: Findings) -> Schedule:
    """Add a refusal for every malformed part. Return the schedule with its collectives folded, for the later passes."""
    if not 1 <= schedule.world_size <= MOST_RANKS or len(schedule.operations) > MOST_OPERATIONS:
        size = f"{len(schedule.operations)} operations on {schedule.world_size} ranks"
        findings.add("too_large", None, f"{size}; up to {MOST_OPERATIONS} on 1 to {MOST_RANKS} ranks are proven")
        return schedule
    _check_names(schedule, findings)
    after_count = {queue.name: len(queue.after) for queue in schedule.queues}
    if sum(after_count.get(operation.queue, 0) for operation in schedule.operations) > MOST_BOUNDARIES:
        findings.add("too_large", None, f"operations stand behind queues more than {MOST_BOUNDARIES} times")
        return schedule
    for buffer in schedule.buffers:
        if not (0 <= buffer.rows <= LIMIT and 0 <= buffer.cols <= LIMIT):
            findings.add("bounds", None, f"buffer {buffer.name} is [{buffer.rows}, {buffer.cols}]")
    check_blocks(schedule, findings)
    if findings.refusals:
        return schedule
    for pad in schedule.pads:
        if not 1 <= pad.size <= LIMIT:
            findings.add("bounds", None, f"pad {pad.name} has {pad.size} signals")
    for credit in schedule.credits:
        if not (0 <= credit.giver < schedule.world_size and 0 <= credit.taker < schedule.world_size):
            findings.add("bounds", None, f"credit from rank {credit.giver} to {credit.taker} of {schedule.world_size}")
    form = _Form(schedule, findings)
    form.check_given_and_goal()
    return replace(schedule, operations=tuple([form.checked(operation) for operation in schedule.operations]))


def _check_names(schedule: Schedule, findings: Findings) -> None:
    """Refuse duplicate names, and queues that run after unknown ones."""
    kinds: tuple[tuple[str, Iterable[str]], ...] = (
        ("buffer", (buffer.name for buffer in schedule.buffers)),
        ("pad", (pad.name for pad in schedule.pads)),
        ("queue", (queue.name for queue in schedule.queues)),
        ("operation", (operation.name for operation in schedule.operations)),
    )
    for kind, names in kinds:
        seen: set[str] = set()
        for name in names:
            if name in seen:
                findings.add("name", None, f"two {kind}s are called {name}")
            seen.add(name)
    queue_names = {queue.name for queue in schedule.queues}
    for queue in schedule.queues:
        for name in queue.after:
            if name not in queue_names:
                findings.add("name", None, f"queue {queue.name} runs after queue {name}, which does not exist")


class _Form:
    """Checks operations one by one. sound: regions that are known to lie within their buffers."""

    def __init__(self, schedule: Schedule, findings: Findings) -> None:
        self.schedule, self.findings = schedule, findings
        self.world_size = schedule.world_size
        self.buffers = {buffer.name: buffer for buffer in schedule.buffers}
        self.pads = {pad.name: pad.size for pad in schedule.pads}  # pad -> number of signals
        self.queues = {queue.name for queue in schedule.queues}
        self.sound: set[Region] = set()
        self.regions = 0

    def check_given_and_goal(self) -> None:
        """Check regions, homes and terms of Givens and Goals."""
        for given in self.schedule.given:
            if self.check_region(None, given.region) and self.buffers[given.region.buffer].home not in (INPUT, OUTPUT):
                self.findings.add("form", None, "only a caller's buffer holds anything at the start", given.region)
        adders = [each for each in self.schedule.operations if isinstance(each, ReducePut) and each.unordered]
        for goal in self.schedule.goal:
            if adders and goal.terms and not goal.unordered:
                message = "adds whenever it comes, but the goal names an order"
                self.findings.add("contribution_order", adders[0], message, goal.region)
            if self.check_region(None, goal.region) and self.buffers[goal.region.buffer].home != OUTPUT:
                self.findings.add("form", None, "only an output can be a goal", goal.region)
            if [term for term in goal.terms if not 0 <= term[0] <= term[1]]:
                self.findings.add("form", None, f"terms {terms_shown(goal.terms)} are not ranges", goal.region)

    def checked(self, operation: Operation) -> Operation:
        """Check an operation and return it, folded first if it is a collective, so that all checks are of few
        regions."""
        if type(operation) is Collective and _check_sides(self, operation):
            operation = fold(operation, self.buffers)
        self._check(operation)
        return operation

    def _check(self, operation: Operation) -> None:
        """Check rank, queue, signals and regions of an operation, then what its kind requires."""
        if not 0 <= operation.rank < self.world_size:
            self.findings.add("bounds", operation, f"the group has {self.world_size} ranks")
            return
        if operation.queue not in self.queues:
            self.findings.add("name", operation, f"queue {operation.queue} does not exist")
        self._check_signals(operation)
        reads, writes = operation.reads, operation.writes
        self.regions += len(reads) + len(writes) + len(getattr(operation, "regions", ()))
        if self.regions > MOST_REGIONS:
            self.findings.add("too_large", operation, f"more than {MOST_REGIONS} regions are touched")
            return
        sound = self.sound
        is_sound = True
        for region in reads:
            if region not in sound and not self.check_region(operation, region):
                is_sound = False
        for region in writes:
            if region not in sound and not self.check_region(operation, region):
                is_sound = False
        if is_sound:
            CHECKS[type(operation)](self, operation)
            for region in writes:
                home = self.buffers[region.buffer].home
                if home == INPUT:
                    self.findings.add("ownership", operation, "an input is only read", region)

    def _check_signals(self, operation: Operation) -> None:
        """Check that waits and notifies lie in existing pads."""
        for wait in operation.all_waits:
            size = self.pads.get(wait.pad)
            lo, hi = wait.signals
            if size is None:
                self.findings.add("name", operation, f"waits for pad {wait.pad}, which does not exist")
            elif not 0 <= lo <= hi <= size:
                self.findings.add("bounds", operation, f"waits for {wait}; the pad has {size} signals")
        for notify in operation.notifies:
            size = self.pads.get(notify.pad)
            if size is None:
                self.findings.add("name", operation, f"notifies pad {notify.pad}, which does not exist")
            elif not (0 <= notify.signal < size and 0 <= notify.rank < self.world_size):
                pad_size = f"the pad has {size} signals on each of {self.world_size} ranks"
                self.findings.add("bounds", operation, f"notifies {notify}; {pad_size}")

    def check_region(self, operation: Operation | None, region: Region) -> bool:
        """Whether the region lies in its buffer, on a rank of the group, where the operation may touch it; else refuse
        it."""
        buffer = self.buffers.get(region.buffer)
        if buffer is None:
            self.findings.add("name", operation, f"buffer {region.buffer} does not exist", region)
            return False
        (r0, r1), (c0, c1) = region.rows, region.cols
        if not (0 <= region.rank < self.world_size and 0 <= r0 <= r1 <= buffer.rows and 0 <= c0 <= c1 <= buffer.cols):
            whole = f"{buffer.name} is [{buffer.rows}, {buffer.cols}] on each of {self.world_size} ranks"
            self.findings.add("bounds", operation, f"out of bounds: {whole}", region)
            return False
        if operation is not None and buffer.home == LOCAL and region.rank != operation.rank:
            self.findings.add("ownership", operation, "a local buffer is its own rank's only", region)
            return False
        if buffer.home != LOCAL:  # whether a local region is sound depends on the rank of the operation
            self.sound.add(region)
        return True

    def all_on(self, operation: Operation, regions: Iterable[Region], what: str) -> None:
        """Refuse regions that are not on the operation's own rank. what: their name in the refusal."""
        for region in regions:
            if region.rank != operation.rank:
                self.findings.add("ownership", operation, f"{what} must lie on its own rank", region)

    def none_on(self, operation: Operation, regions: Iterable[Region], what: str) -> None:
        """Refuse regions on the operation's own rank. what: their name in the refusal."""
        for region in regions:
            if region.rank == operation.rank:
                self.findings.add("ownership", operation, f"{what} must lie on a peer", region)

    def same_shapes(self, operation: Operation, left: Sequence[Region], right: Sequence[Region]) -> None:
        """Refuse sources and destinations that differ in number, shape or dtype."""
        if len(left) != len(right):
            self.findings.add("form", operation, f"{len(left)} sources for {len(right)} destinations")
            return
        for source, destination in zip(left, right, strict=True):
            if source.shape != destination.shape:
                self.findings.add("form", operation, f"{source} does not fit {destination}", destination)
            target_dtype = self.buffers[destination.buffer].dtype
            if isinstance(operation, ReducePut) and target_dtype == SUM_DTYPE:
                continue  # the sum of narrower parts
            if self.buffers[source.buffer].dtype != target_dtype:
                self.findings.add("form", operation, f"{source} has another dtype than {destination}", destination)


def _check_push(form: _Form, operation: Put | ReducePut) -> None:
    """Check that a push goes from its own rank to a peer, in equal shapes."""
    form.all_on(operation, operation.sources, "what it pushes")
    form.none_on(operation, operation.destinations, "where it pushes to")
    form.same_shapes(operation, operation.sources, operation.destinations)
    if not 1 <= operation.instances <= LIMIT:
        form.findings.add("form", operation, f"it moves in {operation.instances} tiles")


def _check_clear(form: _Form, operation: Clear) -> None:
    form.all_on(operation, operation.destinations, "what it clears")
    if operation.sources:
        form.findings.add("form", operation, "what it clears has no source")


def _check_retire(form: _Form, operation: Retire) -> None:
    """Check that it moves nothing, and that what it ends lies in the rank's own workspace."""
    form.all_on(operation, operation.regions, "what it retires")
    if operation.sources or operation.destinations or operation.delay_us:
        form.findings.add("form", operation, "it ends the life of regions, and does nothing else")
    for region in operation.regions:
        if not form.check_region(operation, region):
            continue
        if form.buffers[region.buffer].home not in (SYMMETRIC, LOCAL):
            form.findings.add("ownership", operation, "only workspace is written again in a call", region)
        elif form.buffers[region.buffer].counted:
            form.findings.add("form", operation, "rows of a counted buffer live as long as the call", region)


def _check_get(form: _Form, operation: Get) -> None:
    form.none_on(operation, operation.sources, "what it pulls")
    form.all_on(operation, operation.destinations, "where it pulls to")
    form.same_shapes(operation, operation.sources, operation.destinations)


def _check_copy(form: _Form, operation: Copy) -> None:
    form.all_on(operation, operation.sources, "what it copies")
    form.all_on(operation, operation.destinations, "where it copies to")
    form.same_shapes(operation, operation.sources, operation.destinations)


def _check_compute(form: _Form, compute: Compute) -> None:
    """Check ranks and shapes of a matmul."""
    form.all_on(compute, (*compute.a, compute.b), "what it computes with")
    _check_stored(form, compute)
    if not (compute.a and compute.out and 1 <= compute.tiles <= LIMIT):
        form.findings.add("form", compute, "needs `a`, `out` and at least one tile")
        return
    depth, width = compute.b.shape
    heights = [sum(part.shape[0] for part in parts) for parts in (compute.a, compute.out)]
    fits = all(part.shape[1] == depth for part in compute.a) and all(part.shape[1] == width for part in compute.out)
    if not fits or heights[0] != heights[1]:
        a, out = " + ".join(map(str, compute.a)), " + ".join(map(str, compute.out))
        form.findings.add("form", compute, f"{a} @ {compute.b} does not have the shape of {out}", compute.out[0])
    _check_addends(form, compute)
    check_shapes(compute, form.findings)


def _check_stored(form: _Form, compute: Compute) -> None:
    """Refuse results on peers outside symmetric memory, and results on several ranks in different places."""
    form.none_on(compute, compute.copies, "a copy of its result")
    for region in compute.writes:
        if region.rank != compute.rank and form.buffers[region.buffer].home != SYMMETRIC:
            form.findings.add("ownership", compute, "tiles store at a peer where peers may write only", region)
    if len({part.rank for part in compute.out}) > 1:
        form.findings.add("form", compute, "its result lies on several ranks", compute.out[0])
    if compute.accumulate and compute.stored_at != {compute.rank}:
        form.findings.add("form", compute, "it adds to what lies on a peer", compute.writes[-1])
    for copy in compute.copies:
        if len(compute.out) != 1 or (copy.rows, copy.cols) != (compute.out[0].rows, compute.out[0].cols):
            form.findings.add("form", compute, "a copy of its result is not in the same place on a peer", copy)
        if copy.buffer != compute.copies[0].buffer:
            form.findings.add("form", compute, "copies of its result lie in several buffers", copy)


def _check_addends(form: _Form, compute: Compute) -> None:
    """Check that a matmul with addends writes one region, once, of their shape."""
    if not 0 <= compute.place <= len(compute.addends):
        position = f"{compute.place} of its {len(compute.addends)} addends stand before the product"
        form.findings.add("form", compute, position, compute.out[0])
    if compute.late_waits and not compute.addends:
        form.findings.add("form", compute, "waits late, but has nothing to add", compute.out[0])
    if compute.finishes and not compute.addends:
        form.findings.add("form", compute, "finishes a sum, but has nothing to add", compute.out[0])
    if not compute.addends:
        return
    if compute.accumulate or len(compute.out) != 1:
        form.findings.add("form", compute, "with addends it must write one region, once", compute.out[0])
    for addend in compute.addends:
        if addend.shape != compute.out[0].shape:
            form.findings.add("form", compute, f"addend {addend} does not fit {compute.out[0]}", addend)


def _check_reduce(form: _Form, reduce: Reduce) -> None:
    """Check ranks and shapes of a sum."""
    form.all_on(reduce, (reduce.out,), "its sum")
    if not reduce.operands:
        form.findings.add("form", reduce, "has nothing to sum", reduce.out)
    if not 1 <= reduce.tiles <= LIMIT:
        form.findings.add("form", reduce, "needs at least one tile", reduce.out)
    for operand in reduce.operands:
        if operand.shape != reduce.out.shape:
            form.findings.add("form", reduce, f"operand {operand} does not fit {reduce.out}", operand)


def _check_apply(form: _Form, apply: Apply) -> None:
    """Check ranks, tile ranges and late needs of an Apply."""
    form.all_on(apply, apply.reads, "what its tiles read")
    for region in apply.writes:
        if region.rank != apply.rank and form.buffers[region.buffer].home != SYMMETRIC:
            form.findings.add("ownership", apply, "tiles store at a peer where peers may write only", region)
    ordered = [bound for tiles in apply.tiles for bound in tiles]
    if not ordered or ordered != sorted(ordered) or not 1 <= apply.instances <= LIMIT:
        form.findings.add("form", apply, "needs tiles, as ranges in ascending order")
    if bool(apply.late_waits) != bool(apply.late_needs):
        form.findings.add("form", apply, "what it waits for late and what it reads late belong together")
    if any(output.unordered for output in apply.makes):
        form.findings.add("form", apply, "what tiles make has an order")
    if any(not 0 <= lo < hi for output in apply.makes for lo, hi in output.terms):
        form.findings.add("form", apply, "the terms of what it makes are not ranges")


def _check_collective(form: _Form, part: Collective) -> None:
    """Check one part of a collective; `graphs.py` compares the parts with one another."""
    form.all_on(part, (*part.sources, *part.destinations), "its part")
    if part.finishes and part.function not in ("reduce_scatter", "all_reduce"):
        form.findings.add("form", part, f"finishes sums, but an {part.function} makes none")
    if part.rank not in part.ranks or len(set(part.ranks)) != len(part.ranks):
        form.findings.add("form", part, f"its members are {part.ranks[:16]}")
    check_sides(form.buffers, part, form.findings)


def _check_sides(form: _Form, part: Collective) -> bool:
    """Whether a collective has the numbers of sources and destinations that its members need; else refuse it."""
    lengths = [len(part.ranks) if is_per_member else 1 for is_per_member in CUT_BY_MEMBER[part.function]]
    counts = len(part.sources), len(part.destinations)
    per_member = counts[0] // lengths[0] if lengths[0] else 0  # regions; several if blocks are permuted
    if per_member and counts == (per_member * lengths[0], per_member * lengths[1]):
        return True
    sides = f"{counts[0]} sources and {counts[1]} destinations"
    message = f"{sides}; a {part.function} of {len(part.ranks)} has {lengths[0]} and {lengths[1]}"
    form.findings.add("form", part, message)
    return False


def terms_shown(terms: tuple[Range, ...]) -> str:
    """Return the first few ranges of the reduced axis as text, in the order in which they are added."""
    shown = " + ".join(f"[{lo}:{hi}]" for lo, hi in terms[:8])
    return (shown + (" + ..." if len(terms) > 8 else "")) or "none"


CHECKS: dict[type[Operation], Callable[[_Form, Any], None]] = {
    Put: _check_push,
    Get: _check_get,
    Copy: _check_copy,
    Retire: _check_retire,
    ReducePut: _check_push,
    Clear: _check_clear,
    Compute: _check_compute,
    Reduce: _check_reduce,
    Apply: _check_apply,
    Collective: _check_collective,
}
