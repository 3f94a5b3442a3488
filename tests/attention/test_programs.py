"""The programs of attention on paper: proven for every number of ranks, and what travels; no mutant survives."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from overweave.attention import programs
from overweave.attention.programs import Travel
from overweave.attention.sequence import Sequence
from overweave.ir.schedule import Put
from overweave.ir.verify.plan import verify_schedule
from overweave.ops.author.tile_program import TileQueue

KINDS = {"forward": False, "backward": True}


def travel(kind: str, sequence: Sequence) -> Travel:
    return Travel(sequence, 64, torch.bfloat16, KINDS[kind])


def refusals(kind: str, sequence: Sequence) -> set[str]:
    schedule = travel(kind, sequence).schedule()
    assert schedule is not None
    return {refusal.rule for refusal in verify_schedule(schedule).refusals}


def sequences(ranks: int) -> list[Sequence]:
    """Ranks without rows, uneven shards, even ones, windows, both layouts."""
    masks = ((False, False, None), (True, False, None), (True, False, 2))
    rows = {1, ranks - 1 or 1, 2 * ranks + 1}
    every = [Sequence(each, ranks, *mask) for each in sorted(rows) for mask in masks]
    return [*every, *(Sequence(4 * ranks, ranks, is_causal, True) for is_causal in (False, True))]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_proven_as_it_is(kind: str):
    for sequence in sequences(3):
        assert refusals(kind, sequence) == set(), sequence


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 4, 5, 6, 7, 8])
def test_it_is_proven(kind: str, ranks: int):
    for sequence in sequences(ranks):
        assert refusals(kind, sequence) == set(), sequence


def pushed(kind: str, sequence: Sequence) -> dict[int, int]:
    """Rows of keys that each rank sends."""
    schedule = travel(kind, sequence).schedule()
    assert schedule is not None
    found = dict.fromkeys(range(sequence.ranks), 0)
    for each in schedule.operations:
        if isinstance(each, Put) and each.destinations and each.destinations[0].buffer == "keys":
            found[each.rank] += each.destinations[0].rows[1] - each.destinations[0].rows[0]
    return found


def test_only_what_a_peer_sees_travels():
    contiguous, zigzag = Sequence(16, 4, True), Sequence(16, 4, True, True)
    assert pushed("forward", contiguous) == {0: 12, 1: 8, 2: 4, 3: 0}
    assert pushed("forward", Sequence(16, 4, True, window=3)) == {0: 2, 1: 2, 2: 2, 3: 0}
    assert pushed("forward", zigzag) == {0: 6, 1: 8, 2: 10, 3: 12}  # the head alone to ranks behind
    assert pushed("forward", Sequence(16, 4)) == dict.fromkeys(range(4), 12)


MUTED = [(kind, "arrived") for kind in KINDS] + [(kind, "landed") for kind in KINDS if KINDS[kind]]


@pytest.mark.parametrize(("kind", "channel"), MUTED)
def test_a_reader_that_does_not_wait_is_refused(kind: str, channel: str):
    honest = TileQueue.rank_wait

    def hasty(queue: Any, name: str, rank: int) -> None:
        if name != channel or queue._name != "main":
            honest(queue, name, rank)

    with patch.object(TileQueue, "rank_wait", hasty):
        assert refusals(kind, Sequence(7, 3, True))


def test_parts_that_return_before_they_are_computed_are_refused():
    honest = TileQueue.rank_wait

    def hasty(queue: Any, name: str, rank: int) -> None:
        if name != "computed":
            honest(queue, name, rank)

    with patch.object(TileQueue, "rank_wait", hasty):
        assert refusals("backward", Sequence(7, 3, True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_silent_sender_is_refused(kind: str):
    honest = TileQueue.rank_notify

    def silent(queue: Any, name: str, tile: int, rank: Any) -> None:
        if name != "arrived" or tile != 0:
            honest(queue, name, tile, rank)

    with patch.object(TileQueue, "rank_notify", silent):
        assert refusals(kind, Sequence(7, 3, True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_too_few_is_refused(kind: str):
    """Of what travels."""
    honest = TileQueue.rank_copy_data

    def short(queue: Any, source: Any, target: Any, mode: Any = "p2p") -> None:
        rows = slice(0, source.shape[0] - (target.buffer == "keys"))
        honest(queue, source[rows], target[rows], mode)

    with patch.object(TileQueue, "rank_copy_data", short):
        assert refusals(kind, Sequence(12, 3, True, True))


def test_parts_that_land_on_each_other_are_refused():
    with patch.object(Travel, "landing", lambda self, giver, keys: programs.moved(keys, 0)):
        assert refusals("backward", Sequence(7, 3, True))
