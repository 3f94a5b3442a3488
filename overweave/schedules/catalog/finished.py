"""Which operations of a reduction leave whole sums behind: those are given what an epilogue does to sums, once.

That is where the last partial is added: on the way to the caller, or, of a two-shot, before the sum is shared, so that
every rank gets the owner's bits and nothing more travels. That it is done once, and to no part of a sum, is for
`verify` to prove: what is finished has another name, to which nothing can be added.
"""

from __future__ import annotations

from msgspec.structs import replace

from overweave.ir.dtype import FLOAT8
from overweave.ir.plan import TILE_KERNEL
from overweave.ir.problem import Problem
from overweave.ir.schedule import Collective, Compute, Operation, Reduce, Schedule
from overweave.ir.tensors import epilogue_applied
from overweave.schedules.communication import TOTAL, Y
from overweave.schedules.records.record import Adds
from overweave.schedules.tiles.shape import KernelChoice, TileShape, shapes


def with_finished_sums(schedule: Schedule, problem: Problem) -> Schedule:
    """The same, each whole sum finished, if the problem's epilogue does anything to sums."""
    if not problem.sum_epilogue.bits:
        return schedule
    permuted = {buffer.name for buffer in schedule.buffers if buffer.blocks}
    operations = (replace(each, finishes=True) if _sums_last(each, permuted) else each for each in schedule.operations)
    goals = (replace(goal, tensor=epilogue_applied(goal.tensor)) for goal in schedule.goal)
    return replace(schedule, operations=tuple(operations), goal=tuple(goals))


def shapes_of_tiles(problem: Problem, kernel: KernelChoice, adds: Adds | None, sums: str) -> tuple[TileShape, ...]:
    """The tile shapes of a method's kernel, beside what it does to products, and to sums if its tiles make such.

    adds: how the method adds. sums: the option of this name.
    """
    finish = (adds is not None and adds.by == TILE_KERNEL) or sums == "epilogue"
    candidates = shapes(problem.dtype, kernel, problem.tile_epilogue(finish), len(problem.widths))
    of_parts = problem.epilogue.part_epilogue.added
    if kernel == "portable" or not finish or not (problem.sum_epilogue.bits or of_parts):
        return candidates
    # The assembler spills a register or two: of fp8, beside a step's product; where a consumer has 128 rows, beside
    # several addends; and of both, beside what is registered of parts.
    if of_parts:
        return tuple(shape for shape in candidates if max(shape.config.block_m, shape.config.block_n) <= 128)
    if problem.dtype == FLOAT8:
        return tuple(shape for shape in candidates if shape.config.block_n <= 128)
    has_several = adds is not None and adds.order != "ring" and problem.world_size > 2
    return tuple(shape for shape in candidates if shape.config.block_m <= 128 or not has_several)


def _sums_last(operation: Operation, permuted: set[str]) -> bool:
    """Sums lie in `y` or, to be shared, in `total` once they are whole, and never before. Whole sums in blocks that are
    permuted are finished on their way to `y`, where they lie row by row.
    """
    adds = (
        (isinstance(operation, Reduce) and (len(operation.operands) > 1 or operation.operands[0].buffer in permuted))
        or (isinstance(operation, Compute) and bool(operation.addends))
        or (isinstance(operation, Collective) and operation.function in ("reduce_scatter", "all_reduce"))
    )
    return adds and all(part.buffer in (Y, TOTAL) for part in operation.writes)
