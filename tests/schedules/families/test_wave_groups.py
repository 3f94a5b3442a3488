"""Wave groups: proven for every world size and any partition of the waves; what is refused, and how fast proofs are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from time import process_time

import pytest
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.hardware.machine import load
from overweave.ir.epilogue import Epilogue
from overweave.ir.operators.matmul_all_reduce import OPERATOR as ALL_REDUCE
from overweave.ir.operators.matmul_reduce_scatter import OPERATOR as REDUCE_SCATTER
from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.ir.schedule import Buffer, Collective, Notify, Operation, Reduce, Region, Schedule, Wait
from overweave.ir.text.parse import from_text, to_text
from overweave.ir.verify.plan import MachineLimits, verify_plan, verify_schedule
from overweave.schedules.catalog.catalog import build
from overweave.schedules.communication import COMPUTED, STAGED, SUMMED
from overweave.schedules.families.wave_groups import count_waves, even_partition, rectangles, wave_tiles
from overweave.schedules.tiles.order import tile_orders
from overweave.sim.simulate import total_us
from tests.clock import slowness
from tests.plans import rules, with_schedule

OPERATORS = (ALL_REDUCE.name, REDUCE_SCATTER.name)
FEW_SMS: dict[str, int | str] = {"sms": 20, "library_sms": 4}
CYCLIC: dict[str, int | str] = {"rows": "cyclic", "block_m": 16}


def problem_of(operator: str, shape: tuple[int, int, int], world_size: int, **more: object) -> Problem:
    m, n, k = shape
    return Problem(operator=operator, m=m, n=n, k=k, world_size=world_size, dtype="bfloat16", **more)  # type: ignore[arg-type]


def waves(operator: str, shape: tuple[int, int, int], world_size: int, **options: int | str) -> Plan:
    return build(f"{operator}.waves", problem_of(operator, shape, world_size), FEW_SMS | options)


def groups_of(plan: Plan, rank: int = 0) -> list[Collective]:
    return [one for one in plan.schedule.of_rank(rank) if isinstance(one, Collective)]


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_proven_for_every_world_size_with_ragged_rows_and_columns(operator: str):
    for world_size in range(1, 9):
        for shape in ((1000, 344, 64), (world_size * 300, 136, 32), (2049 - world_size, 600, 64)):
            plan = waves(operator, shape, world_size)
            verdict = verify_plan(plan, MachineLimits())
            assert verdict.ok, f"{world_size} {shape} {verdict}"
            assert from_text(to_text(plan.schedule)) == plan.schedule
            if world_size == 4:
                assert total_us(plan, load("h200x4")) > 0


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("more", [{"kernel": "portable"}, {"kernel": "hopper"}, {"rows": "cyclic"}], ids=str)
def test_a_large_product_is_proven_in_two_seconds(operator: str, more: dict[str, int | str]):
    if operator == ALL_REDUCE.name and "rows" in more:
        pytest.skip("all ranks get all rows of an all-reduce")
    problem, slow, begin = problem_of(operator, (32768, 8192, 1024), 8), slowness(), process_time()
    plan = build(f"{operator}.waves", problem, more, rank=3)
    assert verify_plan(plan, MachineLimits(), rank=3).ok
    assert process_time() - begin < 2 * slow


def test_equal_blocks_are_one_object():
    one, other = (waves(REDUCE_SCATTER.name, (2048, 1024, k), 2).schedule for k in (64, 128))
    for name in (STAGED, SUMMED):
        assert one.buffer(name).blocks is other.buffer(name).blocks is not None


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_partition_says_behind_which_waves_collectives_start(operator: str):
    one = groups_of(waves(operator, (2048, 1024, 64), 2, groups="8"))
    two = groups_of(waves(operator, (2048, 1024, 64), 2, groups="1+7"))
    assert [wait.count for group in one for wait in group.waits] == [128]
    assert [wait.count for group in two for wait in group.waits] == [16, 112]
    assert verify_plan(waves(operator, (2048, 1024, 64), 2, groups="1+2+1+1+3"), MachineLimits()).ok


def test_waves_have_equal_parts_of_every_member():
    assert (wave_tiles(116, 1), wave_tiles(116, 3), wave_tiles(2, 4)) == (116, 114, 4)
    assert (count_waves(0, 116, 1), count_waves(115, 114, 3), count_waves(128, 16, 2)) == (0, 2, 8)
    assert [even_partition(waves) for waves in (0, 1, 3, 4, 10)] == [(), (1,), (1, 1, 1), (1, 1, 1, 1), (3, 3, 2, 2)]


def test_rectangles_hold_every_block_once():
    blocks = {(0, 0), (1, 0), (0, 1), (1, 1), (3, 1), (2, 2)}
    found = rectangles(blocks)
    cover = [(row, col) for rows, cols in found for row in range(*rows) for col in range(*cols)]
    assert sorted(cover) == sorted(blocks)
    assert ((0, 2), (0, 2)) in found


@pytest.mark.parametrize(
    ("operator", "options", "said"),
    [
        (ALL_REDUCE.name, {"groups": "1+2"}, "groups=1+2 are 3 waves of 8"),
        (REDUCE_SCATTER.name, {"groups": "8+1"}, "groups=8+1 are 9 waves of 8"),
        (ALL_REDUCE.name, {"groups": "1+x"}, "option groups=1+x: no such value. Give one of 1..65536+...|auto"),
        (ALL_REDUCE.name, {"groups": "1+0+7"}, "no such value"),
        (ALL_REDUCE.name, {"library_sms": 20}, "library_sms=20 of 20 leave none to tiles"),
        (ALL_REDUCE.name, {"rows": "cyclic"}, "unknown"),
    ],
)
def test_a_partition_that_does_not_fit_is_refused(operator: str, options: dict[str, int | str], said: str):
    with pytest.raises(InputError) as refused:
        waves(operator, (2048, 1024, 64), 2, **options)
    assert said in str(refused.value)


def test_rows_in_strips_are_proven_and_a_wrong_map_is_refused():
    for world_size in range(1, 9):
        for rows in (80, 37, 5):
            plan = waves(REDUCE_SCATTER.name, (world_size * rows, 344, 64), world_size, **CYCLIC)
            assert verify_plan(plan, MachineLimits()).ok, f"{world_size} {rows}"
    plan = waves(REDUCE_SCATTER.name, (240, 344, 64), 3, **CYCLIC)
    goal = list(plan.schedule.goal)
    goal[0], goal[1] = replace(goal[0], row=goal[1].row), replace(goal[1], row=goal[0].row)
    for wrong in (
        with_schedule(plan, goal=tuple(goal)),
        replace(plan, problem=replace(plan.problem, strip=32)),
        replace(plan, problem=replace(plan.problem, strip=0)),
    ):
        assert not verify_plan(wrong, MachineLimits()).ok
    swapped = replace(wrong, problem=plan.problem, schedule=with_rows_swapped(plan.schedule))
    assert not verify_plan(swapped, MachineLimits()).ok


def with_rows_swapped(schedule: Schedule) -> Schedule:
    """A rank's first collective lands strips in each other's rows."""
    operations = list(schedule.operations)
    at = next(at for at, one in enumerate(operations) if isinstance(one, Collective))
    first, second, *more = operations[at].writes
    operations[at] = replace(operations[at], destinations=(second, first, *more))
    return replace(schedule, operations=tuple(operations))


def test_shards_that_have_other_numbers_of_tiles_are_refused():
    with pytest.raises(InputError, match="groups have equal parts of shards, and shards have 3 or 4 rows of tiles"):
        waves(REDUCE_SCATTER.name, (97, 1024, 64), 2, block_m=16, groups="1")


def test_other_shards_and_a_group_of_one_have_no_groups_unless_they_are_asked_for():
    for shape, world_size in (((33, 1024, 64), 8), ((1000, 344, 64), 1)):
        plan = waves(REDUCE_SCATTER.name, shape, world_size)
        assert verify_plan(plan, MachineLimits()).ok
        assert len(groups_of(plan)) == (world_size > 1)
    for operator in OPERATORS:
        plan = waves(operator, (2048, 1024, 64), 1, groups="4+4")
        assert verify_plan(plan, MachineLimits()).ok
        assert len(groups_of(plan)) == 2


def test_strips_are_finished_each_in_its_place():
    problem = problem_of(REDUCE_SCATTER.name, (240, 344, 64), 3, epilogue=Epilogue(bias=True, residual=True))
    plan = build(f"{REDUCE_SCATTER.name}.waves", problem, FEW_SMS | CYCLIC)
    assert verify_plan(plan, MachineLimits()).ok
    goals = list(plan.schedule.goal)
    for wrong in (goals[1:], [replace(goals[0], row=goals[1].row), *goals[1:]]):
        verdict = verify_plan(with_schedule(plan, goal=tuple(wrong)), MachineLimits())
        assert any(refusal.operation == "restore.0" for refusal in verdict.refusals), verdict


# Wave groups that are broken in one place: none is proven.

STRIPS: dict[str, int | str] = {"rows": "cyclic"}
KINDS: tuple[tuple[str, dict[str, int | str]], ...] = (*((one, {}) for one in OPERATORS), (REDUCE_SCATTER.name, STRIPS))
of_each_kind = pytest.mark.parametrize(("operator", "options"), KINDS, ids=("all_reduce", "own", "cyclic"))


def small(operator: str, options: dict[str, int | str] | None = None) -> Plan:
    """Two ranks, ragged columns, and three groups or four."""
    return waves(operator, (1024, 600, 64), 2, block_m=128, block_n=128, group_m=3, **(options or {}))


def with_operation(schedule: Schedule, at: int, operation: Operation) -> Schedule:
    return replace(schedule, operations=(*schedule.operations[:at], operation, *schedule.operations[at + 1 :]))


def collectives(schedule: Schedule) -> list[tuple[int, Collective]]:
    return [(at, one) for at, one in enumerate(schedule.operations) if isinstance(one, Collective)]


def lost_waits(schedule: Schedule) -> Iterator[Schedule]:
    for at, one in collectives(schedule):
        yield with_operation(schedule, at, replace(one, waits=()))
        (wait,) = one.waits
        yield with_operation(schedule, at, replace(one, waits=(Wait(wait.pad, wait.signals, wait.count - 1),)))


def with_places(schedule: Schedule, name: str, places: tuple[int, ...]) -> Schedule:
    def changed(buffer: Buffer) -> Buffer:
        return replace(buffer, blocks=replace(buffer.blocks, places=places)) if buffer.blocks else buffer

    buffers = tuple(changed(one) if one.name == name else one for one in schedule.buffers)
    return replace(schedule, buffers=buffers)


def permuted(schedule: Schedule) -> Iterator[tuple[str, tuple[int, ...]]]:
    return ((one.name, one.blocks.places) for one in schedule.buffers if one.blocks)


def swapped_blocks(schedule: Schedule) -> Iterator[Schedule]:
    """Of two groups, or, of what is scattered, of two members or ends: within a group and a member all blocks move."""
    staged = next(places for name, places in permuted(schedule) if name == STAGED)
    last = len(staged) - 1
    for one, other in ((0, last), (last // 2, last), (0, last // 2)):
        yield with_places(schedule, STAGED, exchanged(staged, one, other))


def exchanged(places: tuple[int, ...], one: int, other: int) -> tuple[int, ...]:
    """The blocks in two cells change places."""
    swap = {one: other, other: one}
    return tuple(swap.get(place, place) for place in places)


def no_bijections(schedule: Schedule) -> Iterator[Schedule]:
    for name, places in permuted(schedule):
        for bad in ((*places[:-1], places[0]), places[:-1], (*places[:-1], len(places)), (*places, len(places))):
            yield with_places(schedule, name, bad)


def in_another_order_on_one_rank(schedule: Schedule) -> Iterator[Schedule]:
    of_rank = [(at, one) for at, one in collectives(schedule) if one.rank == 1]
    for (first, one), (second, other) in combinations(of_rank, 2):
        yield with_operation(with_operation(schedule, first, other), second, one)


def holes(schedule: Schedule) -> Iterator[Schedule]:
    """A collective that leaves out one of its rectangles, at both ends; and one that leaves out a row or a column."""
    for at, one in collectives(schedule):
        size = len(one.sources) // (1 if one.function == "all_reduce" else len(one.ranks))
        for part in range(size):
            kept = tuple(region for index, region in enumerate(one.sources) if index % size != part)
            ends = tuple(region for index, region in enumerate(one.destinations) if index % size != part)
            if kept:
                yield with_operation(schedule, at, replace(one, sources=kept, destinations=ends))
        for cut in (without_a_row, without_a_column):
            sides = {name: tuple(map(cut, getattr(one, name))) for name in ("sources", "destinations")}
            yield with_operation(schedule, at, replace(one, **sides))


def without_a_row(region: Region) -> Region:
    return replace(region, rows=(region.rows[0] + 1, region.rows[1]))


def without_a_column(region: Region) -> Region:
    return replace(region, cols=(region.cols[0], region.cols[1] - 1))


def other_moves(schedule: Schedule) -> Iterator[Schedule]:
    """What puts sums in place leaves out a row, or stands before the collectives are over."""
    for at, one in enumerate(schedule.operations):
        if isinstance(one, Reduce):
            short = replace(one, operands=(without_a_row(one.operands[0]),), out=without_a_row(one.out))
            yield with_operation(schedule, at, short)
    queues = tuple(replace(one, after=()) if one.name == "sums" else one for one in schedule.queues)
    yield replace(schedule, queues=queues)


@of_each_kind
@pytest.mark.parametrize(
    "mutants",
    [lost_waits, swapped_blocks, no_bijections, in_another_order_on_one_rank, holes, other_moves],
    ids=lambda mutants: mutants.__name__,
)
def test_no_mutant_is_proven(operator: str, options, mutants):
    schedule = small(operator, options).schedule
    assert verify_schedule(schedule).ok
    found = list(mutants(schedule))
    assert found
    assert [at for at, mutant in enumerate(found) if verify_schedule(mutant).ok] == []


@of_each_kind
def test_tiles_of_a_table_store_and_multiply_what_their_blocks_hold(operator: str, options):
    plan = small(operator, options)
    order = next(one for one in plan.tile_orders if one.queue == "tiles" and one.rank == 0)
    for field, by in (("row", 128), ("row_end", -1), ("col", 128), ("source_row", 128), ("shift", 128), ("width", 64)):
        changed = order.rows[3]._replace(**{field: getattr(order.rows[3], field) + by})
        rows = (*order.rows[:3], changed, *order.rows[4:])
        tables = tuple(replace(one, rows=rows) if one is order else one for one in plan.tile_orders)
        refused = verify_plan(replace(plan, tile_orders=tables), MachineLimits())
        assert not refused.ok, field


def place_of(operation: Operation) -> tuple[int, int, bool]:
    """By rank and group; what puts sums in place is last."""
    group = int(operation.name.split(".")[2]) if operation.queue != "sums" else 1 << 16
    return operation.rank, group, isinstance(operation, Collective)


def waiting_for_a_sum(plan: Plan, group: int, label: str) -> Plan:
    """The plan in which the tiles of a group wait until a collective is over, each collective behind its own tiles."""
    signal = plan.schedule.pads[0].size
    operations: list[Operation] = []
    for one in plan.schedule.operations:
        if isinstance(one, Collective) and one.label.endswith(f".{label}"):
            one = replace(one, notifies=(Notify(COMPUTED, one.rank, signal),))
        if one.name.startswith(f"multiply.{one.rank}.{group}."):
            one = replace(one, waits=(Wait(COMPUTED, (signal, signal + 1), 1),))
        operations.append(one)
    operations.sort(key=place_of)
    pads = (replace(plan.schedule.pads[0], size=signal + 1),)
    schedule = replace(plan.schedule, pads=pads, operations=tuple(operations))
    return replace(plan, schedule=schedule, tile_orders=tile_orders(schedule, plan.realization))


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_library_needs_sms_where_tiles_wait_for_its_sums(operator: str):
    """The last tiles wait for the first sum: with SMs of its own it runs, without them tiles may hold all."""
    plan = waiting_for_a_sum(small(operator), len(groups_of(small(operator))) - 1, "0")
    assert rules(plan) == set()
    realization = replace(plan.realization, library_sms=0)
    assert rules(replace(plan, realization=realization)) == {"residency"}


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_library_queue_that_waits_for_what_its_tiles_wait_for_is_refused(operator: str):
    plan = waiting_for_a_sum(small(operator), 0, "1")
    assert rules(plan) == {"deadlock"}
