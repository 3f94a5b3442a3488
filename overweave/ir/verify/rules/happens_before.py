"""Which operations have surely completed before each operation starts: the graph with the fewest constraints.

Its edges: completion order of `complete` queues, `after` of queues, every notifier of a signal before its waiters, and
the predecessors of each part of a collective before all its ends. An `issue` queue orders nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from overweave.ir.schedule import Collective
from overweave.ir.verify.rules.collectives import share_of
from overweave.ir.verify.rules.graphs import Graph
from overweave.ir.verify.rules.verdict import WorkBudget

# A set as bits, in words: sets that grew from one another share the words that they have in common.
Bits = tuple[int, ...]
NONE: Bits = ()
_SHIFT = 12  # log2 of a word's bits, which the first word needs for all ranks
_WITHIN = (1 << _SHIFT) - 1
_WORD_BYTES, _PLACE_BYTES = 575, 8
MOST_BYTES = 400 * 2**20  # memory of all sets together


class Past(Struct):
    """Sets of completed operations, as bits. The first word has one bit per rank: "some operation of rank r".

    index: operation -> its bit.     before: operation -> what has completed when it starts.
    late: operation -> what has completed when it reads its addends, if it has any.
    ends: rank -> what has completed when all its operations have.
    """

    world_size: int
    index: list[int]
    before: list[Bits]
    ends: list[Bits]
    late: dict[int, Bits]

    def bit(self, position: int) -> Bits:
        return _singleton(self.index[position])

    def has(self, done: Bits, position: int) -> bool:
        """Whether the operation is in the set."""
        word, offset = self.index[position] >> _SHIFT, self.index[position] & _WITHIN
        return word < len(done) and bool(done[word] >> offset & 1)

    def ranks_before(self, position: int) -> int:
        """Return the ranks, as bits, of which some operation completed before this one starts."""
        return self.ranks(self.before[position])

    def ranks(self, done: Bits) -> int:
        """Return the ranks, as bits, of which some operation is in the set."""
        return done[0] & ((1 << self.world_size) - 1) if done else 0


def union(sets: Iterable[Bits], budget: WorkBudget | None = None) -> Bits:
    """Return the union: the longest set so far itself if the others add nothing to it, else a new one, even where that
    equals a later set. budget: charged for the memory of a new set."""
    first, words = NONE, list[int]()
    changed = 0
    for bits in sets:
        if bits is first:
            continue
        if not first:
            first = bits
            continue
        if not changed:  # so far the union is `first`; merge the shorter set into the longer one
            if len(first) < len(bits):
                first, bits = bits, first
            words = list(first)
        elif len(words) < len(bits):
            words += [0] * (len(bits) - len(words))
        for index, word in enumerate(bits):
            old_word = words[index]
            if word and word is not old_word:
                new_word = old_word | word
                if new_word != old_word:
                    words[index] = word if new_word == word else new_word
                    changed += 1
    if changed and budget:
        budget.spend(_WORD_BYTES * changed + _PLACE_BYTES * len(words))
    return tuple(words) if changed else first


def lacks(done: Bits, needed: Bits) -> bool:
    """Whether an element of `needed` is not in `done`."""
    if len(needed) > len(done) and any(needed[len(done) :]):
        return True
    # A loop takes half the time of any(), since most words are zeros.
    for needed_word, done_word in zip(needed, done, strict=False):  # noqa: SIM110
        if needed_word and needed_word & ~done_word:
            return True
    return False


def without(one: Bits, other: Bits) -> Bits:
    rest = tuple(word & ~removed for word, removed in zip(one, other, strict=False))
    return rest + one[len(other) :]


def _singleton(index: int) -> Bits:
    return (0,) * (index >> _SHIFT) + (1 << (index & _WITHIN),)


def _insert(done: Bits, index: int, rank: int, budget: WorkBudget) -> Bits:
    """Return the set with one operation more, of a rank."""
    last_word = index >> _SHIFT
    words = [*done, *[0] * (last_word + 1 - len(done))]
    words[last_word] |= 1 << (index & _WITHIN)
    if not words[0] >> rank & 1:
        words[0] |= 1 << rank
    budget.spend(_WORD_BYTES + _PLACE_BYTES * len(words))
    return tuple(words)


class _Queue:
    """completed: rank -> what completes with all operations launched so far. after: the same lists of queues it is
    after."""

    def __init__(self, is_complete: bool, world_size: int) -> None:
        self.is_complete = is_complete
        self.completed = [NONE] * world_size
        self.after: list[list[Bits]] = []


def past_of(graph: Graph, order: list[int]) -> Past:
    """Return what has completed before each operation. order: launch order of each rank, so that all `after` is known
    in time. Raises TooMuchWork if the sets of so many operations share too few words."""
    schedule, operations = graph.schedule, graph.operations
    size = schedule.world_size
    queues = {queue.name: _Queue(queue.order == "complete", size) for queue in schedule.queues}
    for declared in schedule.queues:
        queues[declared.name].after = [queues[name].completed for name in dict.fromkeys(declared.after)]
    past = Past(size, [0] * len(operations), [NONE] * len(operations), [NONE] * size, {})
    before, ends = past.before, past.ends
    signals: dict[int, Bits] = {}
    joint: dict[int, Bits] = {}  # position of a part -> what has completed before all that send to it start
    budget = WorkBudget(MOST_BYTES, "what happens before what has too little in common")
    for index, position in enumerate(order, size):
        operation = operations[position]
        rank = operation.rank
        past.index[position] = index
        if type(operation) is Collective:
            if position not in joint:
                members = graph.members[operation.label]
                starts = [union(_completed_before_start(graph, member, queues, signals), budget) for member in members]
                joint |= _joined(graph, members, starts, budget)
                for member, start in zip(members, starts, strict=True):
                    before[member] = start
            start = joint[position]
        else:
            start = before[position] = union(_completed_before_start(graph, position, queues, signals), budget)
            if position in graph.late:
                late = (signals[key] for key in graph.late[position])
                start = past.late[position] = union((start, *late), budget)
        completed = _insert(start, index, rank, budget)
        queue = queues[operation.queue]
        queue.completed[rank] = completed if queue.is_complete else union((queue.completed[rank], completed), budget)
        ends[rank] = union((ends[rank], completed), budget)
        for key in graph.notified[position]:
            signals[key] = union((signals[key], completed), budget) if key in signals else completed
    return past


def _joined(graph: Graph, members: list[int], starts: list[Bits], budget: WorkBudget) -> dict[int, Bits]:
    """Return what has completed when each part of a collective ends: what precedes all of them, or, of an all-to-all,
    those that send it anything, and itself."""
    everything, count = union(starts, budget), len(members)
    joined = dict.fromkeys(members, everything)
    for at, member in enumerate(members):
        part = graph.operations[member]
        assert isinstance(part, Collective)
        if part.function == "all_to_all" and len(part.destinations) == count:  # folded shares are all alike
            shares = [share_of(part.destinations, True, count, sender) for sender in range(count)]
            sends = [sender == at or any(not one.is_empty for one in share) for sender, share in enumerate(shares)]
            if not all(sends):
                of_senders = [start for start, is_one in zip(starts, sends, strict=True) if is_one]
                joined[member] = union(of_senders, budget)
    return joined


def _completed_before_start(
    graph: Graph, position: int, queues: dict[str, _Queue], signals: dict[int, Bits]
) -> list[Bits]:
    """Return the sets whose union has completed when the operation starts."""
    operation = graph.operations[position]
    rank, queue = operation.rank, queues[operation.queue]
    sets = [queue.completed[rank]] if queue.is_complete else []
    sets += [completed[rank] for completed in queue.after]
    waited = graph.waited[position]
    sets += [signals[key] for key in waited[: len(waited) - len(graph.late.get(position, ()))]]
    return sets
