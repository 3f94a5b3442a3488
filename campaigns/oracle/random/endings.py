"""Random right schedules whose sums are finished where they become whole: on their way to the caller."""

from __future__ import annotations

from random import Random

from msgspec.structs import replace

from campaigns.oracle.random.sums import ring, scatter, scatter_into_tiles
from campaigns.oracle.random.totals import all_reduces, read_everywhere
from overweave.ir.schedule import Collective, Compute, Operation, Reduce, Schedule

MADE = (scatter, scatter_into_tiles, ring, all_reduces, read_everywhere)


def adds(operation: Operation) -> bool:
    """Whether an operation makes a sum that it could finish."""
    if isinstance(operation, Compute):
        return bool(operation.addends)
    is_sum = isinstance(operation, Collective) and operation.function in ("reduce_scatter", "all_reduce")
    return is_sum or isinstance(operation, Reduce)


def finished_sums(rng: Random, ranks: int, pieces: int) -> Schedule:
    """One of the others, each sum that goes to an output finished, or to what is copied there."""
    schedule = rng.choice(MADE)(rng, ranks, pieces)
    outputs = {"total", *(buffer.name for buffer in schedule.buffers if buffer.home == "output")}
    ends = (adds(one) and {part.buffer for part in one.writes} <= outputs for one in schedule.operations)
    operations = (
        replace(one, finishes=end) if end else one for one, end in zip(schedule.operations, ends, strict=True)
    )
    goals = (replace(goal, tensor=f"{goal.tensor}.finished") for goal in schedule.goal)
    return replace(schedule, name=f"finished_{schedule.name}", operations=tuple(operations), goal=tuple(goals))
