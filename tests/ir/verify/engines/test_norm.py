"""Plans that end with a norm are proven to norm every row once, where it is whole; what does not is refused."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.epilogue import MOST_NORM_COLS, Norm
from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.ir.schedule import Buffer, Collective, Compute, Copy, Operation, Reduce, Region
from overweave.ir.verify.plan import MachineLimits, verify_plan, verify_schedule
from overweave.schedules.catalog.catalog import build, names
from overweave.schedules.methods.registry import method_of
from tests.plans import refusals, with_operations, with_schedule

NORM = Norm(eps=1e-5, residual=True)
PLAIN = Problem(operator="matmul_all_reduce", m=300, n=40, k=32, world_size=4, dtype="bfloat16")
NORMED = replace(PLAIN, norm=NORM)
SCATTERED = replace(NORMED, operator="matmul_reduce_scatter")
NAMES = [*names(NORMED.operator), *names(SCATTERED.operator)]


def unnormed(name: str) -> bool:
    """Whether a method of reduce-scatters refuses a norm."""
    method = method_of(name)
    return method.operator == SCATTERED.operator and method.norms is None


@pytest.mark.parametrize("name", [name for name in NAMES if method_of(name).norms])
def test_what_can_be_built_is_proven(name: str):
    for changes in ({}, {"m": 3}, {"m": 0}, {"n": 12288}, {"world_size": 1}, {"world_size": 2}):
        check_built(name, replace(NORMED, operator=method_of(name).operator, **changes))


def check_built(name: str, problem: Problem) -> None:
    if method_of(name).is_fused and problem.world_size == 1:
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
    changed = with_operations(plan, operations)
    assert "no whole row" in refusals(changed)


def library_plan(*operations: Operation, ranks: int = 2, rows: int = 4) -> Plan:
    """The library's all-reduce that ends with a norm, with other operations, and buffers for what these keep."""
    problem = replace(NORMED, m=ranks * rows, n=16, k=16, world_size=ranks, norm=Norm(eps=1e-5))
    plan = build("matmul_all_reduce.sequential", problem, {})
    local = (
        Buffer("made", ranks * rows, 16, "local"),
        *(Buffer(name, rows, 16, "local") for name in ("kept", "again")),
    )
    buffers = (*(each for each in plan.schedule.buffers if each.home != "local"), *local)
    return with_schedule(plan, buffers=buffers, operations=operations)


def part(buffer: str, rank: int, rows: tuple[int, int]) -> Region:
    return Region(buffer, rank, rows, (0, 16))


def collective(rank: int, function: str, sources: tuple[Region, ...], destinations: tuple[Region, ...]) -> Collective:
    return Collective(
        name=f"{function}.{rank}", rank=rank, queue="main", function=function, label=function, ranks=(0, 1),  # type: ignore[arg-type]
        sources=sources, destinations=destinations,
    )  # fmt: skip


def shared(rank: int, by_copy: bool) -> list[Operation]:
    """A rank's rows of the sum, in the output, and then those of its peer."""
    rows, own = ((0, 4), (4, 8)), part("y", rank, (4 * rank, 4 * rank + 4))
    product = Compute(
        name=f"multiply.{rank}", rank=rank, queue="main", a=(part("x", rank, (0, 8)),), b=part("w", rank, (0, 16)),
        out=(part("made", rank, (0, 8)),),
    )  # fmt: skip
    scattered = collective(rank, "reduce_scatter", tuple(part("made", rank, one) for one in rows), (own,))
    kept, landing = part("kept", rank, (0, 4)), [part("y", rank, one) for one in rows]
    landing[rank] = kept
    if not by_copy:
        return [product, scattered, collective(rank, "all_to_all", (own, own), tuple(landing))]
    copied = Copy(name=f"keep.{rank}", rank=rank, queue="main", sources=(own,), destinations=(kept,))
    landing[rank] = part("again", rank, (0, 4))
    return [product, scattered, copied, collective(rank, "all_to_all", (kept, kept), tuple(landing))]


def test_rows_that_were_normed_are_not_sent_on_to_be_normed_again():
    for by_copy in (False, True):
        plan = library_plan(*shared(0, by_copy), *shared(1, by_copy))
        if not by_copy:
            assert verify_schedule(plan.schedule).ok
        assert "reads rows of the output that reduce_scatter.0 has normed" in refusals(plan)


def test_every_row_of_a_result_is_normed():
    """Of factors that were gathered, one matmul is the whole sum, and no part of one, which nothing norms."""
    plan, made = library_plan(), list[tuple[list[Operation], Reduce]]()
    for rank in range(2):
        x, w = Buffer("xs", 8, 32, "local"), Buffer("ws", 32, 16, "local")
        landing = [Region("xs", rank, (0, 8), (16 * peer, 16 * peer + 16)) for peer in range(2)]
        gathered = collective(rank, "all_gather", (part("x", rank, (0, 8)),), tuple(landing))
        rows = tuple(part("ws", rank, (16 * peer, 16 * peer + 16)) for peer in range(2))
        weights = replace(gathered, name=f"w.{rank}", label="w", sources=(part("w", rank, (0, 16)),), destinations=rows)
        each = [
            Compute(
                name=f"multiply.{rank}.{peer}", rank=rank, queue="main", a=(landing[peer],), b=rows[peer],
                out=(part("sums", rank, (0, 8)),), accumulate=peer > 0,
            )
            for peer in range(2)
        ]  # fmt: skip
        stored = Reduce(
            name=f"store.{rank}", rank=rank, queue="main", operands=(part("sums", rank, (0, 8)),),
            out=part("y", rank, (0, 8)),
        )  # fmt: skip
        made.append(([gathered, weights, *each], stored))
    buffers = (*plan.schedule.buffers, x, w, Buffer("sums", 8, 16, "local"))

    def plan_of(is_normed: bool) -> Plan:
        """is_normed: what stores the sums moves them, behind which the library norms."""
        operations: list[Operation] = []
        for steps, stored in made:
            direct: list[Operation] = [
                replace(one, out=(stored.out,)) if isinstance(one, Compute) else one for one in steps
            ]
            operations += [*steps, stored] if is_normed else direct
        realization = replace(plan.realization, partial_sums="result")
        schedule = replace(plan.schedule, buffers=buffers, operations=tuple(operations))
        return replace(plan, schedule=schedule, realization=realization)

    assert verify_plan(plan_of(is_normed=True), MachineLimits()).ok
    assert verify_schedule(plan_of(is_normed=False).schedule).ok
    assert "row 0 of the result is not normed" in refusals(plan_of(is_normed=False))
