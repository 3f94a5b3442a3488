"""What the launch of a kernel beside others requires is what verify refuses without."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.ir.launch.gates import first_own_waits, gate_obstacle
from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.schedules.catalog.catalog import build
from overweave.schedules.methods.registry import METHODS


def plan_of(name: str, world_size: int = 2) -> Plan:
    operator = name.partition(".")[0]
    return build(name, Problem(operator=operator, m=256, n=64, k=32, world_size=world_size, dtype="bfloat16"), {})


def without_after(plan: Plan, queue: str) -> Plan:
    queues = tuple(replace(one, after=()) if one.name == queue else one for one in plan.schedule.queues)
    return replace(plan, schedule=replace(plan.schedule, queues=queues))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_method_can_be_launched(name: str, world_size: int):
    plan = plan_of(name, world_size)
    queues = [queue.name for queue in plan.schedule.queues]
    assert not any(gate_obstacle(plan, rank, queue) for rank in range(world_size) for queue in queues)


def test_sums_that_no_kernel_boundary_precedes_wait_for_own_tiles():
    plan = plan_of("matmul_reduce_scatter.scatter")
    assert first_own_waits(plan, 0, "sums")
    assert not gate_obstacle(plan, 0, "sums")


def test_sums_of_a_stored_ring_are_behind_its_tiles():
    """They wait for tiles of peers alone: launched beside the own tiles they could take their SMs."""
    plan = without_after(plan_of("matmul_all_reduce.ring_stored"), "sums")
    assert "waits for no result of its own rank" in gate_obstacle(plan, 0, "sums")
    assert "residency" in {refusal.rule for refusal in verify_plan(plan, MachineLimits()).refusals}
