"""Shipped plans, changed at random: by their structure, by their lines, or byte by byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from msgspec import convert
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.problem import Problem
from overweave.ir.text.files import to_json
from overweave.ir.text.parse import to_text
from overweave.schedules.catalog.catalog import build, names
from overweave.schedules.methods.registry import METHODS

Base = tuple[bytes, bytes]  # a plan as JSON, its schedule as text
NUMBERS = (0, 1, 2, 3, 7, 127, 128, 1023, 1024, 2**16, 2**20, 2**31 - 2, 2**31 - 1)
NO_NUMBERS: tuple[Any, ...] = (2**31, 2**63, -1, 0.5, True, None, "", [], {})
WORDS = (
    "",
    "x",
    "y",
    "w",
    "tiles",
    "copies",
    "arrived",
    "issue",
    "complete",
    "input",
    "local",
    "symmetric",
    "\ud800",
    "[/red]",
    "\x1b[2J",
)
REPEATS = (2, 3, 17, 400)
MOST_STEPS = 5


def bases() -> list[Base]:
    """Plans of two and three ranks of every method, with tables and without."""
    found = []
    for name in names():
        for world_size in (2, 3):
            size = {"dtype": "bfloat16", "m": 128 * world_size, "n": 64, "k": 64 * world_size}
            problem = convert({"operator": METHODS[name].operator, "world_size": world_size, **size}, Problem)
            try:
                plan = build(name, problem, {})
            except InputError:
                continue
            text = to_text(plan.schedule).encode()
            found += [(to_json(one), text) for one in (plan, replace(plan, tile_orders=()))]
    return found


def fuzzed(rng: Random, known: Sequence[Base]) -> bytes:
    """One file."""
    data, text = rng.choice(known)
    kind = rng.random()
    if kind < 0.6:
        return _restructured(rng, data, rng.choice(known)[0])
    if kind < 0.8:
        return _rewritten(rng, text)
    return _spoiled(rng, rng.choice((data, text)))


def fuzzed_json(rng: Random, known: Sequence[bytes]) -> bytes:
    """One file of JSON, of another kind."""
    data = rng.choice(known)
    return _restructured(rng, data, rng.choice(known)) if rng.random() < 0.8 else _spoiled(rng, data)


def _restructured(rng: Random, data: bytes, other: bytes) -> bytes:
    tree, donor = json.loads(data), json.loads(other)
    for _ in range(rng.randint(1, MOST_STEPS)):
        parent, key = _place(rng, tree)
        rng.choice(CHANGES)(rng, parent, key, donor)
    return json.dumps(tree).encode()


def _place(rng: Random, tree: Any) -> tuple[Any, Any]:
    """Somewhere in a tree, each level as likely as the next: a container and a key of it."""
    parent, key = None, None
    node = tree
    while isinstance(node, dict | list) and node:
        parent, key = node, rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        if parent is not tree and rng.random() < 0.15:
            break
        node = parent[key]
    return parent, key


def _replace(rng: Random, parent: Any, key: Any, donor: Any) -> None:
    value = parent[key]
    if rng.random() < 0.02:
        parent[key] = rng.choice(NO_NUMBERS)
    elif isinstance(value, bool):
        parent[key] = not value
    elif isinstance(value, int):
        parent[key] = rng.choice(NUMBERS)
    elif isinstance(value, float):
        parent[key] = rng.choice((*NUMBERS, 1e-9, 1e-300, 1e300, 0.5))
    elif isinstance(value, str):
        parent[key] = rng.choice(WORDS)


def _remove(rng: Random, parent: Any, key: Any, donor: Any) -> None:
    if isinstance(parent, list) or rng.random() < 0.05:
        del parent[key]


def _repeat(rng: Random, parent: Any, key: Any, donor: Any) -> None:
    value = parent[key]
    if isinstance(value, list) and len(json.dumps(value)) < 20_000:
        parent[key] = value * rng.choice(REPEATS)
    elif isinstance(parent, list):
        parent.insert(rng.randrange(len(parent) + 1), value)


def _graft(rng: Random, parent: Any, key: Any, donor: Any) -> None:
    """The same key's value from another plan, if it has one; else anything from there."""
    for _ in range(20):
        there, name = _place(rng, donor)
        if name == key:
            break
    if type(parent[key]) is type(there[name]):
        parent[key] = there[name]


def _swap(rng: Random, parent: Any, key: Any, donor: Any) -> None:
    if isinstance(parent, dict):
        return
    other = rng.randrange(len(parent))
    parent[key], parent[other] = parent[other], parent[key]


def _shift(rng: Random, parent: Any, key: Any, donor: Any) -> None:
    if isinstance(parent[key], int):
        parent[key] += rng.choice((-128, -64, -1, 1, 64, 128))


def _add(rng: Random, parent: Any, key: Any, donor: Any) -> None:
    if isinstance(parent, dict) and rng.random() < 0.1:
        parent[rng.choice(("run", "waits", "tiles", "dtype", "plan"))] = rng.choice(NUMBERS)


CHANGES: tuple[Callable[[Random, Any, Any, Any], None], ...] = (
    _replace, _replace, _shift, _shift, _remove, _repeat, _graft, _swap, _add,
)  # fmt: skip


def _rewritten(rng: Random, text: bytes) -> bytes:
    """Lines and words of a text that stand elsewhere, twice, or not at all."""
    lines = text.decode().split("\n")
    for _ in range(rng.randint(1, MOST_STEPS)):
        at = rng.randrange(len(lines))
        kind = rng.randrange(5)
        if kind == 0:
            lines.insert(rng.randrange(len(lines)), lines[at])
        elif kind == 1:
            del lines[at]
            lines = lines or [""]
        elif kind == 2:
            lines[at:at] = [lines[at]] * rng.choice(REPEATS)
        else:
            words = lines[at].split(" ")
            word = rng.randrange(len(words))
            words[word] = rng.choice((str(rng.choice(NUMBERS)), rng.choice(WORDS), rng.choice(words)))
            lines[at] = " ".join(words)
    return "\n".join(lines).encode(errors="replace")


def _spoiled(rng: Random, data: bytes) -> bytes:
    for _ in range(rng.randint(1, MOST_STEPS)):
        at, length = rng.randrange(len(data) + 1), rng.choice((0, 0, 1, 1, 4, 100))
        put = rng.choice(
            (rng.randbytes(rng.randrange(5)), bytes([rng.choice(b'0123456789{}[],:"')]), data[at : at + 9])
        )
        data = data[:at] + put + data[at + length :]
    return data
