"""The rule about what one partition waits for and another reads: the wait's outcome must be passed on, then heard.

In a warp-specialised kernel one group of warps may wait for a signal and another read what it guards. Between the two
stands an mbarrier: the waiting partition arrives at it behind its wait, before it waits for anything else, and the
reading one waits for it in each turn. Mbarriers are told apart by where they lie in shared memory; one whose place
depends on a register is not recognised, so what hangs on it is a finding.
"""

from __future__ import annotations

from collections.abc import Iterator

from tools.ptx_lint.contract import Finding, Guard
from tools.ptx_lint.flow import reaches
from tools.ptx_lint.graph import NOTHING, Facts, Spread, facts_before
from tools.ptx_lint.ptx import Function, Instruction
from tools.ptx_lint.subject import Subject, Wait
from tools.ptx_lint.turns import MBARRIER_WAITS, owed

SHARED_BASE = "global_smem"


def passed_on(subject: Subject) -> Iterator[Finding]:
    """Guarded data that a partition reads without a wait of its own is read behind an mbarrier that passes one on."""
    for guard in subject.contract.guarded if subject.graph.partitions else ():
        waits = [wait for wait in subject.waits if reaches(wait.pointers, (guard.signal,))]
        waiting = {subject.graph.partition_of(item) for wait in waits for item in wait.done}
        loads = [
            access.instruction
            for access in subject.shared
            if access.kind in ("load", "bulk_load") and guard.data and reaches(access.pointers, guard.data)
        ]
        places = {place for wait in waits for place in _passing(subject, guard, wait)}
        for partition in dict.fromkeys(map(subject.graph.partition_of, loads)):
            if partition not in waiting:
                reads = [item for item in loads if subject.graph.partition_of(item) == partition]
                yield from _unheard(subject, guard, reads, places)


def _unheard(subject: Subject, guard: Guard, loads: list[Instruction], places: set[int]) -> Iterator[Finding]:
    """loads: of one partition."""
    partition = subject.graph.partition_of(loads[0])
    hearing = _at_mbarriers(subject, ("try_wait", "test_wait"))
    mine = [item for item in hearing if subject.graph.partition_of(item) == partition]
    heard = {item.index for item in mine if _place_of(subject, item) in places}
    spins = (subject.graph.innermost(subject.graph.block_of[index]) for index in heard)
    inside = {spin.header for spin in spins if spin is not None}
    before = facts_before(subject.graph, owed(subject, guard, heard, inside))
    for load in loads:
        if before.get(load.index, NOTHING):
            yield subject.finding(
                "guarded-order",
                load,
                f"a load of {'/'.join(guard.data)} in a partition that does not hear of the wait on {guard.signal}",
                "Let the partition that waits arrive at an mbarrier of its own for this, and wait for that first",
            )


def _passing(subject: Subject, guard: Guard, wait: Wait) -> Iterator[int]:
    """Places of the mbarriers at which a wait's partition arrives behind it, before it waits for another partition."""
    done = {item.index for item in wait.done}
    others = {item.index for item in subject.function.instructions if item.parts[:2] in MBARRIER_WAITS}

    def step(item: Instruction, facts: Facts) -> Facts:
        if item.index in done:
            return frozenset(("waited",))
        return NOTHING if item.index in others else facts

    waited = facts_before(subject.graph, Spread(step))
    unpaid = facts_before(subject.graph, owed(subject, guard, done, {wait.loop.header}))
    for item in _at_mbarriers(subject, ("arrive",)):
        place = _place_of(subject, item)
        if place is not None and waited.get(item.index, NOTHING) and not unpaid.get(item.index, NOTHING):
            yield place


def _at_mbarriers(subject: Subject, verbs: tuple[str, ...]) -> Iterator[Instruction]:
    for item in subject.function.instructions:
        if item.parts[0] == "mbarrier" and item.parts[1] in verbs:
            yield item


def _place_of(subject: Subject, item: Instruction) -> int | None:
    """Where an mbarrier lies, counted from the start of shared memory; None if that is not one number."""
    address = next(operand for operand in item.operands if operand.startswith("["))
    return _offset(subject.function, address.strip("[]"))


def _offset(function: Function, text: str) -> int | None:
    base, _, more = text.partition("+")
    if base == SHARED_BASE:
        return int(more or 0)
    written = [item for item in function.instructions if base in item.writes]
    if len(written) != 1 or written[0].predicate is not None:
        return None
    item = written[0]
    if item.root == "mov":
        return _shifted(_offset(function, item.operands[1]), more)
    if item.root == "add" and item.operands[2].lstrip("-").isdigit():
        return _shifted(_offset(function, item.operands[1]), more, int(item.operands[2]))
    return None


def _shifted(offset: int | None, more: str, by: int = 0) -> int | None:
    return None if offset is None else offset + int(more or 0) + by
