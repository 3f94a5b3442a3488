"""Matmuls by columns of the weight: proven and simulated; and what is refused of them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.hardware.machine import load
from overweave.ir.epilogue import Epilogue
from overweave.ir.plan import TILE_KERNEL, MatmulConfig
from overweave.ir.problem import Problem
from overweave.ir.schedule import Compute, Operation, Put
from overweave.ir.text.parse import from_text, to_text
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.schedules.tiles.order import tile_orders
from overweave.sim.simulate import total_us
from tests.ir.column_chunks import gathered, scattered
from tests.plans import changed, refusals

SCATTERED = Problem(operator="matmul_reduce_scatter", m=37, n=40, k=16, world_size=2, dtype="float32")
GATHERED = replace(SCATTERED, operator="all_gather_matmul")
BUILD = {SCATTERED: scattered, GATHERED: gathered}


@pytest.mark.slow
@pytest.mark.parametrize("problem", BUILD, ids=lambda problem: problem.operator)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_chunks_by_columns_are_proven_and_simulated(problem: Problem, world_size: int):
    epilogue = Epilogue(bias=True, residual=problem is SCATTERED)
    for m, chunks in ((0, 3), (1, 3), (37, 1), (37, 3), (64, 7)):
        plan = BUILD[problem](replace(problem, world_size=world_size, m=m, epilogue=epilogue), chunks)
        verdict = verify_plan(plan, MachineLimits())
        assert verdict.ok, str(verdict)
        assert from_text(to_text(plan.schedule)) == plan.schedule
        if world_size <= 4 and m:
            assert total_us(plan, load("h200x4")) > 0


@pytest.mark.parametrize("problem", BUILD, ids=lambda problem: problem.operator)
def test_a_chunk_in_the_columns_of_another_is_refused(problem: Problem):
    def shifted(one: Operation) -> Operation:
        if not isinstance(one, Compute) or one.name != "multiply.0.0":
            return one
        lo, hi = one.b.cols
        return replace(one, b=replace(one.b, cols=(lo + 1, hi + 1)))

    refused = refusals(changed(BUILD[problem](problem, 3), shifted))
    assert "begins with a@b[0,1]" in refused or "it adds a@b[0, 1] and a@b[0, 0]" in refused


def test_a_result_of_another_width_than_its_chunk_is_refused():
    def wider(one: Operation) -> Operation:
        return replace(one, b=replace(one.b, cols=(0, 40))) if isinstance(one, Compute) else one

    assert "does not have the shape of" in refusals(changed(gathered(GATHERED, 3), wider))


def test_a_residual_beside_a_product_in_other_rows_or_columns_is_refused():
    """In a group of one, tiles add the residual to products in the workspace, which lie there as in the result."""
    alone = replace(SCATTERED, world_size=1, epilogue=Epilogue(residual=True))
    plan = BUILD[SCATTERED](alone, 2)
    assert verify_plan(plan, MachineLimits()).ok
    swapped = {(0, 20): (20, 40), (20, 40): (0, 20)}

    def moved(one: Operation) -> Operation:
        if isinstance(one, Compute):
            return replace(one, out=tuple(replace(part, cols=swapped[part.cols]) for part in one.out))
        return replace(one, operands=tuple(replace(part, cols=swapped[part.cols]) for part in one.operands))

    assert "adds rows of a residual to a product that lies elsewhere" in refusals(changed(plan, moved))


def test_a_chunk_that_nobody_pushes_is_missed():
    def narrower(one: Operation) -> Operation:
        if not isinstance(one, Put) or one.name != "push.0-1.1":
            return one
        ends = [tuple(replace(part, cols=(14, 26)) for part in side) for side in (one.sources, one.destinations)]
        return replace(one, sources=ends[0], destinations=ends[1])

    assert "needs landed@1[0:18,13:26], but is held at the start or written only in part" in refusals(
        changed(scattered(SCATTERED, 3), narrower)
    )


def test_a_tile_kernel_takes_whole_weights_only():
    plan = scattered(SCATTERED, 3)
    queues = tuple(replace(one, order="issue") if one.name == "tiles" else one for one in plan.schedule.queues)
    engines = tuple(
        replace(one, engine=TILE_KERNEL) if one.queue == "tiles" else one for one in plan.realization.engines
    )
    schedule = replace(plan.schedule, queues=queues)
    realization = replace(plan.realization, engines=engines, matmul=MatmulConfig())
    orders = tile_orders(schedule, realization)
    refused = refusals(replace(plan, schedule=schedule, realization=realization, tile_orders=orders))
    assert "the kernel multiplies whole rows by a whole `b`" in refused
