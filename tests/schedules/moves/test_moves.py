"""Lists of chunk moves: templates are proven for every size of group, hand-written ones too, and slips are refused."""

from __future__ import annotations

import itertools

import pytest

import overweave as ow
from campaigns.oracle.random.chunks import TEMPLATES
from overweave.errors import InputError, ScheduleError
from overweave.ir.plan import Plan
from overweave.ir.schedule import Copy, Put
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.schedules.communication import MatmulChunk
from overweave.schedules.moves import island_templates
from overweave.schedules.moves.gather_templates import (
    Mesh,
    Template,
    across_mesh,
    gather_of,
    round_two_rings,
)
from overweave.schedules.moves.transfers import transferred
from overweave.schedules.weave.author_plan import author_plan
from tests.tile_spaces import BLOCK, matmul

pytestmark = pytest.mark.slow

ROWS, COLS = 96, 32


def planned(gather: ow.Gather, rows: int = ROWS, chosen: str | None = None) -> Plan:
    plan = author_plan(matmul(rows), {"A": gather}, gather.world_size, "bfloat16", dual_source=chosen)
    verify_plan(plan, MachineLimits()).raise_if_refused()
    return plan


def rows(lo: int, hi: int) -> ow.Chunk:
    return ow.Chunk((lo, hi))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_are_proven(template: Template, world_size: int):
    for m, pieces, col_pieces, lanes, axis in itertools.product(
        (8 * BLOCK, 100), (1, 3), (1, 2), (1, 2), ("inner", "outer")
    ):
        mesh = Mesh(
            rows=m,
            cols=COLS,
            world_size=world_size,
            pieces=pieces,
            col_pieces=col_pieces,
            lanes=lanes,
            axis=axis,
            alignment=BLOCK,
        )
        planned(gather_of(template, mesh), m, chosen="A")


def test_a_group_that_is_no_whole_islands_is_refused():
    with pytest.raises(InputError, match="no whole islands"):
        gather_of(island_templates.gather, Mesh(rows=9, cols=8, world_size=3, island=2))


