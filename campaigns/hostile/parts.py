"""Pieces of schedules as a file holds them: plain dicts that may say anything."""

from __future__ import annotations

import json
from typing import Any

from overweave.ir.plan import SIGNAL_CAPACITY

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
