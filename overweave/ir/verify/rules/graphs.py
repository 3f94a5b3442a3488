"""The edges between operations: launch order, signals from notifiers to waiters, the parts of collectives.

Two graphs are made of them. The one with the most constraints, in which each rank runs its operations one by one in
launch order, decides about deadlock (`deadlock.py`). The one with the fewest decides about races (`happens_before.py`).
Every edge of the second is a path of the first, so an order of the first serves both.
"""

from __future__ import annotations

from itertools import accumulate

from overweave.ir.blocks import CUT_BY_MEMBER
from overweave.ir.schedule import LIMIT, Collective, Operation, Schedule
from overweave.ir.verify.rules.blocks import check_members, check_pair
from overweave.ir.verify.rules.collectives import share_of
from overweave.ir.verify.rules.verdict import Findings

SignalIndex = int  # a signal of one rank, numbered through all pads
MOST_WAITED_SIGNALS = 1 << 20


class Graph:
    """The operations of a schedule with their waits and notifies, by position in `operations`.

    of_rank: rank -> positions of its operations, in launch order.
    waited, notified: operation -> its signals.     full: signal -> its full count, if anything notifies it.
    late: operation -> those of `waited` (the last ones) that its addends alone wait for, if it has any.
    members: label -> positions of a collective's parts, in the order of its ranks.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.operations = schedule.operations
        self.of_rank: list[list[int]] = [[] for _ in range(schedule.world_size)]
        self.waited: list[tuple[SignalIndex, ...] | range] = []
        self.late: dict[int, tuple[SignalIndex, ...]] = {}
        self.notified: list[tuple[SignalIndex, ...]] = []
        self.full: dict[SignalIndex, int] = {}
        self.members: dict[str, list[int]] = {}
        sizes = [pad.size for pad in schedule.pads]
        starts = accumulate(sizes, initial=0)
        self.first_signal = {pad.name: start for pad, start in zip(schedule.pads, starts, strict=False)}  # by pad
        self.signals_per_rank = sum(sizes)

    def key(self, pad: str, rank: int, signal: int) -> SignalIndex:
        return rank * self.signals_per_rank + self.first_signal[pad] + signal

    def signal_name(self, key: SignalIndex) -> str:
        """Return `pad@rank[signal]`."""
        rank, number = divmod(key, self.signals_per_rank)
        for pad in reversed(self.schedule.pads):
            if self.first_signal[pad.name] <= number:
                return f"{pad.name}@{rank}[{number - self.first_signal[pad.name]}]"
        raise KeyError(key)

    def contributors(self, key: SignalIndex) -> list[Operation]:
        return [operation for position, operation in enumerate(self.operations) if key in self.notified[position]]


def build_graph(schedule: Schedule, findings: Findings) -> Graph:
    """Return the graph of a well-formed schedule. Add refusals for signals that are miscounted, never sent or never
    awaited."""
    graph = Graph(schedule)
    first, per_rank, full = graph.first_signal, graph.signals_per_rank, graph.full
    notified, of_rank = graph.notified, graph.of_rank
    for position, operation in enumerate(schedule.operations):
        of_rank[operation.rank].append(position)
        keys = tuple([notify.rank * per_rank + first[notify.pad] + notify.signal for notify in operation.notifies])
        if keys:
            instances = operation.instances
            for key in keys:
                full[key] = full.get(key, 0) + instances
        notified.append(keys)
        if type(operation) is Collective:
            graph.members.setdefault(operation.label, []).append(position)
    _add_waits(graph, findings)
    for label, positions in graph.members.items():
        _check_members(graph, label, positions, findings)
    return graph


def _add_waits(graph: Graph, findings: Findings) -> None:
    """Add the awaited signals of all operations. Refuse signals that are miscounted, never sent or never awaited."""
    first, per_rank, full = graph.first_signal, graph.signals_per_rank, graph.full
    awaited: set[SignalIndex] = set()
    total = 0
    for position, operation in enumerate(graph.operations):
        keys: tuple[SignalIndex, ...] | range = ()
        early = sum(wait.signals[1] - wait.signals[0] for wait in operation.waits)
        for wait in operation.all_waits:
            base = operation.rank * per_rank + first[wait.pad]
            lo, hi = wait.signals
            signals = range(base + lo, base + hi)
            total += hi - lo
            if total > MOST_WAITED_SIGNALS:
                findings.add("too_large", operation, f"more than {MOST_WAITED_SIGNALS} signals are waited for")
                return
            count = wait.count
            for key in signals:
                if full.get(key) != count:
                    _miscounted(graph, operation, key, (count, full.get(key)), findings)
            keys = (*keys, *signals) if keys else signals
        awaited.update(keys)
        graph.waited.append(keys)
        if len(keys) > early:
            graph.late[position] = tuple(keys[early:])
    for key in full.keys() - awaited:
        sender = graph.contributors(key)[0]
        name, rank = graph.signal_name(key), key // per_rank
        findings.add("signal", sender, f"notifies {name}, for which no operation on rank {rank} waits")
    for key, count in full.items():
        if count > LIMIT:
            findings.add("width", graph.contributors(key)[0], f"{graph.signal_name(key)} counts to {count}")


def _miscounted(
    graph: Graph, operation: Operation, key: SignalIndex, counts: tuple[int, int | None], findings: Findings
) -> None:
    """Refuse a wait whose count differs from the signal's full count. counts: expected, full."""
    expected, full = counts
    name = graph.signal_name(key)
    if full is None:
        findings.add("signal", operation, f"waits for {name}, which no operation notifies")
        return
    senders = ", ".join(sender.name for sender in graph.contributors(key)[:4])
    findings.add("signal", operation, f"waits until {name} is {expected}, but {senders} add {full} to it in a call")


def _check_members(graph: Graph, label: str, positions: list[int], findings: Findings) -> None:
    """Check that a collective has one part on each rank, all of one kind, with shapes that fit. Sorts `positions` in
    the order of the ranks."""
    parts: dict[int, Collective] = {}
    for position in positions:
        part = graph.operations[position]
        assert isinstance(part, Collective)
        if part.rank in parts:
            findings.add("form", part, f"rank {part.rank} has two parts of collective {label}")
        parts[part.rank] = part
    first = next(iter(parts.values()))
    missing = [rank for rank in first.ranks if rank not in parts]
    if missing:
        findings.add("form", first, f"collective {label} lacks its part on ranks {missing[:16]}")
    for part in parts.values():
        if (part.ranks, part.function) != (first.ranks, first.function):
            findings.add("form", part, f"{part.function} of {part.ranks[:16]}, but {first.name} says otherwise")
            return
    if missing:
        return
    buffers = {buffer.name: buffer for buffer in graph.schedule.buffers}
    check_members(buffers, list(parts.values()), findings)
    of_sources, of_destinations = CUT_BY_MEMBER[first.function]
    order = {rank: index for index, rank in enumerate(first.ranks)}
    has_separate_shares = any(len(side) > 1 for part in parts.values() for side in (part.sources, part.destinations))
    for rank, part in parts.items():
        # Shares of one region are alike: what fits the same part's ends fits each other.
        for peer in first.ranks if has_separate_shares or first.rank == rank else (first.rank,):
            source = share_of(parts[peer].sources, of_sources, len(parts), order[rank])
            destination = share_of(part.destinations, of_destinations, len(parts), order[peer])
            check_pair(buffers, part, (source, destination), findings)
    positions.sort(key=lambda position: order[graph.operations[position].rank])