def test_each_shard_crosses_to_another_island_once():
    gather = gather_of(island_templates.gather, Mesh(rows=64, cols=8, world_size=8, island=4))
    crossing = [move for move in gather.moves if move.rank // 4 != move.peer // 4]
    assert len(crossing) == 8
    assert {move.lane for move in crossing} == {1}


def test_a_double_ring_goes_both_ways_at_once():
    moves = gather_of(round_two_rings, Mesh(rows=64, cols=8, world_size=4, pieces=2)).moves
    assert {((move.rank - move.peer) % 4, move.lane) for move in moves} == {(1, 0), (3, 1)}


def test_columns_are_chunks_too():
    moves = gather_of(across_mesh, Mesh(rows=64, cols=24, world_size=2, col_pieces=2)).moves
    assert [str(move.chunk) for move in moves] == ["[0:32][0:8]", "[0:32][8:24]", "[32:64][0:8]", "[32:64][8:24]"]


def test_ranks_may_do_different_things():
    """Rank 0 pushes its shard in two halves, rank 1 as columns; rank 2 pulls what rank 0 has, own and passed on."""
    gather = ow.Gather(
        3,
        (
            ow.Put(0, 1, rows(0, 16)),
            ow.Put(0, 1, rows(16, 32)),
            ow.Put(1, 0, ow.Chunk((32, 64), (0, 8)), lane=1),
            ow.Put(1, 0, ow.Chunk((32, 64), (8, 32)), lane=1),
            ow.Get(2, 0, rows(0, 64)),
            ow.Put(2, 0, rows(64, 96)),
            ow.Put(2, 1, rows(64, 96), after=((2, 1),)),
        ),
    )
    plan = planned(gather)
    stages = [step for step in plan.schedule.operations if isinstance(step, Copy) and "stage" in step.name]
    assert [stage.rank for stage in stages] == [0]
    (pulled,) = [step for step in plan.schedule.of_rank(2) if step.name.startswith("A.pull")]
    # The later of two columns that one lane brings, and what is staged.
    assert sum(hi - lo for lo, hi in (wait.signals for wait in pulled.waits)) == 2
    assert {queue.name for queue in plan.schedule.queues} == {"tiles", "main", "copies.0", "copies.1"}
    puts = [step for step in plan.schedule.of_rank(2) if isinstance(step, Put)]
    assert not any(put.waits for put in puts)  # its lane carries one after the other: nothing to wait for


def test_a_dependence_on_another_lane_or_rank_is_a_signal():
    moves = (ow.Put(0, 1, rows(0, 48)), ow.Put(1, 0, rows(48, 96), after=((0, 0),)))
    (later,) = [step for step in planned(ow.Gather(2, moves)).schedule.of_rank(1) if isinstance(step, Put)]
    assert [str(wait) for wait in later.waits] == ["A.arrived[0:1]>=1"]


def test_the_library_may_bring_a_part():
    first = ow.Collective((rows(0, 16), rows(48, 64)))
    rest = (ow.Put(0, 1, rows(16, 48)), ow.Put(1, 0, rows(64, 96), after=((0, 0),)))
    plan = planned(ow.Gather(2, (first, *rest)), chosen="A")
    names = [step.name for step in plan.schedule.of_rank(1) if step.queue == "main"]
    assert names == ["A.stage.1", "A.all_gather.1.0"]
    whole = ow.Collective((rows(0, 48), rows(48, 96)))
    assert next(step.name for step in planned(ow.Gather(2, (whole,))).schedule.of_rank(0)) == "A.all_gather.0.0"


def test_stretches_that_the_library_brings_apart_have_names_of_their_own():
    pieces = (0, 8), (8, 16), (24, 32), (32, 40)
    together = [ow.Collective((rows(*piece), rows(48 + piece[0], 48 + piece[1]))) for piece in pieces]
    one_by_one = [
        ow.Put(rank, 1 - rank, rows(48 * rank + at, 48 * rank + at + 8)) for rank in (0, 1) for at in (16, 40)
    ]
    communication = transferred(ow.Gather(2, (*together, *one_by_one)), ROWS, COLS)
    used = [(step.name, step.rows) for step in communication.steps if isinstance(step, MatmulChunk) and step.rank == 1]
    assert len({name for name, _ in used}) == len(used)
    assert {(0, 16), (24, 40)} < {rows for _, rows in used}


@pytest.mark.parametrize(
    ("moves", "found"),
    [
        ((ow.Put(0, 1, rows(0, 48)),), "rank 0 lacks 1536 of 3072"),
        ((ow.Put(0, 1, rows(48, 96)),), "neither its own"),
        ((ow.Put(0, 1, rows(0, 48)), ow.Put(0, 1, rows(40, 48))), "a part of it already"),
        ((ow.Put(0, 1, rows(0, 97)),), "not inside"),
        ((ow.Put(0, 1, rows(4, 4)),), "is empty"),
        ((ow.Put(0, 0, rows(0, 48)),), "between ranks 0 and 0"),
        ((ow.Put(0, 2, rows(0, 48)),), "between ranks 0 and 2"),
        ((ow.Put(0, 1, rows(0, 48), lane=99),), "lane 99"),
        ((ow.Put(0, 1, rows(0, 48), after=((0, 0),)),), "stands later"),
        ((ow.Put(0, 1, rows(0, 48), after=((1, 7),)),), "no such move"),
        ((ow.Collective((rows(0, 48), rows(0, 48))),), "own shard"),
        ((ow.Collective((rows(0, 48),)),), "one of each"),
        ((ow.Collective((ow.Chunk((0, 48), (0, 8)), rows(48, 96))),), "parts of rows"),
    ],
)
def test_moves_that_do_not_gather_are_refused(moves: tuple[ow.Put, ...], found: str):
    with pytest.raises(ScheduleError, match=found):
        transferred(ow.Gather(2, moves), ROWS, COLS)


def test_it_is_written_for_one_size_of_group():
    gather = ow.Gather(2, (ow.Put(0, 1, rows(0, 48)), ow.Put(1, 0, rows(48, 96))))
    with pytest.raises(InputError, match="the group has 3 ranks"):
        author_plan(matmul(ROWS), {"A": gather}, 3, "bfloat16")


@pytest.mark.parametrize(
    "write",
    [
        lambda: ow.Chunk(3),
        lambda: ow.Chunk([0, 64]),
        lambda: ow.Chunk((0, 64, 1)),
        lambda: ow.Chunk((0, 64), cols=(0, 1.5)),
        lambda: ow.Gather(2, (3,)),
        lambda: ow.Gather(2, (ow.Put(0, 1, (0, 64)),)),
        lambda: ow.Gather(2, (ow.Collective(((0, 64),)),)),
        lambda: ow.Gather("2", ()),
        lambda: ow.Gather(0, ()),
        lambda: ow.Gather(2, None),
        lambda: ow.Gather(2, [ow.Put(0, 1, rows(0, 48))]),
        lambda: ow.Gather(2, (ow.Put("0", 1, rows(0, 48)),)),
        lambda: ow.Gather(2, (ow.Get(0, None, rows(0, 48)),)),
        lambda: ow.Gather(2, (ow.Put(0, 1, rows(0, 48), lane="first"),)),
        lambda: ow.Gather(2, (ow.Put(0, 1, rows(0, 48), after=3),)),
        lambda: ow.Gather(2, (ow.Put(0, 1, rows(0, 48), after=(0, 1)),)),
        lambda: ow.Reduction(2, (ow.Sum(0, rows(0, 48), after=((0, "1"),)),)),
    ],
)
def test_what_is_no_move_is_refused_as_it_is_written(write):
    with pytest.raises(InputError):
        write()
