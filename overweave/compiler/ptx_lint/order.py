"""Rules about what must lie between data and a signal: barriers, completion of bulk stores, proxy fences.

All are walks over the control-flow graph that carry what is still owed: a fact is added where a debt arises, removed
where it is paid, and a finding where it is met unpaid. "On every path" is "unpaid on none".
SOURCE: PTX ISA 8.7, chapter 8 (memory consistency model) and 9.7.9.27 (completion of bulk copies).
"""

from __future__ import annotations

from collections.abc import Iterator

from overweave.compiler.ptx_lint.contract import Finding
from overweave.compiler.ptx_lint.flow import Access, is_shared, reaches
from overweave.compiler.ptx_lint.graph import NOTHING, Facts, Spread, facts_before
from overweave.compiler.ptx_lint.ptx import Instruction
from overweave.compiler.ptx_lint.subject import Subject


def barrier_before_release(subject: Subject) -> Iterator[Finding]:
    """Between what any thread stored (or read of guarded data) and a release lies a block barrier, on every path.

    A release speaks for its own thread only; the barrier makes it speak for the block. The same holds for the arrival
    by which one partition of a warp-specialised kernel passes its stores on to the one that releases.
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
    if access.kind == "store" or access.adds_data:
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
