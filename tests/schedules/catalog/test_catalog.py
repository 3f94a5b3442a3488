"""Every schedule of the catalog, for every size of group, is proven; and says what its tables say."""

from __future__ import annotations

import itertools
import re

import pytest

from overweave.errors import InputError
from overweave.ir.epilogue import Epilogue
from overweave.ir.operators.registry import OPERATORS, operator_of
from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.ir.schedule import Compute, Operation, Reduce
from overweave.ir.verify.plan import MachineLimits, verify_plan, verify_schedule
from overweave.schedules.catalog.catalog import build, names
from overweave.schedules.methods.registry import METHODS, REPLACED

SIZES = (0, 1, 3, 5, 37, 200)
CHOICES = ({}, {"order": "all_peers"}, {"pieces": 3}, {"pieces": 3, "order": "all_peers", "block_m": 16})


def problem(name: str, m: int = 64, world_size: int = 4, **more: object) -> Problem:
    fields = {"n": 48, "k": 16, "dtype": "bfloat16", **more}
    operator = operator_of(name.split(".")[0])
    m = operator.whole_rows(m, world_size)
    return Problem(operator=operator.name, m=m, world_size=world_size, **fields)


def plans(world_size: int):
    for name, m, options in itertools.product(names(), SIZES, CHOICES):
        if set(options) <= {option.name for option in METHODS[name].options}:
            yield build(name, problem(name, m, world_size), options)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_every_schedule_is_proven_and_its_tables_hold_its_tiles(world_size: int):
    for plan in plans(world_size):
        verdict = verify_schedule(plan.schedule)
        assert verdict.ok, (plan.name, plan.problem, verdict.refusals)
        check_tables(plan)


def check_tables(plan: Plan) -> None:
    for rank in range(plan.schedule.world_size):
        computes = [operation for operation in plan.schedule.of_rank(rank) if operation.queue == "tiles"]
        if any(queue.name == "tiles" for queue in plan.schedule.queues):
            rows = plan.tile_order(rank, "tiles").rows
            for position, compute in enumerate(computes):
                assert sum(row.operation == position for row in rows) == compute.tiles
            assert len(rows) == sum(compute.tiles for compute in computes)


