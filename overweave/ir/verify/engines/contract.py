"""Whether a plan's Given and Goal are the pre- and postconditions of its Problem (`ir/contract.py`).

The Given and Goal of a schedule alone are what its author wrote. A plan has a Problem, whose operator's record says
what callers pass and what they must get. Two kinds of plans have no record, and Given and Goal are taken as they are:
plans of kernels that an author annotated, and plans of handwritten schedules, whose Problem names no operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from overweave.ir.contract import Holding, postconditions, preconditions
from overweave.ir.operators.registry import OPERATORS
from overweave.ir.plan import Plan
from overweave.ir.schedule import INPUT, OUTPUT, Apply, Goal, InitialContents, Range, Region
from overweave.ir.tensors import epilogue_applied
from overweave.ir.verify.rules.verdict import Findings, TooMuchWork

MOST_STRIPS = 1 << 20  # pairs of a goal and a strip of columns that are compared

RankBuffer = tuple[str, int]  # a buffer and a rank
Holdings = dict[RankBuffer, Holding]


def check_contract(plan: Plan, findings: Findings) -> None:
    """Add a refusal for every Given that is no precondition, and every postcondition without a Goal."""
    problem, schedule = plan.problem, plan.schedule
    if problem.operator not in OPERATORS:
        if problem.operator and not any(isinstance(operation, Apply) for operation in schedule.operations):
            findings.add("form", None, f"there is no operator {problem.operator}; operators are {', '.join(OPERATORS)}")
        findings.notes.append("the problem names no operator: the schedule's Given and Goal are its contract")
        return
    if problem.world_size != schedule.world_size:
        return  # `verify_plan` refuses it
    ranks = range(schedule.world_size)
    holdings_given: dict[RankBuffer, list[Holding]] = {}
    for one in (one for rank in ranks for one in preconditions(problem, rank)):
        holdings_given.setdefault((one.buffer, one.rank), []).append(one)
    required: dict[RankBuffer, list[Holding]] = {}
    for one in (one for rank in ranks for one in postconditions(problem, rank)):
        required.setdefault((one.buffer, one.rank), []).append(one)
    inputs, outputs = ({key: holdings[0] for key, holdings in side.items()} for side in (holdings_given, required))
    _check_buffers(plan, inputs, outputs, findings)
    for each in schedule.given:
        _check_given(each, holdings_given.get((each.region.buffer, each.region.rank), ()), findings)
    goals: dict[tuple[str, int], list[Goal]] = {}
    for goal in schedule.goal:
        goals.setdefault((goal.region.buffer, goal.region.rank), []).append(goal)
    for key, holdings in required.items():
        for holding in holdings:
            matching = goals.get(key, []) if len(holdings) == 1 else _goals_of(holding, goals.get(key, []))
            _check_postcondition(holding, matching, epilogue_applied(holding.tensor), findings)


def _check_buffers(plan: Plan, given: Holdings, required: Holdings, findings: Findings) -> None:
    """Compare inputs and outputs of the schedule with the buffers of the contract: columns, dtype, counted."""
    for home, holdings in ((INPUT, given), (OUTPUT, required)):
        by_buffer = {holding.buffer: holding for holding in holdings.values()}
        for buffer in plan.schedule.buffers:
            if buffer.home != home:
                continue
            holding = by_buffer.get(buffer.name)
            if holding is None:
                findings.add("form", None, f"the problem has no {home} {buffer.name}; it has {', '.join(by_buffer)}")
            elif (buffer.cols, plan.dtype_of(buffer.name)) != (holding.shape[1], holding.dtype):
                message = f"{home} {buffer.name} has {buffer.cols} columns of {plan.dtype_of(buffer.name)}"
                findings.add("form", None, f"{message}; the problem has {holding.shape[1]} of {holding.dtype}")
            elif buffer.counted != holding.counted:
                message = f"the rows of {home} {buffer.name} are counted as {buffer.counted}"
                findings.add("form", None, f"{message}; the problem's are as {holding.counted}")


def _check_given(given: InitialContents, ranges: Sequence[Holding], findings: Findings) -> None:
    """Refuse a Given that says more than the precondition of its buffer."""
    if not ranges:
        findings.add("form", None, "the problem has no precondition there", given.region)
        return
    holding = next((one for one in ranges if _is_within(given.region, one)), ranges[0])
    position = _tensor_position(holding, given.region)
    if (given.tensor, given.row, given.col) != (holding.tensor, *position) or not _is_within(given.region, holding):
        shape, (row, col) = list(holding.shape), holding.at
        message = f"holds {given.tensor}[{given.row},{given.col}], but the problem gives {holding.tensor}[{row},{col}]"
        findings.add("form", None, f"{message}, {shape}, in {holding.buffer}", given.region)


def _goals_of(holding: Holding, goals: list[Goal]) -> list[Goal]:
    """Return the goals whose first row lies among the rows of one of several holdings of a buffer."""
    return [goal for goal in goals if holding.first <= goal.region.rows[0] < holding.first + holding.shape[0]]


def _check_postcondition(holding: Holding, goals: Iterable[Goal], with_epilogue: str, findings: Findings) -> None:
    """Check that goals cover the whole result, each with its elements in place, summed over the whole range."""
    regions = []
    for goal in goals:
        terms = sorted(term for term in goal.terms if term[0] < term[1])
        place, is_summed = _tensor_position(holding, goal.region), bool(goal.terms)
        if goal.tensor not in (holding.tensor, with_epilogue) or (goal.row, goal.col) != place:
            message = f"{holding.tensor}[{place[0]},{place[1]}]"
            findings.add(
                "form", None, f"the goal is {goal.tensor}[{goal.row},{goal.col}], the problem's {message}", goal.region
            )
        elif is_summed != (holding.reduced is not None) or (holding.reduced and not _covers(terms, holding.reduced)):
            message = f"the goal is summed over {terms[:8]}, the problem's result over {holding.reduced}"
            findings.add("form", None, message, goal.region)
        else:
            regions.append(goal.region)
    first = holding.first
    parts = [replace(region, rows=(region.rows[0] - first, region.rows[1] - first)) for region in regions]
    missing = _uncovered(parts if first else regions, holding.shape)
    if missing:
        rows, cols = (missing[0][0] + first, missing[0][1] + first), missing[1]
        findings.add(
            "form", None, "no goal meets the problem's postcondition", Region(holding.buffer, holding.rank, rows, cols)
        )


def _tensor_position(holding: Holding, region: Region) -> tuple[int, int]:
    """Return the row and column of the logical tensor at which a region begins."""
    return holding.at[0] + region.rows[0] - holding.first, holding.at[1] + region.cols[0]


def _is_within(region: Region, holding: Holding) -> bool:
    last = holding.first + holding.shape[0]
    return holding.first <= region.rows[0] and region.rows[1] <= last and region.cols[1] <= holding.shape[1]


def _covers(parts: Iterable[Range], whole: Range) -> bool:
    """Whether ranges in ascending order make up the whole one, each element once."""
    next_element = whole[0]
    for lo, hi in parts:
        if lo != next_element:
            return False
        next_element = hi
    return next_element == whole[1]


def _uncovered(regions: list[Region], shape: tuple[int, int]) -> tuple[Range, Range] | None:
    """Return (rows, cols) of `shape` from the first row on that no region covers; None if they cover it all. Sorts
    `regions`."""
    rows, cols = shape
    if not rows or not cols:
        return None
    cuts = sorted({0, cols, *(cut for region in regions for cut in region.cols if 0 < cut < cols)})
    if len(cuts) * len(regions) > MOST_STRIPS:
        raise TooMuchWork("its goals are cut into too many columns")
    regions.sort(key=lambda region: region.rows)
    for left, right in zip(cuts, cuts[1:], strict=False):
        next_row = 0
        for region in regions:
            if region.cols[0] <= left and region.cols[1] >= right and region.rows[0] <= next_row:
                next_row = max(next_row, region.rows[1])
        if next_row < rows:
            return (next_row, rows), (left, right)
    return None
