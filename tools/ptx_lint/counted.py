"""The rule about shares that blocks of one device leave for one another: who comes last finds all of them there.

A block stores its share and counts itself in; the one that counts last reads everybody's. No peer hears of it, so any
scope of the device will do; but a count speaks for one thread, and is heard by one.
"""

from __future__ import annotations

from collections.abc import Iterator

from tools.ptx_lint.contract import Finding, Guard
from tools.ptx_lint.debts import START, Due, unpaid
from tools.ptx_lint.flow import Access, reaches
from tools.ptx_lint.subject import Subject

RULE = "counted-shares"
UNCOVERED = Due(
    RULE,
    "no block barrier since a share was stored: the count covers its own thread only",
    "Put tl.debug_barrier() before the count",
)
UNHEARD = Due(
    RULE,
    "a share is read where not every thread has heard of the count",
    "Read behind the count, and a block barrier behind that",
)


def counted_shares(subject: Subject) -> Iterator[Finding]:
    """A block barrier lies between a share's stores and its count, which is acq_rel, and between that and any load."""
    for guard in subject.contract.counted:
        yield from _faults(subject, guard)


def _faults(subject: Subject, guard: Guard) -> Iterator[Finding]:
    counts = [one for one in _of(subject, (guard.signal,)) if one.kind == "atomic"]
    data = _of(subject, guard.data)
    for count in counts:
        if count.order != "acq_rel" or count.scope not in ("gpu", "sys"):
            what = f"shares are counted with {count.order} order and {count.scope or 'no'} scope"
            yield subject.finding(RULE, count.instruction, what, 'Pass sem="acq_rel", scope="gpu"')
    if not counts and data:
        yield subject.finding(RULE, data[0].instruction, "shares are stored and nobody counts them", "Count each")
    counting = {one.instruction.index for one in counts}
    storing = {one.instruction.index for one in data if one.kind == "store"}
    loads = [one.instruction for one in data if one.kind == "load"]
    yield from unpaid(subject, storing, subject.is_block_barrier, (one.instruction for one in counts), UNCOVERED)
    yield from unpaid(subject, storing | {START}, lambda item: item.index in counting, loads, UNHEARD)
    yield from unpaid(subject, counting, subject.is_block_barrier, loads, UNHEARD)


def _of(subject: Subject, names: tuple[str, ...]) -> list[Access]:
    return [one for one in subject.flow.accesses if one.pointers and reaches(one.pointers, names)]
