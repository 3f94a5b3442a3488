"""What one library call takes of permuted blocks: a stretch of one buffer at each side, in equal parts for members."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from overweave.ir.blocks import Blocks, memory_image
from overweave.ir.library_call import CollectiveSide, call_sides, is_permuted, library_obstacle
from overweave.ir.schedule import Buffer, Collective, Copy, Goal, InitialContents, Queue, Region, Schedule
from overweave.ir.verify.plan import verify_schedule

# Blocks 0 and 2 of four, one below the other, lie side by side, and so do 1 and 3.
BUFFERS = {
    "staged": Buffer("staged", 8, 3, "local", blocks=Blocks(2, 3, (0, 2, 1, 3))),
    "got": Buffer("got", 8, 3, "local", blocks=Blocks(2, 3, (2, 0, 3, 1))),
    "rows": Buffer("rows", 8, 3, "local"),
}


def blocks(buffer: str, *which: int) -> tuple[Region, ...]:
    return tuple(Region(buffer, 0, (2 * at, 2 * at + 2), (0, 3)) for at in which)


def call(function: str, sources: tuple[Region, ...], destinations: tuple[Region, ...], **changes: Any) -> Collective:
    return Collective(
        name="call", rank=0, queue="main", function=function, label="call", ranks=(0, 1),  # type: ignore[arg-type]
        sources=sources, destinations=destinations, **changes,
    )  # fmt: skip


def test_blocks_that_lie_side_by_side_are_one_call():
    exchange = call("all_to_all", blocks("staged", 0, 2), blocks("got", 0, 2))
    assert call_sides(exchange, BUFFERS) == (CollectiveSide("staged", (0, 12), 2), CollectiveSide("got", (12, 24), 2))
    assert library_obstacle(exchange, BUFFERS) == ""
    gather = call("all_gather", blocks("staged", 1), blocks("rows", 0, 1))
    assert call_sides(gather, BUFFERS) == (CollectiveSide("staged", (12, 18), 1), CollectiveSide("rows", (0, 12), 2))
    summed = call("all_reduce", blocks("staged", 0, 2), blocks("staged", 0, 2))
    assert call_sides(summed, BUFFERS) == (CollectiveSide("staged", (0, 12), 1),) * 2
    scattered = call("reduce_scatter", blocks("staged", 1, 3), blocks("rows", 3))
    assert call_sides(scattered, BUFFERS) == (
        CollectiveSide("staged", (12, 24), 2),
        CollectiveSide("rows", (18, 24), 1),
    )


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (call("all_to_all", blocks("staged", 0, 1), blocks("got", 0, 1)), "needs one contiguous span"),
        (call("all_to_all", blocks("staged", 0, 2), blocks("rows", 0, 2)), "needs one contiguous span"),  # a gap
        (call("all_to_all", blocks("staged", 2, 0), blocks("got", 2, 0)), "not the same part of its span"),
        (call("all_to_all", (*blocks("staged", 0), *blocks("got", 2)), blocks("got", 0, 2)), "these are 2 buffers"),
        (call("all_reduce", blocks("staged", 0, 2), blocks("got", 0, 2)), "adds in place"),
        (call("all_reduce", blocks("staged", 0, 2), blocks("staged", 2, 0)), "adds in place"),
        (call("all_reduce", *(blocks("staged", 0),) * 2, finishes=True), "finishes sums in permuted blocks"),
        (call("all_gather", blocks("staged", 0, 2), blocks("got", 0, 2)), "padded to another size"),
    ],
    ids=["apart", "gap", "in another order", "two buffers", "elsewhere", "turned", "finished", "sizes"],
)
def test_what_is_no_call_is_refused(part: Collective, said: str):
    assert said in str(call_sides(part, BUFFERS))
    assert said in library_obstacle(part, BUFFERS)


def test_members_have_equal_parts():
    """Three blocks, two for one member: as many regions for each, and all of it one stretch."""
    buffer = Buffer("staged", 6, 3, "local", blocks=Blocks(2, 3, (0, 1, 2)))
    regions = Region("staged", 0, (0, 4), (0, 3)), Region("staged", 0, (4, 6), (0, 3))
    said = str(call_sides(call("all_to_all", regions, regions), {"staged": buffer}))
    assert "for member 0 is not the same part" in said


def test_other_operations_of_a_library_take_no_permuted_blocks():
    moved = Copy(name="c", rank=0, queue="main", sources=blocks("staged", 0), destinations=blocks("rows", 0))
    assert is_permuted(moved, BUFFERS)
    assert "a library's Copy addresses rows" in library_obstacle(moved, BUFFERS)
    assert library_obstacle(replace(moved, sources=blocks("rows", 1)), BUFFERS) == ""


def test_shares_of_a_gather_are_as_wide():
    """A library pads the shorter ones by rows, and cannot pad columns."""
    widths = (1, 2)
    buffers = (Buffer("x", 2, 2, "input"), Buffer("y", 4, 2, "output"))
    parts = [Region("y", 0, (2 * at, 2 * at + 2), (0, wide)) for at, wide in enumerate(widths)]
    operations = tuple(
        call("all_gather", (Region("x", rank, (0, 2), (0, wide)),), tuple(replace(part, rank=rank) for part in parts))
        for rank, wide in enumerate(widths)
    )
    schedule = Schedule(
        name="gather", world_size=2, buffers=buffers, queues=(Queue("main", "complete"),),
        given=tuple(InitialContents(one.sources[0], "a", 2 * rank, 0) for rank, one in enumerate(operations)),
        goal=tuple(
            Goal(part, "a", 2 * at, 0) for one in operations for at, part in enumerate(one.destinations)
        ),
        operations=tuple(replace(one, name=f"call.{rank}", rank=rank) for rank, one in enumerate(operations)),
    )  # fmt: skip
    assert "columns wide" in str(verify_schedule(schedule))


def test_rows_that_lie_further_apart_are_in_another_order():
    """Two rows of three columns, in cells of 3 x 4 and of 6 x 2 elements: as large, and the second row elsewhere."""
    part = (((0, 2), (3, 5)),)
    wide, narrow = (memory_image(Blocks(high, cols, (0, 1)), (high, 5), part, True) for high, cols in ((2, 3), (2, 4)))
    assert wide.order != narrow.order
    whole = (((0, 2), (0, 3)),)
    cells = [memory_image(Blocks(high, wide, (0,)), (2, 3), whole, True) for high, wide in ((3, 4), (2, 6), (4, 3))]
    assert {image.span for image in cells} == {(0, 12)}
    assert len({image.order for image in cells}) == 3
