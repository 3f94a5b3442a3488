"""What surely happened before each operation starts: the graph with the fewest constraints.

Its edges: completion order of `complete` queues, `after` of queues, every contributor of a signal before its waiters,
and what stood before any part of a collective before that collective's ends. Order within an `issue` queue is none.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from overweave.ir.schedule import Collective
from overweave.ir.verify.rules.graphs import Graph
from overweave.ir.verify.rules.verdict import WorkBudget

# A set as bits, in words: sets that grew from one another share the words that they have in common.
Bits = tuple[int, ...]
NONE: Bits = ()
_SHIFT = 12  # of a word's bits: as many as there may be ranks, or more
_WITHIN = (1 << _SHIFT) - 1
_WORD_BYTES, _PLACE_BYTES = 575, 8
MOST_BYTES = 400 * 2**20  # of all sets


class Past(Struct):
    """Sets hold one bit of the first word for "some operation of rank r", then one for each operation.

    index: of each operation's bit.     before: what has completed when it starts.
    late: what has completed when it reads its addends, if it has any.
    ends: what has completed when all operations of a rank have.
    """

    world_size: int
    index: list[int]
    before: list[Bits]
    ends: list[Bits]
    late: dict[int, Bits]

    def bit(self, position: int) -> Bits:
        """The set of one operation."""
        return _only(self.index[position])

    def has(self, done: Bits, position: int) -> bool:
        """Whether the operation is in the set."""
        word, at = self.index[position] >> _SHIFT, self.index[position] & _WITHIN
        return word < len(done) and bool(done[word] >> at & 1)

    def ranks_before(self, position: int) -> int:
        """Ranks, as bits, of which some operation completed before this one starts."""
        return self.ranks(self.before[position])

    def ranks(self, done: Bits) -> int:
        """Ranks, as bits, of which some operation is in the set."""
        return done[0] & ((1 << self.world_size) - 1) if done else 0


def union(sets: Iterable[Bits], purse: WorkBudget | None = None) -> Bits:
    """What is in any of the sets; one of them where that is all. A purse pays for a new one."""
    first, words = NONE, list[int]()
    new = 0
    for one in sets:
        if one is first:
            continue
        if not first:
            first = one
            continue
        if not new:
            if len(first) < len(one):
                first, one = one, first
            words = list(first)
        elif len(words) < len(one):
            words += [0] * (len(one) - len(words))
        for at, its in enumerate(one):
            mine = words[at]
            if its and its is not mine:
                both = mine | its
                if both != mine:
                    words[at] = its if both == its else both
                    new += 1
    if new and purse:
        purse.take(_WORD_BYTES * new + _PLACE_BYTES * len(words))
    return tuple(words) if new else first


def lacks(done: Bits, needed: Bits) -> bool:
    """Whether anything needed is not done."""
    if len(needed) > len(done) and any(needed[len(done) :]):
        return True
    for its, mine in zip(needed, done, strict=False):  # noqa: SIM110 - most words are zeros: a loop takes half the time
        if its and its & ~mine:
            return True
    return False


def without(one: Bits, other: Bits) -> Bits:
    """What is in one set and not in the other."""
    both = tuple(its & ~mine for its, mine in zip(one, other, strict=False))
    return both + one[len(other) :]


def _only(index: int) -> Bits:
    return (0,) * (index >> _SHIFT) + (1 << (index & _WITHIN),)


def _with(done: Bits, index: int, rank: int, purse: WorkBudget) -> Bits:
    """The set and one operation more, of a rank."""
    at = index >> _SHIFT
    words = [*done, *[0] * (at + 1 - len(done))]
    words[at] |= 1 << (index & _WITHIN)
    if not words[0] >> rank & 1:
        words[0] |= 1 << rank
    purse.take(_WORD_BYTES + _PLACE_BYTES * len(words))
    return tuple(words)


class _Queue:
    """`completed`: what completes with all operations launched so far, for each rank."""

    def __init__(self, is_complete: bool, world_size: int) -> None:
        self.is_complete = is_complete
        self.completed = [NONE] * world_size
        self.after: list[list[Bits]] = []


def past_of(graph: Graph, order: list[int]) -> Past:
    """Follows `order`, in which the operations of a rank stand as launched, so all that is `after` is known in time.

    Raises TooMuchWork where the sets of so many operations have too little in common.
    """
    schedule, operations = graph.schedule, graph.operations
    size = schedule.world_size
    queues = {queue.name: _Queue(queue.order == "complete", size) for queue in schedule.queues}
    for declared in schedule.queues:
        queues[declared.name].after = [queues[name].completed for name in dict.fromkeys(declared.after)]
    past = Past(size, [0] * len(operations), [NONE] * len(operations), [NONE] * size, {})
    before, ends = past.before, past.ends
    signals: dict[int, Bits] = {}
    joint: dict[str, Bits] = {}
    purse = WorkBudget(MOST_BYTES, "what happens before what has too little in common")
    for index, position in enumerate(order, size):
        operation = operations[position]
        rank = operation.rank
        past.index[position] = index
        if type(operation) is Collective:
            if operation.label not in joint:
                members = graph.members[operation.label]
                starts = [union(_ended(graph, member, queues, signals), purse) for member in members]
                joint[operation.label] = union(starts, purse)
                for member, start in zip(members, starts, strict=True):
                    before[member] = start
            start = joint[operation.label]
        else:
            start = before[position] = union(_ended(graph, position, queues, signals), purse)
            if position in graph.late:
                late = (signals[key] for key in graph.late[position])
                start = past.late[position] = union((start, *late), purse)
        completed = _with(start, index, rank, purse)
        queue = queues[operation.queue]
        queue.completed[rank] = completed if queue.is_complete else union((queue.completed[rank], completed), purse)
        ends[rank] = union((ends[rank], completed), purse)
        for key in graph.notified[position]:
            signals[key] = union((signals[key], completed), purse) if key in signals else completed
    return past


def _ended(graph: Graph, position: int, queues: dict[str, _Queue], signals: dict[int, Bits]) -> list[Bits]:
    """The sets of all that has completed when the operation starts."""
    operation = graph.operations[position]
    rank, queue = operation.rank, queues[operation.queue]
    sets = [queue.completed[rank]] if queue.is_complete else []
    sets += [completed[rank] for completed in queue.after]
    waited = graph.waited[position]
    sets += [signals[key] for key in waited[: len(waited) - len(graph.late.get(position, ()))]]
    return sets
