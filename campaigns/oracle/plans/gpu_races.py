"""Which accesses to memory the launches of a plan leave unordered: what a stream, an event, a gate or a signal orders.

A second look at what the proof says of races, by what is launched (`gpu_launch.py`) and not by what queues declare: a
queue that is `after` another one is behind it only if its launch is. Sets of operations are bits of an int.
"""

from __future__ import annotations

from collections.abc import Iterator

from campaigns.oracle.plans.gpu_launch import launches
from overweave.ir.plan import Plan
from overweave.ir.schedule import Apply, Collective, Compute, Operation, ReducePut, Region, Wait


class _Order:
    """start, late: what has ended when an operation starts, and when it reads what it waits for late."""

    def __init__(self, plan: Plan) -> None:
        self.operations = plan.schedule.operations
        self.number = {one.name: at for at, one in enumerate(self.operations)}
        self.full: dict[tuple[int, str, int], int] = {}
        self.makers: dict[tuple[int, str, int], int] = {}
        for at, one in enumerate(self.operations):
            for notify in one.notifies:
                key = notify.rank, notify.pad, notify.signal
                self.full[key] = self.full.get(key, 0) + one.instances
                self.makers[key] = self.makers.get(key, 0) | 1 << at
        self.behind = [0] * len(self.operations)
        for rank in range(plan.schedule.world_size):
            self._add_launches(plan, rank)
        self.behind_late = [self._contributors(one.rank, getattr(one, "late_waits", ())) for one in self.operations]
        self.start = [0] * len(self.operations)
        self.late, self.done = list(self.start), list(self.start)
        while self._grow():
            pass

    def _add_launches(self, plan: Plan, rank: int) -> None:
        last: dict[str, int] = {}  # what the last launch of each stream runs
        launched = launches(plan, rank)
        for at, launch in enumerate(launched):
            earlier = [one for one in launched[:at] if one.queue in launch.behind]
            before = self._contributors(rank, launch.gate)
            before |= last.get(launch.stream, 0) | self._bits([one for each in earlier for one in each.operations])
            for one in launch.operations:
                number = self.number[one.name]
                self.behind[number] = before | self._contributors(rank, one.waits)
                if not launch.is_kernel:
                    before = 1 << number
            last[launch.stream] = self._bits(launch.operations) if launch.is_kernel else before

    def _bits(self, operations: tuple[Operation, ...] | list[Operation]) -> int:
        return sum({1 << self.number[one.name] for one in operations})

    def _contributors(self, rank: int, waits: tuple[Wait, ...]) -> int:
        """Whoever must have ended for the waits to pass. A partial count is no promise of anybody's."""
        found = 0
        for wait in waits:
            for at in range(*wait.signals):
                key = rank, wait.pad, at
                found |= self.makers.get(key, 0) if self.full.get(key) == wait.count else 0
        return found

    def _grow(self) -> bool:
        """Once more over all operations; whether any set grew."""
        before, meeting = list(self.done), dict[str, int]()
        for at, one in enumerate(self.operations):
            self.start[at] = self._closed(self.behind[at])
            self.late[at] = self.start[at] | self._closed(self.behind_late[at])
            self.done[at] = self.late[at] | 1 << at
            if isinstance(one, Collective):
                meeting[one.label] = meeting.get(one.label, 0) | self.start[at]
        for at, one in enumerate(self.operations):
            if isinstance(one, Collective):
                self.done[at] |= meeting[one.label]
        return self.done != before

    def _closed(self, behind: int) -> int:
        found, left = 0, behind
        while left:
            lowest = left & -left
            found |= self.done[lowest.bit_length() - 1] | lowest
            left ^= lowest
        return found


def _accesses(operation: Operation, order: _Order) -> Iterator[tuple[Region, bool, int]]:
    """(region, whether written, what has ended by then)."""
    at = order.number[operation.name]
    late: tuple[Region, ...] = ()
    if isinstance(operation, Compute):
        late = operation.addends
    elif isinstance(operation, Apply):
        late = tuple(need.region for need in operation.late_needs)
    for region in operation.reads:
        yield region, False, order.late[at] if region in late else order.start[at]
    for region in operation.writes:
        yield region, True, order.start[at]


def race(plan: Plan) -> str:
    """Two accesses to one element, one of them a write, of which neither is ordered before the other; or nothing."""
    order = _Order(plan)
    places: dict[tuple[str, int], list[tuple[Operation, Region, bool, int]]] = {}
    for one in plan.schedule.operations:
        for region, is_write, past in _accesses(one, order):
            if not region.is_empty:
                places.setdefault((region.buffer, region.rank), []).append((one, region, is_write, past))
    for accesses in places.values():
        for at, (one, region, writes, past) in enumerate(accesses):
            for other, its, also_writes, its_past in accesses[:at]:
                if one is other or not (writes or also_writes) or not _overlap(region, its) or _commute(one, other):
                    continue
                is_behind, is_before = past >> order.number[other.name] & 1, its_past >> order.number[one.name] & 1
                if not (is_behind or is_before):
                    return f"{one.name} and {other.name} meet in {region}, and no launch or signal orders them"
                reader, writer = (one, other) if is_before else (other, one)
                if writes != also_writes and writes == bool(is_behind) and region not in writer.reads:
                    return f"{reader.name} reads {region}, which {writer.name} writes only after it"
    return ""


def _overlap(one: Region, other: Region) -> bool:
    (a, b), (c, d) = (one.rows, one.cols), (other.rows, other.cols)
    return max(a[0], c[0]) < min(a[1], c[1]) and max(b[0], d[0]) < min(b[1], d[1])


def _commute(one: Operation, other: Operation) -> bool:
    """Additions in any order; parts of one collective, which the library orders."""
    if isinstance(one, Collective) and isinstance(other, Collective):
        return one.label == other.label
    return all(isinstance(each, ReducePut) and each.unordered for each in (one, other))
