"""Whether a plan's Given and Goal are those of its Problem: it assumes no more, and it promises no less.

The Given and Goal of a schedule alone are what its author wrote. A plan has a Problem, whose operator's record says
what callers bring and what they are owed (`ir/promise.py`). A kernel that an author annotated, and a plan of a schedule
written by hand, whose Problem names no operator, have no record: Given and Goal are the author's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from overweave.ir.operators.registry import OPERATORS
from overweave.ir.plan import Plan
from overweave.ir.promise import Holding, given_to, owed_by
from overweave.ir.schedule import INPUT, OUTPUT, Apply, Goal, InitialContents, Range, Region
from overweave.ir.tensors import finished
from overweave.ir.verify.rules.verdict import Findings, TooMuchWork

MOST_STRIPS = 1 << 20  # goals looked at, once for each strip of columns

RankBuffer = tuple[str, int]  # a buffer and a rank
Holdings = dict[RankBuffer, Holding]


def check_promised(plan: Plan, findings: Findings) -> None:
    """Adds a refusal for every Given that no caller brings, and every result that no Goal is for."""
    problem, schedule = plan.problem, plan.schedule
    if problem.operator not in OPERATORS:
        if problem.operator and not any(isinstance(operation, Apply) for operation in schedule.operations):
            findings.add("form", None, f"there is no operator {problem.operator}; operators are {', '.join(OPERATORS)}")
        findings.notes.append("the problem is no operator's: what is given and what is owed is what the schedule says")
        return
    if problem.world_size != schedule.world_size:
        return  # said elsewhere
    ranks = range(schedule.world_size)
    given: dict[RankBuffer, list[Holding]] = {}
    for one in (one for rank in ranks for one in given_to(problem, rank)):
        given.setdefault((one.buffer, one.rank), []).append(one)
    owed: dict[RankBuffer, list[Holding]] = {}
    for one in (one for rank in ranks for one in owed_by(problem, rank)):
        owed.setdefault((one.buffer, one.rank), []).append(one)
    first_given, first_owed = ({key: all_of[0] for key, all_of in side.items()} for side in (given, owed))
    _check_buffers(plan, first_given, first_owed, findings)
    for each in schedule.given:
        _check_given(each, given.get((each.region.buffer, each.region.rank), ()), findings)
    goals: dict[tuple[str, int], list[Goal]] = {}
    for goal in schedule.goal:
        goals.setdefault((goal.region.buffer, goal.region.rank), []).append(goal)
    for key, holdings in owed.items():
        for holding in holdings:
            mine = goals.get(key, []) if len(holdings) == 1 else _goals_of(holding, goals.get(key, []))
            _check_owed(holding, mine, finished(holding.tensor), findings)


def _check_buffers(plan: Plan, given: Holdings, owed: Holdings, findings: Findings) -> None:
    """Each of the caller's buffers is an operand or a result of the Problem, as wide as that, and of its dtype."""
    for home, holdings in ((INPUT, given), (OUTPUT, owed)):
        known = {holding.buffer: holding for holding in holdings.values()}
        for buffer in plan.schedule.buffers:
            if buffer.home != home:
                continue
            holding = known.get(buffer.name)
            if holding is None:
                findings.add("form", None, f"the problem has no {home} {buffer.name}; it has {', '.join(known)}")
            elif (buffer.cols, plan.dtype_of(buffer.name)) != (holding.shape[1], holding.dtype):
                said = f"{home} {buffer.name} has {buffer.cols} columns of {plan.dtype_of(buffer.name)}"
                findings.add("form", None, f"{said}; the problem has {holding.shape[1]} of {holding.dtype}")
            elif buffer.counted != holding.counted:
                said = f"the rows of {home} {buffer.name} are counted as {buffer.counted}"
                findings.add("form", None, f"{said}; the problem's are as {holding.counted}")


def _check_given(given: InitialContents, ranges: Sequence[Holding], findings: Findings) -> None:
    """A part of what one range of the rank's operand holds."""
    if not ranges:
        findings.add("form", None, "the problem gives nothing there", given.region)
        return
    holding = next((one for one in ranges if _is_within(given.region, one)), ranges[0])
    wanted = _place(holding, given.region)
    if (given.tensor, given.row, given.col) != (holding.tensor, *wanted) or not _is_within(given.region, holding):
        shape, (row, col) = list(holding.shape), holding.at
        said = f"holds {given.tensor}[{given.row},{given.col}], but the problem gives {holding.tensor}[{row},{col}]"
        findings.add("form", None, f"{said}, {shape}, in {holding.buffer}", given.region)


def _goals_of(holding: Holding, goals: list[Goal]) -> list[Goal]:
    """The goals that begin among the rows of one of several holdings of a buffer."""
    return [goal for goal in goals if holding.first <= goal.region.rows[0] < holding.first + holding.shape[0]]


def _check_owed(holding: Holding, goals: Iterable[Goal], ended: str, findings: Findings) -> None:
    """Goals for all of the result, each of them its elements in place, summed over the whole range."""
    regions = []
    for goal in goals:
        terms = sorted(term for term in goal.terms if term[0] < term[1])
        place, is_summed = _place(holding, goal.region), bool(goal.terms)
        if goal.tensor not in (holding.tensor, ended) or (goal.row, goal.col) != place:
            said = f"{holding.tensor}[{place[0]},{place[1]}]"
            findings.add(
                "form", None, f"the goal is {goal.tensor}[{goal.row},{goal.col}], the problem's {said}", goal.region
            )
        elif is_summed != (holding.reduced is not None) or (holding.reduced and not _covers(terms, holding.reduced)):
            said = f"the goal is summed over {terms[:8]}, the problem's result over {holding.reduced}"
            findings.add("form", None, said, goal.region)
        else:
            regions.append(goal.region)
    first = holding.first
    parts = [replace(region, rows=(region.rows[0] - first, region.rows[1] - first)) for region in regions]
    missing = _missing(parts if first else regions, holding.shape)
    if missing:
        rows, cols = (missing[0][0] + first, missing[0][1] + first), missing[1]
        findings.add(
            "form", None, "no goal says what the problem owes", Region(holding.buffer, holding.rank, rows, cols)
        )


def _place(holding: Holding, region: Region) -> tuple[int, int]:
    return holding.at[0] + region.rows[0] - holding.first, holding.at[1] + region.cols[0]


def _is_within(region: Region, holding: Holding) -> bool:
    last = holding.first + holding.shape[0]
    return holding.first <= region.rows[0] and region.rows[1] <= last and region.cols[1] <= holding.shape[1]


def _covers(parts: Iterable[Range], whole: Range) -> bool:
    """Whether ranges in ascending order make up the whole one, each element once."""
    at = whole[0]
    for lo, hi in parts:
        if lo != at:
            return False
        at = hi
    return at == whole[1]


def _missing(regions: list[Region], shape: tuple[int, int]) -> tuple[Range, Range] | None:
    """A rectangle of `shape` that no region covers; None if they cover it all."""
    rows, cols = shape
    if not rows or not cols:
        return None
    cuts = sorted({0, cols, *(cut for region in regions for cut in region.cols if 0 < cut < cols)})
    if len(cuts) * len(regions) > MOST_STRIPS:
        raise TooMuchWork("its goals are cut into too many columns")
    regions.sort(key=lambda region: region.rows)
    for left, right in zip(cuts, cuts[1:], strict=False):
        at = 0
        for region in regions:
            if region.cols[0] <= left and region.cols[1] >= right and region.rows[0] <= at:
                at = max(at, region.rows[1])
        if at < rows:
            return (at, rows), (left, right)
    return None
