"""Each rule that verify_plan adds, provoked on plans of the catalog."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from msgspec.structs import replace

from overweave.ir.epilogue import Epilogue
from overweave.ir.operators.registry import operator_of
from overweave.ir.plan import EngineAssignment, MatmulConfig, Plan, Realization, ReduceConfig
from overweave.ir.problem import Problem
from overweave.ir.schedule import (
    LIMIT,
    Buffer,
    Compute,
    Copy,
    Goal,
    InitialContents,
    Notify,
    Operation,
    Queue,
    Reduce,
    Region,
    Schedule,
    SignalPad,
    Wait,
)
from overweave.ir.tile_order import NO_SIGNAL, TileOrder, TileRow
from overweave.ir.verify.plan import KernelResources, MachineLimits, fit_together, verify_plan
from overweave.schedules.catalog.catalog import build, names
from overweave.schedules.methods.registry import method_of
from overweave.schedules.tiles.order import tile_orders
from tests.plans import refused, with_operations, with_schedule

H200 = MachineLimits()
SMALL = {"block_m": 16, "block_n": 16, "pieces": 2}


def plan_of(name: str, m: int = 100, n: int = 40, world_size: int = 3, options=None, **changes) -> Plan:
    operator = operator_of(name.split(".")[0])
    rows = operator.whole_rows(m, world_size)
    size = {"m": rows, "n": n, "k": 16, "world_size": world_size, "dtype": "bfloat16"}
    problem = Problem(operator=operator.name, **size | changes)
    method = method_of(name)
    small = {option: value for option, value in SMALL.items() if method.is_fused and method.takes(option)}
    return build(name, problem, options or small)


def with_tables(plan: Plan, change) -> Plan:
    """The plan with the rows of rank 0's first table changed."""
    first = plan.tile_orders[0]
    changed = TileOrder(first.rank, first.queue, tuple(change(list(first.rows))))
    return replace(plan, tile_orders=(changed, *plan.tile_orders[1:]))


@pytest.mark.parametrize("name", names())
def test_the_catalog_is_proven(name: str):
    for world_size, m in product((1, 2, 4), (0, 3, 100)):
        plan = plan_of(name, m, world_size=world_size)
        assert verify_plan(plan, H200).refusals == (), (world_size, m)


def test_a_plan_with_one_ranks_tables_is_proven_for_that_rank_only():
    problem = Problem(operator="all_gather_matmul", m=100, n=40, k=16, world_size=3, dtype="bfloat16")
    plan = build("all_gather_matmul.push", problem, SMALL, rank=1)
    assert verify_plan(plan, H200, rank=1).ok
    assert {refusal.rule for refusal in verify_plan(plan, H200).refusals} == {"lowering"}


def test_a_refused_schedule_is_a_refused_plan():
    plan = plan_of("all_gather_matmul.push")
    refused(with_schedule(plan, credits=()), "reuse")


@pytest.mark.slow
def test_every_change_of_a_tile_is_refused():
    """Slots, signals, counts, rows, columns, sources: nothing in a table may be different."""
    rng = Random(0)
    several = plan_of("all_gather_matmul.push", columns=(8, 24, 8))
    one = ("all_gather_matmul.push", "all_gather_matmul.pull", "matmul_reduce_scatter.scatter")
    for plan in (several, *map(plan_of, one)):
        name = plan.name
        order = plan.tile_orders[-1] if name.endswith("scatter") else plan.tile_orders[0]
        for field, by in product(TileRow._fields, (-1, 1, 16, LIMIT)):
            told = [at for at, row in enumerate(order.rows) if says_something(row, field)]
            if not told:
                continue
            at = rng.choice(told)
            rows = list(order.rows)
            rows[at] = rows[at]._replace(**{field: getattr(rows[at], field) + by})
            changed = tuple(replace(one, rows=tuple(rows)) if one == order else one for one in plan.tile_orders)
            verdict = verify_plan(replace(plan, tile_orders=changed), H200)
            assert not verdict.ok, f"{name}: {field} of row {at} changed by {by}"
            assert {refusal.rule for refusal in verdict.refusals} == {"lowering"}


def test_cut_tiles_are_proven_and_every_change_of_one_is_refused():
    options = {"block_m": 16, "block_n": 128, "split_n": 2, "sms": 12, "pieces": 1}
    plan = plan_of("all_gather_matmul.push", n=200, options=options)
    assert verify_plan(plan, H200).ok
    rows = plan.tile_orders[0].rows
    cut = next(at for at, row in enumerate(rows) if row.width)
    assert rows[cut].row == rows[cut + 1].row
    for field, value in (("width", 0), ("width", 32), ("col", 128 - rows[cut].col), ("row", rows[cut].row + 1)):
        changed = rows[cut]._replace(**{field: value})
        refused(with_tables(plan, lambda rows, row=changed: [*rows[:cut], row, *rows[cut + 1 :]]), "lowering", "tile")
    refused(with_tables(plan, lambda rows: rows[:cut] + rows[cut + 1 :]), "lowering", "tile")
    refused(with_tables(plan, lambda rows: [*rows[: cut + 1], *rows[cut:]]), "lowering", "tile")
    narrow = replace(plan.realization, matmul=replace(plan.realization.matmul, block_n=64))
    refused(replace(plan, realization=narrow), "lowering", "less than 64 columns")


