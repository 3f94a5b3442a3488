"""Timelines: when each operation ran on every rank, measured on a machine or simulated, in one form.

A Timeline holds spans. Times are microseconds from the start of the call, with three decimals. Its measures are unions
of intervals, so they do not depend on how many tiles ran at once or how finely a run was recorded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

from msgspec import Struct

from overweave.errors import InputError

SpanKind = Literal["compute", "copy", "collective", "reduce", "wait", "begin"]
TimelineSource = Literal["measured", "simulated", "steps"]
COMPUTE: Final = "compute"
COPY: Final = "copy"
COLLECTIVE: Final = "collective"
REDUCE: Final = "reduce"
WAIT: Final = "wait"
BEGIN: Final = "begin"
KINDS: tuple[SpanKind, ...] = (COMPUTE, COPY, COLLECTIVE, REDUCE, WAIT, BEGIN)
COMMUNICATION = (COPY, COLLECTIVE, REDUCE)
DECIMALS = 3

TimeInterval = tuple[float, float]


class TimelineSpan(Struct, frozen=True, forbid_unknown_fields=True):
    """An interval in which a rank did one thing on one of its tracks: a queue, or a program of a kernel.

    compute, reduce: tiles. copy: a chunk, from its first byte to its last. collective: from its start on all ranks.
    wait: only waiting for a signal. begin: the prologue of a call.
    """

    rank: int
    track: str
    name: str
    kind: SpanKind
    begin_us: float
    end_us: float


class Arrow(Struct, frozen=True, forbid_unknown_fields=True):
    """`spans[target]` waited for a signal of `spans[source]`."""

    source: int
    target: int


class Content(Struct, frozen=True, forbid_unknown_fields=True):
    """The regions that one operation of the schedule reads and writes, in words, and the bytes that it writes."""

    operation: str
    regions: str
    written_bytes: int


class Timeline(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Spans of one call on all ranks, by begin time.

    source: `steps` where each operation takes one step in place of a time (ir/timeline/operations.py). contents: of the
    operations that the spans are named after; empty unless `with_contents` added them.
    """

    name: str
    source: TimelineSource
    world_size: int
    spans: tuple[TimelineSpan, ...]
    arrows: tuple[Arrow, ...] = ()
    contents: tuple[Content, ...] = ()

    @property
    def total_us(self) -> float:
        """Return the time from the start of the call to the end of the slowest rank."""
        return max((span.end_us for span in self.spans), default=0.0)

    def of_rank(self, rank: int) -> tuple[TimelineSpan, ...]:
        return tuple(span for span in self.spans if span.rank == rank)

    def tracks(self) -> tuple[tuple[int, str], ...]:
        """Return (rank, track), ranks ascending, tracks in order of first use."""
        first: dict[tuple[int, str], int] = {}
        for position, span in enumerate(self.spans):
            first.setdefault((span.rank, span.track), position)
        return tuple(sorted(first, key=lambda key: (key[0], first[key])))

    def busy_us(self, rank: int, kinds: Iterable[str]) -> float:
        """Return the time in which at least one span of these kinds was running on `rank`."""
        return length_us(self._union(rank, kinds))

    def exposed_us(self, rank: int | None = None) -> float:
        """Return the exposed communication: time of copies, collectives, reductions and waits during which nothing
        computed. rank: None for the largest over the ranks."""
        if rank is None:
            return max((self.exposed_us(each) for each in range(self.world_size)), default=0.0)
        return length_us(self.exposed(rank))

    def exposed(self, rank: int) -> list[TimeInterval]:
        """Return the intervals in which a rank communicated or waited and computed nothing."""
        return subtract(self._union(rank, (*COMMUNICATION, WAIT)), self._union(rank, (COMPUTE,)))

    def hidden_share(self) -> float:
        """Return 1 - exposed / (communicated or waited), of the rank with the most exposed time. 1 without
        communication."""
        ranks = range(self.world_size)
        exposed_us, rank = max(((self.exposed_us(rank), -rank) for rank in ranks), default=(0.0, 0))
        moving_us = self.busy_us(-rank, (*COMMUNICATION, WAIT))
        return 1.0 - exposed_us / moving_us if moving_us > 0 else 1.0

    def overlap_ratio(self, rank: int | None = None) -> float:
        """Return (T_comp + T_comm - T) / T_comm, zero without communication.

        T_comp and T_comm are the times in which the rank computed and communicated, T its time until the call's end. It
        is less than `hidden_share` by the time in which the rank did neither. rank: None for the one that ends last.
        SOURCE: TileLink, section 7.
        """
        if rank is None:
            rank = max(self.spans, key=lambda span: span.end_us).rank if self.spans else 0
        computing, moving = self.busy_us(rank, (COMPUTE,)), self.busy_us(rank, COMMUNICATION)
        total = max((span.end_us for span in self.of_rank(rank)), default=0.0)
        return max(0.0, (computing + moving - total) / moving) if moving > 0 else 0.0

    def _union(self, rank: int, kinds: Iterable[str]) -> list[TimeInterval]:
        selected = set(kinds)
        return union((span.begin_us, span.end_us) for span in self.spans if span.rank == rank and span.kind in selected)


