"""Signals that follow from what steps read and write."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from overweave.errors import ScheduleError
from overweave.ir.schedule import Operation, Put, Queue, Reduce, Region
from overweave.schedules.communication import Communication, MatmulChunk
from overweave.schedules.signals import with_signals

COPIES, SUMS, TELLERS = Queue("copies", "complete"), Queue("sums", "issue"), Queue("copies.told", "complete")


def derived(steps: Iterable[Operation | MatmulChunk], *queues: Queue, **changes: Any) -> Communication:
    made = Communication(world_size=3, buffers=(), queues=queues, given=(), goal=(), steps=tuple(steps), **changes)
    return with_signals(made)


def part(buffer: str, rank: int, lo: int = 0, hi: int = 8) -> Region:
    return Region(buffer, rank, (lo, hi), (0, 16))


def chunk(rank: int, out: Region, addends: tuple[Region, ...] = (), places: tuple[Region, ...] = ()) -> MatmulChunk:
    return MatmulChunk(name=f"multiply.{rank}", rank=rank, rows=(0, 8), region=out, addends=addends, places=places)


def put(source: Region, to: Region) -> Put:
    return Put(name=f"put.{to.rank}", rank=source.rank, queue="copies", sources=(source,), destinations=(to,))


def sum_of(rank: int, *operands: Region, out: str = "y") -> Reduce:
    return Reduce(name=f"sum.{rank}", rank=rank, queue="sums", operands=operands, out=part(out, rank))


def told(step: Operation | MatmulChunk) -> list[str]:
    return [*map(str, step.waits), "->", *map(str, step.notifies)]


def test_who_reads_waits_for_who_writes_and_nobody_else_is_told():
    steps = (
        chunk(0, part("partial", 0)),
        chunk(0, part("unread", 0)),
        put(part("partial", 0), part("slots", 1)),
        chunk(1, part("partial", 1)),
        sum_of(1, part("slots", 1), part("partial", 1)),
    )
    made = derived(steps, COPIES, SUMS)
    assert [told(step) for step in made.steps] == [
        ["->", "computed@0[0]"],
        ["->"],
        ["computed[0:1]>=1", "->", "arrived@1[0]"],
        ["->", "computed@1[0]"],
        ["computed[0:1]>=1", "arrived[0:1]>=1", "->"],
    ]
    assert [(pad.name, pad.size) for pad in made.pads] == [("computed", 1), ("arrived", 1)]


def test_what_queues_imply_is_not_waited_for():
    steps = (chunk(0, part("partial", 0)), sum_of(0, part("partial", 0)))
    behind = Queue("sums", "issue", after=("tiles",))
    assert not derived(steps, behind).pads
    assert derived(steps, SUMS).pads
    assert derived(steps[::-1], behind).pads


def test_what_a_queue_completes_in_order_is_told_by_the_last():
    halves = [put(part("partial", 0, lo, lo + 4), part("slots", 1, lo, lo + 4)) for lo in (0, 4)]
    both = (*halves, sum_of(1, part("slots", 1)))
    assert [told(step) for step in derived(both, COPIES, SUMS).steps] == [
        ["->"],
        ["->", "arrived@1[0]"],
        ["arrived[0:1]>=1", "->"],
    ]
    by_kernel = derived(both, Queue("copies", "issue"), SUMS)
    assert told(by_kernel.steps[2]) == ["arrived[0:2]>=1", "->"]


@pytest.mark.parametrize("writer", [chunk(0, part("partial", 0)), sum_of(0, part("x", 0), out="partial")])
def test_a_stream_tells_peers_what_kernels_have_written(writer: MatmulChunk | Reduce):
    made = derived((writer, sum_of(1, part("partial", 0))), SUMS)
    pad = "computed" if isinstance(writer, MatmulChunk) else "summed"
    assert [told(step) for step in made.steps] == [
        ["->", f"{pad}@0[0]"],
        [f"{pad}[0:1]>=1", "->", "told@1[0]"],
        ["told[0:1]>=1", "->"],
    ]
    assert made.queues[-1] == TELLERS


def test_tiles_that_one_step_waits_for_count_on_one_signal():
    stored = [chunk(rank, part("slots", 2, 8 * rank, 8 * rank + 8)) for rank in (0, 1)]
    adds = chunk(2, part("y", 2), addends=(part("slots", 2, 0, 8), part("slots", 2, 8, 16)))
    steps = derived((*stored, adds)).steps
    assert [told(step) for step in steps[:2]] == [["->", "arrived@2[0]"]] * 2
    assert [str(wait) for wait in steps[2].late_waits] == ["arrived[0:1]>=1"]  # type: ignore[union-attr]


def test_what_tiles_store_on_several_ranks_has_one_number_everywhere():
    ranks = range(3)
    total = [part("total", rank) for rank in ranks]
    everywhere = [
        chunk(rank, own, places=(own, *(replace(one, rows=(8 * rank, 8 * rank + 8)) for one in total)))
        for rank in ranks
        for own in [part("y", rank)]
    ]
    moves = [sum_of(rank, part("total", rank, 8 * by, 8 * by + 8)) for rank in ranks for by in ranks if by != rank]
    steps = derived((*everywhere, *moves), SUMS).steps[:3]
    assert sorted({(one.signal, step.rank) for step in steps for one in step.notifies}) == [(0, 1), (1, 2), (2, 0)]


def test_tiles_that_read_wait_before_they_start_and_are_numbered_by_their_rows():
    puts = [put(part("x", 0, lo, lo + 4), part("gathered", 1, lo, lo + 4)) for lo in (4, 0)]
    chunks = [
        MatmulChunk(name=f"m.{lo}", rank=1, rows=(lo, lo + 4), region=part("gathered", 1, lo, lo + 4)) for lo in (4, 0)
    ]
    made = derived((*puts, *chunks), COPIES, tiles_read=True)
    assert [told(step) for step in made.steps] == [
        ["->", "arrived@1[1]"],
        ["->", "arrived@1[0]"],
        ["arrived[1:2]>=1", "->"],
        ["arrived[0:1]>=1", "->"],
    ]


def test_a_step_may_stand_behind_what_it_does_not_read():
    steps = (chunk(0, part("partial", 0)), sum_of(0, part("total", 0)))
    made = derived(steps, SUMS, behind={steps[1].name: (part("partial", 0),)})
    assert told(made.steps[1]) == ["computed[0:1]>=1", "->"]


def test_what_a_kernel_carries_is_told_to_its_peer_alone():
    steps = (put(part("x", 0), part("gathered", 1)), sum_of(2, part("gathered", 1)))
    assert derived(steps, COPIES, SUMS).pads
    with pytest.raises(ScheduleError, match="tell the peer alone"):
        derived(steps, Queue("copies", "issue"), SUMS)
