"""Rules about memory order: what must lie between data and the signals that stand for it.

All are walks over the control-flow graph that carry what is still owed: a fact is added where a debt arises, removed
where it is paid, and a finding where it is met unpaid. "On every path" is "unpaid on none".
SOURCE: PTX ISA 8.7, chapter 8 (memory consistency model) and 9.7.9.27 (completion of bulk copies).
"""

from __future__ import annotations

from collections.abc import Iterator

from overweave.compiler.lint_contract import Finding, Guard
from overweave.compiler.lint_subject import Subject
from overweave.compiler.ptx import Edge, Instruction
from overweave.compiler.ptx_flow import Access, is_shared, reaches
from overweave.compiler.ptx_graph import NOTHING, Facts, Spread, facts_after, facts_before


_MBARRIER_WAITS = (("mbarrier", "try_wait"), ("mbarrier", "test_wait"))


def barrier_before_release(subject: Subject) -> Iterator[Finding]:
    """Between what any thread stored (or read of guarded data) and a release lies a block barrier, on every path.

    A release speaks for its own thread only; the barrier makes it speak for the block. The same holds for the arrival by
    which one partition of a warp-specialised kernel passes its stores on to the one that releases.
    """
    owing = {access.instruction.index for access in subject.shared if _must_precede_release(subject, access)}
    if _bulk_stores(subject):
        owing |= {item.index for item in subject.function.instructions if _completes(item)}

    def step(item: Instruction, facts: Facts) -> Facts:
        if subject.is_block_barrier(item):
            return NOTHING
        return facts | {str(item.index)} if item.index in owing else facts

    before = facts_before(subject.graph, Spread(step))
    for release in subject.releases:
        unpaid = before.get(release.instruction.index, NOTHING)
        if unpaid:
            yield subject.finding(
                "barrier-before-release",
                release.instruction,
                f"no block barrier since {_lines(subject, unpaid)}: the release covers its own thread only",
                "Put tl.debug_barrier() before the release",
            )
    announced = tuple(name for guard in subject.contract.announced for name in guard.data)
    stores = {
        str(access.instruction.index)
        for access in subject.shared
        if access.kind == "store" and announced and reaches(access.pointers, announced)
    }
    for arrival in subject.handovers:
        if unpaid := before.get(arrival.index, NOTHING) & stores:
            yield subject.finding(
                "barrier-before-release",
                arrival,
                f"no barrier of the partition since {_lines(subject, unpaid)}: one thread arrives for all",
                "Put gl.thread_barrier() before the arrival",
            )


def _must_precede_release(subject: Subject, access: Access) -> bool:
    if access.kind == "store":
        return not access.is_release
    if access.kind == "atomic":
        signals = tuple(guard.signal for guard in (*subject.contract.announced, *subject.contract.guarded))
        names = (*signals, *subject.contract.alarm)
        return access.order == "relaxed" and not (access.pointers and reaches(access.pointers, names))
    data = tuple(name for guard in subject.contract.guarded for name in guard.data)
    return access.kind == "load" and bool(data) and reaches(access.pointers, data)


def bulk_completion(subject: Subject) -> Iterator[Finding]:
    """Bulk stores are committed and complete (`wait_group 0`, not `.read`) before a release."""
    stores = _bulk_stores(subject)

    def step(item: Instruction, facts: Facts) -> Facts:
        if item.index in stores:
            return facts | {f"open:{item.index}"}
        if item.parts[:4] == ("cp", "async", "bulk", "commit_group"):
            return frozenset(fact.replace("open:", "sent:") for fact in facts)
        return frozenset(fact for fact in facts if not fact.startswith("sent:")) if _completes(item) else facts

    before = facts_before(subject.graph, Spread(step))
    for release in subject.releases:
        unpaid = before.get(release.instruction.index, NOTHING)
        if unpaid:
            yield subject.finding(
                "bulk-completion",
                release.instruction,
                f"bulk stores of {_lines(subject, unpaid)} may still be under way (`.read` only frees shared memory)",
                "Wait with cp.async.bulk.wait_group 0, then a block barrier, before the release",
            )


def proxy_fence(subject: Subject) -> Iterator[Finding]:
    """Proxy fences stand between a wait and bulk loads of what it guards, and between shared stores and a bulk store.

    Bulk copies use another path to memory than loads and stores; only `fence.proxy.async` joins the two.
    """
    done = {item.index: at for at, wait in enumerate(subject.waits) for item in wait.done}
    stores = (item for item in subject.function.instructions if item.root in ("st", "stmatrix") and is_shared(item))
    stored = {item.index for item in stores}

    def step(item: Instruction, facts: Facts) -> Facts:
        facts = facts - _paid_by_fence(item, facts)
        facts = facts | {f"shared:{item.index}"} if item.index in stored else facts
        return facts | {f"wait:{done[item.index]}"} if item.index in done else facts

    before = facts_before(subject.graph, Spread(step))
    for access in subject.shared:
        unpaid = before.get(access.instruction.index, NOTHING)
        waits = (wait for at, wait in enumerate(subject.waits) if f"wait:{at}" in unpaid)
        data = tuple(
            name
            for wait in waits
            for guard in subject.contract.guarded
            if reaches(wait.pointers, (guard.signal,))
            for name in guard.data
        )
        if access.kind == "bulk_load" and data and reaches(access.pointers, data):
            yield subject.finding(
                "proxy-fence",
                access.instruction,
                "a bulk load of guarded data without a proxy fence after the wait",
                "Put fence.proxy.async.global after the wait's block barrier, in every thread",
            )
        if access.kind == "bulk_store" and (shared := frozenset(fact for fact in unpaid if fact.startswith("shared:"))):
            yield subject.finding(
                "proxy-fence",
                access.instruction,
                f"a bulk store may not see the shared-memory stores of {_lines(subject, shared)}",
                "Put fence.proxy.async.shared::cta before the barrier in front of it",
            )