def test_a_kernel_multiplies_by_so_many_weights_and_each_has_an_output(monkeypatch: pytest.MonkeyPatch):
    plan = plan_of("all_gather_matmul.push", columns=(8, 24, 8))
    assert verify_plan(plan, H200).ok
    # The same columns of the product, but two weights change their outputs for one chunk.
    swapped = {"y": "y.2", "y.2": "y"}
    first = next(at for at, each in enumerate(plan.schedule.operations) if isinstance(each, Compute))
    operations = list(plan.schedule.operations)
    for at in (first, first + 2):
        out = operations[at].out[0]
        operations[at] = replace(operations[at], out=(replace(out, buffer=swapped[out.buffer]),))
    crossed = with_operations(plan, operations)
    refused(crossed, "value", "begins with a@b[0,32]")
    monkeypatch.setattr("overweave.ir.verify.lowering.MOST_WEIGHTS", 2)
    refused(plan, "lowering", "w.2: more weights than its kernel takes")


def test_a_gated_tile_is_one_accumulator_of_two_rectangles():
    swiglu = Epilogue(activation="silu", gate=True)
    plan = plan_of("all_gather_matmul.push", options={"kernel": "hopper"}, epilogue=swiglu)
    assert verify_plan(plan, H200).ok
    halves, wide, low = {"block_n": 128, "split_n": 2}, {"block_n": 256}, {"block_m": 64}
    for change, words in ((halves, "in one rectangle"), (wide, "not 256"), (low, "128 rows")):
        matmul = replace(plan.realization.matmul, **change)
        refused(replace(plan, realization=replace(plan.realization, matmul=matmul)), "lowering", words)


def test_a_gated_tile_of_fp8_has_128_rows():
    fp8 = {"dtype": "float8_e4m3fn", "b_is_transposed": True, "out_dtype": "bfloat16"}
    swiglu = Epilogue(scaling="rows", activation="silu", gate=True)
    plan = plan_of("all_gather_matmul.push", options={"kernel": "hopper"}, epilogue=swiglu, **fp8)
    assert verify_plan(plan, H200).ok
    matmul = replace(plan.realization.matmul, block_m=256, block_n=64)
    refused(replace(plan, realization=replace(plan.realization, matmul=matmul)), "lowering", "128 rows, not 256")


def test_a_step_of_k_fills_what_tensor_cores_take_and_no_more_than_a_swizzle():
    plan = plan_of("all_gather_matmul.push", options={"kernel": "hopper"})
    for block_k, words in ((128, "256 bytes of k"), (8, "take 32 at once")):
        matmul = replace(plan.realization.matmul, block_k=block_k)
        refused(replace(plan, realization=replace(plan.realization, matmul=matmul)), "lowering", words)


def says_something(row: TileRow, field: str) -> bool:
    """What a tile that waits for nothing counts to is nothing."""
    return {"wait_count": row.wait_lo < row.wait_hi, "also_count": row.also != NO_SIGNAL}.get(field, True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: rows[:-1], "tiles"),
        (lambda rows: [*rows, rows[-1]], "tiles"),
        (lambda rows: [*rows[:-1], rows[-2]], "tile"),
        (lambda rows: rows[::-1], "claimed behind"),
    ],
)
def test_tiles_are_there_once_and_in_order(change, words):
    refused(with_tables(plan_of("all_gather_matmul.push"), change), "lowering", words)


def test_tables_belong_to_kernels():
    plan = plan_of("all_gather_matmul.push")
    refused(replace(plan, tile_orders=plan.tile_orders[1:]), "lowering", "no tile table")
    refused(replace(plan, tile_orders=(*plan.tile_orders, plan.tile_orders[0])), "lowering", "two tile tables")
    refused(replace(plan, tile_orders=(*plan.tile_orders, TileOrder(0, "copies", ()))), "lowering", "queue copies")


