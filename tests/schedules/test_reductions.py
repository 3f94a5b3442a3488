"""Lists of moves and sums: templates and lists by hand are proven, each wait is missed, and slips are refused."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

import overweave as ow
from campaigns.oracle.fewer_waits import is_proven, without_one_emitted_wait, without_one_wait
from campaigns.oracle.random.reductions import by_hand
from overweave.errors import InputError, ScheduleError
from overweave.ir.plan import Plan
from overweave.ir.schedule import Apply, Collective, Put, Reduce, Schedule
from overweave.ir.text.files import from_json, to_json
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.schedules.communication import Mover
from overweave.schedules.moves import island_templates
from overweave.schedules.moves.gather_templates import Mesh
from overweave.schedules.moves.provenance import trace_provenance
from overweave.schedules.moves.reduction_templates import reduction_of, round_two_rings
from overweave.schedules.weave.author_plan import author_plan
from tests.schedules.weave.test_weave import PUSH
from tests.tile_spaces import BLOCK, matmul

COLS = 48
NAMES = ("mesh", "ring", "double_ring", "islands")
WAYS = ("", " pieces=1", " pieces=3 col_pieces=2")


def planned(how: str | ow.Reduction, world_size: int, rows: int = 0, cols: int = COLS) -> Plan:
    plan = author_plan(matmul(rows or 3 * BLOCK * world_size, n=cols), {"C": how}, world_size, "bfloat16")
    verify_plan(plan, MachineLimits()).raise_if_refused()
    return plan


def rows(lo: int, hi: int) -> ow.Chunk:
    return ow.Chunk((lo, hi))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("name", NAMES)
def test_templates_are_proven(name: str, world_size: int):
    for collective in ("reduce_scatter", "all_reduce"):
        for options in (*WAYS, " pieces=2 lanes=2" if name in ("mesh", "ring") else " pieces=4"):
            plan = planned(f"{collective}.{name}{options}", world_size)
            assert from_json(to_json(plan)) == plan
    both = {"A": PUSH, "C": f"reduce_scatter.{name}"}
    plan = author_plan(matmul(2 * BLOCK * world_size), both, world_size, "bfloat16")
    verify_plan(plan, MachineLimits()).raise_if_refused()


@pytest.mark.slow
def test_lists_of_any_kind_are_proven_and_miss_every_wait():
    rng = Random(7)
    for turn in range(60):
        ranks, pieces = rng.randint(2, 4), rng.randint(1, 2)
        how = by_hand(rng, (ranks * pieces * BLOCK, COLS, ranks, pieces), everywhere=turn % 2 == 0)
        plan = planned(how, ranks, ranks * pieces * BLOCK)
        if turn < 12:
            assert not any(map(is_proven, without_one_wait(plan)))


def test_a_partial_is_sent_to_its_owner_who_adds_in_rank_order():
    plan = planned("reduce_scatter.mesh pieces=1", 4)
    (total,) = [one for one in plan.schedule.of_rank(2) if isinstance(one, Reduce)]
    assert [part.buffer for part in total.operands] == ["C.slots", "C.slots", "C.partial", "C.slots"]
    puts = [one for one in plan.schedule.of_rank(2) if isinstance(one, Put)]
    assert [put.peer for put in puts] == [3, 0, 1]
    tiles = [one for one in plan.schedule.of_rank(2) if isinstance(one, Apply)]
    assert [one.makes[0].row // (3 * BLOCK) for one in tiles] == [3, 0, 1, 2]


def test_sums_run_beside_the_tiles():
    for name in NAMES:
        queues = {queue.name: queue for queue in planned(f"reduce_scatter.{name}", 4).schedule.queues}
        assert queues["sums"].after == ()


def test_columns_that_no_kernel_adds_are_the_librarys():
    for how in ("reduce_scatter.mesh", "all_reduce.ring"):
        names = {queue.name for queue in planned(how, 3, cols=36).schedule.queues}
        assert "sums" not in names


def test_each_sum_crosses_to_another_island_once():
    moves = reduction_of(island_templates.sums, None, Mesh(rows=64, cols=8, world_size=8, island=4)).moves
    crossing = [move for move in moves if isinstance(move, ow.Put) and move.rank // 4 != move.peer // 4]
    assert len(crossing) == 8
    assert {move.lane for move in crossing} == {1}


def test_a_double_ring_goes_both_ways_at_once():
    moves = reduction_of(round_two_rings, None, Mesh(rows=64, cols=8, world_size=4, pieces=2)).moves
    puts = [move for move in moves if isinstance(move, ow.Put)]
    assert {((move.peer - move.rank) % 4, move.lane) for move in puts} == {(1, 0), (3, 1)}


def test_one_shot_sends_whole_partials_to_all():
    """Of each shard apart, so that every sum is a rank's own and nobody passes one on."""
    ranks = range(4)
    sent = [(rank, peer, shard) for rank in ranks for peer in ranks if peer != rank for shard in ranks]
    puts = tuple(ow.Put(rank, peer, rows(16 * shard, 16 * shard + 16)) for rank, peer, shard in sent)
    plan = planned(ow.Reduction(4, puts, everywhere=True), 4, 64)
    for rank in range(4):
        totals = [one for one in plan.schedule.of_rank(rank) if isinstance(one, Reduce)]
        assert {len(one.operands) for one in totals} == {4}


