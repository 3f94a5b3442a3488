"""Runs every interleaving of a small schedule, twice on one slot: the judge of verify, sharing no code with it.

Memory is one list of labelled elements, signals are counters, and a schedule is a set of events. Nothing is inferred
from the schedule's text but what each event needs to have happened before it: an element holds what was stored into it
last, a wait passes when its counters say so. Reported is what goes wrong in *some* interleaving:

- conflict: two operations can be under way at once, and one writes an element the other touches;
- unwritten: an operation reads an element that nothing was stored into;
- value: a call returns with an output that differs from its goal, element by element, term by term;
- stuck: nothing can happen any more.

An operation is under way from when it may start until it ends. It takes effect at its end: what differs if it takes
effect earlier differs only if a conflicting operation is under way, which is reported. The tiles of a Compute end one
by one, all but the last with a signal only.

A call is three events of its rank. It zeroes the rank's counters and gives its credits; it begins, once the credits
it needs are there, with new inputs in the caller's buffers; it returns after all of the rank's operations, and the
caller's buffers are gone. A credit says no more than that the last call is over: the next need not have begun.

Partial order reduction: an event that may happen now, and that nothing conflicts with which may be under way before it
has happened, is taken alone. All other choices are followed, and states already seen are not followed twice.
SOURCE: Godefroid, Partial-Order Methods (persistent sets); conflicts are preserved because such an event commutes with
everything that can happen before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from msgspec.structs import replace

from campaigns.oracle.memory import Counts, Malformed, Memory, pairs_of_counts
from overweave.ir.schedule import Collective, Compute, Operation, Schedule, Wait

CALLS = 2
MOST_STATES = 20_000
Kind = Literal["right", "conflict", "unwritten", "value", "stuck", "malformed", "unfinished"]


class Outcome(NamedTuple):
    kind: Kind
    message: str
    states: int


class Fault(Exception):
    """Something went wrong in the interleaving at hand."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Event(NamedTuple):
    """needs: events that must have happened, as bits.     waits: (counter, count).     adds: counters it adds one to.

    call, rank, operation: what it belongs to; operation is None for the events of a call itself.
    """

    name: str
    call: int
    rank: int
    operation: Operation | None
    needs: int
    waits: tuple[tuple[int, int], ...]
    adds: tuple[int, ...]


State = tuple[int, tuple[int, ...], tuple[int, ...]]  # events that happened, counters, memory


def explore(schedule: Schedule, serial: bool = False, reduced: bool = True) -> Outcome:
    """All interleavings of two calls, or, if reduced, enough of them to find whatever goes wrong in any.

    serial: every rank runs its operations one by one in launch order. Where blocks are filled in part, with counts of
    several pairs of calls.
    """
    states = 0
    for counts in pairs_of_counts(schedule):
        try:
            outcome = System(schedule, serial, counts).explore(reduced)
        except Malformed as error:
            outcome = Outcome("malformed", str(error), 0)
        states += outcome.states
        if outcome.kind != "right":
            return outcome
    return Outcome("right", "", states)