def handed_over(subject: Subject) -> Iterator[Finding]:
    """Tiles that one partition writes to shared memory for another's bulk store are fenced before the arrival."""
    tiles = {item.index for item in subject.function.instructions if item.root == "stmatrix"}

    def step(item: Instruction, facts: Facts) -> Facts:
        facts = facts - _paid_by_fence(item, facts)
        return facts | {f"shared:{item.index}"} if item.index in tiles else facts

    before = facts_before(subject.graph, Spread(step))
    for arrival in subject.handovers if _bulk_stores(subject) else ():
        if unpaid := before.get(arrival.index, NOTHING):
            yield subject.finding(
                "proxy-fence",
                arrival,
                f"another partition's bulk store may not see the tile of {_lines(subject, unpaid)}",
                "Put fence_async_shared() before the arrival",
            )


def guarded_order(subject: Subject) -> Iterator[Finding]:
    """No load of guarded data lies above its wait, not even that of the next turn of the loop around the wait."""
    for guard in subject.contract.guarded:
        loads = (access for access in subject.shared if access.kind in ("load", "bulk_load"))
        data = tuple(access for access in loads if guard.data and reaches(access.pointers, guard.data))
        waits = tuple(wait for wait in subject.waits if reaches(wait.pointers, (guard.signal,)))
        done = {item.index for wait in waits for item in wait.done}
        before = facts_before(subject.graph, _owed(subject, guard, done, inside={wait.loop.header for wait in waits}))
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
        after = facts_after(subject.graph, _owed(subject, guard, releases | handovers, inside=set()))
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
    joins = {item.index for item in subject.function.instructions if item.parts[:2] in _MBARRIER_WAITS}
    before = facts_before(subject.graph, _owed(subject, guard, joins, inside=set()))
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
        announces = access.kind == "atomic" and bool(access.pointers) and reaches(access.pointers, signals)
        if announces and access.order in ("relaxed", "acquire") and "cas" not in access.instruction.parts:
            yield subject.finding(
                "announced-order",
                access.instruction,
                f"a signal is raised with {access.order} order, so nothing stored before it is announced",
                'Pass sem="release"',
            )


def _owed(subject: Subject, guard: Guard, paid: set[int], inside: set[int]) -> Spread:
    """One fact, "owed": from the start, and again on each turn of a loop that pays; removed where it is paid.

    A turn ends at the loop's back edge, or sooner, where the block claims its next tile.
    inside: headers of spins, whose own turns owe nothing new.
    """
    graph = subject.graph
    blocks = {graph.block_of[index] for index in paid}
    loops = [loop for loop in graph.loops if loop.header not in inside and not blocks.isdisjoint(loop.blocks)]
    again = {edge for loop in loops for edge in loop.back_edges}
    turning = {block for loop in loops for block in loop.blocks}
    claims = {index for index in subject.claims if graph.block_of[index] in turning}
    around = {edge for block in blocks for edge in graph.branches_around(block)} if guard.optional else set()

    def step(item: Instruction, facts: Facts) -> Facts:
        if item.index in claims:
            return facts | {"owed"}
        return NOTHING if item.index in paid else facts

    def cross(edge: Edge, facts: Facts) -> Facts:
        if edge in around:
            return NOTHING
        return facts | {"owed"} if edge in again else facts

    return Spread(step, frozenset(("owed",)), cross)


def _bulk_stores(subject: Subject) -> set[int]:
    return {access.instruction.index for access in subject.shared if access.kind == "bulk_store"}


def _completes(item: Instruction) -> bool:
    is_wait = item.parts[:4] == ("cp", "async", "bulk", "wait_group")
    return is_wait and "read" not in item.parts and item.operands == ("0",) and item.predicate is None


def _paid_by_fence(item: Instruction, facts: Facts) -> Facts:
    if item.parts[:3] != ("fence", "proxy", "async") or item.predicate is not None:
        return NOTHING
    spaces = {part.split("::")[0] for part in item.parts[3:]} or {"global", "shared"}
    kinds = {"global": "wait:", "shared": "shared:"}
    return frozenset(fact for fact in facts for space in spaces if fact.startswith(kinds.get(space, "-")))


def _lines(subject: Subject, facts: Facts) -> str:
    """`line 3` or `lines 3, 5 and 9 more` of the instructions that facts end in."""
    indices = sorted(int(fact.split(":")[-1]) for fact in facts)
    shown = ", ".join(str(subject.function.instructions[index].line) for index in indices[:3])
    more = f" and {len(indices) - 3} more" if len(indices) > 3 else ""
    return f"line{'s' if len(indices) > 1 else ''} {shown}{more}"
