"""Blocks that calls fill in part: where filled rows lie, and what is refused that is right for whole blocks alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
from msgspec.structs import replace

from overweave.ir.counts import Filled, filled_rows
from overweave.ir.plan import Plan
from overweave.ir.schedule import (
    Buffer,
    Compute,
    Copy,
    Credit,
    Get,
    Notify,
    Operation,
    Put,
    Region,
    Schedule,
    SignalPad,
    Wait,
)
from overweave.ir.text.parse import from_text, to_text
from overweave.ir.verify.plan import MachineLimits, verify_plan, verify_schedule
from tests.plans import plan_of, with_operations, with_schedule

BLOCK = 4


def planned(name: str = "per_peer", world_size: int = 3, counted: bool = True, **options: int | str) -> Plan:
    sizes = {"m": BLOCK * world_size, "n": 16, "k": 16, "world_size": world_size}
    return plan_of(f"all_to_all_matmul.{name}", options, counted=counted, **sizes)


def refusals(schedule: Schedule) -> list[str]:
    return [str(refusal) for refusal in verify_schedule(schedule).refusals]


@pytest.mark.parametrize("filled", [(0, 0, 0), (4, 4, 4), (1, 0, 3), (0, 4, 1)])
def test_filled_rows_lie_one_behind_the_other(filled: tuple[int, ...]):
    rows = [filled_rows((row, row + 1), BLOCK, filled) for row in range(3 * BLOCK)]
    assert [hi - lo for lo, hi in rows] == [int(row < count) for count in filled for row in range(BLOCK)]
    assert all(one[1] == other[0] for one, other in pairwise(rows))
    assert filled_rows((0, 3 * BLOCK), BLOCK, filled) == (0, sum(filled))
    assert filled_rows((0, 0), 0, filled) == (0, 0)


def test_an_operation_moves_what_is_filled_and_signals_as_ever():
    plan = planned(world_size=2)
    filled = Filled(plan.schedule, [[1, 2], [0, 3]])
    made = [filled.operation(operation) for operation in plan.schedule.operations]
    assert [one.reads[0].rows for one in made] == [(1, 3), (0, 1), (1, 1), (0, 0), (0, 3), (0, 2)]
    assert [one.writes[0].rows for one in made] == [(0, 2), (0, 1), (1, 1), (1, 1), (2, 5), (0, 2)]
    assert [one.notifies for one in made] == [one.notifies for one in plan.schedule.operations]


@pytest.mark.parametrize("name", ["sequential", "per_peer"])
@pytest.mark.parametrize("world_size", range(1, 9))
def test_all_plans_are_proven_and_are_data(name: str, world_size: int):
    plan = planned(name, world_size)
    verify_plan(plan, MachineLimits()).raise_if_refused()
    assert from_text(to_text(plan.schedule)) == plan.schedule


def swapped(region: Region) -> Region:
    """Of what has arrived at rank 0, blocks 1 and 2 change places."""
    if (region.buffer, region.rank) != ("gathered", 0) or region.rows[0] < BLOCK:
        return region
    other = 2 * BLOCK if region.rows[0] < 2 * BLOCK else BLOCK
    return replace(region, rows=(other, other + BLOCK))


def with_blocks_swapped(operation: Operation) -> Operation:
    if isinstance(operation, Compute):
        return replace(operation, a=tuple(map(swapped, operation.a)))
    assert hasattr(operation, "destinations")
    return replace(operation, destinations=tuple(map(swapped, operation.destinations)))


def test_blocks_that_land_in_each_others_places_are_right_only_if_they_are_whole():
    for counted in (False, True):
        schedule = planned(counted=counted).schedule
        changed = replace(schedule, operations=tuple(map(with_blocks_swapped, schedule.operations)))
        assert bool(refusals(changed)) == counted
    assert "other rows" in refusals(changed)[0]


def through_a_buffer(whole: bool) -> Schedule:
    """All that has arrived is copied to a buffer that is not counted, at once or block by block, and multiplied."""
    schedule = planned("sequential", 2).schedule
    rows = ((0, 2 * BLOCK),) if whole else ((0, BLOCK), (BLOCK, 2 * BLOCK))
    cols, staged, made = (0, 16), Buffer("staged", 2 * BLOCK, 16, "local"), list[Operation]()
    for one in schedule.operations:
        if not isinstance(one, Compute):
            made.append(one)
            continue
        for at, part in enumerate(rows):
            arrived, place = (Region(name, one.rank, part, cols) for name in ("gathered", "staged"))
            out = replace(one.out[0], rows=part)
            made += [
                Copy(
                    name=f"stage.{one.rank}.{at}",
                    rank=one.rank,
                    queue="main",
                    sources=(arrived,),
                    destinations=(place,),
                ),
                replace(one, name=f"{one.name}.{at}", a=(place,), out=(out,)),
            ]
    return replace(schedule, buffers=(*schedule.buffers, staged), operations=tuple(made))


def test_rows_elsewhere_are_paired_with_one_block_at_a_time():
    assert refusals(through_a_buffer(whole=False)) == []
    assert "is of several blocks" in refusals(through_a_buffer(whole=True))[0]


def test_a_part_of_a_block_has_as_many_rows_elsewhere():
    schedule = through_a_buffer(whole=False)
    filled = Filled(schedule, [[1, 4], [2, 0]])
    staged = [filled.operation(one) for one in schedule.operations if isinstance(one, Copy)]
    assert [one.destinations[0].rows for one in staged] == [(0, 1), (4, 6), (0, 4), (4, 4)]


def hops(rows: dict[int, int], world_size: int = 2) -> Plan:
    """What has arrived goes row by row to rows that are not counted, to counted ones, and to others that are not, which
    are multiplied. rows: where in the counted ones those of each block lie that lie elsewhere."""
    plan, block = planned("sequential", world_size), BLOCK
    total, cols, made = world_size * block, (0, 16), list[Operation]()
    for one in plan.schedule.operations:
        if not isinstance(one, Compute):
            made.append(one)
            continue
        for row in range(total):
            at = row // block * block + rows.get(row % block, row % block)
            places = [(one.a[0].buffer, row), ("first", row), ("again", at), ("last", row)]
            regions = [Region(name, one.rank, (lo, lo + 1), cols) for name, lo in places]
            for number, (source, target) in enumerate(pairwise(regions)):
                name = f"hop.{one.rank}.{row}.{number}"
                move = Copy(name=name, rank=one.rank, queue="main", sources=(source,), destinations=(target,))
                made.append(move)
        for lo in range(0, total, block):
            a, out = Region("last", one.rank, (lo, lo + block), cols), replace(one.out[0], rows=(lo, lo + block))
            made.append(replace(one, name=f"{one.name}.{lo}", a=(a,), out=(out,)))
    local = [Buffer(name, total, 16, "local", counted=None) for name in ("first", "last")]
    again = Buffer("again", total, 16, "local", counted="received")
    schedule = replace(plan.schedule, buffers=(*plan.schedule.buffers, *local, again), operations=tuple(made))
    return replace(plan, schedule=schedule)


def verdict(plan: Plan) -> str:
    return "\n".join(str(refusal) for refusal in verify_plan(plan, MachineLimits()).refusals)


def test_rows_keep_their_place_through_buffers_that_are_not_counted():
    """Two rows that change places twice are right where a call fills both or none, and in whole blocks."""
    for world_size in (1, 2, 3):
        assert verdict(hops({}, world_size)) == ""
        assert "counts may fill one without the other" in verdict(hops({0: 1, 1: 0}, world_size))
    plan = hops({0: 1, 1: 0})
    whole = tuple(replace(each, counted=None) for each in plan.schedule.buffers)
    uncounted = replace(plan, schedule=replace(plan.schedule, buffers=whole), problem=planned(counted=False).problem)
    assert refusals(uncounted.schedule) == []


def test_rows_that_counts_fill_are_no_factor_that_is_needed_whole():
    """As `b` of a matmul, by way of a buffer that is not counted, rows that are not there would be added."""
    plan = hops({})
    first = next(one for one in plan.schedule.operations if isinstance(one, Compute))
    assert "needs all rows" not in verdict(plan)
    rows = Region("last", first.rank, (0, BLOCK), (0, 16))
    by_rows = replace(first, a=(replace(first.a[0], cols=(0, BLOCK)),), b=rows)
    operations = tuple(by_rows if one is first else one for one in plan.schedule.operations)
    assert "needs all rows" in verdict(with_operations(plan, operations))


def test_blocks_are_those_of_the_problem():
    plan = hops({})
    higher = tuple(
        replace(each, rows=each.rows + 2) if each.name == "again" else each for each in plan.schedule.buffers
    )
    assert "are of blocks of one size" in verdict(with_schedule(plan, buffers=higher))
    taller = replace(plan, problem=replace(plan.problem, m=2 * (BLOCK + 1)))
    assert "those of the problem are of 5 rows" in verdict(taller)


def test_an_output_beside_counted_blocks_is_counted():
    schedule = planned().schedule
    buffers = tuple(replace(each, counted=None) if each.name == "y" else each for each in schedule.buffers)
    assert any("output y is not counted" in each for each in refusals(replace(schedule, buffers=buffers)))


def lent(counted: bool, credits: tuple[tuple[int, int], ...]) -> Schedule:
    """Of three ranks, rank 0 keeps what it sends rank 1 where rank 1 fetches it, and what it sends rank 2 where rank 1
    brings it back to and rank 2 fetches it. Of ranks 0 and 2 none writes a row that the other one reads."""
    schedule, block, cols = planned("per_peer", 3).schedule, BLOCK, (0, 16)

    def part(buffer: str, rank: int, at: int) -> Region:
        return Region(buffer, rank, (at * block, (at + 1) * block), cols)

    signals = {"push.0-1.0": ("fetch.1", 1), "push.0-2.0": ("fetch.2", 2)}
    kept = [one for one in schedule.operations if one.name not in signals]
    arrived = {one.name: one.notifies for one in schedule.operations if one.name in signals}
    made = [
        Put(name="relay.0", rank=0, queue="copies", sources=(part("x", 0, 2),), destinations=(part("t", 1, 0),),
            notifies=(Notify("there", 1, 0),)),
        Copy(name="keep.0", rank=0, queue="main", sources=(part("x", 0, 1),), destinations=(part("s", 0, 1),),
             notifies=(Notify("kept", 1, 0),)),
        Put(name="relay.1", rank=1, queue="copies", sources=(part("t", 1, 0),), destinations=(part("s", 0, 2),),
            waits=(Wait("there", (0, 1), 1),), notifies=(Notify("kept", 2, 0),)),
    ]  # fmt: skip
    fetched = [
        Get(name=name, rank=rank, queue="copies", sources=(part("s", 0, rank),),
            destinations=(part("gathered", rank, 0),), waits=(Wait("kept", (0, 1), 1),), notifies=arrived[push])
        for push, (name, rank) in signals.items()
    ]  # fmt: skip
    by_rank = [[*(one for one in (*made, *fetched, *kept) if one.rank == rank)] for rank in range(3)]
    return replace(
        schedule,
        buffers=(*(each if counted else replace(each, counted=None) for each in schedule.buffers),
                 Buffer("t", block, 16, "symmetric"),
                 Buffer("s", 3 * block, 16, "symmetric", counted="sent" if counted else None)),
        pads=(*schedule.pads, SignalPad("there", 1), SignalPad("kept", 1)),
        credits=tuple(Credit(*one) for one in credits),
        operations=tuple(one for its in by_rank for one in its),
    )  # fmt: skip


def test_the_next_call_may_store_where_this_one_reads_another_block():
    every = tuple((giver, taker) for giver in range(3) for taker in range(3) if giver != taker)
    lacking = tuple(one for one in every if one != (2, 0))
    assert refusals(lent(True, every)) == []
    assert refusals(lent(False, lacking)) == []
    told = refusals(lent(True, lacking))
    assert len(told) == 1
    assert "[reuse] keep.0" in told[0]
    assert "no credit from rank 2 to rank 0" in told[0]


def test_buffers_of_other_sizes_and_sums_are_refused():
    schedule = planned().schedule
    uneven = tuple(replace(each, rows=each.rows + 1) if each.name == "gathered" else each for each in schedule.buffers)
    assert "no 3 whole blocks" in refusals(replace(schedule, buffers=uneven))[0]
    first, *others = schedule.operations
    assert isinstance(others[1], Compute)
    added = replace(others[1], addends=(Region("y", others[1].rank, others[1].out[0].rows, others[1].out[0].cols),))
    told = refusals(replace(schedule, operations=(first, others[0], added, *others[2:])))
    assert any("does not know which rows are filled" in each for each in told)


def test_a_collective_between_filled_rows_and_whole_blocks_is_refused():
    schedule = planned("sequential").schedule
    buffers = tuple(replace(each, counted=None) if each.name == "gathered" else each for each in schedule.buffers)
    assert "whole blocks at the other" in refusals(replace(schedule, buffers=buffers))[0]


def test_a_kernel_of_whole_blocks_is_refused():
    plan = planned("push", counted=False)
    kinds = {"x": "sent", "gathered": "received", "y": "received"}
    buffers = tuple(replace(each, counted=kinds.get(each.name)) for each in plan.schedule.buffers)  # type: ignore[arg-type]
    told = verify_plan(
        replace(plan, schedule=replace(plan.schedule, buffers=buffers), problem=replace(plan.problem, counted=True)),
        MachineLimits(),
    ).refusals
    assert any("tile_kernel knows whole blocks alone" in str(each) for each in told)


def test_a_plan_counts_the_rows_that_its_problem_says():
    plan = planned()
    told = verify_plan(replace(plan, problem=replace(plan.problem, counted=False)), MachineLimits()).refusals
    assert any("are counted as" in str(each) for each in told)
