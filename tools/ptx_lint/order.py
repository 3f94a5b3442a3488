"""Rules about what must lie between data and a signal: barriers, completion of bulk stores, proxy fences.

SOURCE: PTX ISA 8.7, chapter 8 (memory consistency model) and 9.7.9.27 (completion of bulk copies).
"""

from __future__ import annotations

from collections.abc import Iterator

from tools.ptx_lint.contract import Finding
from tools.ptx_lint.flow import Access, is_shared, reaches
from tools.ptx_lint.ptx import Instruction
from tools.ptx_lint.subject import Subject
from tools.ptx_lint.waits import Due, unpaid

BARRIER = Due(
    "barrier-before-release",
    "no block barrier since {lines}: the release covers its own thread only",
    "Put tl.debug_barrier() before the release",
)
BARRIER_OF_PARTITION = Due(
    BARRIER.rule,
    "no barrier of the partition since {lines}: one thread arrives for all",
    "Put gl.thread_barrier() before the arrival",
)
COMPLETION = Due(
    "bulk-completion",
    "bulk stores of {lines} may still be under way (`.read` only frees shared memory)",
    "Wait with cp.async.bulk.wait_group 0, then a block barrier, before the release",
)
FENCE_OF_LOADS = Due(
    "proxy-fence",
    "a bulk load of guarded data without a proxy fence after the wait",
    "Put fence.proxy.async.global after the wait's block barrier, in every thread",
)
FENCE_OF_STORES = Due(
    FENCE_OF_LOADS.rule,
    "a bulk store may not see the shared-memory stores of {lines}",
    "Put fence.proxy.async.shared::cta before the barrier in front of it",
)
FENCE_OF_TILES = Due(
    FENCE_OF_LOADS.rule,
    "another partition's bulk store may not see the tile of {lines}",
    "Put fence_async_shared() before the arrival",
)


def barrier_before_release(subject: Subject) -> Iterator[Finding]:
    """Between what any thread stored (or read of guarded data) and a release lies a block barrier, on every path.

    A release speaks for its own thread only; the barrier makes it speak for the block. The same holds for the arrival
    by which one partition of a warp-specialised kernel passes its stores on to the one that releases.
    """
    owing = {access.instruction.index for access in subject.shared if _must_precede_release(subject, access)}
    if _bulk_stores(subject):
        owing |= {item.index for item in subject.function.instructions if _completes(item)}
    yield from unpaid(subject, owing, subject.is_block_barrier, _releases(subject), BARRIER)
    announced = tuple(name for guard in subject.contract.announced for name in guard.data)
    stores = (access for access in subject.shared if access.kind == "store" and announced)
    told = {access.instruction.index for access in stores if reaches(access.pointers, announced)}
    yield from unpaid(subject, owing & told, subject.is_block_barrier, subject.handovers, BARRIER_OF_PARTITION)


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
    """Bulk stores are committed, and what was committed is complete (`wait_group 0`, not `.read`), before a release."""
    stores = _bulk_stores(subject)
    commits = {item.index for item in subject.function.instructions if _commits(item)} if stores else set[int]()
    yield from unpaid(subject, stores, _commits, _releases(subject), COMPLETION)
    yield from unpaid(subject, commits, _completes, _releases(subject), COMPLETION)


def proxy_fence(subject: Subject) -> Iterator[Finding]:
    """Proxy fences stand between a wait and bulk loads of what it guards, and between shared stores and a bulk store.

    Bulk copies use another path to memory than loads and stores; only `fence.proxy.async` joins the two. Where one
    partition leaves tiles to another's bulk store, the fence stands before the arrival.
    """
    for guard in subject.contract.guarded:
        waits = (wait for wait in subject.waits if reaches(wait.pointers, (guard.signal,)))
        done = {item.index for wait in waits for item in wait.done}
        loads = (access for access in subject.shared if access.kind == "bulk_load" and guard.data)
        due = [access.instruction for access in loads if reaches(access.pointers, guard.data)]
        yield from unpaid(subject, done, _fences_global, due, FENCE_OF_LOADS)
    stores = [item for item in subject.function.instructions if item.root in ("st", "stmatrix") and is_shared(item)]
    bulk = [access.instruction for access in subject.shared if access.kind == "bulk_store"]
    tiles = {item.index for item in stores if item.root == "stmatrix"}
    yield from unpaid(subject, {item.index for item in stores}, _fences_shared, bulk, FENCE_OF_STORES)
    yield from unpaid(subject, tiles, _fences_shared, subject.handovers if bulk else (), FENCE_OF_TILES)


def _releases(subject: Subject) -> list[Instruction]:
    return [release.instruction for release in subject.releases]


def _bulk_stores(subject: Subject) -> set[int]:
    return {access.instruction.index for access in subject.shared if access.kind == "bulk_store"}


def _commits(item: Instruction) -> bool:
    return item.parts[:4] == ("cp", "async", "bulk", "commit_group")


def _completes(item: Instruction) -> bool:
    is_wait = item.parts[:4] == ("cp", "async", "bulk", "wait_group")
    return is_wait and "read" not in item.parts and item.operands == ("0",) and item.predicate is None


def _fences_global(item: Instruction) -> bool:
    return _fences(item, "global")


def _fences_shared(item: Instruction) -> bool:
    return _fences(item, "shared")


def _fences(item: Instruction, space: str) -> bool:
    """Whether it joins the proxies in a state space; without a space it does in all."""
    if item.parts[:3] != ("fence", "proxy", "async") or item.predicate is not None:
        return False
    return space in ({part.split("::")[0] for part in item.parts[3:]} or {space})
