"""What verify asks of scales that travel beside the rows they belong to, each rule provoked."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.epilogue import Epilogue
from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.ir.schedule import Compute, Operation, Put, Region
from overweave.ir.text.parse import from_text, to_text
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.schedules.catalog.catalog import build, names
from overweave.schedules.methods.registry import METHODS
from overweave.schedules.records.needs import obstacle
from overweave.schedules.records.record import MethodRequest
from tests.plans import refused, with_operations, with_schedule

H200 = MachineLimits()
SMALL = {"block_m": 16, "block_n": 32, "pieces": 2}


GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"


def problem_of(
    m: int, world_size: int, scaling: str = "rows", returns_gathered: bool = False, operator: str = GATHER
) -> Problem:
    return Problem(
        operator=operator,
        m=m,
        n=64,
        k=32,
        world_size=world_size,
        dtype="float8_e4m3fn",
        b_is_transposed=True,
        returns_gathered=returns_gathered,
        epilogue=Epilogue(scaling=scaling),  # type: ignore[arg-type]
        out_dtype="bfloat16",
    )


def changed(change: Callable[[Operation], Operation], name: str = f"{GATHER}.push") -> Plan:
    """A plan of three ranks, each operation changed."""
    operator = name.partition(".")[0]
    plan = build(name, problem_of(100, 3, operator=operator), SMALL if operator == GATHER else {})
    operations = tuple(map(change, plan.schedule.operations))
    return with_operations(plan, operations)


def scaled_from(rows: Callable[[Region], Region]) -> Callable[[Operation], Operation]:
    def change(operation: Operation) -> Operation:
        if isinstance(operation, Compute):
            return replace(operation, scales=tuple(map(rows, operation.scales)))
        return operation

    return change


def assert_all_proven(world_size: int, rows: tuple[int, ...]) -> None:
    for m, name, scaling, gathered in (
        (m, name, scaling, gathered)
        for m in rows
        for name in names("all_gather_matmul")
        for scaling in ("rows", "tensor")
        for gathered in (False, True)
    ):
        problem = problem_of(m, world_size, scaling, gathered)
        assert_proven_or_refused(name, problem)


def assert_proven_or_refused(name: str, problem: Problem) -> None:
    """A method that cannot scale says so by name."""
    if not (found := obstacle(MethodRequest(problem), METHODS[name], "schedule")):
        assert_proven(build(name, problem, {}))
        return
    assert "scales" in found
    with pytest.raises(InputError, match=found):
        build(name, problem, {})


def assert_proven(plan: Plan) -> None:
    verdict = verify_plan(plan, H200)
    assert verdict.ok, (plan.name, plan.problem, [str(refusal) for refusal in verdict.refusals[:3]])
    assert from_text(to_text(plan.schedule)) == plan.schedule


def assert_sums_proven(world_size: int, rows: tuple[int, ...]) -> None:
    for operator, m, scaling in product((SCATTER, REDUCE), rows, ("rows", "tensor")):
        problem = problem_of(m, world_size, scaling, operator=operator)
        for name in names(operator):
            assert_proven_or_refused(name, problem)
        fused = {SCATTER: "scatter", REDUCE: "two_shot"}[operator]
        assert_proven(build(f"{operator}.{fused}", problem, {"sums": "epilogue"}))


@pytest.mark.slow
def test_every_schedule_is_proven():
    assert_all_proven(3, (7,))
    assert_sums_proven(3, (7,))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, pytest.param(8, marks=pytest.mark.nightly)])
def test_every_schedule_is_proven_at_any_size(world_size: int):
    assert_all_proven(world_size, (0, 1, 3, 100, 256))
    assert_sums_proven(world_size, (0, 1, 3, 100, 256))


def test_scales_of_other_rows_are_refused():
    def next_rows(part: Region) -> Region:
        by = 1 if part.buffer == "scales" and part.rows[1] < 100 else 0
        return replace(part, rows=(part.rows[0] + by, part.rows[1] + by))

    refused(changed(scaled_from(next_rows)), "value", "where it needs a.scale")


def test_scales_that_nobody_waits_for_are_a_race():
    pushes = [each for each in changed(lambda each: each).schedule.operations if each.queue == "scales"]
    told = {(notify.rank, notify.signal) for each in pushes for notify in each.notifies}

    def impatient(operation: Operation) -> Operation:
        if not operation.name.endswith(".1"):  # the first piece of a shard still waits
            return operation
        signals = ((wait, signal) for wait in operation.waits for signal in range(*wait.signals))
        left = [replace(wait, signals=(at, at + 1)) for wait, at in signals if (operation.rank, at) not in told]
        return replace(operation, waits=tuple(left))

    refused(changed(impatient), "race", "scales@")


def test_scales_that_never_come_are_missing():
    plan = changed(lambda operation: operation)
    kept = tuple(one for one in plan.schedule.operations if not (isinstance(one, Put) and one.queue == "scales"))
    assert not verify_plan(with_operations(plan, kept), H200).ok


def test_a_product_of_scaled_rows_needs_its_scales():
    def bare(operation: Operation) -> Operation:
        return replace(operation, scales=()) if isinstance(operation, Compute) else operation

    refused(changed(bare), "form", "has no scales of its rows")
    tensor = replace(changed(lambda operation: operation), problem=problem_of(100, 3, "tensor"))
    refused(tensor, "form", "which no epilogue applies")


def test_columns_of_another_shape_are_refused():
    def shorter(part: Region) -> Region:
        return replace(part, rows=(part.rows[0], part.rows[1] - 1))

    refused(changed(scaled_from(shorter)), "form", "one scale for each row")
    refused(changed(scaled_from(lambda part: replace(part, rank=(part.rank + 1) % 3))), "ownership", "its scales")

    def doubled(operation: Operation) -> Operation:
        return replace(operation, scales=operation.scales * 2) if isinstance(operation, Compute) else operation

    refused(changed(doubled), "form", "2 columns of scales for 1 parts")


def test_scales_of_another_part_of_the_reduced_axis_are_refused():
    plan = changed(lambda operation: operation, f"{SCATTER}.scatter")
    given = tuple(replace(one, col=0) if one.tensor == "a.scale" else one for one in plan.schedule.given)
    refused(with_schedule(plan, given=given), "value", "where it needs a.scale[34,32]")


@pytest.mark.parametrize(
    ("name", "options", "buffers", "dtype", "rule", "word"),
    [
        (f"{GATHER}.push", SMALL, ("scale_x", "scales"), None, "lowering", "reads one of float32"),
        (f"{GATHER}.push", SMALL, ("scales",), "float16", "form", "another dtype"),
        (f"{SCATTER}.scatter", {}, ("y", "total"), "float16", "lowering", "dtype of sums"),
        (f"{SCATTER}.scatter", {"sums": "epilogue"}, ("y", "total"), "float16", "lowering", "dtype of sums"),
        (f"{REDUCE}.one_shot_packed", {}, ("y", "total"), "float16", "lowering", "numbers of one dtype"),
        (f"{REDUCE}.two_shot_packed", {}, ("y", "total"), "float16", "lowering", "numbers of one dtype"),
    ],
)
def test_a_buffer_of_another_dtype_is_refused(
    name: str, options: dict[str, str | int], buffers: tuple[str, ...], dtype: str | None, rule: str, word: str
):
    """Kernels read fp32 scales beside their rows, bytes are moved as they are, and numbers of one dtype are added."""
    plan = build(name, problem_of(100, 3, operator=name.partition(".")[0]), options)
    made = (replace(each, dtype=dtype) if each.name in buffers else each for each in plan.schedule.buffers)
    refused(with_schedule(plan, buffers=tuple(made)), rule, word)