def test_a_reduction_may_leave_out_what_the_kernel_boundary_implies():
    """The sums stand behind the tiles' kernel, so they need not wait for the own tiles, only for the peers."""
    plan = plan_of("matmul_reduce_scatter.scatter", options={**SMALL, "own_pieces": 1})
    sums = next(order for order in plan.tile_orders if order.queue == "sums")
    reduce = next(op for op in plan.schedule.of_rank(sums.rank) if isinstance(op, Reduce))
    assert [wait.pad for wait in reduce.waits] == ["arrived"]
    assert sums.rows[0].also == NO_SIGNAL
    loose = tuple(
        replace(queue, after=tuple(name for name in queue.after if name != "tiles")) for queue in plan.schedule.queues
    )
    refused(with_schedule(plan, queues=loose), "race", "notifies nothing")


def test_engines():
    plan = plan_of("all_gather_matmul.push", returns_gathered=True)
    engines = plan.realization.engines

    def assigned(queue, engine):
        swapped = tuple(EngineAssignment(one.queue, engine) if one.queue == queue else one for one in engines)
        return replace(plan, realization=replace(plan.realization, engines=swapped))

    refused(assigned("tiles", "library"), "engine", "queue tiles runs in issue order")
    refused(assigned("copies", "library"), "engine", "Put cannot run on a library")
    refused(assigned("main", "copy_engine"), "engine", "is after tiles")
    free = with_schedule(plan, queues=tuple(replace(one, after=()) for one in plan.schedule.queues))
    refused(replace(free, realization=assigned("main", "copy_engine").realization), "engine", "needs SMs")
    refused(replace(plan, realization=replace(plan.realization, engines=engines[1:])), "engine", "has no engine")
    refused(replace(plan, realization=replace(plan.realization, matmul=None)), "engine", "no configuration")


def test_a_copy_engine_cannot_count():
    """It sets a word to one: two puts may not share a signal."""
    plan = plan_of("all_gather_matmul.push", options={**SMALL, "pieces": 1})
    schedule = plan.schedule
    shared = []
    for operation in schedule.operations:
        notifies = tuple(replace(notify, signal=0) for notify in operation.notifies)
        waits = tuple(Wait(wait.pad, (0, 1), schedule.world_size - 1) for wait in operation.waits)
        shared.append(replace(operation, notifies=notifies, waits=waits))
    refused(replace(plan, schedule=replace(schedule, operations=tuple(shared))), "replay", "signal counts to 2")


def test_alignment():
    odd = Problem(operator="all_gather_matmul", m=64, n=40, k=17, world_size=2, dtype="bfloat16")
    refused(build("all_gather_matmul.push", odd, SMALL), "alignment", "rows are 34 bytes apart")
    narrow = replace(odd, k=16, n=41)
    refused(build("all_gather_matmul.push", narrow, SMALL), "alignment", "w@0", "82 bytes")
    assert verify_plan(build("all_gather_matmul.push", replace(narrow, b_is_transposed=True), SMALL), H200).ok


def test_width():
    plan = plan_of("all_gather_matmul.push", world_size=1)
    tall = LIMIT - 8
    schedule = plan.schedule
    buffers = tuple(Buffer(one.name, tall, one.cols, one.home) if one.name == "y" else one for one in schedule.buffers)
    compute = next(op for op in schedule.operations if isinstance(op, Compute))
    rows = compute.out[0].shape[0]
    out = replace(compute.out[0], rows=(tall - rows, tall))
    goal = tuple(replace(one, region=out) for one in schedule.goal)
    moved = replace(schedule, buffers=buffers, goal=goal, operations=(replace(compute, out=(out,)),))
    refused(replace(plan, schedule=moved), "width", "31 bits")


def test_the_problem_must_be_the_schedules():
    plan = plan_of("all_gather_matmul.push")
    refused(replace(plan, problem=replace(plan.problem, world_size=4)), "form", "4 ranks")


def test_residency_of_a_library_call_behind_a_kernel_that_waits_for_it():
    """In launch order the last tiles stand behind the copy; as one launch the kernel stands before it, and spins."""
    plan = plan_of("all_gather_matmul.pull", world_size=2)
    schedule = plan.schedule
    queues = tuple(replace(queue, after=()) for queue in schedule.queues)
    kept: list[Operation] = []
    for rank in range(2):
        own, *rest = [op for op in schedule.of_rank(rank) if op.queue == "tiles"]
        others = [op for op in schedule.of_rank(rank) if op.queue != "tiles"]
        kept += [own, *others, *rest]
    refused(
        replace(plan, schedule=replace(schedule, queues=queues, operations=tuple(kept))),
        "residency",
        "multiply.0-1.0, rank 0: waits for arrived@0[0] from pull.0-1.0",
        "told@0[0] from stage.1 on rank 1, which is launched behind multiply.1-0.1",
    )


