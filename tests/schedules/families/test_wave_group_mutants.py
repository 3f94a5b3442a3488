"""Wave groups that are broken in one place: none is proven."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pytest
from msgspec.structs import replace

from overweave.ir.operators.matmul_all_reduce import OPERATOR as ALL_REDUCE
from overweave.ir.operators.matmul_reduce_scatter import OPERATOR as REDUCE_SCATTER
from overweave.ir.plan import Plan
from overweave.ir.schedule import Buffer, Collective, Notify, Operation, Reduce, Region, Schedule, Wait
from overweave.ir.verify.plan import MachineLimits, verify_plan, verify_schedule
from overweave.schedules.communication import COMPUTED, STAGED
from overweave.schedules.tiles.order import tile_orders
from tests.schedules.families.test_wave_groups import groups_of, waves

OPERATORS = (ALL_REDUCE.name, REDUCE_SCATTER.name)


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


def refusals(plan: Plan) -> set[str]:
    return {refusal.rule for refusal in verify_plan(plan, MachineLimits()).refusals}


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_library_needs_sms_where_tiles_wait_for_its_sums(operator: str):
    """The last tiles wait for the first sum: with SMs of its own it runs, without them tiles may hold all."""
    plan = waiting_for_a_sum(small(operator), len(groups_of(small(operator))) - 1, "0")
    assert refusals(plan) == set()
    realization = replace(plan.realization, library_sms=0)
    assert refusals(replace(plan, realization=realization)) == {"residency"}


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_library_queue_that_waits_for_what_its_tiles_wait_for_is_refused(operator: str):
    plan = waiting_for_a_sum(small(operator), 0, "1")
    assert refusals(plan) == {"deadlock"}
