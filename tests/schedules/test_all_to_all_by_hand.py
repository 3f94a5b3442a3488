"""All-to-alls as lists of chunk moves, on both sides of a kernel: proven, each wait missed, slips refused."""

from __future__ import annotations

import pytest

import overweave as ow
from campaigns.oracle.fewer_waits import is_proven, without_one_emitted_wait, without_one_wait
from overweave.errors import InputError, ScheduleError
from overweave.ir.plan import Plan
from overweave.ir.schedule import Apply, Collective, Put
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.schedules.weave.author_plan import author_plan
from tests.tile_spaces import BLOCK, matmul

COLS = 64


def rows(lo: int, hi: int) -> ow.Chunk:
    return ow.Chunk((lo, hi))


def halves(ranks: int, sends: bool, mover: str = "copy_engine", block: int = 2 * BLOCK) -> ow.AllToAll:
    """Every block in two chunks, in two lanes: by rows, and the last peer's by columns if the copy engine does it."""
    moves: list[ow.Put] = []
    for step in range(1, ranks):
        for rank in range(ranks):
            peer = (rank + step) % ranks
            low, middle, high = peer * block, peer * block + block // 2, (peer + 1) * block
            cut = [rows(low, middle), rows(middle, high)]
            if mover == "copy_engine" and step == ranks - 1 and not sends:
                cut = [ow.Chunk((low, high), (0, 8)), ow.Chunk((low, high), (8, COLS))]
            moves += [ow.Put(rank, peer, chunk, lane, mover=mover) for lane, chunk in enumerate(cut)]  # type: ignore[arg-type]
    return ow.AllToAll(ranks, tuple(moves), sends)


def planned(ranks: int, **wanted: ow.AllToAll) -> Plan:
    plan = author_plan(matmul(2 * BLOCK * ranks, n=COLS, k=COLS), wanted, ranks, "bfloat16", dual_source="A")
    verify_plan(plan, MachineLimits()).raise_if_refused()
    return plan


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_both_sides_are_proven(ranks: int):
    for wanted in ({"A": halves(ranks, False)}, {"C": halves(ranks, True)}):
        plan = planned(ranks, **wanted)
        if ranks < 4:
            assert not any(map(is_proven, [*without_one_wait(plan), *without_one_emitted_wait(plan)]))
    planned(ranks, A=halves(ranks, False), C=halves(ranks, True))


@pytest.mark.slow
@pytest.mark.parametrize("mover", ["copy_kernel", "bulk_kernel", "tiles", "bulk_tiles"])
def test_other_back_ends_carry_it(mover: str):
    assert not any(map(is_proven, without_one_wait(planned(3, A=halves(3, False, mover)))))
    if mover == "bulk_tiles":
        with pytest.raises(ScheduleError, match="stored from registers"):
            planned(3, C=halves(3, True, mover))
    else:
        assert not any(map(is_proven, without_one_wait(planned(3, C=halves(3, True, mover)))))


def test_tiles_run_in_the_order_of_sending_and_the_own_block_last():
    backwards = ow.AllToAll(
        2, (ow.Put(0, 1, rows(48, 64)), ow.Put(0, 1, rows(32, 48)), ow.Put(1, 0, rows(0, 32))), True
    )
    tiles = [one.makes[0].region.rows for one in planned(2, C=backwards).schedule.of_rank(0) if isinstance(one, Apply)]
    assert tiles == [(48, 64), (32, 48), (0, 32)]


def test_a_move_may_come_after_another_ranks():
    moves = (ow.Put(0, 1, rows(32, 64)), ow.Put(1, 0, rows(0, 32), after=((0, 0),)))
    for sends in (False, True):
        plan = planned(2, **{"C" if sends else "A": ow.AllToAll(2, moves, sends)})
        (later,) = [one for one in plan.schedule.of_rank(1) if isinstance(one, Put)]
        assert any(wait.pad.endswith("arrived") for wait in later.waits)


