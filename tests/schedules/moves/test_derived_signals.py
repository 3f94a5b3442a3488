"""Signals that follow from what steps read and write."""

from __future__ import annotations

from overweave.ir.schedule import Copy, Operation, Put, Queue, Reduce, Region
from overweave.schedules.communication import Chunk
from overweave.schedules.moves.derived_signals import Behind, with_signals

COPIES, SUMS, TELLERS = Queue("copies", "complete"), Queue("sums", "issue"), Queue("copies.told", "complete")


def part(buffer: str, rank: int, lo: int = 0, hi: int = 8) -> Region:
    return Region(buffer, rank, (lo, hi), (0, 16))


def chunk(rank: int, out: Region, addends: tuple[Region, ...] = (), copies: tuple[Region, ...] = ()) -> Chunk:
    return Chunk(name=f"multiply.{rank}", rank=rank, rows=(0, 8), region=out, addends=addends, copies=copies)


def put(source: Region, to: Region) -> Put:
    return Put(name=f"put.{to.rank}", rank=source.rank, queue="copies", sources=(source,), destinations=(to,))


def sum_of(rank: int, *operands: Region) -> Reduce:
    return Reduce(name=f"sum.{rank}", rank=rank, queue="sums", operands=operands, out=part("y", rank))


def told(step: Operation | Chunk) -> list[str]:
    return [*map(str, step.waits), "->", *map(str, step.notifies)]


def test_who_reads_waits_for_who_writes_and_nobody_else_is_told():
    steps = (
        chunk(0, part("partial", 0)),
        chunk(0, part("unread", 0)),
        put(part("partial", 0), part("slots", 1)),
        chunk(1, part("partial", 1)),
        sum_of(1, part("slots", 1), part("partial", 1)),
    )
    made, pads = with_signals(steps, (COPIES, SUMS))
    assert [told(step) for step in made] == [
        ["->", "computed@0[0]"],
        ["->"],
        ["computed[0:1]>=1", "->", "arrived@1[0]"],
        ["->", "computed@1[0]"],
        ["computed[0:1]>=1", "arrived[0:1]>=1", "->"],
    ]
    assert [(pad.name, pad.size) for pad in pads] == [("computed", 1), ("arrived", 1)]


def test_what_queues_imply_is_not_waited_for():
    steps = (chunk(0, part("partial", 0)), sum_of(0, part("partial", 0)))
    assert not with_signals(steps, (Queue("sums", "issue", after=("tiles",)),))[1]
    assert with_signals(steps, (SUMS,))[1]
    backwards = with_signals(steps[::-1], (Queue("sums", "issue", after=("tiles",)),))
    assert backwards[1]


def test_a_stream_tells_peers_what_tiles_have_written():
    made, _ = with_signals((chunk(0, part("partial", 0)), sum_of(1, part("partial", 0))), (SUMS, TELLERS))
    assert [type(step) for step in made] == [Chunk, Copy, Reduce]
    assert [told(step) for step in made] == [
        ["->", "computed@0[0]"],
        ["computed[0:1]>=1", "->", "told@1[0]"],
        ["told[0:1]>=1", "->"],
    ]


def test_tiles_that_one_step_waits_for_count_on_one_signal():
    stored = [chunk(rank, part("slots", 2, 8 * rank, 8 * rank + 8)) for rank in (0, 1)]
    adds = chunk(2, part("y", 2), addends=(part("slots", 2, 0, 8), part("slots", 2, 8, 16)))
    made, _ = with_signals((*stored, adds), ())
    assert [told(step) for step in made[:2]] == [["->", "arrived@2[0]"]] * 2
    assert [str(wait) for wait in made[2].late_waits] == ["arrived[0:1]>=1"]  # type: ignore[union-attr]


def test_what_tiles_store_on_several_ranks_has_one_number_everywhere():
    everywhere = [
        chunk(rank, part("y", rank), copies=(part("total", 1 - rank, 8 * rank, 8 * rank + 8),)) for rank in (0, 1)
    ]
    moves = [sum_of(1 - rank, part("total", 1 - rank, 8 * rank, 8 * rank + 8)) for rank in (1, 0)]
    made, _ = with_signals((*everywhere, *moves), (SUMS,))
    assert [told(step)[-1] for step in made[:2]] == ["told@1[0]", "told@0[1]"]


def test_a_step_may_stand_behind_what_it_does_not_read():
    steps = (chunk(0, part("partial", 0)), Behind(sum_of(0, part("total", 0)), (part("partial", 0),)))
    assert told(with_signals(steps, (SUMS,))[0][1]) == ["computed[0:1]>=1", "->"]
