"""The one question of most rules: on every path, is what arises here paid before it is due there?

A walk over the control-flow graph carries what is still owed: a debt is added where it arises and removed where it is
paid; where it is met unpaid, that is a finding. "On every path" is "unpaid on none".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from tools.ptx_lint.contract import Finding
from tools.ptx_lint.graph import NOTHING, Facts, Spread, facts_before
from tools.ptx_lint.ptx import Instruction
from tools.ptx_lint.subject import Subject

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
