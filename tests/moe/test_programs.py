"""The overlapped programs of experts on paper: proven for every number of ranks and tokens; no mutant survives."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from overweave.errors import InputError
from overweave.ir.schedule import Put
from overweave.ir.verify.plan import verify_schedule
from overweave.moe import programs
from overweave.moe.programs import Sizes, schedule_of
from overweave.ops.author.tile_program import TileQueue
from overweave.runtime.handwritten import Access

KINDS = ("gather", "scatter", "total", "chain")


def sizes(m: int, ranks: int, top: int = 2) -> Sizes:
    return Sizes(m, 32, top, torch.bfloat16, ranks, 2 * top)


def test_a_peer_is_told_of_all_columns_but_the_last_ones_at_once():
    """Their copies follow each other without a signal between, each a stretch of memory."""
    large = Sizes(8192, 2048, 2, torch.bfloat16, 4)
    schedule = schedule_of("scatter", large, 64)
    copies = [each for each in schedule.of_rank(0) if isinstance(each, Put)]
    assert len(large.cuts) == 4
    assert [bool(each.notifies) for each in copies] == [False] * 6 + [True] * 6
    widths = {buffer.name: buffer.cols for buffer in schedule.buffers}
    assert all(region.shape[1] == widths[region.buffer] for each in copies for region in each.reads)


def refusals(kind: str, m: int = 7, ranks: int = 3) -> set[str]:
    return {refusal.rule for refusal in verify_schedule(schedule_of(kind, sizes(m, ranks), 16)).refusals}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", range(1, 9))
def test_it_is_proven(kind: str, ranks: int):
    for m in {0, 1, ranks - 1, ranks, 2 * ranks + 1, 40}:  # no token, ranks without, uneven shards, even ones
        verify_schedule(schedule_of(kind, sizes(m, ranks), 16)).raise_if_refused()


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_proven_as_it_is(kind: str):
    assert refusals(kind) == set()


@pytest.mark.parametrize(
    ("kind", "channel"),
    [
        ("gather", "slots"),
        ("scatter", "landed"),
        ("scatter", "last"),
        ("total", "last"),
        ("total", "summed0"),
        ("total", "gathered1"),
        ("chain", "slots"),
        ("chain", "last"),
    ],
)
def test_a_reader_that_does_not_wait_is_refused(kind: str, channel: str):
    honest = TileQueue.rank_wait

    def hasty(queue: Any, name: str, rank: int) -> None:
        if name != channel:
            honest(queue, name, rank)

    with patch.object(TileQueue, "rank_wait", hasty):
        assert refusals(kind)


@pytest.mark.parametrize("kind", ["gather", "chain"])
def test_a_tile_that_does_not_wait_for_one_of_its_shards_is_refused(kind: str):
    honest = TileQueue.rank_compute_arriving

    def hasty(queue: Any, name: str, run: Any, channel: str, shards: dict[int, Any]) -> None:
        both = tuple(one + more for one, more in zip(shards[0], shards.pop(1), strict=True))
        honest(queue, name, run, channel, {**shards, 0: both})

    with patch.object(TileQueue, "rank_compute_arriving", hasty):
        assert refusals(kind)


TOLD = [
    ("gather", "tokens"),
    ("gather", "slots"),
    ("scatter", "landed"),
    ("scatter", "last"),
    ("scatter", "computed0"),
    ("total", "landed"),
    ("total", "summed0"),
    ("total", "gathered0"),
    ("chain", "tokens"),
    ("chain", "computed1"),
]


@pytest.mark.parametrize(("kind", "channel"), TOLD)
def test_an_empty_shard_that_does_not_signal_is_refused(kind: str, channel: str):
    honest = TileQueue.rank_notify

    def silent(queue: Any, name: str, tile: int, rank: Any) -> None:
        if name != channel or tile != 2:
            honest(queue, name, tile, rank)

    with patch.object(TileQueue, "rank_notify", silent):
        assert refusals(kind, m=2)  # of three ranks one has no token


@pytest.mark.parametrize("kind", ["scatter", "total", "chain"])
def test_landing_rows_that_overlap_are_refused(kind: str):
    class Narrow(Sizes):
        @property
        def shard(self) -> int:
            return 2  # of three

    declared = programs.BUFFERS[kind]
    with patch.dict(programs.BUFFERS, {kind: lambda _: declared(sizes(7, 3))}):
        schedule = schedule_of(kind, Narrow(*sizes(7, 3)), 16)
    assert verify_schedule(schedule).refusals


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_that_is_one_row_too_long_is_refused(kind: str):
    """A shard whose experts make, or an owner's that read, a row of the next one."""

    def longer(part: Any, tensor: str, row: int = 0, col: int = 0) -> tuple[Access, ...]:
        found = honest(part, tensor, row, col)
        if not found or tensor not in ("h", "part.0") or part.rows[1] - part.rows[0] < 2:
            return found
        wide = type(part)(part.buffer, part.rank, (part.rows[0], part.rows[1] + 1), part.cols)
        return (Access(wide, tensor, row, col),)

    honest = programs._made
    with patch.object(programs, "_made", longer):
        assert refusals(kind)


def test_another_kind_is_refused():
    with pytest.raises(InputError, match="gather, scatter, total, chain"):
        schedule_of("ring", sizes(4, 2), 16)
