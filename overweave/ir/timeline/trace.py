"""Timelines as trace files for Perfetto (ui.perfetto.dev) and chrome://tracing, without loss, and their reader.

One process per rank and timeline, one thread per track (more where spans of a track overlap, which these viewers cannot
draw in one), flow arrows from notifying spans to waiting ones. Measured and simulated runs share the form, so both can
stand in one file.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from overweave.errors import InputError
from overweave.ir.timeline.timeline import (
    COMPUTE,
    DECIMALS,
    Arrow,
    Content,
    Timeline,
    TimelineSource,
    TimelineSpan,
    make_timeline,
)
from overweave.untrusted import check_keys, check_words

SCHEMA = "overweave.timeline/1"
MAX_BYTES = 2**28  # of a file that is read again
MOST_RANKS, MOST_TIMELINES = 1024, 64


class _Header(Struct, frozen=True):
    name: str
    source: TimelineSource
    world_size: int
    contents: tuple[Content, ...] = ()


class _Other(Struct, frozen=True):
    schema: str = ""
    timelines: tuple[_Header, ...] = ()


class _Arguments(Struct, frozen=True):
    timeline: int | None = None
    rank: int | None = None
    track: str | None = None
    source: int | None = None
    target: int | None = None


class _Event(Struct, frozen=True):
    ph: str
    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: _Arguments = _Arguments()


class _File(Struct, frozen=True):
    other: _Other = msgspec.field(name="otherData")
    events: tuple[_Event, ...] = msgspec.field(name="traceEvents")


def to_chrome(*timelines: Timeline) -> bytes:
    """Return a trace file that holds the timelines, in order."""
    events: list[dict[str, Any]] = []
    process = 0
    for number, timeline in enumerate(timelines):
        threads = _threads(timeline)
        for rank in range(timeline.world_size):
            own_threads = {thread for span, thread in zip(timeline.spans, threads, strict=True) if span.rank == rank}
            events += _name_events(process + rank, f"{timeline.source} rank {rank}", own_threads)
        for span, thread in zip(timeline.spans, threads, strict=True):
            events.append(_span_event(span, number, process, thread[1]))
        for identifier, arrow in enumerate(timeline.arrows):
            events += _arrow_events(timeline, arrow, (number, process, identifier), threads)
        process += timeline.world_size
    headers = tuple(_Header(each.name, each.source, each.world_size, each.contents) for each in timelines)
    other = _Other(SCHEMA, headers)
    return msgspec.json.encode({"displayTimeUnit": "ns", "otherData": other, "traceEvents": events})


def is_trace(data: bytes) -> bool:
    """Whether a file may have been written by `to_chrome`."""
    return SCHEMA.encode() in data[:MAX_BYTES]


def from_chrome(data: bytes) -> tuple[Timeline, ...]:
    """Return the timelines of a file that `to_chrome` wrote. Raises InputError for anything else: files are
    untrusted."""
    cure = "Give a file that `overweave trace` or `overweave simulate --trace` wrote"
    if len(data) > MAX_BYTES:
        raise InputError("read a trace", f"more than {MAX_BYTES} bytes", cure)
    try:
        file = msgspec.json.decode(data, type=_File)
        if file.other.schema != SCHEMA:
            raise InputError("read a trace", f"its form is {file.other.schema[:40]!r}, not {SCHEMA}", cure)
        check_keys(data)
        if len(file.other.timelines) > MOST_TIMELINES:
            raise InputError("read a trace", f"{len(file.other.timelines)} timelines", f"Give at most {MOST_TIMELINES}")
        events_of: dict[int | None, list[_Event]] = {}
        for event in file.events:
            events_of.setdefault(event.args.timeline, []).append(event)
        return tuple(_timeline(header, events_of.get(number, [])) for number, header in enumerate(file.other.timelines))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError("read a trace", str(error)[:300], cure) from None


def _timeline(header: _Header, events: list[_Event]) -> Timeline:
    """Return one timeline of a file. Raises ValidationError, ValueError and InputError."""
    if not 0 < header.world_size <= MOST_RANKS:
        raise InputError("read a trace", f"{header.world_size} ranks", f"A trace has 1 to {MOST_RANKS}")
    words = {word for each in header.contents for word in (each.operation, each.regions)}
    check_words([header.name, *words, *{word for event in events for word in (event.name, event.args.track or "")}])
    spans = [
        {
            "rank": event.args.rank,
            "track": event.args.track,
            "name": event.name,
            "kind": event.cat,
            "begin_us": event.ts,
            "end_us": round(event.ts + event.dur, DECIMALS),
        }
        for event in events
        if event.ph == "X"
    ]
    arrows = [{"source": event.args.source, "target": event.args.target} for event in events if event.ph == "s"]
    return make_timeline(
        header.name,
        header.source,
        header.world_size,
        msgspec.convert(spans, list[TimelineSpan]),
        msgspec.convert(arrows, list[Arrow]),
        header.contents,
    )


def _threads(timeline: Timeline) -> list[tuple[str, int]]:
    """Return (label, number) of the thread that draws each span: the first lane of its track that is free by then."""
    lanes: dict[tuple[int, str], list[tuple[float, str, int]]] = {}
    count: dict[int, int] = {}
    threads: list[tuple[str, int]] = []
    for span in timeline.spans:
        lanes_of_track = lanes.setdefault((span.rank, span.track), [])
        free = next((lane for lane, (end, _, _) in enumerate(lanes_of_track) if end <= span.begin_us), None)
        if free is None:
            free = len(lanes_of_track)
            number = count[span.rank] = count.get(span.rank, 0) + 1
            lanes_of_track.append((0.0, span.track if free == 0 else f"{span.track} ({free + 1})", number))
        _, label, number = lanes_of_track[free]
        lanes_of_track[free] = (span.end_us, label, number)
        threads.append((label, number))
    return threads


def _name_events(process: int, title: str, threads: set[tuple[str, int]]) -> list[dict[str, Any]]:
    """Return the metadata events that name a process and its threads."""

    def metadata(name: str, thread: int, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": arguments}

    events = [metadata("process_name", 0, {"name": title}), metadata("process_sort_index", 0, {"sort_index": process})]
    for label, number in sorted(threads, key=lambda thread: thread[1]):
        events.append(metadata("thread_name", number, {"name": label}))
        events.append(metadata("thread_sort_index", number, {"sort_index": number}))
    return events


def _span_event(span: TimelineSpan, number: int, process: int, thread: int) -> dict[str, Any]:
    """Return the complete event ("X") of a span."""
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": process + span.rank,
        "tid": thread,
        "ts": span.begin_us,
        "dur": round(span.end_us - span.begin_us, DECIMALS),
        "args": {"timeline": number, "rank": span.rank, "track": span.track},
    }


def _arrow_events(
    timeline: Timeline, arrow: Arrow, place: tuple[int, int, int], threads: list[tuple[str, int]]
) -> list[dict[str, Any]]:
    """Return the flow events ("s", "f") of an arrow. place: number of the timeline, its first process, and of the
    arrow."""
    number, process, identifier = place
    source, target = timeline.spans[arrow.source], timeline.spans[arrow.target]
    common = {"name": "signal", "cat": "signal", "id": f"{number}.{identifier}"}
    pair = {"timeline": number, "source": arrow.source, "target": arrow.target}
    # An arrow starts at the slice its time lies in, and a slice does not hold its own end.
    leaves = max(source.begin_us, round(source.end_us - 10**-DECIMALS, DECIMALS))
    start = {"ph": "s", "pid": process + source.rank, "tid": threads[arrow.source][1], "ts": leaves}
    # A span of compute begins with its first tile, which may not be the one that waited: the arrow ends inside it.
    arrives = max(target.begin_us, min(source.end_us, target.end_us)) if target.kind == COMPUTE else target.begin_us
    finish = {"ph": "f", "bp": "e", "pid": process + target.rank, "tid": threads[arrow.target][1], "ts": arrives}
    return [common | start | {"args": pair}, common | finish]
