"""The programs of tokens that are pushed, on paper: proven for every number of ranks; no mutant survives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from overweave.errors import InputError
from overweave.ir.verify.plan import verify_schedule
from overweave.moe import sending
from overweave.moe.sending import schedule_of
from overweave.ops.author.tile_program import TileQueue
from overweave.runtime.handwritten import TileRows
from overweave.runtime.sent_rows import SendSizes

KINDS = ("dispatch", "combine")
SIZES = SendSizes(shard=5, most=9, words=8, metadata=4, programs=3)
Change = Callable[[TileRows], TileRows]


def refusals(kind: str, sizes: SendSizes = SIZES, ranks: int = 3) -> set[str]:
    return {refusal.rule for refusal in verify_schedule(schedule_of(kind, sizes, ranks)).refusals}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_proven(kind: str):
    for ranks in range(1, 9):
        for sizes in (SIZES, SendSizes(1, 1, 4, 0, 12)):
            verify_schedule(schedule_of(kind, sizes, ranks)).raise_if_refused()


def changed(kind: str, change: Change) -> set[str]:
    """The rules that a changed program breaks."""
    honest = TileQueue.rank_rows

    def rank_rows(queue: Any, rows: TileRows) -> None:
        honest(queue, change(rows))

    with patch.object(TileQueue, "rank_rows", rank_rows):
        return refusals(kind)


CHANNELS = [("dispatch", "counts"), ("dispatch", "arrived"), ("combine", "arrived")]


@pytest.mark.parametrize(("kind", "channel"), CHANNELS)
def test_a_reader_that_does_not_wait_is_refused(kind: str, channel: str):
    assert changed(kind, lambda rows: replace(rows, awaits=tuple(each for each in rows.awaits if each[0] != channel)))


@pytest.mark.parametrize(("kind", "channel"), CHANNELS)
def test_an_empty_source_that_does_not_signal_is_refused(kind: str, channel: str):
    def silent(rows: TileRows) -> TileRows:
        return replace(rows, sends=tuple(each for each in rows.sends if (each.channel, each.peer) != (channel, 2)))

    assert changed(kind, silent)


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_that_does_not_signal_is_refused(kind: str):
    def short(rows: TileRows) -> TileRows:
        return replace(rows, sends=tuple(replace(each, programs=max(1, each.programs - 1)) for each in rows.sends))

    assert changed(kind, short)


@pytest.mark.parametrize("kind", KINDS)
def test_landing_rows_that_overlap_are_refused(kind: str):
    honest = sending._block

    def overlapping(rank: int, sizes: SendSizes) -> slice:
        block = honest(rank, sizes)
        return slice(block.start - (rank > 0), block.stop - (rank > 0))

    with patch.object(sending, "_block", overlapping):
        assert "double_write" in refusals(kind)


def test_another_kind_is_refused():
    with pytest.raises(InputError, match="dispatch, combine"):
        schedule_of("ring", SIZES, 2)
