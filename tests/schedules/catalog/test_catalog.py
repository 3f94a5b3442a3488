"""Every schedule of the catalog, for every size of group, is proven; and says what its tables say."""

from __future__ import annotations

import itertools
import re

import pytest

from overweave.errors import InputError
from overweave.ir.epilogue import Epilogue
from overweave.ir.operators.registry import operator_of
from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.ir.verify.plan import MachineLimits, verify_plan, verify_schedule
from overweave.schedules.catalog.catalog import build, names
from overweave.schedules.methods.registry import METHODS

SIZES = (0, 1, 3, 5, 37, 200)
CHOICES = (
    {},
    {"order": "all_peers"},
    {"pieces": 3},
    {"pieces": 3, "order": "all_peers", "block_m": 16},
    {"sums": "epilogue", "pieces": 3, "order": "all_peers", "block_m": 16},
    {"pieces": 3, "own_pieces": 2},
)


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


def test_one_ranks_tables_are_those_of_the_whole_plan():
    name = "matmul_reduce_scatter.scatter"
    whole, own = build(name, problem(name), {}), build(name, problem(name), {}, rank=2)
    assert own.schedule == whole.schedule
    assert {order.rank for order in own.tile_orders} == {2}
    assert own.tile_order(2, "sums") == whole.tile_order(2, "sums")


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


def test_own_tiles_that_add_may_not_keep_pushes_from_their_sms():
    problem = Problem(operator="matmul_reduce_scatter", m=100, n=96, k=64, world_size=2, dtype="bfloat16")
    with pytest.raises(InputError, match="copy_kernel"):
        build("matmul_reduce_scatter.scatter", problem, {"sums": "epilogue", "mover": "copy_kernel"})


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
