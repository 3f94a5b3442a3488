"""What a page shows of a timeline: where bars lie, what they say, what is shaded, and which bars arrows join."""

from __future__ import annotations

from typing import Any

import pytest

from overweave.cli.pictures.lanes import MOST_NAMED, TableColumns, bytes_text, drawing_of
from overweave.ir.problem import Problem
from overweave.ir.timeline.operations import timeline_of_steps, with_contents
from overweave.ir.timeline.timeline import Arrow, Content, TimelineSpan, make_timeline
from overweave.schedules.catalog.catalog import build

CALL = make_timeline(
    "call",
    "measured",
    2,
    [
        TimelineSpan(0, "tiles", "begin", "begin", 0, 1),
        TimelineSpan(0, "tiles.000", "product.0", "compute", 1, 40),
        TimelineSpan(0, "tiles.001", "product.1", "wait", 1, 8),
        TimelineSpan(0, "tiles.001", "product.1", "compute", 8, 40),
        TimelineSpan(1, "copies", "push", "copy", 0, 8),
    ],
    [Arrow(4, 3)],
    [Content("push", "x@1[0:8,0:4] to x@0[8:16,0:4]", 2048), Content("product", "x, w to y", 64)],
)


def rows(columns: TableColumns) -> list[dict[str, Any]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def test_each_queue_has_a_lane_and_each_program_a_part_of_it():
    drawing = drawing_of(CALL)
    assert [(lane.rank, lane.label) for lane in drawing.lanes] == [(0, "tiles"), (1, "copies")]
    tiles, copies = drawing.lanes
    assert tiles.bottom < copies.top
    first, second = rows(drawing.bars["compute"])
    assert (first["top"], second["bottom"]) == (tiles.top, tiles.bottom)
    assert first["bottom"] == second["top"]
    (begin,) = rows(drawing.bars["begin"])
    assert (begin["top"], begin["bottom"]) == (tiles.top, tiles.bottom)


def test_bars_say_what_moves_how_much_and_who_waits_for_whom():
    bars = drawing_of(CALL).bars
    (push,) = rows(bars["copy"])
    assert (push["left"], push["right"], push["took"]) == (0, 8, 8)
    assert (push["moves"], push["size"]) == ("x@1[0:8,0:4] to x@0[8:16,0:4]", "2 KiB")
    assert (push["waits_for"], push["waited_for_by"]) == ("nothing", "product")
    tile = rows(bars["compute"])[1]
    assert (tile["name"], tile["moves"], tile["waits_for"]) == ("product.1", "x, w to y", "push")
    assert tile["place"] == "rank 0, tiles.001"


def test_an_arrow_leads_from_the_end_of_what_signals_to_what_waits():
    drawing = drawing_of(CALL)
    (arrow,) = rows(drawing.arrows)
    assert (arrow["x0"], arrow["x1"], arrow["says"]) == (8, 8, "product.1 waits for push")
    assert drawing.lanes[1].top < arrow["y0"] < drawing.lanes[1].bottom
    assert drawing.lanes[0].top < arrow["y1"] < drawing.lanes[0].bottom


def test_exposed_communication_is_shaded_over_its_rank():
    drawing = drawing_of(CALL)
    (shade,) = rows(drawing.exposed)
    assert (shade["left"], shade["right"]) == (0, 8)
    assert (shade["top"], shade["bottom"]) == (drawing.lanes[1].top, drawing.lanes[1].bottom)
    assert "8.0 us of communication exposed" in drawing.title


def test_long_lists_are_cut_and_empty_timelines_are_drawn():
    spans = [TimelineSpan(0, "copies", f"c{number}", "copy", number, number + 1) for number in range(8)]
    many = make_timeline("many", "simulated", 1, spans, [Arrow(number, 7) for number in range(7)])
    assert rows(drawing_of(many).bars["copy"])[7]["waits_for"] == f"c0, c1, c2, c3 and {7 - MOST_NAMED} more"
    assert drawing_of(make_timeline("empty", "simulated", 1, [])).bars == {}


def test_steps_are_counted_and_leave_nothing_exposed():
    problem = Problem(operator="all_gather_matmul", m=256, n=256, k=64, world_size=2, dtype="bfloat16")
    plan = build("all_gather_matmul.push", problem, {"pieces": 1})
    steps = with_contents(timeline_of_steps(plan.schedule), plan.schedule, plan.realization.dtype)
    drawing = drawing_of(steps)
    assert (drawing.unit, drawing.exposed) == ("steps", {})
    assert drawing.title == "all_gather_matmul.push: 2 steps, each operation one step"
    (copy, _) = rows(drawing.bars["copy"])
    assert "x@0[0:128,0:64] to gathered@1[0:128,0:64]" in copy["moves"]
    assert copy["size"] == "16 KiB"


@pytest.mark.parametrize(
    ("count", "text"), [(0, ""), (1, "1 byte"), (3, "3 bytes"), (1536, "1.5 KiB"), (2**33, "8 GiB")]
)
def test_bytes_have_a_unit(count: int, text: str):
    assert bytes_text(count) == text
