"""Rules about waiting: that a wait is a real loop, that it is bounded, and that as many are left as the source has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from tools.ptx_lint.contract import Finding
from tools.ptx_lint.flow import reaches
from tools.ptx_lint.graph import NOTHING, Facts, Spread, facts_before
from tools.ptx_lint.ptx import Edge, Instruction
from tools.ptx_lint.subject import Subject, Wait

# The one question of most rules: on every path, is what arises here paid before it is due there?
# A walk over the control-flow graph carries what is still owed: a debt is added where it arises and removed where it
# is paid; where it is met unpaid, that is a finding. "On every path" is "unpaid on none".

START = -1  # among instructions: a debt is owed before any of them


class Due(NamedTuple):
    """What a rule says where a debt is met unpaid; `{lines}` of the PTX are where it arose."""

    rule: str
    what: str
    cure: str


def unpaid(
    subject: Subject,
    arises: Collection[int],
    paid: Callable[[Instruction], bool],
    due: Iterable[Instruction],
    says: Due,
) -> Iterator[Finding]:
    """A finding for each instruction before which a debt is due and not paid on some path. arises: at which
    instructions, by their index. paid: by such.
    """

    def step(item: Instruction, facts: Facts) -> Facts:
        facts = NOTHING if paid(item) else facts
        return facts | {str(item.index)} if item.index in arises else facts

    before = facts_before(subject.graph, Spread(step, frozenset((str(START),)) if START in arises else NOTHING))
    for item in due:
        if owed := before.get(item.index, NOTHING):
            yield subject.finding(says.rule, item, says.what.format(lines=_lines(subject, owed)), says.cure)


def _lines(subject: Subject, owed: Facts) -> str:
    """`line 3` or `lines 3, 5 and 9 more`, where debts arose."""
    indices = sorted(map(int, owed - {str(START)}))
    shown = ", ".join(str(subject.function.instructions[index].line) for index in indices[:3])
    more = f" and {len(indices) - 3} more" if len(indices) > 3 else ""
    return f"line{'s' if len(indices) > 1 else ''} {shown}{more}"


# How the outcome of a comparison reads when the branch is left on false, or when its operands change places.
_NEGATED = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}
_SWAPPED = {"lt": "gt", "gt": "lt", "ge": "le", "le": "ge", "eq": "eq", "ne": "ne"}
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def wait_loop(subject: Subject) -> Iterator[Finding]:
    """Every wait is a loop that is left only by an acquire that saw the value, or by its deadline or alarm."""
    rule = "wait-loop"
    for wait in subject.waits:
        yield from _exits(subject, wait, rule)
        if not wait.done:
            yield subject.finding(
                rule,
                wait.first_poll,
                "some threads poll and no block barrier tells the others",
                "End the wait with bar.sync",
            )
    for look in subject.looks if len(subject.looks) != subject.contract.looks else ():
        yield subject.finding(
            rule,
            look.instruction,
            "an acquire of a signal that no loop depends on",
            f"Loop until the value is seen, or declare looks={len(subject.looks)}",
        )
    signals = tuple(guard.signal for guard in subject.contract.guarded)
    for access in subject.shared:
        is_alarm = access.order == "relaxed" and reaches(access.pointers, subject.contract.alarm)
        orders_nothing = access.kind == "load" and not access.is_acquire and not is_alarm
        if orders_nothing and access.pointers and reaches(access.pointers, signals):
            yield subject.finding(
                rule,
                access.instruction,
                f"a signal is read by a {access.order} load, which orders nothing after it",
                "Poll with ld.acquire.sys",
            )


def _exits(subject: Subject, wait: Wait, rule: str) -> Iterator[Finding]:
    for edge in wait.blind:
        at = edge.branch or subject.graph.blocks[edge.source].instructions[-1]
        yield subject.finding(
            rule, at, "the spin is left without having seen the value", "Leave only by the acquire or the deadline"
        )
    for edge in wait.seen:
        assert edge.branch is not None  # such exits depend on a condition
        if not any(subject.graph.dominates(poll.instruction, edge.branch) for poll in wait.polls):
            yield subject.finding(
                rule, edge.branch, "the spin can be left before its first look", "Look first, then decide"
            )
        if _outcome(subject, wait, edge) in ("lt", "le", "ne"):
            yield subject.finding(
                rule, edge.branch, "the spin is left while the value has not been reached", "Reverse the comparison"
            )


def _outcome(subject: Subject, wait: Wait, edge: Edge) -> str:
    """How the polled value compares to the wanted one where the edge leaves; empty if that cannot be told."""
    assert edge.branch is not None
    assert edge.branch.predicate is not None
    compare = _definition(subject, edge.branch)
    if compare is None or compare.root != "setp" or compare.parts[1] not in (*_NEGATED, *_UNSIGNED):
        return ""
    polled = {f"read:{poll.instruction.index}" for poll in wait.polls}
    first, second = (bool(subject.flow.of_operand(compare, at) & polled) for at in (1, 2))
    if first == second:
        return ""
    outcome = _UNSIGNED.get(compare.parts[1], compare.parts[1])
    outcome = outcome if first else _SWAPPED[outcome]
    return outcome if edge.taken != edge.branch.predicate.is_negated else _NEGATED[outcome]


def _definition(subject: Subject, branch: Instruction) -> Instruction | None:
    """The last instruction of the branch's block that writes its predicate."""
    assert branch.predicate is not None
    before = subject.graph.blocks[subject.graph.block_of[branch.index]].instructions
    return next((item for item in reversed(before) if branch.predicate.register in item.writes), None)


def deadline(subject: Subject) -> Iterator[Finding]:
    """Every spin on a signal looks at the clock, and at the alarm if the kernel has one."""
    for wait in subject.waits:
        if not wait.timed:
            yield subject.finding(
                "deadline",
                wait.first_poll,
                "a spin without a deadline",
                "Leave when %globaltimer is past it",
            )
        if subject.contract.alarm and not wait.aborted:
            yield subject.finding(
                "deadline", wait.first_poll, "a spin that does not watch the alarm", "Leave when the abort word is set"
            )
    for access in subject.shared:
        if access.kind == "load" and access.order == "weak" and access.pointers & {*subject.contract.alarm}:
            what = "the alarm is read weakly, so perhaps only once"
            yield subject.finding("deadline", access.instruction, what, "Use ld.relaxed.sys")


def declared_counts(subject: Subject) -> Iterator[Finding]:
    """As many waits and releases as the contract declares, and none on pointers that it does not speak of."""
    contract, rule = subject.contract, "declared-counts"
    guards = tuple(guard.signal for guard in contract.guarded)
    announced = tuple(guard.signal for guard in contract.announced)
    counts = (
        ("waits", contract.waits, sum(reaches(wait.pointers, guards) for wait in subject.waits)),
        ("releases", contract.releases, sum(reaches(access.pointers, announced) for access in subject.releases)),
    )
    for word, declared, found in counts:
        if found not in {declared * copies for copies in (1, *contract.unrolls)}:
            yield subject.finding(
                rule,
                None,
                f"{found} {word} in the PTX, {declared} declared",
                "Find out what the compiler deleted or doubled",
            )
    known = (*guards, *announced, *contract.alarm)
    for access in subject.shared:
        orders = access.is_acquire or access.is_release
        if orders and not (access.pointers and reaches(access.pointers, known)):
            origins = ", ".join(sorted(access.pointers)) or "an untraceable pointer"
            yield subject.finding(
                "undeclared-signal",
                access.instruction,
                f"{access.instruction.opcode} through {origins}, which the contract does not name",
                "Declare it as a signal, an alarm, a claim or private",
            )