def kernels_that_feed_each_other() -> Plan:
    """One launch of tiles, one of sums: the second tile waits for the sum of the first."""

    def multiply(name: str, rows: tuple[int, int], waits: tuple[Wait, ...], signal: int) -> Compute:
        return Compute(
            name=name,
            rank=0,
            queue="tiles",
            waits=waits,
            notifies=(Notify("computed", 0, signal),),
            a=(Region("x", 0, rows, (0, 16)),),
            b=Region("w", 0, (0, 16), (0, 16)),
            out=(Region("part", 0, rows, (0, 16)),),
            tiles=2,
        )

    def total(name: str, rows: tuple[int, int], signal: int, notifies: tuple[Notify, ...]) -> Reduce:
        parts = (Region("part", 0, rows, (0, 16)),)
        waits, out = (Wait("computed", (signal, signal + 1), 2),), Region("y", 0, rows, (0, 16))
        return Reduce(name=name, rank=0, queue="sums", waits=waits, notifies=notifies, operands=parts, out=out)

    first, second = (0, 32), (32, 64)
    whole = Region("x", 0, (0, 64), (0, 16)), Region("w", 0, (0, 16), (0, 16))
    schedule = Schedule(
        name="fed",
        world_size=1,
        buffers=(
            Buffer("x", 64, 16, "input"),
            Buffer("w", 16, 16, "input"),
            Buffer("part", 64, 16, "local"),
            Buffer("y", 64, 16, "output"),
        ),
        pads=(SignalPad("computed", 2), SignalPad("summed", 1)),
        queues=(Queue("tiles", "issue"), Queue("sums", "issue")),
        given=(InitialContents(whole[0], "a", 0, 0), InitialContents(whole[1], "b", 0, 0)),
        goal=(Goal(Region("y", 0, (0, 64), (0, 16)), "a@b", 0, 0, ((0, 16),)),),
        operations=(
            multiply("multiply.0", first, (), 0),
            total("total.0", first, 0, (Notify("summed", 0, 0),)),
            multiply("multiply.1", second, (Wait("summed", (0, 1), 1),), 1),
            total("total.1", second, 1, ()),
        ),
    )
    realization = Realization(
        dtype="bfloat16",
        engines=(EngineAssignment("tiles", "tile_kernel"), EngineAssignment("sums", "reduce_kernel")),
        matmul=MatmulConfig(block_m=16, block_n=16),
        reduction=ReduceConfig(block_m=32, block_n=16),
    )
    problem = Problem(operator="", m=64, n=16, k=16, world_size=1, dtype="bfloat16")
    tables = tile_orders(schedule, realization)
    return Plan(name="fed", problem=problem, schedule=schedule, realization=realization, tile_orders=tables)


MATMUL = KernelResources(queue="tiles", registers_per_thread=168, shared_bytes=150_000, threads=256, programs=132)
SUMS = KernelResources(queue="sums", registers_per_thread=32, shared_bytes=0, threads=128, programs=132)


def test_residency_of_two_kernels_that_feed_each_other():
    plan = kernels_that_feed_each_other()
    refused(plan, "residency", "multiply.1", "summed@0[0] from total.0 on rank 0, which is launched behind multiply.1")
    assert verify_plan(plan, H200, (MATMUL, SUMS)).ok
    assert not verify_plan(plan, H200, (MATMUL, replace(SUMS, shared_bytes=100_000))).ok
    assert not verify_plan(plan, MachineLimits(threads_per_sm=256), (MATMUL, SUMS)).ok


def test_registers_shared_memory_and_threads_decide_what_fits():
    matmul, sums = MATMUL, SUMS
    assert fit_together(H200, (matmul, sums)) == {"tiles", "sums"}
    assert not fit_together(H200, (matmul, replace(sums, shared_bytes=100_000)))
    # A share of the SMs leaves the others free.
    assert fit_together(H200, (replace(matmul, programs=131), replace(sums, shared_bytes=100_000, programs=131)))
    assert not fit_together(H200, (matmul, replace(sums, threads=2048, registers_per_thread=16)))
    assert not fit_together(H200, (matmul, replace(sums, registers_per_thread=255, threads=512)))
    # Many small blocks may crowd one another out; a block that fits on no SM never fits.
    assert not fit_together(H200, (matmul, replace(sums, programs=132 * 20, registers_per_thread=40)))
    assert not fit_together(H200, (replace(matmul, shared_bytes=300_000), sums))


def test_a_copy_that_only_waits_may_stand_on_the_copy_engine():
    plan = plan_of("all_gather_matmul.push", world_size=2)
    waits = next(op.waits for op in plan.schedule.of_rank(0) if op.waits)
    idle = Copy(name="idle", rank=0, queue="copies", waits=waits, sources=(), destinations=())
    schedule = replace(plan.schedule, operations=(*plan.schedule.operations, idle))
    assert verify_plan(replace(plan, schedule=schedule), H200).ok
