"""Puts that the library carries: which are one call, what travels by way of third ranks, and slips that are refused."""

from __future__ import annotations

from itertools import permutations

import pytest

import overweave as ow
from overweave.errors import InputError, ScheduleError
from overweave.ir.plan import Plan
from overweave.ir.schedule import Collective, Operation
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.schedules.moves.library_calls import library_calls
from overweave.schedules.moves.moves import Gather, Put
from overweave.schedules.moves.transfers import transferred
from overweave.schedules.weave.author_plan import author_plan
from tests.tile_spaces import BLOCK, matmul

ROWS = 2 * BLOCK
HALF = ow.Chunk((2 * ROWS, 2 * ROWS + BLOCK))  # of rank 2's block


def shard(rank: int) -> ow.Chunk:
    return ow.Chunk((rank * ROWS, (rank + 1) * ROWS))


def sent(rank: int, peer: int, owner: int, *among: int, **more: int) -> Put:
    return Put(rank, peer, shard(owner), mover="library", among=among, **more)  # type: ignore[arg-type]


def shared(written: object, ranks: int, side: str = "A") -> Plan:
    plan = author_plan(matmul(ranks * ROWS, n=64, k=64), {side: written}, ranks, "bfloat16", dual_source="A")  # type: ignore[dict-item]
    verify_plan(plan, MachineLimits()).raise_if_refused()
    return plan


def calls_of(operations: tuple[Operation, ...]) -> dict[str, tuple[int, ...]]:
    return {one.label: one.ranks for one in operations if isinstance(one, Collective)}


def test_puts_of_the_same_ranks_are_one_call_until_a_rank_sends_again():
    pairs = [sent(rank, rank ^ 2, rank, rank & 1, rank & 1 | 2) for rank in (0, 2, 1, 3)]
    assert [call.ranks for call in library_calls(Gather(4, tuple(pairs))).values()] == [(0, 2), (1, 3)]
    turns = [sent(rank, (rank + step) % 3, rank) for step in (1, 2) for rank in range(3)]
    assert [sorted(call.puts) for call in library_calls(Gather(3, tuple(turns))).values()] == [
        [(0, 1), (1, 2), (2, 0)],
        [(0, 2), (1, 0), (2, 1)],
    ]
    apart = (turns[0], Put(1, 0, shard(1)), turns[1])
    assert [call.puts for call in library_calls(Gather(3, apart)).values()] == [{(0, 1): 0}, {(1, 2): 2}]


def test_a_gather_by_hand_is_proven():
    turns = [sent(rank, (rank + step) % 3, rank) for step in (1, 2) for rank in range(3)]
    assert len(calls_of(shared(Gather(3, tuple(turns)), 3).schedule.operations)) == 2


def test_authors_kernels_have_the_same_calls():
    assert {*calls_of(shared("all_gather.islands carrier=library", 4).schedule.operations).values()} == {(0, 2), (1, 3)}


@pytest.mark.parametrize("words", ["reduce_scatter.islands carrier=library", "all_reduce.islands carrier=library"])
def test_authors_sums_cross_by_the_library(words: str):
    calls = calls_of(shared(words, 4, "C").schedule.operations)
    assert {*calls.values()} == {(0, 2), (1, 3)}


@pytest.mark.parametrize("sends", [False, True])
def test_blocks_travel_by_way_of_third_ranks(sends: bool):
    """Rank 0's block for rank 2 lies on rank 1 meanwhile."""
    moves = [Put(rank, peer, shard(peer)) for rank, peer in permutations(range(3), 2) if (rank, peer) != (0, 2)]
    by_way = (sent(0, 1, 2, origin=0), Put(1, 2, shard(2), origin=0))
    for listed in ((*moves, *by_way), (*by_way, *moves)):
        plan = shared(ow.AllToAll(3, listed, sends), 3, "C" if sends else "A")
        assert any("passed" in buffer.name for buffer in plan.schedule.buffers)


@pytest.mark.parametrize(
    ("moves", "found"),
    [
        ((Put(1, 2, shard(2), origin=0),), "no earlier move has brought it"),
        (
            (Put(0, 1, ow.Chunk((2 * ROWS, 2 * ROWS + BLOCK)), origin=0), Put(1, 2, shard(2), origin=0)),
            "no earlier move",
        ),
        ((sent(0, 1, 2, origin=0),), "lacks"),
        ((sent(0, 1, 1, 0, 2),), "among"),
        ((sent(0, 1, 1, 1, 0),), "among"),
        ((Put(0, 1, shard(1), among=(0, 1)),), "among"),
    ],
)
def test_slips_are_refused(moves: tuple[Put, ...], found: str):
    with pytest.raises(ScheduleError, match=found):
        transferred(ow.AllToAll(3, moves), 3 * ROWS, 8)


def test_rows_of_an_all_to_all_alone_have_an_origin():
    with pytest.raises(InputError, match="names an origin"):
        Gather(2, (Put(0, 1, shard(0), origin=0),))