@pytest.mark.parametrize("method", ["sequential", "per_shard", "push", "pull"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_gathered_input_is_returned_when_asked_for(method: str, world_size: int):
    name = f"all_gather_matmul.{method}"
    schedule = build(name, problem(name, 10, world_size, returns_gathered=True), {}).schedule
    assert verify_schedule(schedule).ok
    assert {goal.region.buffer for goal in schedule.goal} == {"gathered_out", "y"}


def reads_products(operation: Operation) -> bool:
    """Whether it multiplies, or has to do with the product of one weight."""
    products = {"products", "added"}
    return isinstance(operation, Compute) or not products.isdisjoint(
        part.buffer.partition(".")[0] for part in operation.reads
    )


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", names("all_gather_matmul"))
def test_several_weights_over_one_gather(name: str, world_size: int):
    """What moves is what moves for one weight; every output is proven."""
    for m, columns in itertools.product(SIZES, ((8, 40), (16, 24, 8))):
        one, several = (build(name, problem(name, m, world_size, columns=split), {}) for split in ((), columns))
        verdict = verify_plan(several, MachineLimits())
        assert verdict.ok, (m, columns, verdict.refusals)
        check_tables(several)
        moves = [[op for op in plan.schedule.operations if not reads_products(op)] for plan in (one, several)]
        assert moves[0] == moves[1]
        goals = {goal.region.buffer: goal.region.cols for goal in several.schedule.goal}
        assert goals == ({f"y.{at}" if at else "y": (0, cols) for at, cols in enumerate(columns)} if m else {})


@pytest.mark.parametrize(
    ("operator", "fields", "found"),
    [
        ("matmul_reduce_scatter.scatter", {"columns": (8, 40)}, "Only all_gather_matmul takes several"),
        ("all_gather_matmul.push", {"columns": (8, 8)}, "n=48, weights of 8+8 columns"),
        ("all_gather_matmul.push", {"columns": (8, 8, 8, 24)}, "4 weights"),
        (
            "all_gather_matmul.per_shard",
            {"columns": (8, 40), "epilogue": Epilogue(residual=True)},
            "residual takes one",
        ),
        ("matmul_reduce_scatter.scatter", {"epilogue": Epilogue(gate=True)}, "takes no gate"),
        ("all_gather_matmul.per_shard", {"epilogue": Epilogue(gate=True, bias=True)}, "bias beside a gate"),
    ],
)
def test_weights_that_cannot_be_say_why(operator: str, fields: dict[str, object], found: str):
    with pytest.raises(InputError, match=re.escape(found)):
        build(operator, problem(operator, **fields), {})


def test_a_group_of_one_communicates_nothing():
    for name in names():
        schedule = build(name, problem(name, 10, 1), {}).schedule
        assert not schedule.pads
        assert not schedule.credits
        assert [operation.__struct_config__.tag for operation in schedule.operations] == ["compute"]
        assert {buffer.name for buffer in schedule.buffers} == {"x", "w", "y"}


def test_buffers_and_signals_of_push():
    schedule = build("all_gather_matmul.push", problem("all_gather_matmul", 512), {"pieces": 2, "block_m": 64}).schedule
    shapes = {buffer.name: (buffer.rows, buffer.cols, buffer.home) for buffer in schedule.buffers}
    assert shapes == {
        "x": (128, 16, "input"),
        "gathered": (512, 16, "symmetric"),
        "w": (16, 48, "input"),
        "y": (512, 48, "output"),
    }
    puts = [operation for operation in schedule.of_rank(1) if operation.queue == "copies"]
    assert [put.notifies[0].rank for put in puts] == [0, 0, 3, 3, 2, 2]
    assert [put.notifies[0].signal for put in puts] == [0, 1, 2, 3, 2, 3]
    computes = [operation for operation in schedule.of_rank(1) if operation.queue == "tiles"]
    assert [compute.a[0].buffer for compute in computes] == ["x"] + ["gathered"] * 6
    assert [compute.out[0].rows[0] for compute in computes] == [128, 256, 320, 384, 448, 0, 64]


def test_scatter_serves_the_next_rank_first_and_sums_in_rank_order():
    schedule = build("matmul_reduce_scatter.scatter", problem("matmul_reduce_scatter", 512), {"pieces": 1}).schedule
    of_one = list(schedule.of_rank(1))
    computes = [operation for operation in of_one if operation.queue == "tiles"]
    assert [compute.out[0].rows[0] // 128 for compute in computes] == [2, 3, 0, 1]
    puts = [operation for operation in of_one if operation.queue == "copies"]
    assert [(put.destinations[0].rank, put.destinations[0].rows, put.notifies[0].signal) for put in puts] == [
        (2, (0, 128), 1),
        (3, (128, 256), 1),
        (0, (256, 384), 0),
    ]
    assert all(put.waits[0].count == compute.tiles for put, compute in zip(puts, computes, strict=False))
    (reduce,) = [operation for operation in of_one if operation.queue == "sums"]
    assert [part.buffer for part in reduce.operands] == ["slots", "partial", "slots", "slots"]
    assert schedule.goal[1].terms == ((0, 16), (16, 32), (32, 48), (48, 64))


def test_ring_sums_in_the_order_in_which_it_passes():
    schedule = build("matmul_reduce_scatter.fused_ring", problem("matmul_reduce_scatter", 64), {}).schedule
    assert schedule.goal[1].terms == ((32, 48), (48, 64), (0, 16), (16, 32))


def test_one_ranks_tables_are_those_of_the_whole_plan():
    name = "matmul_reduce_scatter.scatter"
    whole, own = build(name, problem(name), {}), build(name, problem(name), {}, rank=2)
    assert own.schedule == whole.schedule
    assert {order.rank for order in own.tile_orders} == {2}
    assert own.tile_order(2, "sums") == whole.tile_order(2, "sums")


def test_names_are_sorted_by_operator():
    assert tuple(OPERATORS) == (
        "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "all_to_all_matmul", "matmul_all_to_all"
    )  # fmt: skip
    assert names("all_gather_matmul") == tuple(
        f"all_gather_matmul.{m}"
        for m in (
            *("sequential", "per_shard", "push", "gather_packed", "pull"),
            *("mesh", "ring", "double_ring", "islands"),
            *("uniform_fused_1d", "hetero_fused_1d", "hetero_unfused_1d", "uniform_fused_2d"),
            *("uniform_unfused_1d", "uniform_unfused_2d", "hetero_fused_2d", "hetero_unfused_2d"),
        )
    )
    with pytest.raises(InputError, match="Operators: all_gather_matmul"):
        names("all_to_all")


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("all_gather_matmul.shove", {}, "all_gather_matmul.push"),
        (
            "all_gather_matmul.push",
            {"peices": 2},
            "Valid options, nearest first: pieces=1..64; ",
        ),
        ("all_gather_matmul.push", {"pieces": 0}, "1..64"),
        ("all_gather_matmul.push", {"pieces": "9" * 50}, "1..64"),
        ("all_gather_matmul.push", {"pieces": True}, "1..64"),
        ("all_gather_matmul.push", {"order": "random"}, "ring|all_peers"),
        ("all_gather_matmul.push", {"block_m": 48}, "16|32|64|128|256|auto"),
        ("all_gather_matmul.push", {"kernel": "cuda"}, "portable|hopper"),
        ("all_gather_matmul.push", {"kernel": "hopper", "block_m": 32}, "64|128|256"),
        ("all_gather_matmul.sequential", {"pieces": 2}, "Valid options: none"),
    ],
)
def test_what_is_not_known_is_refused_by_naming_what_is(name: str, options: dict[str, str | int], named: str):
    with pytest.raises(InputError) as caught:
        build(name, problem("all_gather_matmul"), options)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"operator": "matmul_reduce_scatter"}, "matmul_reduce_scatter"),
        ({"dtype": "float8"}, "float8"),
        ({"world_size": 0}, "world_size 0"),
        ({"m": -1}, "m=-1"),
        ({"n": 0}, "n=0"),
        ({"k": 2**30}, "31 bits"),
    ],
)
def test_a_problem_that_is_none_is_refused(fields: dict[str, object], found: str):
    asked = {"operator": "all_gather_matmul", "m": 8, "n": 8, "k": 8, "world_size": 4, "dtype": "float32", **fields}
    with pytest.raises(InputError, match=found):
        build("all_gather_matmul.push", Problem(**asked), {})
    with pytest.raises(InputError, match="rank 4 of 4"):
        build("all_gather_matmul.push", problem("all_gather_matmul"), {}, rank=4)