def make_timeline(
    name: str,
    source: TimelineSource,
    world_size: int,
    spans: Iterable[TimelineSpan],
    arrows: Iterable[Arrow] = (),
    contents: Iterable[Content] = (),
) -> Timeline:
    """Return a Timeline with rounded times and spans sorted by begin; `arrows` index `spans` as passed. Raises
    InputError for a span that ends before it begins, or an arrow or rank that does not exist."""
    unsorted = tuple(spans)
    for span in unsorted:
        if not (0 <= span.rank < world_size and span.begin_us <= span.end_us < float("inf")):
            found = f"{span.name} on rank {span.rank} from {span.begin_us} to {span.end_us}"
            raise InputError("timeline span", found, f"Ranks lie in [0, {world_size}) and a span ends after it begins")
    order = sorted(range(len(unsorted)), key=lambda index: (unsorted[index].begin_us, unsorted[index].end_us, index))
    place = {old: new for new, old in enumerate(order)}
    try:
        renumbered = sorted({(place[arrow.source], place[arrow.target]) for arrow in arrows})
    except KeyError as missing:
        raise InputError("timeline arrow", f"span {missing}", f"Use a number below {len(unsorted)}") from None
    return Timeline(
        name=name,
        source=source,
        world_size=world_size,
        spans=tuple(_rounded(unsorted[index]) for index in order),
        arrows=tuple(Arrow(*pair) for pair in renumbered),
        contents=tuple(contents),
    )


def union(intervals: Iterable[TimeInterval]) -> list[TimeInterval]:
    """Return disjoint intervals, ascending, that cover the same points."""
    merged: list[TimeInterval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def length_us(intervals: Iterable[TimeInterval]) -> float:
    return sum(end - begin for begin, end in intervals)


def subtract(whole: list[TimeInterval], removed: list[TimeInterval]) -> list[TimeInterval]:
    """Return the part of one union that another does not cover."""
    rest: list[TimeInterval] = []
    next_removed = 0
    for begin, end in whole:
        while next_removed < len(removed) and removed[next_removed][1] <= begin:
            next_removed += 1
        index = next_removed
        while index < len(removed) and removed[index][0] < end:
            if removed[index][0] > begin:
                rest.append((begin, removed[index][0]))
            begin = max(begin, removed[index][1])
            index += 1
        if begin < end:
            rest.append((begin, end))
    return rest


def _rounded(span: TimelineSpan) -> TimelineSpan:
    return TimelineSpan(
        span.rank, span.track, span.name, span.kind, round(span.begin_us, DECIMALS), round(span.end_us, DECIMALS)
    )
