"""Trace files as Timelines again: a trace says all that a Timeline does."""

from __future__ import annotations

import json

from overweave.ir.timeline.timeline import DECIMALS, Arrow, Span, Timeline, make_timeline


def timelines_of(data: bytes) -> tuple[Timeline, ...]:
    """What `to_chrome` was given. Raises KeyError or InputError for a file that lacks any of it."""
    trace = json.loads(data)
    spans: dict[int, list[Span]] = {}
    arrows: dict[int, list[Arrow]] = {}
    for event in trace["traceEvents"]:
        told = event.get("args", {})
        if event["ph"] == "X":
            ts = event["ts"]
            end = round(ts + event["dur"], DECIMALS)
            span = Span(told["rank"], told["track"], event["name"], event["cat"], ts, end)
            spans.setdefault(told["timeline"], []).append(span)
        elif event["ph"] == "s":
            arrows.setdefault(told["timeline"], []).append(Arrow(told["source"], told["target"]))
    return tuple(
        make_timeline(**header, spans=spans.get(number, []), arrows=arrows.get(number, []))
        for number, header in enumerate(trace["otherData"]["timelines"])
    )