WHOLE = {"block_m": 128, "block_n": 256}


@pytest.mark.parametrize(
    ("m", "asked", "shape"), [(2048, {}, (128, 128, 5)), (4096, {}, (128, 256, 3)), (2048, WHOLE, (128, 256, 3))]
)
def test_rings_take_half_tiles_where_a_shard_of_whole_ones_is_one_wave(
    m: int, asked: dict[str, int], shape: tuple[int, int, int]
):
    """4,096 columns, two ranks: 128 tiles of 128 x 256 for 132 SMs, or twice as many."""
    size = Problem(operator="matmul_reduce_scatter", m=m, n=4096, k=2048, world_size=2, dtype="bfloat16")
    for plan, expected in (("ring_stored", shape), ("scatter", (128, 256, 3))):
        config = build(f"matmul_reduce_scatter.{plan}", size, {"kernel": "hopper", **asked}).realization.matmul
        assert config is not None
        assert (config.block_m, config.block_n, config.stages) == expected


def test_half_tiles_are_for_whoever_asks():
    """112 tiles of 128 x 256 in both shards, or twice as many; larger ones if these are asked for, too."""
    size = Problem(operator="all_gather_matmul", m=1024, n=3584, k=5120, world_size=2, dtype="bfloat16")
    halves = {"half_tiles": "on"}
    for asked, tile in (({}, (128, 256)), (halves, (128, 128)), (WHOLE | halves, (128, 256))):
        config = build("all_gather_matmul.push", size, {"kernel": "hopper", **asked}).realization.matmul
        assert config is not None
        assert (config.block_m, config.block_n) == tile