def tree(schedule: Schedule) -> set[str]:
    return {operation.name.split(".")[1] for operation in schedule.operations if not isinstance(operation, Apply)}


def partly_the_librarys(everywhere: bool) -> ow.Reduction:
    """Of two shards of three blocks, the first block of the one and two of the other."""
    together = ow.Collective((rows(0, 16), rows(48, 80)))
    to = [ow.Put(1, 0, rows(16, 48)), ow.Put(0, 1, rows(80, 96))]
    back = [ow.Sum(0, rows(16, 48)), ow.Sum(1, rows(80, 96)), ow.Put(0, 1, rows(16, 48)), ow.Get(0, 1, rows(80, 96))]
    return ow.Reduction(2, (to[0], together, to[1], *(back if everywhere else ())), everywhere)


@pytest.mark.parametrize("everywhere", [False, True])
def test_the_library_may_sum_a_part(everywhere: bool):
    plan = planned(partly_the_librarys(everywhere), 2, 96)
    calls = [one.function for one in plan.schedule.of_rank(0) if isinstance(one, Collective)]
    assert calls == (["all_reduce", "all_reduce"] if everywhere else ["reduce_scatter"])
    assert not any(map(is_proven, [*without_one_wait(plan), *without_one_emitted_wait(plan)]))
    first, *_, last = (one for one in plan.schedule.of_rank(0) if isinstance(one, Apply))
    assert first.notifies
    assert not last.notifies  # what the library takes is computed behind what peers wait for


@pytest.mark.parametrize("everywhere", [False, True])
def test_in_a_group_of_one_the_tiles_write_the_sum(everywhere: bool):
    """Also of a part that the list leaves to the library, and what a list would get wrong it gets wrong there too."""
    moves = (ow.Collective((rows(0, 16),)), ow.Sum(0, rows(16, 96)))
    plan = planned(ow.Reduction(1, moves, everywhere), 1, 96)
    assert {type(one).__name__ for one in plan.schedule.operations} == {"Apply"}
    with pytest.raises(ScheduleError, match="whole rows"):
        planned(ow.Reduction(1, (ow.Collective((ow.Chunk((0, 96), (0, 8)),)),), everywhere), 1, 96)


@pytest.mark.parametrize("mover", ["copy_kernel", "bulk_kernel", "tiles"])
def test_the_library_sums_behind_kernels_that_push(mover: str):
    """Its calls hold SMs while they wait for each other."""
    together = ow.Collective((rows(0, 16), rows(48, 96)))
    put = ow.Put(1, 0, rows(16, 48), mover=mover)  # type: ignore[arg-type]
    planned(ow.Reduction(2, (together, put)), 2, 96)


def test_the_library_may_sum_any_rows_everywhere():
    """One call for each chunk, in place, however shards are cut."""
    written = ow.Reduction(2, (ow.Collective((rows(0, 64),)), ow.Collective((rows(64, 80), rows(80, 96)))), True)
    plan = planned(written, 2, 96)
    assert verify_plan(plan, MachineLimits()).ok
    calls = [one for one in plan.schedule.of_rank(1) if isinstance(one, Collective)]
    assert [one.sources[0].rows for one in calls] == [(0, 64), (64, 80), (80, 96)]
    assert all(one.sources == one.destinations for one in calls)
    with pytest.raises(ScheduleError, match="not whole rows"):
        planned(ow.Reduction(2, (ow.Collective((ow.Chunk((0, 96), (0, 8)),)),), True), 2, 96)


def test_what_is_read_in_place_is_a_partial():
    there = ow.Get(2, 1, rows(64, 96), in_place=True)
    moves = (there, ow.Get(2, 0, rows(64, 96), in_place=True))
    others = tuple(ow.Put(rank, to, rows(32 * to, 32 * to + 32)) for to in (0, 1) for rank in range(3) if rank != to)
    assert trace_provenance(ow.Reduction(3, (*moves, *others)), 96, COLS).ends[2]
    summed = (ow.Put(0, 1, rows(64, 96)), ow.Sum(1, rows(64, 96)), there)
    with pytest.raises(ScheduleError, match="rank 1 has a sum of it"):
        trace_provenance(ow.Reduction(3, (*summed, *others)), 96, COLS)


