"""Files made to cost their reader time, memory or its composure; each says in its name what it attacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

from msgspec import convert

from overweave.ir.plan import SIGNAL_CAPACITY
from overweave.ir.problem import Problem
from overweave.ir.text.files import to_json
from overweave.ir.text.forms import MAX_BYTES
from overweave.ir.text.parse import to_text
from overweave.schedules.catalog.catalog import build

# Pieces of schedules as a file holds them: plain dicts that may say anything.

Json = dict[str, Any]
MOST = 2**31 - 1


def region(buffer: str, rank: int, rows: tuple[int, int] = (0, 1), cols: tuple[int, int] = (0, 1)) -> Json:
    return {"buffer": buffer, "rank": rank, "rows": rows, "cols": cols}


def held(there: Json, row: int = 0, **more: Any) -> Json:
    """A Given, or with terms a Goal, of tensor `a`."""
    return {"region": there, "tensor": "a", "row": row, "col": 0, **more}


def wait(lo: int, hi: int, count: int = 1, pad: str = "p") -> Json:
    return {"pad": pad, "signals": (lo, hi), "count": count}


def notify(signal: int, rank: int = 0, pad: str = "p") -> Json:
    return {"pad": pad, "rank": rank, "signal": signal}


def operation(kind: str, name: int | str, rank: int = 0, queue: str = "q", **more: Any) -> Json:
    return {"kind": kind, "name": f"o{name}", "rank": rank, "queue": queue, **more}


def copy(name: int, source: Json, destination: Json, **more: Any) -> Json:
    rank = more.pop("rank", 0)
    return operation("copy", name, rank, sources=[source], destinations=[destination], **more)


def schedule(operations: list[Json], **more: Any) -> Json:
    """One rank, one queue, an input `x`, an output `y`, a workspace `s` and pad `p`, each as large as can be."""
    homes = {"x": "input", "y": "output", "s": "symmetric", "l": "local"}
    return {
        "name": "hostile",
        "world_size": 1,
        "buffers": [{"name": name, "rows": MOST, "cols": MOST, "home": home} for name, home in homes.items()],
        "pads": [{"name": "p", "size": 1 << 22}],
        "queues": [{"name": "q", "order": "complete"}],
        "given": [held(region("x", 0, (0, MOST), (0, MOST)))],
        "goal": [],
        "operations": operations,
        **more,
    }


def filed(**value: Json) -> bytes:
    """A file with a `schedule` or a `plan`."""
    return json.dumps({"version": 1, **value}, separators=(",", ":")).encode()


def plan(of: Json, engines: dict[str, str], **more: Any) -> bytes:
    """A file with a plan of a schedule. Its pads have no more signals than a slot holds: what is refused for that is
    looked at no further."""
    of = {**of, "pads": [{**pad, "size": min(pad["size"], SIGNAL_CAPACITY)} for pad in of["pads"]]}
    realization = {
        "dtype": "bfloat16",
        "engines": [{"queue": queue, "engine": engine} for queue, engine in engines.items()],
        **more.pop("realization", {}),
    }
    problem = {"operator": "matmul", "m": 1, "n": 1, "k": 1, "world_size": of["world_size"], "dtype": "bfloat16"}
    return filed(plan={"name": "hostile", "problem": problem, "schedule": of, "realization": realization, **more})


def row(kind: int, *numbers: int) -> list[int]:
    """A row of a tile table; what is not given is zero."""
    return [kind, *numbers, *[0] * (27 - 1 - len(numbers))]


MANY = 10_000


def _moved(count: int, **more: Any) -> list[Json]:
    """Copies of one element each, row by row."""
    return [copy(at, region("x", 0, (at, at + 1)), region("s", 0, (at, at + 1)), **more) for at in range(count)]


def _apply(**more: Any) -> Json:
    made = held(region("y", 0), terms=[])
    return operation("apply", 0, **{"function": "f", "makes": [made], "tiles": [(0, 1)], **more})


def _compute(**more: Any) -> Json:
    parts = {"a": [region("x", 0)], "b": region("x", 0), "out": [region("y", 0)]}
    return operation("compute", 0, **{**parts, **more})


def _issue(operations: list[Json], **more: Any) -> Json:
    return schedule(operations, **{"queues": [{"name": "q", "order": "issue"}], **more})


def _shipped(change: Callable[[Json], object], name: str = "all_gather_matmul.push", **size: int) -> bytes:
    """A plan of the catalog, changed."""
    shape = {"m": 256, "n": 128, "k": 64, **size}
    problem = convert({"operator": name.split(".")[0], "world_size": 2, "dtype": "bfloat16", **shape}, Problem)
    envelope = json.loads(to_json(build(name, problem, {})))
    envelope["plan"]["tile_orders"] = []
    change(envelope["plan"])
    return json.dumps(envelope).encode()


def _with_rows(rows: list[list[int]], of: Json, engine: str = "author_kernel") -> bytes:
    return plan(of, {"q": engine}, tile_orders=[{"rank": 0, "queue": "q", "rows": rows}])


def _collective(world: int, count: int = 1, function: str = "all_reduce") -> Json:
    ranks = list(range(world))
    parts = [
        operation(
            "collective",
            f"{at}.{rank}",
            rank,
            function=function,
            label=f"c{at}",
            ranks=ranks,
            sources=[region("x", rank, (at, at + 1))],
            destinations=[region("s", rank, (at, at + 1))],
        )
        for at in range(count)
        for rank in ranks
    ]
    given = [held(region("x", rank, (0, MOST), (0, MOST)), rank) for rank in ranks]
    return schedule(parts, world_size=world, given=given)


def _ring(length: int) -> Json:
    """Every rank's only operation waits for the next rank's."""
    parts = [
        operation(
            "copy", at, at, waits=[wait(0, 1)], notifies=[notify(0, (at - 1) % length)], sources=[], destinations=[]
        )
        for at in range(length)
    ]
    return schedule(parts, world_size=length)


def _crossed(count: int) -> Json:
    """Copies of rows, then of columns, across each other."""
    rows = [
        copy(at, region("x", 0, (at, at + 1), (0, count)), region("s", 0, (at, at + 1), (0, count)))
        for at in range(count)
    ]
    cols = [
        copy(count + at, region("s", 0, (0, count), (at, at + 1)), region("l", 0, (0, count), (at, at + 1)))
        for at in range(count)
    ]
    return schedule([*rows, *cols])


def _reused(count: int) -> Json:
    """Two ranks without a credit that write all over each other's memory."""
    writes = [
        copy(at, region("x", at % 2, (at, at + 1)), region("s", at % 2, (at // 2, at // 2 + 1)), rank=at % 2)
        for at in range(count)
    ]
    reads = [
        operation("get", count + at, at % 2, sources=[region("s", 1 - at % 2, (at // 2, at // 2 + 1))],
                  destinations=[region("l", at % 2, (at // 2, at // 2 + 1))], waits=[])
        for at in range(count)
    ]  # fmt: skip
    given = [held(region("x", rank, (0, MOST), (0, MOST))) for rank in range(2)]
    return schedule([*writes, *reads], world_size=2, given=given)


def _mixed(count: int) -> Json:
    """Each operation waits for two at random, so that no two have the same past."""
    rng = Random(1)
    parts = []
    for at in range(count):
        picks = {rng.randrange(at) for _ in range(2)} if at else set()
        waits = [wait(one, one + 1) for one in sorted(picks)]
        parts.append(copy(at, region("x", 0), region("s", 0, (at, at + 1)), waits=waits, notifies=[notify(at)]))
    return _issue(parts, pads=[{"name": "p", "size": count}])


def _added(count: int, kind: str = "reduce_put", **more: Any) -> Json:
    """So many that add to one element of a peer."""
    parts = [
        operation(kind, at, 0, sources=[region("x", 0)], destinations=[region("s", 1)], **more) for at in range(count)
    ]
    clear = operation("clear", "first", 1, destinations=[region("s", 1)], notifies=[notify(0, 0)])
    parts[0]["waits"] = [wait(0, 1)]
    return schedule([clear, *parts], world_size=2)


def _queues(count: int, is_after: bool = False) -> Json:
    names = [f"q{at}" for at in range(count)]
    behind = {later: [earlier] for earlier, later in pairwise(names)} if is_after else {}
    queues = [{"name": name, "order": "complete", "after": behind.get(name, [])} for name in names]
    parts = [operation("copy", at, 0, name, sources=[], destinations=[]) for at, name in enumerate(names)]
    return schedule(parts, queues=queues)


def _text(lines: int, line: str) -> bytes:
    return ("schedule s world_size=1 version=1\n" + (line + "\n") * lines).encode()


def _text_of_push() -> bytes:
    problem = Problem(operator="all_gather_matmul", m=512 * 16, n=64, k=64, world_size=16, dtype="bfloat16")
    return to_text(build("all_gather_matmul.push", problem, {"pieces": 32}).schedule).encode()


def _part_waits() -> bytes:
    late = {"late_waits": [wait(0, 1)], "late_needs": [held(region("x", 0))]}
    sender = operation("copy", 1, sources=[], destinations=[], queue="c", notifies=[notify(0)])
    queues = [{"name": "c", "order": "complete"}, {"name": "q", "order": "issue"}]
    of = schedule([sender, _apply(**late)], queues=queues, pads=[{"name": "p", "size": 1}])
    rows = [row(3, 0, 0, 0, 1), *(row(4, 0, 1, 0, 1, 0, 0, MOST, 1, -1) for _ in range(4))]
    return plan(of, {"c": "copy_engine", "q": "author_kernel"}, tile_orders=[{"rank": 0, "queue": "q", "rows": rows}])


CRAFTED: dict[str, Callable[[], bytes]] = {
    # Bytes that are no schedule.
    "empty": lambda: b"",
    "blanks": lambda: b" " * MAX_BYTES,
    "zeros": lambda: bytes(4 << 20),
    "random bytes": lambda: Random(1).randbytes(4 << 20),
    "utf-16": lambda: _text_of_push().decode().encode("utf-16"),
    "larger than any file may be": lambda: b"{" * (MAX_BYTES + 1),
    "deep lists": lambda: b"[" * (4 << 20),
    "deep objects": lambda: b'{"a":' * (1 << 20),
    "a string that never ends": lambda: b'{"' + b'\\"' * (4 << 20),
    "a million empty lists": lambda: filed(schedule=schedule([], goal=[[]] * (1 << 20))),
    "a number of a million digits": lambda: b'{"version":' + b"9" * (1 << 20) + b"}",
    "half a character": lambda: filed(schedule=schedule([], name="\ud800")),
    "an object with a million keys": lambda: filed(schedule=schedule([], **{f"k{at}": 0 for at in range(1 << 18)})),
    "one key a million times": lambda: b'{"version":1' + b',"version":1' * (1 << 20) + b"}",
    "a text of blank lines": lambda: _text(8 << 20, ""),
    "a text of one line": lambda: _text(1, "pad " + "p" * (8 << 20)),
    "a text of words": lambda: _text(1, "rank 0\n  q o: put " + "s@0[0:1,0:1] " * (1 << 19)),
    "a text of pads": lambda: _text(1 << 19, "pad p [1]"),
    # A few words that stand for very much.
    "tiles of an apply": lambda: plan(_issue([_apply(tiles=[(0, MOST)])]), {"q": "author_kernel"}),
    "tiles of an apply, with a table": lambda: _with_rows([row(3)], _issue([_apply(tiles=[(0, MOST)])])),
    "ranges of tiles": lambda: _with_rows([row(3)], _issue([_apply(tiles=[(0, MOST)] * MANY)])),
    "tiles of a put": lambda: _shipped(
        lambda p: [each.update(tiles=MOST) for each in p["schedule"]["operations"] if each["kind"] == "put"]
    ),
    "tiles of a put in a kernel": lambda: plan(
        _issue([operation("put", 0, 0, sources=[region("x", 0, (0, MOST))], destinations=[region("s", 1, (0, MOST))],
                          tiles=MOST)], world_size=2, credits=[{"giver": 1, "taker": 0}]),
        {"q": "copy_kernel"}, realization={"copy": {}}),
    "tiles of a compute": lambda: _shipped(
        lambda p: [each.update(tiles=MOST) for each in p["schedule"]["operations"] if each["kind"] == "compute"]
    ),
    "tiles of one element": lambda: _shipped(
        lambda p: p["realization"]["matmul"].update(block_m=1, block_n=1), m=1 << 20, n=1 << 12
    ),
    "waits of parts": _part_waits,
    "a wait of a tile": lambda: _with_rows([row(3, 0, 0, 0, 1, 0, 0, MOST, 1, -1)] * MANY, _issue([_apply()])),
    "a wait for every signal": lambda: schedule_of([operation("copy", 0, waits=[wait(0, MOST)], sources=[],
                                                              destinations=[])], pads=[{"name": "p", "size": MOST}]),
    "many waits for many signals": lambda: filed(schedule=schedule(
        [operation("copy", 0, sources=[], destinations=[], notifies=[notify(at) for at in range(1 << 13)]),
         *(operation("copy", at, waits=[wait(0, 1 << 13)], sources=[], destinations=[]) for at in range(1, 512))])),
    "pads beyond any memory": lambda: schedule_of(
        [operation("copy", 0, sources=[], destinations=[])],
        pads=[{"name": f"p{at}", "size": MOST} for at in range(MANY)]),
    "ranks beyond any cluster": lambda: schedule_of([], world_size=MOST),
    "programs beyond any GPU": lambda: _shipped(
        lambda p: p["realization"].update(copy={"programs": MOST}), "matmul_reduce_scatter.scatter"),
    # What costs more than it is long.
    "regions across each other": lambda: filed(schedule=_crossed(1500)),
    "more regions across each other": lambda: filed(schedule=_crossed(MANY)),
    "reuse without a credit": lambda: filed(schedule=_reused(MANY)),
    "no two pasts alike": lambda: filed(schedule=_mixed(30_000)),
    "sums of one element": lambda: filed(schedule=_added(MANY)),
    "sums of one element in any order": lambda: filed(schedule=_added(MANY, unordered=True)),
    "a queue for each operation": lambda: filed(schedule=_queues(20_000)),
    "an engine for each operation": lambda: plan(
        _queues(20_000), {f"q{at}": "copy_engine" for at in range(20_000)}),
    "streams of a library beside each other": lambda: plan(
        _queues(40), {f"q{at}": "library" for at in range(40)}),
    "queues after queues": lambda: filed(schedule=_queues(20_000, is_after=True)),
    "a queue after every queue": lambda: filed(schedule=schedule(
        [operation("copy", at, sources=[], destinations=[]) for at in range(3000)],
        queues=[{"name": "q", "order": "complete", "after": ["q"] * 30_000}])),
    "operations of one queue": lambda: filed(schedule=schedule(_moved(20_000))),
    "operations of one queue of a library": lambda: plan(schedule(_moved(20_000)), {"q": "library"}),
    "operations of one kernel": lambda: plan(_issue(_moved(20_000)), {"q": "copy_kernel"}, realization={"copy": {}}),
    "ranks of one operation": lambda: filed(schedule=_ring(1024)),
    "a collective of many ranks": lambda: filed(schedule=_collective(1024)),
    "collectives of many ranks": lambda: filed(schedule=_collective(256, 16)),
    "many collectives": lambda: filed(schedule=_collective(4, 4000)),
    "one goal many times": lambda: filed(schedule=schedule(
        _moved(1), goal=[held(region("y", 0, (0, MOST)), terms=[(0, 1)]) for _ in range(MANY)])),
    "terms of a goal": lambda: filed(schedule=schedule(
        [], goal=[held(region("y", 0), terms=[(at, at + 1) for at in range(100_000)])])),
    "one gift many times": lambda: filed(schedule=schedule([], given=[held(region("x", 0))] * MANY)),
    "gifts side by side": lambda: filed(schedule=schedule(
        [copy(0, region("x", 0, (0, MANY)), region("s", 0, (0, MANY)))] ,
        given=[held(region("x", 0, (at, at + 1)), 2 * at) for at in range(MANY)])),
    "gifts side by side, read often": lambda: filed(schedule=schedule(
        [copy(at, region("x", 0, (0, MANY - at)), region("s", 0, (0, MANY - at), (at, at + 1))) for at in range(MANY)],
        given=[held(region("x", 0, (at, at + 1)), 2 * at) for at in range(MANY)])),
    "credits": lambda: filed(schedule=schedule([], credits=[{"giver": 0, "taker": 0}] * 500_000)),
    "parts of a product": lambda: filed(schedule=schedule(
        [_compute(a=[region("x", 0, (at, at + 1)) for at in range(50_000)],
                  out=[region("y", 0, (at, at + 1)) for at in range(50_000)])])),
    "operands of a sum": lambda: filed(schedule=schedule(
        [operation("reduce", at, operands=[region("x", 0)] * 2000, out=region("s", 0, (at, at + 1)))
         for at in range(50)])),
    "signals that nobody awaits": lambda: filed(schedule=schedule(
        [operation("copy", at, sources=[], destinations=[], notifies=[notify(at)]) for at in range(20_000)])),
    "signals counted wrongly": lambda: filed(schedule=schedule(
        [operation("copy", at, sources=[], destinations=[], notifies=[notify(at)], waits=[wait(at, at + 1, 2)])
         for at in range(20_000)])),
    "rows of a table": lambda: _with_rows(
        [row(3, at) for at in range(200_000)], _issue([_apply(tiles=[(0, 200_000)])])),
    "rows that claim slices": lambda: _with_rows(
        [*(row(3, at) for at in range(MANY)), *(row(2) for _ in range(100_000))], _issue([_apply(tiles=[(0, MANY)])])),
    "parts of a table": lambda: _with_rows(
        [row(3), *(row(4, at, at + 1) for at in range(100_000))], _issue([_apply()])),
    "tables": lambda: _shipped(
        lambda p: p.update(tile_orders=[{"rank": at, "queue": "tiles", "rows": []} for at in range(MANY)])),
    "applies of one kernel": lambda: plan(
        _issue([operation("apply", at, function="f", makes=[held(region("y", 0, (at, at + 1)), terms=[])],
                          tiles=[(at, at + 1)]) for at in range(5000)]),
        {"q": "author_kernel"},
        tile_orders=[{"rank": 0, "queue": "q",
                      "rows": [row(3, at, 0, 0, 1, 0, 0, 0, 0, -1, at) for at in range(5000)]}],
    ),
    "a long rest": lambda: filed(schedule=schedule(
        [operation("copy", at, sources=[], destinations=[], delay_us=600_000_000) for at in range(MANY)])),
    # Plans that nothing can run.
    "no engine": lambda: _shipped(lambda p: p["realization"].update(engines=[])),
    "another engine": lambda: _shipped(
        lambda p: [each.update(engine="reduce_kernel") for each in p["realization"]["engines"]]),
    "no config": lambda: _shipped(lambda p: p["realization"].update(matmul=None)),
    "packed without a config": lambda: _shipped(
        lambda p: [each.update(engine="packed_kernel") for each in p["realization"]["engines"]]),
    "an operator that nobody knows": lambda: _shipped(lambda p: p["problem"].update(operator="nothing")),
    "a problem of nothing": lambda: _shipped(lambda p: p["problem"].update(m=0, n=0, k=0)),
    "a wait for two ranges": lambda: _shipped(
        lambda p: [each["waits"].append({"pad": "arrived", "signals": [0, 1], "count": 1})
                   for each in p["schedule"]["operations"] if each["waits"]] and None),
}  # fmt: skip


def schedule_of(operations: list[Json], **more: Any) -> bytes:
    """A file of a schedule of these operations."""
    return filed(schedule=schedule(operations, **more))
