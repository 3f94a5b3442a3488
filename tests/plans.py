"""Plans of the catalog as tests want them, something of one changed, and what verify says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from overweave.ir.operators.registry import operator_of
from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.ir.schedule import Operation, Schedule
from overweave.ir.tile_order import TileRow
from overweave.ir.verify.plan import MachineLimits, verify_plan, verify_schedule
from overweave.schedules.catalog.catalog import build

Options = Mapping[str, int | str]
SIZES = {"m": 100, "n": 48, "k": 32, "world_size": 3, "dtype": "bfloat16"}


def plan_of(name: str, options: Options | None = None, **problem: Any) -> Plan:
    """A plan of the catalog by its name, for a problem of SIZES unless told; m is raised to what its operator takes."""
    operator = operator_of(name.partition(".")[0])
    sizes: dict[str, Any] = SIZES | problem
    m = operator.whole_rows(sizes["m"], sizes["world_size"])
    return build(name, Problem(operator=operator.name, **sizes | {"m": m}), dict(options or {}))


def with_schedule(plan: Plan, **fields: Any) -> Plan:
    """The plan with these fields of its schedule; tables stay."""
    return replace(plan, schedule=replace(plan.schedule, **fields))


def with_operations(plan: Plan, operations: Iterable[Operation]) -> Plan:
    return with_schedule(plan, operations=tuple(operations))


def changed(plan: Plan, change: Callable[[Any], Operation], kind: type = object) -> Plan:
    """The plan with every operation of a kind changed."""
    return with_operations(plan, (change(one) if isinstance(one, kind) else one for one in plan.schedule.operations))


def with_rows(plan: Plan, change: Callable[[TileRow], TileRow]) -> Plan:
    """The plan with every row of its tables changed; operations stay."""
    orders = (replace(order, rows=tuple(map(change, order.rows))) for order in plan.tile_orders)
    return replace(plan, tile_orders=tuple(orders))


def rules(checked: Plan | Schedule) -> set[str]:
    """The rules by which verify refuses a plan, or a schedule alone."""
    verdict = verify_schedule(checked) if isinstance(checked, Schedule) else verify_plan(checked, MachineLimits())
    return {refusal.rule for refusal in verdict.refusals}


def refusals(plan: Plan) -> str:
    """What verify says against a plan, line by line; empty if it is proven."""
    return "\n".join(map(str, verify_plan(plan, MachineLimits()).refusals))


def refused(plan: Plan, rule: str, *words: str, limits: MachineLimits | None = None) -> None:
    """Asserts that one line against the plan is of this rule and holds all words."""
    found = verify_plan(plan, limits or MachineLimits()).refusals
    said = [str(refusal) for refusal in found if refusal.rule == rule]
    assert any(all(word in line for word in words) for line in said), [str(refusal) for refusal in found]
