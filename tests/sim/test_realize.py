"""Schedules without a plan get engines that suit their queues."""

from __future__ import annotations

import pytest

from overweave.hardware.machine import load
from overweave.ir.problem import Problem
from overweave.schedules.catalog.catalog import build, names
from overweave.sim.realize import realize
from overweave.sim.simulate import total_us


@pytest.mark.parametrize("name", names())
def test_a_bare_schedule_of_the_catalog_gets_the_catalogs_engines(name: str):
    machine = load("h200x4")
    problem = Problem(operator=name.split(".")[0], m=4096, n=2048, k=1024, world_size=4, dtype="bfloat16")
    plan = build(name, problem, {})
    bare = realize(plan.schedule, machine)
    for operation in plan.schedule.operations:
        assert bare.realization.engine_of(operation.queue) == plan.realization.engine_of(operation.queue)
    assert total_us(bare, machine) == pytest.approx(total_us(plan, machine), rel=0.3)
