"""The rule about shares that blocks of one device leave for one another: who comes last finds all of them there.

A block stores its share and counts itself in; the one that counts last reads everybody's. No peer hears of it, so any
scope of the device will do; but a count speaks for one thread, and is heard by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from overweave.compiler.ptx_lint.contract import Finding, Guard
from overweave.compiler.ptx_lint.flow import Access, reaches
from overweave.compiler.ptx_lint.graph import NOTHING, Facts, Spread, facts_before
from overweave.compiler.ptx_lint.ptx import Instruction
from overweave.compiler.ptx_lint.subject import Subject

STORED, UNHEARD, ALONE = "stored", "unheard", "alone"


def counted_shares(subject: Subject) -> Iterator[Finding]:
    """A block barrier lies between a share's stores and its count, which is acq_rel, and between that and any load."""
    for guard in subject.contract.counted:
        yield from _faults(subject, guard)


def _faults(subject: Subject, guard: Guard) -> Iterator[Finding]:
    rule = "counted-shares"
    counts = [one for one in _of(subject, (guard.signal,)) if one.kind == "atomic"]
    data = _of(subject, guard.data)
    for count in counts:
        if count.order != "acq_rel" or count.scope not in ("gpu", "sys"):
            what = f"shares are counted with {count.order} order and {count.scope or 'no'} scope"
            yield subject.finding(rule, count.instruction, what, 'Pass sem="acq_rel", scope="gpu"')
    if not counts and data:
        yield subject.finding(rule, data[0].instruction, "shares are stored and nobody counts them", "Count each")
    before = facts_before(subject.graph, Spread(_step(subject, counts, data), frozenset((UNHEARD,))))
    for count in counts:
        if STORED in before.get(count.instruction.index, NOTHING):
            what = "no block barrier since a share was stored: the count covers its own thread only"
            yield subject.finding(rule, count.instruction, what, "Put tl.debug_barrier() before the count")
    for load in (one for one in data if one.kind == "load"):
        if before.get(load.instruction.index, NOTHING) & {UNHEARD, ALONE}:
            what = "a share is read where not every thread has heard of the count"
            yield subject.finding(
                rule, load.instruction, what, "Read behind the count, and a block barrier behind that"
            )


def _of(subject: Subject, names: tuple[str, ...]) -> list[Access]:
    return [one for one in subject.flow.accesses if one.pointers and reaches(one.pointers, names)]


def _step(subject: Subject, counts: list[Access], data: list[Access]) -> Callable[[Instruction, Facts], Facts]:
    """How facts move: a store is owed a barrier, and a count one behind it before anything is read."""
    counting = {one.instruction.index for one in counts}
    storing = {one.instruction.index for one in data if one.kind == "store"}

    def step(item: Instruction, facts: Facts) -> Facts:
        if subject.is_block_barrier(item):
            return facts - {STORED, ALONE}
        if item.index in counting:
            return facts - {UNHEARD} | {ALONE}
        return facts | {STORED, UNHEARD} if item.index in storing else facts

    return step
