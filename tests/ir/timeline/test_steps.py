"""A schedule in steps: nothing begins before what it needs has ended, and nothing rests without a reason."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.problem import Problem
from overweave.ir.schedule import Collective, Notify, Schedule
from overweave.ir.timeline.operations import signal_edges, timeline_of_steps
from overweave.schedules.catalog.catalog import build, names
from overweave.schedules.methods.registry import method_of


def schedule_of(name: str, world_size: int) -> Schedule:
    sizes = {"m": 256 * world_size, "n": 256, "k": 64 * world_size}
    problem = Problem(operator=method_of(name).operator, world_size=world_size, dtype="bfloat16", **sizes)
    return build(name, problem, {}).schedule


@pytest.mark.slow
def test_every_schedule_of_the_catalog_runs_in_steps():
    for name in names():
        for world_size in (1, 2, 4):
            schedule = schedule_of(name, world_size)
            timeline = timeline_of_steps(schedule)
            begins = {span.name: span.begin_us for span in timeline.spans}
            assert len(begins) == len(schedule.operations)
            assert all(begins[source] < begins[target] for source, target in signal_edges(schedule)), name
            for queue in schedule.queues:
                for rank in range(world_size):
                    own = [begins[each.name] for each in schedule.of_rank(rank) if each.queue == queue.name]
                    assert own == sorted(set(own)), name
            assert min(begins.values(), default=0) == 0


def test_the_parts_of_a_collective_begin_together():
    schedule = schedule_of("matmul_reduce_scatter.sequential", 4)
    begins = {span.name: span.begin_us for span in timeline_of_steps(schedule).spans}
    parts = [begins[each.name] for each in schedule.operations if isinstance(each, Collective)]
    assert len(parts) == 4
    assert set(parts) == {1}


def test_operations_that_wait_for_each_other_are_refused():
    schedule = schedule_of("all_gather_matmul.push", 2)
    waiting = next(each for each in schedule.operations if each.waits)
    wait = waiting.waits[0]
    knot = replace(waiting, notifies=(*waiting.notifies, Notify(wait.pad, waiting.rank, wait.signals[0])))
    held = replace(schedule, operations=tuple(knot if each is waiting else each for each in schedule.operations))
    with pytest.raises(InputError, match="a circle of waits"):
        timeline_of_steps(held)