@pytest.mark.parametrize(
    "move", [ow.Put(0, 1, rows(48, 96), mover="copy_kernel", adds=True), ow.Get(1, 0, rows(48, 96), in_place=True)]
)
def test_authors_kernels_add_nothing_on_its_way_and_where_it_lies(move: ow.Put | ow.Get):
    other = replace(move, rank=1 - move.rank, peer=1 - move.peer, chunk=rows(0, 48))
    with pytest.raises(ScheduleError, match="only kernels of operators"):
        planned(ow.Reduction(2, (move, other)), 2, 96)


@pytest.mark.parametrize(
    ("moves", "found"),
    [
        ((ow.Collective((rows(0, 48),)),), "Give one for each rank"),
        ((ow.Collective((rows(0, 64), rows(64, 96))),), "not one of each rank's shard"),
        ((ow.Collective((ow.Chunk((0, 48), (0, 8)), ow.Chunk((48, 96), (0, 8)))),), "whole rows"),
        ((ow.Put(1, 0, rows(0, 48)), ow.Collective((rows(0, 48), rows(48, 96)))), "another move carries rows"),
        ((ow.Collective((rows(0, 48), rows(48, 96))), ow.Put(1, 0, rows(0, 48))), "leaves some of it to the library"),
        ((ow.Collective((rows(0, 48), rows(48, 96))),) * 2, "another move carries rows"),
        ((ow.Collective((rows(0, 48), rows(48, 96)), after=((0, 0),)),), "behind all else"),
        ((ow.Collective((rows(0, 16), rows(48, 96))), ow.Put(1, 0, rows(16, 48), after=((1, 0),))), "behind all else"),
        ((ow.Collective((rows(0, 16), rows(48, 96))),), r"lacks the partials of ranks \[1\] for rows \[16:48\]"),
    ],
)
def test_what_the_library_cannot_sum_is_refused(moves: tuple[ow.Put, ...], found: str):
    with pytest.raises(ScheduleError, match=found):
        planned(ow.Reduction(2, moves), 2, 96)


def test_ranks_may_do_different_things():
    """Rank 0 pushes halves to rank 1, who adds and passes the sum on to their owner; rank 2 pulls from rank 0."""
    moves = (
        ow.Put(0, 1, rows(64, 80)),
        ow.Put(0, 1, rows(80, 96), lane=1),
        ow.Sum(1, rows(64, 80)),
        ow.Put(1, 2, rows(64, 80)),
        ow.Sum(1, rows(80, 96), after=((1, 1),)),
        ow.Get(2, 1, rows(80, 96)),
        ow.Get(0, 1, rows(0, 32)),
        ow.Put(2, 0, rows(0, 32), after=((0, 1),)),
        ow.Put(0, 1, ow.Chunk((32, 64), (0, 16))),
        ow.Put(0, 1, ow.Chunk((32, 64), (16, 48))),
        ow.Put(2, 1, rows(32, 64)),
    )
    plan = planned(ow.Reduction(3, moves), 3, 96)
    assert tree(plan.schedule) == {"push", "pull", "sum", "tell"}
    assert not any(map(is_proven, [*without_one_wait(plan), *without_one_emitted_wait(plan)]))


def test_sums_are_shared_by_whoever_has_them():
    moves = (ow.Put(1, 0, rows(0, 64)), ow.Put(2, 0, rows(0, 64)), ow.Sum(0, rows(0, 64)))
    shared = (ow.Put(0, 1, rows(0, 64)), ow.Put(1, 2, rows(0, 64)))
    plan = planned(ow.Reduction(3, (*moves, *shared), everywhere=True), 3, 64)
    assert tree(plan.schedule) == {"push", "sum", "move"}


