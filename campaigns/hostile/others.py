"""Files that are no schedules: machines, traces, shapes and tables. What each is read by, and made to cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from msgspec import convert

from campaigns.hostile.crafted import Json
from overweave.hardware.machine import load
from overweave.ir.problem import Problem
from overweave.ir.timeline.trace import SCHEMA, to_chrome
from overweave.schedules.catalog.catalog import build
from overweave.sim.simulate import simulate

FILE = "{}"
MACHINE, TRACE, SHAPES, TABLE = "machine", "trace", "shapes", "table"
_OPERATOR, _SHAPE = "all_gather_matmul", ("--shape", "4096,4096,4096")
COMMANDS: dict[str, tuple[tuple[str, ...], ...]] = {
    MACHINE: (
        ("simulate", f"{_OPERATOR}.push", *_SHAPE, "--machine", FILE, "--json"),
        ("compare", f"{_OPERATOR}.push", f"{_OPERATOR}.sequential", *_SHAPE, "--machine", FILE),
        ("explain", _OPERATOR, *_SHAPE, "--machine", FILE),
        ("characterize", "--only", "comm", "--world", "4", "--simulate", FILE),
        ("characterize", "--only", "cil", "--world", "4", "--simulate", FILE),
    ),
    TRACE: (("compare", FILE, FILE),),
    SHAPES: (("characterize", "--simulate", "h200x8", "--shapes", FILE),),
    TABLE: (("explain", _OPERATOR, *_SHAPE, "--world", "4", "--device", "cuda"),),
}


def _machine(change: Callable[[Json], object]) -> bytes:
    """The H200s' file, changed."""
    told = json.loads((files("overweave.hardware") / "machines" / "h200x4.json").read_bytes())
    change(told)
    return json.dumps(told).encode()


def _trace(spans: int = 1, tracks: int = 1, **header: Any) -> bytes:
    """A trace of one timeline, of spans one behind the other."""
    told = {"name": "t", "source": "simulated", "world_size": 1, **header}
    ranks = told["world_size"]
    events = [
        {"ph": "X", "name": "s", "cat": "copy", "ts": at, "dur": 1,
         "args": {"timeline": 0, "rank": at % ranks, "track": f"q{at % tracks}"}}
        for at in range(spans)
    ]  # fmt: skip
    return _traces([told], events)


def _traces(timelines: list[Json], events: list[Json]) -> bytes:
    return json.dumps({"otherData": {"schema": SCHEMA, "timelines": timelines}, "traceEvents": events}).encode()


def _shapes(**case: Any) -> bytes:
    return json.dumps({"cases": [{"name": "a", "m": 64, "n": 64, "k": 64, **case}]}).encode()


def _twice(data: bytes, key: str) -> bytes:
    return data.replace(b"{", b'{"%b": 1, "%b": 1, ' % (key.encode(), key.encode()), 1)


def _points(count: int, rate: float = 100.0) -> list[list[float]]:
    return [[at + 1, rate] for at in range(count)]


