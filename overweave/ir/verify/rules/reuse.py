"""Reuse: whether the next call on the same slot, and the callers, may take their memory back when they do.

A call's prologue on a rank runs after all of its own operations of the slot's last use, and after those of every giver
whose credit it takes. All operations behind that prologue, on any rank, are behind these too. So for each operation the
ranks whose last use is surely over are collected along its past, and compared with the ranks that touch what it
overwrites.

A schedule that reuses by echoes takes no credits and alternates between two halves of memory. Its rule: a rank's call
ends only behind some operation of every other rank in the same call. A rank's calls follow each other in its stream, so
when call e begins anywhere, call e - 1 is over there; that was behind an operation of every peer in e - 1, and this
behind all of the peer's call e - 2, the last one in the same half. All plans of that memory obey the rule, so it does
not matter which of them the calls are of.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from msgspec.structs import replace

from overweave.ir.counts import rows_of_counted
from overweave.ir.schedule import ECHOES, INPUT, LOCAL, OUTPUT, SYMMETRIC, Compute, Operation, Region, Schedule, overlap
from overweave.ir.verify.rules.graphs import Graph
from overweave.ir.verify.rules.happens_before import Past
from overweave.ir.verify.rules.verdict import Findings


def check_reuse(graph: Graph, past: Past, findings: Findings) -> None:
    """Add refusals where the next use may overtake this one, or a peer may touch memory outside of a caller's call."""
    schedule = graph.schedule
    homes = {buffer.name: buffer.home for buffer in schedule.buffers}
    for position, operation in enumerate(graph.operations):
        for region in (*operation.reads, *operation.writes):
            if region.rank != operation.rank and not region.is_empty and homes[region.buffer] in (INPUT, OUTPUT):
                _check_callers_memory(graph, past, position, region, findings)
    if schedule.reuse == ECHOES:
        _check_echoes(schedule, past, findings)
        return
    last_use_over = _last_uses_completed(schedule)
    everyone = (1 << schedule.world_size) - 1
    if all(last_use_over(1 << rank) == everyone for rank in range(schedule.world_size)):
        return
    users = _Users(schedule)
    for position, operation in enumerate(graph.operations):
        own, late = 1 << operation.rank, past.late.get(position, past.before[position])
        over_at_notify = last_use_over(past.ranks(late) | own)
        # A Compute stores behind its late waits, tiles of an Apply perhaps before them. Both notify at their end.
        over_at_start = last_use_over(past.ranks_before(position) | own)
        over_at_store = over_at_notify if isinstance(operation, Compute) else over_at_start
        if over_at_store != everyone:
            _check_next_use(operation, (over_at_store, over_at_notify), users, findings)


def _check_echoes(schedule: Schedule, past: Past, findings: Findings) -> None:
    """Refuse a call that may end on a rank without an operation of some peer before that end."""
    if schedule.credits:
        findings.add("reuse", None, "it takes credits, but reuses by echoes, without a prologue that takes them")
    for rank, completed in enumerate(past.ends if schedule.operations else ()):
        silent = [peer for peer in range(schedule.world_size) if peer != rank and not past.ranks(completed) >> peer & 1]
        if silent:
            message = f"the call ends on rank {rank} without an operation of rank {silent[0]} before that"
            findings.add("reuse", None, f"{message}, so the next call but one may overwrite what that rank still reads")


def _last_uses_completed(schedule: Schedule) -> Callable[[int], int]:
    """Return the function from ranks whose prologues have passed to ranks whose last use of the slot is over, as
    bits."""
    over = [1 << rank for rank in range(schedule.world_size)]
    for credit in schedule.credits:
        over[credit.taker] |= 1 << credit.giver

    @cache
    def over_with(ranks: int) -> int:
        result = 0
        for rank, givers in enumerate(over):
            if ranks >> rank & 1:
                result |= givers
        return result

    return over_with


class _Users:
    """Which ranks touch each instance of a workspace buffer, as a whole and region by region, as bits. The filled rows
    of a counted buffer lie elsewhere in every call: there a region stands for all rows."""

    def __init__(self, schedule: Schedule) -> None:
        workspace = [buffer for buffer in schedule.buffers if buffer.home in (SYMMETRIC, LOCAL)]
        self.names = {buffer.name for buffer in workspace}  # of workspace buffers
        self.rows_of_counted = rows_of_counted(schedule)
        self.of_instance: dict[tuple[str, int], int] = {}  # (buffer, rank) -> ranks that touch it
        self.of_region: dict[tuple[str, int], dict[Region, int]] = {}  # the same, by region
        for operation in schedule.operations:
            bit = 1 << operation.rank
            for region in map(self._all_rows, (*operation.reads, *operation.writes)):
                if region.buffer in self.names:
                    instance = (region.buffer, region.rank)
                    self.of_instance[instance] = self.of_instance.get(instance, 0) | bit
                    regions = self.of_region.setdefault(instance, {})
                    regions[region] = regions.get(region, 0) | bit

    def _all_rows(self, region: Region) -> Region:
        rows = self.rows_of_counted.get(region.buffer)
        return region if rows is None or region.is_empty else replace(region, rows=(0, rows))

    def late_user(self, region: Region, over: int) -> tuple[int, Region] | None:
        """Return a rank outside of `over` that touches the region, and where; None if there is none."""
        region = self._all_rows(region)
        instance = (region.buffer, region.rank)
        if not self.of_instance.get(instance, 0) & ~over:
            return None
        for other, ranks in self.of_region[instance].items():
            if ranks & ~over and overlap(region, other):
                late = ranks & ~over
                return (late & -late).bit_length() - 1, other
        return None


def _check_next_use(operation: Operation, over: tuple[int, int], users: _Users, findings: Findings) -> None:
    """Add a refusal if its writes or notifies in the slot's next use may overtake a rank's use in this one. over:
    ranks, as bits, whose use in this call is over when the operation stores, and when it notifies."""
    rank, (over_at_store, over_at_notify) = operation.rank, over
    for region in operation.writes:
        if late_user := users.late_user(region, over_at_store):
            late, where = late_user
            message = f"in the slot's next use it overwrites what rank {late} may still use in this one ({where})"
            findings.add("reuse", operation, f"{message}: {_no_credit(late, rank)}", region)
            return
    for notify in operation.notifies:
        if not over_at_notify >> notify.rank & 1:
            message = f"in the slot's next use it may notify {notify} before rank {notify.rank} has zeroed it"
            findings.add("reuse", operation, f"{message}: {_no_credit(notify.rank, rank)}")
            return


def _no_credit(giver: int, taker: int) -> str:
    return f"no credit from rank {giver} to rank {taker}, nor to a rank with an operation before it"


def _check_callers_memory(graph: Graph, past: Past, position: int, region: Region, findings: Findings) -> None:
    """Refuse an access to a peer's caller's tensor that may happen before or after the call there."""
    operation, owner = graph.operations[position], region.rank
    if not past.ranks_before(position) >> owner & 1:
        message = f"no operation of rank {owner} comes before it, so the call there may not have begun"
        findings.add("caller_memory", operation, message, region)
    elif not past.has(past.ends[owner], position):
        message = f"no operation of rank {owner} comes after it, so the call there may have returned"
        findings.add("caller_memory", operation, message, region)
