"""Trace files: what viewers need is there, and nothing is lost."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.timeline.timeline import KINDS, Arrow, Content, TimelineSpan, make_timeline
from overweave.ir.timeline.trace import SCHEMA, from_chrome, is_trace, to_chrome


def scattered(seed: int, source: str = "measured"):
    """A random timeline in which spans of one track overlap."""
    chance = random.Random(seed)
    found = []
    for number in range(60):
        begin = chance.uniform(0, 300)
        kind = chance.choice(KINDS)
        end = begin + chance.uniform(0, 40)
        found.append(
            TimelineSpan(chance.randrange(3), chance.choice(["tiles", "copies"]), f"s{number}", kind, begin, end)
        )
    arrows = {(chance.randrange(60), chance.randrange(60)) for _ in range(20)}
    return make_timeline(f"t{seed}", source, 3, found, [Arrow(*pair) for pair in arrows])


def test_a_trace_holds_all_of_measured_beside_simulated():
    contents = (Content("s1", "x@0[0:8,0:4] to y@1[0:8,0:4]", 64),)
    both = replace(scattered(1), contents=contents), scattered(2, "simulated")
    assert is_trace(to_chrome(*both))
    assert from_chrome(to_chrome(*both)) == both
    assert json.loads(to_chrome(*both))["otherData"]["schema"] == SCHEMA


def test_slices_of_a_thread_never_overlap():
    events = json.loads(to_chrome(*(scattered(seed) for seed in range(5))))["traceEvents"]
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for slices in threads.values():
        slices.sort()
        assert all(first[1] <= second[0] + 1e-6 for first, second in pairwise(slices))


def test_processes_and_threads_have_names_and_arrows_both_ends():
    events = json.loads(to_chrome(scattered(1), scattered(2, "simulated")))["traceEvents"]
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"} == named
    titles = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert titles == [f"{source} rank {rank}" for source in ("measured", "simulated") for rank in range(3)]
    ends = [{event["id"] for event in events if event["ph"] == phase} for phase in "sf"]
    assert ends[0] == ends[1]
    assert len(ends[0]) == len(scattered(1).arrows) + len(scattered(2).arrows)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'{"traceEvents": [], "otherData": {"schema": "another"}}',
        b'{"traceEvents": 7, "otherData": {}}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_trace_is_refused(data: bytes):
    with pytest.raises(InputError, match="read a trace"):
        from_chrome(data)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"world_size":3', '"world_size":3000000000'),
        ('"world_size":3', '"world_size":1'),
        ('"cat":"copy"', '"cat":"magic"'),
        ('"track":"copies"', '"track":7'),
        ('"dur":', '"dur":-1e9,"was":'),
        ('"target":', '"target":99999,"was":'),
        ('"source":"measured"', '"source":"dreamt"'),
    ],
)
def test_a_trace_that_says_what_cannot_be_is_refused(old: str, new: str):
    text = to_chrome(scattered(1)).decode()
    assert old in text
    with pytest.raises(InputError):
        from_chrome(text.replace(old, new).encode())
