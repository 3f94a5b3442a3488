"""From regions to addresses: what a copy queue does is carried out here, word by word, and read back."""

from __future__ import annotations

import pytest

from overweave.errors import ScheduleError
from overweave.ir.problem import Problem
from overweave.ir.schedule import Put, Schedule
from overweave.memory.layout import lay_out
from overweave.memory.lower import (
    StreamStep,
    WorkspaceAddresses,
    WriteStep,
    copy_steps,
    copy_targets,
    reduction_operands,
)
from overweave.schedules.catalog.catalog import build
from overweave.schedules.communication import PUSHES
from tests.ir.two_ranks import altered, exchange, put, sums, total, whole

BASES = (1 << 20, 1 << 40)


def addresses_of(schedule: Schedule) -> WorkspaceAddresses:
    return WorkspaceAddresses(schedule, "float32", lay_out(schedule, "float32"), BASES)


def steps_of(schedule: Schedule) -> tuple[StreamStep, ...]:
    operations = [operation for operation in schedule.of_rank(0) if operation.queue == "copies"]
    return copy_steps(addresses_of(schedule), operations)


def test_an_empty_chunk_still_signals():
    nothing = {"sources": (whole("x", 0, (2, 2)),), "destinations": (whole("slot", 1, (2, 2)),)}
    assert [type(step) for step in steps_of(exchange(put(0, **nothing)))] == [WriteStep]


def test_a_kernel_s_pushes_are_told_their_peers_buffer_and_signals():
    problem = Problem(operator="all_gather_matmul", m=37, n=8, k=8, world_size=3, dtype="float32")
    plan = build("all_gather_matmul.push", problem, {"block_m": 16, "mover": "copy_kernel"})
    layout, bases = lay_out(plan.schedule, "float32"), tuple(rank + 1 << 32 for rank in range(3))
    targets = copy_targets(WorkspaceAddresses(plan.schedule, "float32", layout, bases), 1, PUSHES)
    moves = [operation for operation in plan.schedule.of_rank(1) if operation.queue == PUSHES]
    gathered = layout.buffers["gathered"]
    assert targets == [
        [bases[move.peer] + gathered, bases[move.peer]] if isinstance(move, Put) else [0, 0] for move in moves
    ]
    assert {target for target, _ in targets} >= {bases[0] + gathered, bases[2] + gathered}


def test_a_kernel_cannot_push_into_a_callers_tensor():
    into_x = exchange(put(0, destinations=(whole("x", 1),)))
    with pytest.raises(ScheduleError) as caught:
        copy_targets(addresses_of(into_x), 0, "copies")
    assert "workspace" in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        (altered(sums(), total_0=total(0, operands=(whole("part", 0), whole("x", 0)))), "caller's tensor"),
    ],
)
def test_sums_that_one_kernel_cannot_do(changed: Schedule, found: str):
    with pytest.raises(ScheduleError) as caught:
        reduction_operands(addresses_of(changed), 0, "main")
    assert found in str(caught.value)