CRAFTED: dict[str, dict[str, Callable[[], bytes]]] = {
    MACHINE: {
        "an empty machine": lambda: b"",
        "a machine of lists": lambda: b"[" * (1 << 20),
        "a machine beyond any file": lambda: b" " * (1 << 24),
        "a key of a machine twice": lambda: _twice(_machine(lambda m: None), "name"),
        "a key deep in a machine twice": lambda: _machine(lambda m: None).replace(b'"sms":', b'"sms": 1, "sms":', 1),
        "a machine of all GPUs": lambda: _machine(lambda m: m.update(gpus=10**9)),
        "a machine of many GPUs": lambda: _machine(lambda m: m.update(gpus=1024)),
        "a machine of all SMs": lambda: _machine(lambda m: m["processor"].update(sms=2**31 - 1)),
        "rates of nothing": lambda: _machine(lambda m: m["links"]["push"].update(points=[[1e-320, 1e-320]])),
        "the slowest rates": lambda: _machine(lambda m: m["links"]["push"].update(points=[[1e-9, 1e-9]])),
        "the slowest memory": lambda: _machine(lambda m: m["hbm"].update(gb_per_s=1e-9)),
        "rates beyond numbers": lambda: _machine(lambda m: m["hbm"].update(gb_per_s=10**400)),
        "a rate in words": lambda: _machine(lambda m: m["hbm"].update(gb_per_s="nan")),
        "many points": lambda: _machine(lambda m: m["links"]["pull"].update(points=_points(30_000))),
        "tiles of one element, on a machine": lambda: _machine(
            lambda m: [each.update(block_m=1, block_n=1) for each in m["tiles"]]
        ),
        "the longest overhead": lambda: _machine(lambda m: [each.update(overhead_us=1e12) for each in m["tiles"]]),
        "no tiles": lambda: _machine(lambda m: m.update(tiles=[])),
        "no dtypes": lambda: _machine(lambda m: m.update(dtypes=[])),
        "no collectives": lambda: _machine(lambda m: m.update(collectives=[])),
        "no links": lambda: _machine(lambda m: m["topology"].update(links=[])),
        "every two GPUs many times": lambda: _machine(
            lambda m: [m.update(gpus=1024)]
            + [link.update(between=[["gpu", "gpu"]] * 1000) for link in m["topology"]["links"]]
        ),
        "a machine like itself": lambda: b'{"like": "machine.json"}',
        "a machine like markup": lambda: b'{"like": "[/red]"}',
        "a machine named in markup": lambda: _machine(lambda m: m.update(name="[/red]", title="[bold]x[/]")),
        "a machine named in escapes": lambda: _machine(lambda m: m.update(title="\u001b[2J\u202e")),
        "a field named in escapes": lambda: _machine(lambda m: m.update({"\u001b[2J": 1})),
    },
    TRACE: {
        "a trace of nothing": lambda: _traces([], []),
        "a trace of no ranks": lambda: _trace(world_size=1, spans=0),
        "a trace named in markup": lambda: _trace(name="[/red]"),
        "a trace named in escapes": lambda: _trace(name="[/red]\u001b[2J"),
        "a trace of many tracks": lambda: _trace(spans=30_000, tracks=30_000),
        "a trace of many ranks": lambda: _trace(spans=20_000, world_size=1024),
        "a trace of all ranks": lambda: _trace(world_size=2**31 - 1),
        "a trace of many timelines": lambda: _traces([{"name": "t", "source": "steps", "world_size": 1}] * 30_000, []),
        "timelines of many ranks": lambda: _traces([{"name": "t", "source": "steps", "world_size": 1024}] * 64, []),
        "a trace of deep lists": lambda: SCHEMA.encode() + b"[" * (1 << 20),
        "a trace whose keys are there twice": lambda: _twice(_trace(), "displayTimeUnit"),
        "a span that never ends": lambda: _trace(spans=1).replace(b'"dur": 1', b'"dur": 1e308'),
        "a span of no number": lambda: _trace(spans=1).replace(b'"ts": 0', b'"ts": "now"'),
        "a span of a list": lambda: _trace(spans=1).replace(b'"timeline": 0', b'"timeline": []'),
    },
    SHAPES: {
        "shapes of nothing": lambda: b'{"cases": []}',
        "a key of shapes twice": lambda: _twice(_shapes(), "note"),
        "shapes of deep lists": lambda: b"[" * (1 << 19),
        "a shape of no rows": lambda: _shapes(m=0),
        "the largest shape": lambda: _shapes(m=2**31 - 1, n=2**31 - 1, k=2**31 - 1),
        "a shape named in markup": lambda: _shapes(name="[/red]"),
        "a shape named in escapes": lambda: _shapes(name="\u001b[2J"),
        "many shapes": lambda: json.dumps(
            {"cases": [{"name": f"c{at}", "m": 8192, "n": 8192, "k": 8192} for at in range(10_000)]}
        ).encode(),
    },
    TABLE: {
        "an empty table": lambda: b"",
        "a table of deep lists": lambda: b"[" * (1 << 20),
        "a table of blanks": lambda: b" " * (1 << 24),
        "a table of another form": lambda: b'{"format": 99}',
        "a table whose keys are there twice": lambda: b'{"format": 1, "format": 1, "entries": []}',
        "a table of many empty rows": lambda: b'{"format": 1, "entries": [' + b"{}," * 100_000 + b"{}]}",
    },
}  # fmt: skip


def bases() -> dict[str, list[bytes]]:
    """Files of each kind that are as they should be."""
    problem = convert(
        {"operator": _OPERATOR, "world_size": 4, "dtype": "bfloat16", "m": 4096, "n": 512, "k": 512}, Problem
    )
    plan = build(f"{_OPERATOR}.push", problem, {})
    runs = [simulate(plan, load(name), with_tiles=True) for name in ("h200x4", "h100x8")]
    folder = files("overweave.hardware") / "machines"
    tables = files("overweave.tuner") / "tables"
    return {
        MACHINE: [(folder / f"{name}.json").read_bytes() for name in ("h200x4", "h100x8", "a100_pciex8")],
        TRACE: [to_chrome(*runs), to_chrome(runs[0])],
        SHAPES: [_shapes(), _shapes(name="b", m=512, n=96, columns=[32, 64])],
        TABLE: [table.read_bytes() for table in tables.iterdir() if table.name.endswith(".json")][:2],
    }  # fmt: skip
