"""The rule about alarms: whoever finds a wait void says so, to the host that launched it and to every peer.

A contract promises it whose alarm is a table as well: `alarm=("words", "*limits")`, the own abort word, and where the
report and the peers' abort words lie. The own word is claimed by a compare-and-swap, so that one block reports; then
come the report, its release, and a compare-and-swap of each peer's word. Else the host hears of nothing but its own
deadline, or reads a report that is not all there.
SOURCE: docs/design/0002-device-protocol.md, on waits that are void.
"""

from __future__ import annotations

from collections.abc import Iterator

from tools.ptx_lint.contract import Finding
from tools.ptx_lint.flow import Access, direct
from tools.ptx_lint.graph import NOTHING, Facts, Spread, facts_before
from tools.ptx_lint.ptx import Instruction
from tools.ptx_lint.subject import Subject
from tools.ptx_lint.waits import Due, unpaid

RULE = "sounded-alarm"
LATE = Due(
    RULE,
    "a word of the report is stored below its release",
    "Store all of it, then a barrier, then release it",
)


def sounded_alarm(subject: Subject) -> Iterator[Finding]:
    """A void wait leads to a claim of the alarm; a claim to a released report, and that to the peers' abort words."""
    tables = {name for name in subject.contract.alarm if name.startswith("*")}
    if not tables:
        return
    claims = [one for one in subject.shared if _swaps(one) and direct(one.pointers) & {*subject.contract.alarm}]
    told = [one for one in subject.shared if one.pointers & tables and not direct(one.pointers)]
    reports = [one for one in told if one.is_release and not _swaps(one)]
    yield from _unheard(subject, claims)
    for claim in claims:
        if not _follows(subject, claim, reports):
            what = "the alarm is claimed, and no report is released behind it"
            yield subject.finding(RULE, claim.instruction, what, "Release the report's flag, at system scope")
    for report in reports:
        if not _follows(subject, report, [one for one in told if _swaps(one)]):
            what = "the alarm is reported, and no peer's abort word is set behind it"
            yield subject.finding(RULE, report.instruction, what, "Compare and swap the word of every peer")
    claimed = {claim.instruction.index for claim in claims}
    claimed, reported = ({one.instruction.index for one in accesses} for accesses in (claims, reports))
    words = [one.instruction for one in told if one.kind == "store" and not one.is_release]
    # Behind a claim come the words of the next report.
    yield from unpaid(subject, reported, lambda item: item.index in claimed, words, LATE)


def _unheard(subject: Subject, claims: list[Access]) -> Iterator[Finding]:
    """Waits behind which no alarm can be claimed. Those for packed messages are no spins on a signal."""
    polls = {poll.instruction.index: at for at, wait in enumerate(subject.waits) for poll in wait.polls}

    def step(item: Instruction, facts: Facts) -> Facts:
        return facts | {str(polls[item.index])} if item.index in polls else facts

    before = facts_before(subject.graph, Spread(step))
    heard = NOTHING.union(*(before.get(claim.instruction.index, NOTHING) for claim in claims))
    for at, wait in enumerate(subject.waits):
        if str(at) not in heard:
            what = "a wait that may be void, behind which no alarm is claimed"
            yield subject.finding(RULE, wait.first_poll, what, "Compare and swap the own abort word, and report")
    if subject.contract.packed and not claims:
        yield subject.finding(RULE, None, "no alarm is claimed", "Compare and swap the own abort word, and report")


def _follows(subject: Subject, first: Access, others: list[Access]) -> bool:
    """Whether one of the others comes behind the first, and only there."""
    return any(other is not first and subject.graph.dominates(first.instruction, other.instruction) for other in others)


def _swaps(access: Access) -> bool:
    return access.kind == "atomic" and "cas" in access.instruction.parts