class System:
    """The events of a schedule, what each conflicts with, and the search through its states."""

    def __init__(self, schedule: Schedule, serial: bool, counts: tuple[Counts, Counts]) -> None:
        self.schedule, self.serial = schedule, serial
        self.memory = Memory(schedule, counts)
        self.is_counted = any(counts)
        self.events: list[Event] = []
        self.last: dict[tuple[int, str], int] = {}  # the event that ends an operation of a call
        self.parts: dict[tuple[int, str], list[int]] = {}  # of collectives, by call and label
        self.resets: dict[int, tuple[int, int]] = {}  # counters that an event zeroes
        self._build()
        self.touches = [self._touches(event) for event in self.events]
        self.conflicts = self._conflicts()

    # What happens.

    def _build(self) -> None:
        ends: dict[int, int] = {}
        for call in range(CALLS):
            zeroed = {}
            for rank in range(self.schedule.world_size):
                zeroed[rank] = self._event("zero", call, rank, None, ends.get(rank, 0))
                self.resets[zeroed[rank]] = self.memory.counters_of(rank)
            begun = {}
            for rank in zeroed:
                givers = [credit.giver for credit in self.schedule.credits if credit.taker == rank]
                needs = [1 << zeroed[one] for one in (rank, *givers)]
                begun[rank] = self._event("begin", call, rank, None, _all(needs))
            for rank in zeroed:
                filled = self.memory.fillings[call].operation
                operations = [filled(one) for one in self.schedule.operations if one.rank == rank]
                self._launch(call, operations, 1 << begun[rank])
                done = _all([1 << self.last[call, operation.name] for operation in operations])
                returned = self._event("return", call, rank, None, done | 1 << begun[rank])
                ends[rank] = 1 << returned

    def _launch(self, call: int, operations: list[Operation], begun: int) -> None:
        queues = {queue.name: queue for queue in self.schedule.queues}
        previous: dict[str, int] = {}
        completed: dict[str, int] = {}
        all_before = 0
        for operation in operations:
            queue = queues[operation.queue]
            needs = begun | _all([completed.get(name, 0) for name in queue.after])
            if queue.order == "complete":
                needs |= previous.get(queue.name, 0)
            if self.serial:
                needs |= all_before
            waits = self._counters(operation.rank, operation.waits)
            adds = tuple(self.memory.counter(one.pad, one.rank, one.signal) for one in operation.notifies)
            for _ in range(operation.instances):
                if isinstance(operation, Compute) and operation.addends:
                    # The product is an event of its own: what its tile adds may arrive, or not, while it is under way.
                    changes = dict.fromkeys(("out", "addends", "copies", "notifies"), ())
                    product = replace(operation, name=f"product of {operation.name}", **changes)
                    needs |= 1 << self._event(product.name, call, operation.rank, product, needs, waits)
                    waits = self._counters(operation.rank, operation.late_waits)
                at = self._event(operation.name, call, operation.rank, operation, needs, waits, adds)
                needs |= 1 << at
                waits = self._counters(operation.rank, operation.waits)
            if (call, operation.name) in self.last:
                raise Malformed(f"two operations are called {operation.name}")
            self.last[call, operation.name] = at
            if isinstance(operation, Collective):
                self.parts.setdefault((call, operation.label), []).append(at)
            previous[queue.name] = all_before = 1 << at
            completed[queue.name] = completed.get(queue.name, 0) | 1 << at

    def _counters(self, rank: int, waits: tuple[Wait, ...]) -> tuple[tuple[int, int], ...]:
        """The counters that waits look at, with what they wait for."""
        signals = ((wait, signal) for wait in waits for signal in range(*wait.signals))
        return tuple((self.memory.counter(wait.pad, rank, signal), wait.count) for wait, signal in signals)

    def _event(
        self,
        name: str,
        call: int,
        rank: int,
        operation: Operation | None,
        needs: int,
        waits: tuple[tuple[int, int], ...] = (),
        adds: tuple[int, ...] = (),
    ) -> int:
        self.events.append(Event(name, call, rank, operation, needs, waits, adds))
        return len(self.events) - 1

    # What conflicts.

    def _touches(self, event: Event) -> tuple[int, int]:
        """(elements it reads, elements it writes). A rank's counters count as one element, which notifies only read."""
        memory = self.memory
        if event.operation is None:
            zeroes = event.name == "zero"
            return 0, memory.pad_element(event.rank) if zeroes else memory.callers_elements(event.rank)
        reads, writes = memory.touches(event.operation)
        for notify in event.operation.notifies:
            reads |= memory.pad_element(notify.rank)
        return reads, writes

    def _commute(self, at: int, other: int) -> bool:
        one, two = self.events[at].operation, self.events[other].operation
        return one is not None and two is not None and self.memory.commute(one, two)

    def _conflicts(self) -> list[int]:
        """For each event, as bits, the events it conflicts with and that its needs do not order before or after it."""
        behind = [0] * len(self.events)
        for at, event in enumerate(self.events):
            for other in _bits(event.needs):
                behind[at] |= behind[other] | 1 << other
        conflicts = [0] * len(self.events)
        for at, (reads, writes) in enumerate(self.touches):
            for other in range(at):
                its_reads, its_writes = self.touches[other]
                ordered = behind[at] >> other & 1 or behind[other] >> at & 1
                if not ordered and self._commute(at, other):
                    continue
                if not ordered and (writes & (its_reads | its_writes) or its_writes & reads):
                    conflicts[at] |= 1 << other
                    conflicts[other] |= 1 << at
        return conflicts

    # The search.

    def explore(self, reduced: bool) -> Outcome:
        everything = (1 << len(self.events)) - 1
        start: State = (0, (0,) * self.memory.counters, self.memory.blank())
        stack, seen = [start], {start}
        while stack:
            state = stack.pop()
            try:
                under_way, ready = self._look(state)
                if not ready and state[0] != everything:
                    stuck = [event.name for at, event in enumerate(self.events) if not state[0] >> at & 1]
                    raise Fault("stuck", f"{', '.join(stuck[:4])} never happen")
                for at in self._choices(state, under_way, ready) if reduced else ready:
                    following = self._happen(state, at)
                    if following not in seen:
                        seen.add(following)
                        stack.append(following)
            except Fault as fault:
                return Outcome(fault.kind, str(fault), len(seen))
            if len(seen) > MOST_STATES:
                return Outcome("unfinished", f"more than {MOST_STATES} states", len(seen))
        return Outcome("right", "", len(seen))

    def _look(self, state: State) -> tuple[int, list[int]]:
        """(events under way, as bits; events that may happen). Raises Fault if two under way conflict."""
        done, counters, _ = state
        under_way = self._under_way(done, counters)
        for at in _bits(under_way):
            other = self.conflicts[at] & under_way
            if other:
                one, two = self.events[at], self.events[next(_bits(other))]
                said = (
                    f"{one.name} (rank {one.rank}, call {one.call}) and {two.name} (rank {two.rank}, call {two.call})"
                )
                raise Fault("conflict", f"{said} are under way at once")
        return under_way, [at for at in _bits(under_way) if self._may_end(at, done, under_way)]

    def _under_way(self, done: int, counters: tuple[int, ...] | list[int]) -> int:
        under_way = 0
        for at, event in enumerate(self.events):
            if not done >> at & 1 and not event.needs & ~done and all(counters[one] >= n for one, n in event.waits):
                under_way |= 1 << at
        return under_way

    def _may_end(self, at: int, done: int, under_way: int) -> bool:
        """Parts of a collective end after all have started."""
        event = self.events[at]
        if not isinstance(event.operation, Collective):
            return True
        parts = self.parts[event.call, event.operation.label]
        ranks = {self.events[part].rank for part in parts}
        return ranks == set(event.operation.ranks) and all((done | under_way) >> part & 1 for part in parts)

    def _choices(self, state: State, under_way: int, ready: list[int]) -> list[int]:
        """One event that commutes with all that can happen before it, or else every event that may happen."""
        done, counters, _ = state
        for at in ready:
            if not self.conflicts[at] & ~done:
                return [at]
        for at in ready:
            if not self.conflicts[at] & self._reach_without(at, done, counters, under_way):
                return [at]
        return ready

    def _reach_without(self, held: int, done: int, counters: tuple[int, ...], under_way: int) -> int:
        """Whatever may get under way while `held` does not happen: at least that, since counters are never zeroed."""
        totals, reached = list(counters), under_way
        fresh = True
        while fresh:
            fresh = False
            for at in _bits(self._under_way(done, totals)):
                reached |= 1 << at
                if at != held and self._may_end(at, done, reached):
                    done |= 1 << at
                    fresh = True
                    for counter in self.events[at].adds:
                        totals[counter] += 1
        return reached

    def _happen(self, state: State, at: int) -> State:
        """The state after an event."""
        done, counters, memory = state
        event = self.events[at]
        new_counters, elements = list(counters), list(memory)
        if at in self.resets:
            lo, hi = self.resets[at]
            new_counters[lo:hi] = [0] * (hi - lo)
        for counter in event.adds:
            new_counters[counter] += 1
        if event.operation is None:
            self._call_event(event, elements)
        elif self.last.get((event.call, event.name)) == at:
            self._take_effect(event, done, elements)
        return done | 1 << at, tuple(new_counters), tuple(elements)

    def _call_event(self, event: Event, elements: list[int]) -> None:
        if event.name == "begin":
            self.memory.fill_inputs(event.rank, event.call, elements)
        elif event.name == "return":
            wrong = self.memory.compare_goals(event.rank, event.call, elements)
            if wrong:
                raise Fault("value", f"call {event.call} of rank {event.rank} returns {wrong}")
            self.memory.spoil_callers_elements(event.rank, elements)

    def _take_effect(self, event: Event, done: int, elements: list[int]) -> None:
        """Stores the results. All parts of a collective take effect with the first that ends."""
        operation = event.operation
        assert operation is not None
        if isinstance(operation, Collective):
            parts = self.parts[event.call, operation.label]
            if any(done >> part & 1 for part in parts):
                return
            found = [part for part in (self.events[at].operation for at in parts) if isinstance(part, Collective)]
            patch = self.memory.exchange(sorted(found, key=lambda part: part.ranks.index(part.rank)), elements)
        else:
            patch = self.memory.result(operation, elements)
        if patch.unwritten is not None and not self.is_counted:  # rows that no count fills may be moved, too
            raise Fault("unwritten", f"{event.name} reads {patch.unwritten}, which nothing was stored into")
        for element, value in patch.stores:
            elements[element] = value


def _bits(bits: int) -> Iterator[int]:
    """The positions of the ones."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _all(sets: list[int]) -> int:
    union = 0
    for one in sets:
        union |= one
    return union