def partly_the_librarys(sends: bool) -> ow.AllToAll:
    """The library carries all of block 0 and the head of blocks 1 and 2; a Put of what is left comes behind it."""
    together = ow.Collective((rows(0, 32), rows(32, 48), rows(64, 80)))
    puts = [ow.Put(rank, peer, rows(32 * peer + 16, 32 * peer + 32)) for rank in range(3) for peer in (1, 2)]
    puts = [put for put in puts if put.rank != put.peer]
    listed = (*puts, together) if sends else (together, ow.Put(0, 1, puts[0].chunk, after=((0, 0),)), *puts[1:])
    return ow.AllToAll(3, listed, sends)


@pytest.mark.slow
@pytest.mark.parametrize("sends", [False, True])
def test_the_library_may_carry_a_part(sends: bool):
    plan = planned(3, **{"C" if sends else "A": partly_the_librarys(sends)})
    assert [one.function for one in plan.schedule.of_rank(1) if isinstance(one, Collective)] == ["all_to_all"]
    assert not any(map(is_proven, [*without_one_wait(plan), *without_one_emitted_wait(plan)]))


def test_a_part_of_the_librarys_may_come_after_a_move():
    puts = (ow.Put(0, 1, rows(48, 64)), ow.Put(1, 0, rows(16, 32)))
    for sends in (False, True):
        together = ow.Collective((rows(0, 16), rows(32, 48)), after=((0, 0),))
        plan = planned(2, **{"C" if sends else "A": ow.AllToAll(2, (*puts, together), sends)})
        waits = [one.waits for one in plan.schedule.operations if isinstance(one, Collective)]
        assert all(len(each) == 1 for each in waits)


@pytest.mark.parametrize(
    "chunks",
    [
        (rows(0, 32),),
        (rows(0, 32), rows(16, 48)),
        (ow.Chunk((0, 32), (0, 8)), ow.Chunk((32, 64), (0, 8))),
    ],
)
def test_the_library_carries_whole_rows_of_every_block(chunks: tuple[ow.Chunk, ...]):
    with pytest.raises(ScheduleError, match="Give one"):
        planned(2, A=ow.AllToAll(2, (ow.Collective(chunks),)))


@pytest.mark.parametrize(
    ("moves", "found"),
    [
        ((ow.Put(0, 1, rows(32, 64)),), "rank 0 lacks 2048 of 4096 elements"),
        ((ow.Put(0, 1, rows(32, 64)), ow.Put(0, 1, rows(32, 48))), "rank 1 has a part of it already"),
        ((ow.Put(0, 1, rows(0, 32)),), "not inside"),
        ((ow.Put(0, 1, rows(40, 40)),), "is empty"),
        ((ow.Put(0, 0, rows(0, 32)),), "between ranks 0 and 0"),
        ((ow.Put(0, 1, rows(32, 64), lane=99),), "lane 99"),
        ((ow.Put(0, 1, rows(32, 64), after=((1, 3),)), ow.Put(1, 0, rows(0, 32))), "no such move"),
        ((ow.Put(0, 1, rows(32, 64), mover="auto"),), "only compile_auto"),
    ],
)
def test_moves_that_are_no_all_to_all_are_refused(moves: tuple[ow.Put, ...], found: str):
    for sends in (False, True):
        with pytest.raises(ScheduleError, match=found):
            planned(2, **{"C" if sends else "A": ow.AllToAll(2, moves, sends)})


def test_sides_sizes_and_kinds_are_held_to():
    with pytest.raises(InputError, match="loads A, B"):
        planned(2, C=halves(2, False))
    with pytest.raises(InputError, match="no whole blocks"):
        author_plan(matmul(33), {"A": halves(2, False)}, 2, "bfloat16")
    with pytest.raises(InputError, match="Pass Put"):
        ow.AllToAll(2, (ow.Get(0, 1, rows(0, 4)),))  # type: ignore[arg-type]


def test_tiles_may_straddle_chunks():
    straddling = (ow.Put(0, 1, rows(32, 40)), ow.Put(0, 1, rows(40, 64)), ow.Put(1, 0, rows(0, 32)))
    planned(2, C=ow.AllToAll(2, straddling, True))
