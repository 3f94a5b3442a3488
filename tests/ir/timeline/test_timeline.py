"""Timelines: unions of intervals, what was exposed, what was hidden."""

from __future__ import annotations

import random

import pytest

from overweave.errors import InputError
from overweave.ir.timeline.timeline import Arrow, TimelineSpan, length_us, make_timeline, subtract, union


def spans(*rows: tuple[int, str, float, float]) -> list[TimelineSpan]:
    return [
        TimelineSpan(rank, kind, f"{kind}{number}", kind, begin, end)
        for number, (rank, kind, begin, end) in enumerate(rows)
    ]


def test_unions_and_what_is_left_of_them_agree_with_points_counted_one_by_one():
    chance = random.Random(1)
    for _ in range(200):
        left, right = ([tuple(sorted(chance.sample(range(40), 2))) for _ in range(chance.randrange(6))] for _ in "ab")
        cover = [{cell for begin, end in side for cell in range(begin, end)} for side in (left, right)]
        assert length_us(union(left)) == len(cover[0])
        rest = subtract(union(left), union(right))
        assert {cell for begin, end in rest for cell in range(int(begin), int(end))} == cover[0] - cover[1]
        assert rest == union(rest)


def test_exposed_is_what_no_compute_covers():
    timeline = make_timeline(
        "t",
        "measured",
        1,
        spans((0, "compute", 10, 50), (0, "copy", 0, 30), (0, "wait", 40, 55), (0, "reduce", 60, 70)),
    )
    assert timeline.exposed_us(0) == 10 + 5 + 10
    assert timeline.busy_us(0, ("copy", "reduce")) == 40
    assert timeline.total_us == 70


def test_overlap_ratio_counts_hidden_communication():
    hidden = make_timeline("t", "measured", 1, spans((0, "compute", 0, 100), (0, "copy", 20, 60)))
    serial = make_timeline("t", "measured", 1, spans((0, "copy", 0, 40), (0, "compute", 40, 140)))
    half = make_timeline("t", "measured", 1, spans((0, "copy", 0, 40), (0, "compute", 20, 120)))
    none = make_timeline("t", "measured", 1, spans((0, "compute", 0, 100)))
    assert [each.overlap_ratio() for each in (hidden, serial, half, none)] == [1.0, 0.0, 0.5, 0.0]
    assert [each.hidden_share() for each in (hidden, serial, half, none)] == [1.0, 0.0, 0.5, 1.0]


def test_what_is_hidden_is_what_is_not_exposed():
    """Of the rank that leaves most exposed; a rank that neither computes nor communicates for a while hides no less."""
    late = make_timeline("t", "measured", 2, spans((0, "compute", 0, 90), (0, "copy", 10, 50), (1, "copy", 95, 100)))
    assert (late.exposed_us(), late.hidden_share()) == (5.0, 0.0)
    gap = make_timeline("t", "measured", 1, spans((0, "compute", 0, 50), (0, "copy", 10, 50), (0, "compute", 80, 100)))
    assert (gap.exposed_us(), gap.hidden_share(), gap.overlap_ratio()) == (0.0, 1.0, 0.25)


def test_the_slowest_rank_is_the_one_that_counts():
    timeline = make_timeline("t", "measured", 2, spans((0, "compute", 0, 10), (1, "copy", 0, 4), (1, "compute", 4, 20)))
    assert timeline.exposed_us() == timeline.exposed_us(1) == 4
    assert timeline.overlap_ratio() == timeline.overlap_ratio(1) == 0.0


def test_spans_are_sorted_and_arrows_follow_them():
    late, early = spans((0, "compute", 5, 9), (0, "copy", 0, 4))
    timeline = make_timeline("t", "simulated", 1, [late, early], [Arrow(source=1, target=0)])
    assert [span.kind for span in timeline.spans] == ["copy", "compute"]
    assert timeline.arrows == (Arrow(source=0, target=1),)


@pytest.mark.parametrize(
    "span",
    [
        TimelineSpan(2, "t", "x", "copy", 0, 1),
        TimelineSpan(0, "t", "x", "copy", 2, 1),
        TimelineSpan(0, "t", "x", "copy", 0, float("inf")),
    ],
)
def test_impossible_spans_are_refused(span: TimelineSpan):
    with pytest.raises(InputError, match="span"):
        make_timeline("t", "measured", 2, [span])


def test_an_arrow_from_nowhere_is_refused():
    with pytest.raises(InputError, match="arrow"):
        make_timeline("t", "measured", 1, spans((0, "copy", 0, 1)), [Arrow(0, 1)])
