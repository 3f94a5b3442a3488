"""Rings on one level and on two: ways of shards, memory, and programs that are proven; no mutant survives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from msgspec.structs import replace

from overweave.attention.rings import RingTravel
from overweave.attention.routes import ACROSS, AROUND, SLOTS, Turn, double_ring_islands, routes
from overweave.attention.sequence import Sequence
from overweave.ir.schedule import Operation, Put, Retire, Schedule
from overweave.ir.verify.plan import verify_schedule
from overweave.ops.author.tile_program import TileQueue
from tests.attention.test_programs import sequences

BOTH = {"forward": False, "backward": True}


def schedule(sequence: Sequence, is_backward: bool = False, islands: int = 1) -> Schedule:
    written = RingTravel(sequence, 64, torch.bfloat16, is_backward, islands).schedule()
    assert written is not None
    return written


def refused(written: Schedule) -> set[str]:
    return {refusal.rule for refusal in verify_schedule(written).refusals}


def test_every_rank_meets_every_shard_that_it_sees_once():
    for ranks in range(1, 9):
        for sequence in sequences(ranks):
            for islands in {1, double_ring_islands(ranks)}:
                for rank, route in enumerate(routes(sequence, islands)):
                    seen = [stop.source for stop in route.stops if stop.is_seen]
                    piece = [each for each in range(ranks) if sequence.piece(rank, each) is not None]
                    assert sorted(seen) == piece, (sequence, islands, rank)


def test_a_shard_goes_no_further_than_it_is_seen():
    moved = [len(route.stops) - 1 for route in routes(Sequence(16, 4, True))]
    assert moved == [0, 1, 2, 3]
    assert [len(route.stops) - 1 for route in routes(Sequence(16, 4, True, window=2))] == [0, 1, 1, 1]
    assert [len(route.stops) for route in routes(Sequence(3, 4))] == [3, 3, 3, 0]  # who has no rows stands beside


def test_a_double_ring_crosses_between_islands_once_a_shard_and_island():
    found = routes(Sequence(16, 8), 2)
    turns = [stop.came for route in found for stop in route.stops if stop.came]
    assert sum(turn.level == ACROSS for turn in turns) == 8
    assert sum(turn.level == AROUND for turn in turns) == 8 * 6
    assert [double_ring_islands(ranks) for ranks in range(1, 9)] == [1, 1, 1, 2, 1, 2, 1, 2]
    assert Turn(AROUND, 3, 0, 0).slot == 1


@pytest.mark.parametrize("kind", BOTH)
def test_it_is_proven_as_it_is(kind: str):
    for sequence in sequences(4):
        for islands in (1, 2):
            assert refused(schedule(sequence, BOTH[kind], islands)) == set(), (sequence, islands)


@pytest.mark.slow
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 6, 7, 8])
def test_it_is_proven(kind: str, ranks: int):
    for sequence in sequences(ranks):
        for islands in {1, double_ring_islands(ranks)}:
            assert refused(schedule(sequence, BOTH[kind], islands)) == set(), (sequence, islands)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("ranks", [12, 16])
def test_many_ranks_are_proven(kind: str, ranks: int):
    for sequence in sequences(ranks):
        for islands in {1, 2, double_ring_islands(ranks)}:
            assert refused(schedule(sequence, BOTH[kind], islands)) == set(), (sequence, islands)


def symmetric_rows(ranks: int, islands: int, is_backward: bool = False) -> dict[str, int]:
    """Of keys and values, in shards of both: of what travels, and of sums."""
    travel = RingTravel(Sequence(64 * ranks, ranks), 8, torch.bfloat16, is_backward, islands)
    buffers = travel.declared().buffers
    rows = {"sums": 0, "shards": 0}
    for each in buffers.values():
        rows["sums" if each.dtype == torch.float32 else "shards"] += each.rows
    return {name: count / 64 / 2 for name, count in rows.items()}  # type: ignore[misc]


def test_memory_is_that_of_two_shards_whatever_the_ranks():
    """Two places, beside the caller's own shard; sums have two to come, two to go, and one at home."""
    for ranks in (3, 4, 8, 16):
        assert symmetric_rows(ranks, 1)["shards"] == SLOTS <= 2 + 1 / ranks
        assert symmetric_rows(ranks, 1, True) == {"shards": SLOTS, "sums": 2 * SLOTS + 1}
    assert symmetric_rows(2, 1)["shards"] == 1
    assert symmetric_rows(16, 4)["shards"] == 2 * SLOTS


def without(rank_method: str, is_left_out: Callable[..., bool]) -> Any:
    honest = getattr(TileQueue, rank_method)

    def patched(queue: Any, *arguments: Any) -> None:
        if not is_left_out(queue, *arguments):
            honest(queue, *arguments)

    return patch.object(TileQueue, rank_method, patched)


SEEN_BY_ALL = Sequence(10, 5)
FORWARD = ("arrived_around", "computed", "free_around")
BACKWARD = ("arrived_sums_around", "made", "sent", "free_sums_around", "home")


@pytest.mark.parametrize("channel", FORWARD + BACKWARD)
def test_who_does_not_wait_is_refused(channel: str):
    with without("rank_wait", lambda queue, name, number: name == channel):
        assert refused(schedule(SEEN_BY_ALL, channel in BACKWARD))


@pytest.mark.parametrize("channel", ["gone", "arrived_across", "free_across"])
def test_who_does_not_wait_in_a_double_ring_is_refused(channel: str):
    sequence = Sequence(8, 8)  # four islands of two: places of the level across are used again, too
    assert refused(schedule(sequence, islands=4)) == set()
    with without("rank_wait", lambda queue, name, number: name == channel):
        assert refused(schedule(sequence, islands=4))


def test_a_place_that_is_not_retired_is_not_written_again():
    for is_backward in (False, True):
        with without("rank_retire", lambda queue, part: True):
            assert "double_write" in refused(schedule(SEEN_BY_ALL, is_backward))


def test_a_place_that_is_retired_too_early_is_refused():
    """Behind the computation alone, and not behind the copy that passes the shard on."""

    def early(op: Operation) -> Operation:
        return replace(op, queue="main") if isinstance(op, Retire) else op

    written = schedule(SEEN_BY_ALL)
    assert refused(replace(written, operations=tuple(map(early, written.operations))))


def test_the_wrong_shard_in_a_place_is_refused():
    """One that is sent to the other place."""
    written = schedule(SEEN_BY_ALL)
    put = [op for op in written.operations if isinstance(op, Put) and op.destinations][4]
    (target,) = put.destinations
    other = replace(target, buffer=target.buffer[:-1] + str(1 - int(target.buffer[-1])))
    changed = tuple(replace(op, destinations=(other,)) if op is put else op for op in written.operations)
    assert refused(replace(written, operations=changed))