@pytest.mark.parametrize(
    ("asked", "stages"), [({"block_m": 128, "block_n": 128}, 5), ({"stages": 2}, 2), ({"block_n": 256, "stages": 2}, 2)]
)
def test_who_asks_for_a_tile_gets_what_it_runs_best_with(asked: dict[str, int], stages: int):
    made = build("all_gather_matmul.push", problem("all_gather_matmul.push", 8192, 2), {"kernel": "hopper", **asked})
    config = made.realization.matmul
    assert config is not None
    assert config.stages == stages
    assert asked.items() <= {"block_m": config.block_m, "block_n": config.block_n, "stages": config.stages}.items()


def test_numbers_may_come_as_text():
    name = "all_gather_matmul.push"
    as_text, as_numbers = {"pieces": "4", "block_m": "32", "warps": "auto"}, {"pieces": 4, "block_m": 32}
    assert build(name, problem(name), as_text) == build(name, problem(name), as_numbers)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_own_tiles_that_add_are_proven_whatever_the_shards(world_size: int):
    """Empty shards, empty first and last pieces: every arrival is waited for by somebody."""
    for m, pieces, order in itertools.product((0, 1, 2, 5, 100, 515), (1, 2, 4), ("ring", "all_peers")):
        problem = Problem(operator="matmul_reduce_scatter", m=m, n=96, k=64, world_size=world_size, dtype="bfloat16")
        options = {"sums": "epilogue", "pieces": pieces, "order": order, "block_m": 64, "block_n": 64}
        plan = build("matmul_reduce_scatter.scatter", problem, options)
        assert verify_plan(plan, MachineLimits()).refusals == ()
        assert not any(isinstance(operation, Reduce) for operation in plan.schedule.operations)


def test_own_tiles_that_add_may_not_keep_pushes_from_their_sms():
    problem = Problem(operator="matmul_reduce_scatter", m=100, n=96, k=64, world_size=2, dtype="bfloat16")
    with pytest.raises(InputError, match="copy_kernel"):
        build("matmul_reduce_scatter.scatter", problem, {"sums": "epilogue", "mover": "copy_kernel"})


def test_a_schedule_that_is_gone_names_the_one_that_does_its_work():
    for name, plan in REPLACED.items():
        operator = name.split(".")[0]
        assert f"{operator}.{plan}" in names(operator)
        with pytest.raises(InputError, match=f"gone.*Use {plan}"):
            build(name, problem(operator), {})


def test_rotation_changes_the_order_of_the_peers_and_nothing_else():
    problem = Problem(operator="all_gather_matmul", m=512, n=64, k=32, world_size=4, dtype="bfloat16")
    on, off = (
        build("all_gather_matmul.push", problem, {"rotation": way, "pieces": 1}).schedule for way in ("on", "off")
    )
    first = [[next(schedule.of_rank(rank)).writes[0].rank for rank in range(4)] for schedule in (on, off)]
    assert first == [[3, 0, 1, 2], [1, 0, 0, 0]]
    assert {each.name for each in on.operations} == {each.name for each in off.operations}


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("world_size", [3, 1, 2])
@pytest.mark.slow
def test_whatever_choice_builds_a_plan_is_proven(name: str, world_size: int):
    """All of the plan, engines and tables too; what cannot be is refused when it is built."""
    chosen = [{option.name: choice} for option in METHODS[name].options for choice in option.choices]
    for options, m in itertools.product(chosen, (0, 5, 64)):
        try:
            plan = build(name, problem(name, m, world_size, n=64, k=32), options)
        except InputError:
            continue
        assert verify_plan(plan, MachineLimits()).refusals == (), (options, m)
