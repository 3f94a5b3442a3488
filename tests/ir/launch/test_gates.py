"""What the launch of a kernel beside others requires is what verify refuses without."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.ir.launch.streams import first_own_waits, kernels_on_own_streams, launch_obstacle
from overweave.ir.plan import Plan
from overweave.ir.schedule import Operation
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.schedules.methods.registry import METHODS
from tests.plans import plan_of, with_schedule


def without_after(plan: Plan, queue: str) -> Plan:
    queues = tuple(replace(one, after=()) if one.name == queue else one for one in plan.schedule.queues)
    return with_schedule(plan, queues=queues)


def own(plan: Plan, rank: int = 0) -> tuple[Operation, ...]:
    return tuple(plan.schedule.of_rank(rank))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_method_can_be_launched(name: str, world_size: int):
    plan = plan_of(name, m=256, world_size=world_size)
    assert not any(
        launch_obstacle(plan, own(plan, rank), queue)
        for rank in range(world_size)
        for queue in kernels_on_own_streams(plan)
    )


def test_sums_that_no_kernel_boundary_precedes_wait_for_own_tiles():
    plan = plan_of("matmul_reduce_scatter.scatter", m=256, world_size=2)
    assert first_own_waits(own(plan), "sums")
    assert not launch_obstacle(plan, own(plan), "sums")


def test_sums_of_a_stored_ring_are_behind_its_tiles():
    """They wait for tiles of peers alone: launched beside the own tiles they could take their SMs."""
    plan = without_after(plan_of("matmul_all_reduce.ring_stored", m=256, world_size=2), "sums")
    assert "waits for no result of its own rank" in launch_obstacle(plan, own(plan), "sums")
    assert "residency" in {refusal.rule for refusal in verify_plan(plan, MachineLimits()).refusals}
