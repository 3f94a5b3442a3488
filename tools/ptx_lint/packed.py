"""Rules about packed messages: data and flag in one access of 128 bits, so neither needs a release or an acquire."""

from __future__ import annotations

from collections.abc import Iterator

from tools.ptx_lint.contract import Finding, Guard
from tools.ptx_lint.flow import Access, reaches
from tools.ptx_lint.subject import Subject
from tools.ptx_lint.waits import START, Due, unpaid


def packed_messages(subject: Subject) -> Iterator[Finding]:
    """Every access to packed memory is one relaxed access of 128 bits at system scope, as many as declared; every look
    is in a loop that is left by what it saw, by its deadline or by the alarm.

    SOURCE: PTX ISA 8.7, 8.2: a vector of words is several accesses in any order, a scalar `.b128` is one.
    """
    rule, contract = "packed-messages", subject.contract
    if contract.packed is None:
        return
    touches = [access for access in subject.shared if access.pointers and reaches(access.pointers, contract.packed.at)]
    for access in touches:
        if not _is_message(access):
            yield subject.finding(
                rule,
                access.instruction,
                f"{access.instruction.opcode} on packed memory: data and flag may come apart",
                "Use ld.relaxed.sys.global.b128 and st.relaxed.sys.global.b128",
            )
    counts = (("pushes", contract.packed.pushes, "store"), ("looks", contract.packed.looks, "load"))
    for word, declared, kind in counts:
        found = sum(access.kind == kind for access in touches)
        if found != declared:
            cure = "Find out what the compiler deleted or doubled"
            yield subject.finding(rule, None, f"{found} {word} at messages in the PTX, {declared} declared", cure)
    for access in touches:
        if access.kind == "load":
            yield from _unbounded(subject, access, rule)


def _is_message(access: Access) -> bool:
    is_one = "b128" in access.instruction.parts and not {"v2", "v4"} & set(access.instruction.parts)
    return is_one and access.kind in ("load", "store") and (access.order, access.scope) == ("relaxed", "sys")


def _unbounded(subject: Subject, look: Access, rule: str) -> Iterator[Finding]:
    loop = subject.graph.innermost(subject.graph.block_of[look.instruction.index])
    if loop is None:
        yield subject.finding(rule, look.instruction, "one look at a message, no loop", "Look until the flag is right")
        return
    causes = [subject.causes(edge, loop, (look,)) for edge in loop.exits]
    for cause, what in (
        ("seen", "its flag does not end the spin"),
        ("timed", "a spin without a deadline"),
        ("aborted", "a spin that does not watch the alarm"),
    ):
        if not any(cause in each for each in causes):
            yield subject.finding(
                rule, look.instruction, f"a look at a message: {what}", "Leave by flag, deadline or alarm"
            )
    if any(each == {"blind"} for each in causes):
        yield subject.finding(rule, look.instruction, "the spin is left by chance", "Leave by flag, deadline or alarm")


# The rule about shares that blocks of one device leave for one another: who comes last finds all of them there.
# A block stores its share and counts itself in; the one that counts last reads everybody's. No peer hears of it, so
# any scope of the device will do; but a count speaks for one thread, and is heard by one.

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
