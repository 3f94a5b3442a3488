"""Sums that an epilogue finishes are proven to be finished once, whole and in their place; what is not is refused."""

from __future__ import annotations

from functools import partial

import pytest
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.epilogue import Epilogue, Norm
from overweave.ir.plan import Plan
from overweave.ir.schedule import Collective, Compute, Operation, Reduce
from overweave.ir.tensors import epilogue_applied
from overweave.ir.text.files import from_json, to_json
from overweave.ir.text.parse import from_text, to_text
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.ir.verify.rules.values import Mismatch, ValuePiece, add, apply_epilogue
from overweave.schedules.catalog.catalog import build, names
from tests.plans import changed, plan_of, refusals, with_schedule

SCATTER, REDUCE = "matmul_reduce_scatter", "matmul_all_reduce"
ENDING = Epilogue(bias=True, activation="silu", residual=True)
FUSED = {"sums": "epilogue"}
made = partial(plan_of, m=300, n=40, world_size=4, epilogue=ENDING)


def finishing(plan: Plan, name: str, how: bool = True) -> Plan:
    """The plan, one operation of which finishes its sum, or does not."""
    assert any(operation.name == name for operation in plan.schedule.operations)
    return changed(plan, lambda each: replace(each, finishes=how) if each.name == name else each)


def sums(operation: Operation) -> bool:
    return isinstance(operation, Reduce) or (isinstance(operation, Compute) and bool(operation.addends))


@pytest.mark.parametrize("name", [*names(SCATTER), *names(REDUCE)])
def test_what_can_be_built_is_proven(name: str):
    for changes in ({}, {"m": 3}, {"m": 0}, {"world_size": 1}, {"world_size": 2}):
        check_built(name, changes)


def check_built(name: str, changes: dict[str, int]) -> None:
    plan = made(name, **changes)
    assert verify_plan(plan, MachineLimits()).ok
    if "sums" in name or name.endswith((".scatter", ".two_shot")):
        assert verify_plan(made(name, FUSED, **changes), MachineLimits()).ok
    if plan.problem.m and plan.problem.world_size > 1:
        ends = [each for each in plan.schedule.operations if getattr(each, "finishes", False)]
        assert len(ends) >= min(plan.problem.m, plan.problem.world_size)
        assert {goal.tensor for goal in plan.schedule.goal} == {epilogue_applied("a@b")}
    assert from_text(to_text(plan.schedule)) == plan.schedule == from_json(to_json(plan)).schedule


def test_a_sum_that_is_not_finished_is_refused():
    plan = made(f"{SCATTER}.sequential")
    assert "begins with a@b" in refusals(finishing(plan, "reduce_scatter.2.0.0", False))
    assert "the goal is a@b" in refusals(made_of_unfinished(plan))


def made_of_unfinished(plan: Plan) -> Plan:
    return replace(build(plan.name, replace(plan.problem, epilogue=Epilogue()), {}), problem=plan.problem)


def test_what_is_finished_where_nothing_is_to_be_done_is_refused():
    plan = made(f"{REDUCE}.one_shot_packed")
    assert "epilogue , but the goal" in refusals(replace(plan, problem=replace(plan.problem, epilogue=Epilogue())))


def test_a_sum_that_is_finished_twice_is_refused():
    plan = made(f"{REDUCE}.two_shot", {"pieces": 1})
    moved = next(one.name for one in plan.schedule.of_rank(1) if isinstance(one, Reduce) and len(one.operands) == 1)
    assert "begins with a@b.finished.finished" in refusals(finishing(plan, moved))


def test_parts_of_a_sum_are_not_finished():
    """Of a ring, what is passed on: it is no row of the own result, and the owner would finish it again."""
    plan, passed_on = made(f"{SCATTER}.fused_ring", {"pieces": 1}), "multiply.2.0"
    assert "it finishes a@b[0, 0] as if that were element [150, 0]" in refusals(finishing(plan, passed_on))
    nowhere = changed(plan, lambda each: replace(each, finishes=each.name == passed_on) if sums(each) else each)
    assert not verify_plan(nowhere, MachineLimits()).ok


def test_rows_of_others_are_not_finished():
    """They stand at the same rows as in the whole, whose first ones are rank 0's: beyond its residual."""
    plan = made(f"{SCATTER}.fused_ring", {"pieces": 1})
    assert "no place in the result" in refusals(finishing(plan, "multiply.0.150"))


def test_products_are_not_finished():
    told = refusals(finishing(made(f"{REDUCE}.one_shot_packed"), "multiply.0"))
    assert "finishes a sum, but has nothing to add" in told


def test_what_adds_nothing_up_finishes_nothing():
    plan = made("all_gather_matmul.sequential", epilogue=Epilogue())
    told = refusals(changed(plan, lambda each: replace(each, finishes=True) if isinstance(each, Collective) else each))
    assert "an all_gather makes none" in told


def test_tables_say_which_tiles_finish():
    for name, options in ((f"{SCATTER}.scatter", {}), (f"{SCATTER}.fused_ring", {}), (f"{REDUCE}.two_shot", FUSED)):
        plan = made(name, options)
        rows = [row for order in plan.tile_orders for row in order.rows]
        assert {row.finishes for row in rows} == {0, 1}
        first, *others = plan.tile_orders
        turned = replace(first, rows=tuple(row._replace(finishes=1 - row.finishes) for row in first.rows))
        assert "against its operation" in refusals(replace(plan, tile_orders=(turned, *others)))


def test_every_sum_of_a_packed_kernel_is_finished():
    assert "begins with a@b" in refusals(finishing(made(f"{REDUCE}.two_shot_packed"), "sum.0", False))
    plan = made(f"{REDUCE}.one_shot_packed")  # the goal that the schedule meets would be another than the kernel's
    bare = changed(plan, lambda each: replace(each, finishes=False) if sums(each) else each)
    goals = tuple(replace(goal, tensor="a@b") for goal in bare.schedule.goal)
    assert "packed kernel finishes every sum" in refusals(with_schedule(bare, goal=goals))


def test_sums_are_finished_beside_their_own_rows():
    value = (ValuePiece(0, 4, 0, 8, "a@b", 12, 0, ((0, 2),)),)
    assert apply_epilogue(value, (12, 0))[0].tensor == epilogue_applied("a@b")
    with pytest.raises(Mismatch, match="as if that were element"):
        apply_epilogue(value, (8, 0))
    with pytest.raises(Mismatch, match="is finished"):
        add(apply_epilogue(value, (12, 0)), value)


def test_tiles_that_finish_are_told_so_wherever_they_stand():
    plan = made(f"{SCATTER}.fused_ring")
    ends = [each for each in plan.schedule.operations if isinstance(each, Compute) and each.finishes]
    assert {each.out[0].buffer for each in ends} == {"y"}
    assert any(each.addends and not each.finishes for each in plan.schedule.operations if isinstance(each, Compute))


@pytest.mark.parametrize("changes", [{"epilogue": Epilogue(activation="silu", gate=True)}, {"norm": Norm(eps=1e-5)}])
def test_gates_and_norms_are_refused(changes: dict[str, object]):
    with pytest.raises(InputError, match=r"gate|norm"):
        made(f"{REDUCE}.sequential", **changes)
