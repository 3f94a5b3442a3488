"""Plans that end with a norm are proven to norm every row once, where it is whole; what does not is refused."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.epilogue import MOST_NORM_COLS, Norm
from overweave.ir.plan import REDUCE_KERNEL, Plan
from overweave.ir.problem import Problem
from overweave.ir.schedule import Reduce
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.schedules.catalog.catalog import build, names
from overweave.schedules.methods.registry import method_of

NORM = Norm(eps=1e-5, residual=True)
PLAIN = Problem(operator="matmul_all_reduce", m=300, n=40, k=32, world_size=4, dtype="bfloat16")
NORMED = replace(PLAIN, norm=NORM)
SCATTERED = replace(NORMED, operator="matmul_reduce_scatter")
NAMES = [*names(NORMED.operator), *names(SCATTERED.operator)]


def unnormed(name: str) -> bool:
    """Whether a method of reduce-scatters refuses a norm."""
    method = method_of(name)
    return method.operator == SCATTERED.operator and method.norms is None


def refusals(plan: Plan) -> str:
    return str(verify_plan(plan, MachineLimits()))


@pytest.mark.parametrize("name", [name for name in NAMES if method_of(name).norms])
def test_what_can_be_built_is_proven(name: str):
    for changes in ({}, {"m": 3}, {"m": 0}, {"n": 12288}, {"world_size": 1}, {"world_size": 2}):
        check_built(name, replace(NORMED, operator=method_of(name).operator, **changes))


def check_built(name: str, problem: Problem) -> None:
    if method_of(name).norms == REDUCE_KERNEL and problem.world_size == 1:
        with pytest.raises(InputError, match="group of one"):
            build(name, problem, {})
        return
    plan = build(name, problem, {})
    assert verify_plan(plan, MachineLimits()).ok
    sums = plan.realization.reduction
    assert sums is None or (sums.block_n >= problem.n and sums.block_n // sums.parts <= 4096)


@pytest.mark.parametrize(
    ("name", "problem", "options", "why"),
    [
        ("matmul_all_reduce.one_shot_packed", replace(NORMED, n=MOST_NORM_COLS + 8), {}, "columns"),
        ("matmul_reduce_scatter.scatter_packed", replace(SCATTERED, n=MOST_NORM_COLS + 8), {}, "columns"),
        ("matmul_reduce_scatter.scatter", SCATTERED, {"sums": "epilogue"}, "a tile holds no whole row to norm"),
        *((name, SCATTERED, {}, "does not norm") for name in NAMES if unnormed(name)),
    ],
)
def test_what_cannot_norm_is_refused(name: str, problem: Problem, options: dict[str, str], why: str):
    with pytest.raises(InputError, match=why):
        build(name, problem, options)
    assert build(name, replace(problem, norm=None), options)


def test_results_that_reach_the_output_unnormed_are_refused():
    bare = replace(SCATTERED, norm=None)
    ring = build("matmul_reduce_scatter.fused_ring", bare, {})
    assert "the tile_kernel that writes them does not norm" in refusals(replace(ring, problem=SCATTERED))
    packed = build("matmul_reduce_scatter.scatter_packed", bare, {})
    assert packed.realization.packed is not None
    gathers = replace(packed.realization, packed=replace(packed.realization.packed, exchange="gather"))
    assert "a packed gather does not norm" in refusals(replace(packed, problem=SCATTERED, realization=gathers))


def test_tiles_that_hold_no_whole_row_are_refused():
    plain = build("matmul_all_reduce.two_shot", replace(PLAIN, n=2048), {})
    assert "holds no row" in refusals(replace(plain, problem=replace(NORMED, n=2048)))


def test_parts_of_rows_belong_to_a_norm():
    plan = build("matmul_all_reduce.two_shot", replace(NORMED, n=8192), {})
    assert plan.realization.reduction.parts == 2
    assert "parts" in refusals(replace(plan, problem=replace(PLAIN, n=8192)))


def test_half_a_row_is_no_row():
    plan = build("matmul_all_reduce.two_shot", NORMED, {})
    moves = {
        each.name for each in plan.schedule.operations if isinstance(each, Reduce) and each.name.startswith("move")
    }

    def halved(reduce: Reduce) -> tuple[Reduce, ...]:
        parts = []
        for at, cols in enumerate(((0, 16), (16, 40))):
            out = replace(reduce.out, cols=cols)
            operands = tuple(replace(each, cols=cols) for each in reduce.operands)
            parts.append(replace(reduce, name=f"{reduce.name}.{at}", out=out, operands=operands))
        return tuple(parts)

    operations = []
    for operation in plan.schedule.operations:
        operations += halved(operation) if operation.name in moves else [operation]
    changed = replace(plan, schedule=replace(plan.schedule, operations=tuple(operations)))
    assert "no whole row" in refusals(changed)