@pytest.mark.parametrize(
    ("moves", "everywhere", "found"),
    [
        ((ow.Put(0, 1, rows(48, 96)),), False, r"rank 0 lacks the partials of ranks \[1\] for rows \[0:48\]"),
        ((ow.Put(0, 1, rows(48, 96)), ow.Put(0, 1, rows(48, 64))), False, "has that of rank 0 already"),
        ((ow.Put(0, 1, rows(0, 48)), ow.Put(1, 0, rows(0, 48)), ow.Put(0, 1, rows(48, 96))), False, "never added"),
        ((ow.Put(0, 1, rows(0, 97)),), False, "not inside"),
        ((ow.Put(0, 1, rows(4, 4)),), False, "is empty"),
        ((ow.Put(0, 0, rows(0, 48)),), False, "ranks 0 and 0"),
        ((ow.Sum(2, rows(0, 48)),), False, "one of rank 2"),
        ((ow.Sum(0, rows(0, 48)),), False, "nothing has arrived"),
        ((ow.Put(0, 1, rows(0, 48), lane=99),), False, "lane 99"),
        ((ow.Put(1, 0, rows(0, 48)), ow.Put(0, 1, rows(48, 96), after=((0, 4),))), False, "no such move"),
        (
            (ow.Put(1, 0, rows(0, 48)), ow.Sum(0, rows(0, 48)), ow.Put(0, 1, rows(0, 48)), ow.Put(0, 1, rows(0, 48))),
            True,
            "has it already",
        ),
        ((ow.Put(1, 0, rows(0, 48)), ow.Sum(0, rows(0, 32)), ow.Put(0, 1, rows(0, 48))), False, "added alike"),
        ((ow.Put(0, 1, rows(0, 48)), ow.Sum(1, rows(0, 48)), ow.Put(0, 1, rows(48, 96))), False, "lacks"),
    ],
)
def test_moves_that_do_not_add_up_are_refused(moves: tuple[ow.Put, ...], everywhere: bool, found: str):
    with pytest.raises(ScheduleError, match=found):
        planned(ow.Reduction(2, moves, everywhere), 2, 96)


def test_a_sum_that_is_nobodys_is_refused():
    moves = (ow.Put(0, 1, rows(0, 48)), ow.Sum(1, rows(0, 48)), ow.Put(1, 0, rows(0, 48)), ow.Put(0, 1, rows(48, 96)))
    planned(ow.Reduction(2, moves), 2, 96)
    idle = (ow.Put(0, 1, rows(0, 48)), ow.Sum(1, rows(0, 48)), ow.Put(0, 1, rows(48, 96)), ow.Put(1, 0, rows(0, 48)))
    planned(ow.Reduction(2, idle), 2, 96)
    with pytest.raises(ScheduleError, match=r"never added|neither"):
        planned(ow.Reduction(2, (ow.Put(1, 0, rows(0, 96)), ow.Put(0, 1, rows(48, 96)))), 2, 96)


def test_ranks_that_would_differ_in_bits_are_refused():
    """Rank 0 adds (0 + 1) + 2, rank 1 what it has of 0, 1 and 2 at once, and so rounds once less."""
    whole = rows(0, 48)
    moves = (
        ow.Put(2, 0, whole),
        ow.Put(0, 1, whole),
        ow.Put(2, 1, whole),
        ow.Put(1, 0, whole),
        ow.Sum(0, whole),
        ow.Put(0, 2, whole),
    )
    planned(ow.Reduction(3, moves, everywhere=True), 3, 48)
    twice = (ow.Put(1, 0, whole), ow.Put(0, 1, whole), ow.Put(2, 1, whole), ow.Sum(0, whole), ow.Put(2, 0, whole))
    shared = (ow.Sum(0, whole), ow.Put(0, 2, whole))
    with pytest.raises(ScheduleError, match="on some ranks"):
        trace_provenance(ow.Reduction(3, (*twice, *shared), everywhere=True), 48, COLS)


@pytest.mark.parametrize("mover", ["copy_engine", "tiles"])
def test_tiles_may_straddle_chunks_where_they_do_not_store_at_peers(mover: Mover):
    """Who waits for either chunk waits for such tiles."""
    parts = [(0, 1, rows(50, 96)), (0, 1, rows(48, 50)), (1, 0, rows(0, 48))]
    moves = tuple(ow.Put(*part, mover=mover) for part in parts)
    if mover == "tiles":
        with pytest.raises(ScheduleError, match="straddle"):
            planned(ow.Reduction(2, moves), 2, 96)
    else:
        planned(ow.Reduction(2, moves), 2, 96)


def test_it_is_written_for_one_size_of_group_and_for_what_is_stored():
    reduction = ow.Reduction(2, (ow.Put(0, 1, rows(48, 96)), ow.Put(1, 0, rows(0, 48))))
    with pytest.raises(InputError, match="the group has 3 ranks"):
        planned(reduction, 3, 96)
    with pytest.raises(InputError, match="stores C"):
        author_plan(matmul(96), {"A": reduction}, 2, "bfloat16")
    added = ow.Reduction(2, (*reduction.moves, ow.Sum(0, rows(0, 48), by="tiles")))
    with pytest.raises(ScheduleError, match="its tiles are to add"):
        planned(added, 2, 96)


@pytest.mark.parametrize("moves", [(3,), (rows(0, 4),), (ow.Collective(((0, 4), (4, 8))),), (ow.Sum(0, (0, 4)),)])
def test_what_is_no_move_is_refused_as_it_is_written(moves: tuple[object, ...]):
    with pytest.raises(InputError):
        ow.Reduction(2, moves)  # type: ignore[arg-type]
