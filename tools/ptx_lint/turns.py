"""Rules about where data is touched: never above its wait, never below its release, in every turn of every loop.

A persistent kernel waits and releases once per tile, so what was paid for one tile says nothing about the next: a debt
is owed from the start, again on each turn of a loop that pays, and again where the block claims its next tile.
"""

from __future__ import annotations

from collections.abc import Iterator

from tools.ptx_lint.contract import Finding, Guard
from tools.ptx_lint.flow import reaches
from tools.ptx_lint.graph import NOTHING, Facts, Spread, facts_after, facts_before
from tools.ptx_lint.ptx import Edge, Instruction
from tools.ptx_lint.subject import Subject

MBARRIER_WAITS = (("mbarrier", "try_wait"), ("mbarrier", "test_wait"))


def guarded_order(subject: Subject) -> Iterator[Finding]:
    """No load of guarded data lies above its wait, not even that of the next turn of the loop around the wait."""
    for guard in subject.contract.guarded:
        loads = (access for access in subject.shared if access.kind in ("load", "bulk_load"))
        data = tuple(access for access in loads if guard.data and reaches(access.pointers, guard.data))
        waits = tuple(wait for wait in subject.waits if reaches(wait.pointers, (guard.signal,)))
        done = {item.index for wait in waits for item in wait.done}
        spins = {wait.loop.header for wait in waits}
        before = facts_before(subject.graph, owed(subject, guard, done, inside=spins, decided=spins))
        for access in data:
            if before.get(access.instruction.index, NOTHING):
                yield subject.finding(
                    "guarded-order",
                    access.instruction,
                    f"a load of {'/'.join(guard.data)} can run before the wait on {guard.signal}",
                    "Keep the load behind the wait, and the wait outside of pipelined loops",
                )


def announced_order(subject: Subject) -> Iterator[Finding]:
    """No store of announced data lies below its release: each is followed by one, in the same turn of the loop.

    In a warp-specialised kernel, stores of a partition that does not release are followed by an arrival, and the
    partition that releases waits for one first.
    """
    for guard in subject.contract.announced:
        releases = {item.instruction.index for item in subject.releases if reaches(item.pointers, (guard.signal,))}
        handovers = {item.index for item in subject.handovers}
        debts = owed(subject, guard, releases | handovers, inside=set(), ahead=subject.contract.claims_ahead)
        after = facts_after(subject.graph, debts)
        for access in subject.shared:
            is_data = access.kind in ("store", "bulk_store") or (access.kind == "atomic" and access.order == "relaxed")
            touches = guard.data and is_data and reaches(access.pointers, guard.data)
            if touches and not access.is_release and after.get(access.instruction.index, NOTHING):
                yield subject.finding(
                    "announced-order",
                    access.instruction,
                    f"a store of {'/'.join(guard.data)} may never be followed by a release of {guard.signal}",
                    "Keep the store above the release",
                )
        yield from _joined(subject, guard, releases)
    yield from _unordered(subject)


def _joined(subject: Subject, guard: Guard, releases: set[int]) -> Iterator[Finding]:
    """Where partitions pass their work on, the one that releases waits for them in each turn."""
    if not subject.handovers:
        return
    joins = {item.index for item in subject.function.instructions if item.parts[:2] in MBARRIER_WAITS}
    before = facts_before(subject.graph, owed(subject, guard, joins, inside=set()))
    for release in releases:
        if before.get(release, NOTHING):
            yield subject.finding(
                "announced-order",
                subject.function.instructions[release],
                "a release that does not wait for the other partitions' arrivals",
                "Wait on their mbarrier first",
            )


def _unordered(subject: Subject) -> Iterator[Finding]:
    signals = tuple(guard.signal for guard in subject.contract.announced)
    for access in subject.shared:
        announces = (
            access.kind == "atomic"
            and not access.adds_data
            and bool(access.pointers)
            and reaches(access.pointers, signals)
        )
        if announces and access.order in ("relaxed", "acquire") and "cas" not in access.instruction.parts:
            yield subject.finding(
                "announced-order",
                access.instruction,
                f"a signal is raised with {access.order} order, so nothing stored before it is announced",
                'Pass sem="release"',
            )


def owed(
    subject: Subject,
    guard: Guard,
    paid: set[int],
    inside: set[int],
    ahead: bool = False,
    decided: set[int] | None = None,
) -> Spread:
    """One fact, "owed": from the start, and again on each turn of a loop that pays; removed where it is paid.

    A turn ends at the loop's back edge, or sooner, where the block claims its next tile.
    inside: headers of spins, whose own turns owe nothing new. ahead: a claim is for the turn after this one.
    decided: the blocks of which an optional guard may find that there is no need; those that pay, if not told. What a
    spin is left with is no such decision: barriers behind it are for whoever has waited.
    """
    graph = subject.graph
    blocks = {graph.block_of[index] for index in paid}
    loops = [loop for loop in graph.loops if loop.header not in inside and not blocks.isdisjoint(loop.blocks)]
    again = {edge for loop in loops for edge in loop.back_edges}
    turning = {block for loop in loops for block in loop.blocks}
    claims = {index for index in subject.claims if graph.block_of[index] in turning and not ahead}
    needless = blocks if decided is None else decided
    around = {edge for block in needless for edge in graph.branches_around(block)} if guard.optional else set()

    def step(item: Instruction, facts: Facts) -> Facts:
        if item.index in claims:
            return facts | {"owed"}
        return NOTHING if item.index in paid else facts

    def cross(edge: Edge, facts: Facts) -> Facts:
        if edge in around:
            return NOTHING
        return facts | {"owed"} if edge in again else facts

    return Spread(step, frozenset(("owed",)), cross)
