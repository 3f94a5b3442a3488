"""The text form: exact in both directions, and a reader that names the line it cannot read."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overweave.errors import ScheduleFileError
from overweave.ir.schedule import (
    Buffer,
    Collective,
    Compute,
    Copy,
    Credit,
    Goal,
    InitialContents,
    Notify,
    Put,
    Queue,
    Reduce,
    ReducePut,
    Region,
    Schedule,
    SignalPad,
    Wait,
)
from overweave.ir.text.parse import from_text, to_text


def region(buffer: str, rank: int, lo: int = 0, hi: int = 4) -> Region:
    return Region(buffer, rank, (lo, hi), (0, 2))


# One of everything, with the names that are hardest to tell from what stands beside them.
EVERYTHING = Schedule(
    name="every.thing",
    world_size=2,
    buffers=(Buffer("x@1", 4, 2, "input"), Buffer("y-+.", 4, 2, "output", "float8_e4m3fn")),
    pads=(SignalPad("wait", 2),),
    queues=(Queue("a", "complete"), Queue("b", "issue", ("a", "after"))),
    credits=(Credit(1, 0), Credit(0, 1), Credit(1, 1)),
    given=(InitialContents(region("x@1", 0), "a@b", 1, 2),),
    goal=(Goal(region("y-+.", 1), "a", 0, 0), Goal(region("y-+.", 0), "a@b", 3, 4, ((0, 5), (5, 9)))),
    operations=(
        Put(name="put", rank=0, queue="a", sources=(region("x@1", 0),), destinations=(region("x@1", 1),)),
        ReducePut(name="signal", rank=0, queue="wait", sources=(), destinations=(region("x@1", 1),)),
        Copy(name="c", rank=1, queue="a", sources=(), destinations=(), delay_us=7, waits=(Wait("wait", (0, 2), 3),)),
        Copy(
            name="d", rank=0, queue="a", sources=(region("x@1", 0),), destinations=(), notifies=(Notify("wait", 1, 0),)
        ),
        Compute(name="m", rank=0, queue="b", a=(), b=region("x@1", 0), out=(region("y-+.", 0),) * 2, accumulate=True),
        Compute(
            name="m2",
            rank=0,
            queue="b",
            a=(region("x@1", 0),) * 2,
            b=region("x@1", 0),
            out=(),
            scales=(region("y-+.", 0),),
            tiles=9,
        ),
        Reduce(name="r", rank=1, queue="b", operands=(region("x@1", 0), region("x@1", 1)), out=region("y-+.", 1)),
        Reduce(name="r0", rank=1, queue="b", operands=(), out=region("y-+.", 1, 3, 3)),
        Reduce(name="r1", rank=1, queue="b", operands=(region("x@1", 1),), out=region("y-+.", 1), tiles=4),
        Collective(
            name="g",
            rank=1,
            queue="a",
            function="all_gather",
            label="g",
            ranks=(1, 0),
            sources=(region("x@1", 1),),
            destinations=(region("x@1", 1), region("x@1", 1)),
        ),
        Collective(
            name="h",
            rank=1,
            queue="a",
            function="all_reduce",
            label="h",
            ranks=(1, 0),
            sources=(region("x@1", 1),),
            destinations=(region("x@1", 1),),
        ),
    ),
)


def test_everything_comes_back():
    assert from_text(to_text(EVERYTHING)) == EVERYTHING


def test_the_form_is_the_one_that_is_documented(golden):
    golden("text/everything.txt", to_text(EVERYTHING))


LINES = to_text(EVERYTHING).splitlines()


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("world_size=2 version=1", "world_size=2 version=2", "line 1: version 2"),
        ("world_size=2", "world_size=99999999999", "line 1: cannot read"),
        ("world_size=2", "world_size=0", "world_size"),
        ("[4, 2] input", "[4, 2] attic", "home"),
        ("[4, 2] input", "[4, ٢] input", "line 2"),
        ("pad wait [2]", "pad wait [2] [2]", "line 4"),
        ("queue a complete", "queue a sideways", "sideways"),
        ("credits 0 -> 1", "credits 0 1", "line 8"),
        ("= a@b[1,2]", "= a@b[1,2", "line 10"),
        ("sum 0:5 5:9", "sum 0:5 5-9", "line 12"),
        ("rank 1", "rank one", "cannot read"),
        ("put: put", "put: shove", "cannot read"),
        ("x@1@0[0:4,0:2] ->", "x@1@0[0:4,0:9999999999] ->", "<= 2147483647"),
        ("x@1@0[0:4,0:2] ->", "x@1@0[0:4] ->", "cannot read"),
        ("delay_us=7", "delay_us=-7", "cannot read"),
        ("delay_us=7", "delay_us=7 delay_us=7", "cannot read"),
        (" wait wait[0:2]>=3", " wait wait[0:2]>=3 wait wait[0:2]>=3", "cannot read"),
        (" wait wait[0:2]>=3", " wait wait[0:2]>=0", "waits"),
        (" + ", " - ", "between `+`"),
        ("@ x@1@0", "@ x@1@0[0:4,0:2] x@1@0", "one region"),
    ],
)
def test_a_line_that_says_nothing_is_named(old: str, new: str, found: str):
    text = to_text(EVERYTHING)
    assert old in text
    with pytest.raises(ScheduleFileError) as caught:
        from_text(text.replace(old, new))
    assert found in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n", "rank 0\n", "  a b: put", LINES[0] + "\n" + LINES[0], "\0", "schedule"])
def test_what_is_no_schedule_is_refused(text: str):
    with pytest.raises(ScheduleFileError):
        from_text(text)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_changed_text_is_refused_or_read_and_never_anything_else(data: st.DataObject):
    text = to_text(EVERYTHING)
    at = data.draw(st.integers(0, len(text)))
    length = data.draw(st.integers(0, 12))
    changed = text[:at] + data.draw(st.text(max_size=6)) + text[at + length :]
    try:
        schedule = from_text(changed)
    except ScheduleFileError:
        return
    assert from_text(to_text(schedule)) == schedule
