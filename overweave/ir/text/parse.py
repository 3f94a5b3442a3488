"""Reads a Schedule's text form (`ir.text`). Lines become plain data; the types then check every name and number."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from msgspec import MsgspecError, convert

from overweave.errors import ScheduleFileError
from overweave.ir.schedule import Operation, Schedule

VERSION = 1
MAX_BYTES = 32 * 2**20

_NUMBER = "([0-9]{1,10})"
_NAME = r"([A-Za-z_][A-Za-z0-9_.@+-]{0,63})"
_REGION = re.compile(rf"{_NAME}@{_NUMBER}\[{_NUMBER}:{_NUMBER},{_NUMBER}:{_NUMBER}\]")
_WAIT = re.compile(rf"{_NAME}\[{_NUMBER}:{_NUMBER}\]>={_NUMBER}")
_NOTIFY = re.compile(rf"{_NAME}@{_NUMBER}\[{_NUMBER}\]")
_PLACE = re.compile(rf"{_NAME}\[{_NUMBER},{_NUMBER}\]")
_TERM = re.compile(f"{_NUMBER}:{_NUMBER}")
_RANK = re.compile(f"rank {_NUMBER}")
_COUNT = re.compile(_NUMBER)

_Parts = dict[str, Any]


class _Refused(Exception):
    """A line, or a word in it, that says nothing known."""


def from_text(text: str) -> Schedule:
    """The schedule that `ir.text.to_text` wrote. Raises ScheduleFileError with the first unusable line."""
    if len(text) > MAX_BYTES:
        raise _file_error(f"{len(text)} characters, more than {MAX_BYTES}")
    parts: _Parts = {key: [] for key in ("buffers", "pads", "queues", "credits", "given", "goal", "operations")}
    rank: int | None = None
    for number, line in enumerate(text.split("\n"), 1):
        try:
            rank = _line(line, rank, parts)
        except _Refused as error:
            raise _file_error(f"line {number}: {error}") from None
    try:
        return convert(parts, Schedule)
    except MsgspecError as error:
        raise _file_error(str(error)) from None


def _line(line: str, rank: int | None, parts: _Parts) -> int | None:
    """Adds what a line says; returns the rank of the operations that follow."""
    words = line.split()
    if match := _RANK.fullmatch(line):
        return int(match[1])
    if line.startswith(" ") and rank is not None and words:
        try:
            parts["operations"].append(convert({"rank": rank, **_operation(words)}, Operation))
        except MsgspecError as error:
            raise _Refused(str(error)) from None
    elif words:
        _section(words, line, parts)
    return rank


def _file_error(found: str) -> ScheduleFileError:
    return ScheduleFileError("read a schedule's text", found[:300], "`overweave show` prints the form")


def _section(words: list[str], line: str, parts: _Parts) -> None:
    pattern, read = _SECTIONS.get(words[0], (None, None))
    match = pattern.fullmatch(line) if pattern else None
    if match is None or read is None:
        raise _Refused(f"cannot read {line[:60]!r}")
    for key, value in read(*match.groups()):
        if isinstance(parts.get(key), list):
            parts[key].append(value)
        elif key in parts:
            raise _Refused(f"a second `{words[0]}` line")
        else:
            parts[key] = value


_Found = list[tuple[str, Any]]


def _schedule(name: str, world_size: str, version: str) -> _Found:
    if int(version) != VERSION:
        raise _Refused(f"version {version}; this is a reader of version {VERSION}")
    return [("name", name), ("world_size", int(world_size))]


def _buffer(name: str, rows: str, cols: str, home: str, dtype: str | None, *permuted: str | None) -> _Found:
    buffer = {"name": name, "rows": int(rows), "cols": int(cols), "home": home, "dtype": dtype}
    height, width, places = permuted
    if height and width:
        numbers = [_int(word) for word in (places or "").split()]
        buffer["blocks"] = {"rows": int(height), "cols": int(width), "places": numbers}
    return [("buffers", buffer)]


def _pad(name: str, size: str) -> _Found:
    return [("pads", {"name": name, "size": int(size)})]


def _queue(name: str, order: str, after: str | None) -> _Found:
    return [("queues", {"name": name, "order": order, "after": (after or "").split()})]


def _credits(giver: str, takers: str) -> _Found:
    return [("credits", {"giver": int(giver), "taker": _int(taker)}) for taker in takers.split()]


def _reuse(how: str) -> _Found:
    return [("reuse", how)]


def _given(region: str, place: str) -> _Found:
    return [("given", {"region": _region(region), **_place(place)})]


def _goal(region: str, place: str, terms: str | None) -> _Found:
    first, *rest = (terms or "").split() or [""]
    words = rest if first == "any" or not first else [first, *rest]
    ranges = [tuple(map(int, _match(_TERM, term))) for term in words]
    return [("goal", {"region": _region(region), **_place(place), "terms": ranges, "unordered": first == "any"})]


def _form(pattern: str, read: Callable[..., _Found]) -> tuple[re.Pattern[str], Callable[..., _Found]]:
    return re.compile(pattern), read


_SECTIONS = {
    "schedule": _form(rf"schedule {_NAME} world_size={_NUMBER} version={_NUMBER}", _schedule),
    "buffer": _form(
        rf"buffer {_NAME} \[{_NUMBER}, {_NUMBER}\] ([a-z]+)(?: (?!blocks )([a-z0-9_]+))?"
        rf"(?: blocks {_NUMBER}x{_NUMBER} at(?: (\S.*))?)?",
        _buffer,
    ),
    "pad": _form(rf"pad {_NAME} \[{_NUMBER}\]", _pad),
    "queue": _form(rf"queue {_NAME} ([a-z]+)(?: after (\S.*))?", _queue),
    "credits": _form(rf"credits {_NUMBER} -> (\S.*)", _credits),
    "reuse": _form(r"reuse ([a-z]+)", _reuse),
    "given": _form(r"given (\S+) = (\S+)", _given),
    "goal": _form(r"goal (\S+) = (\S+)(?: sum (\S.*))?", _goal),
}

# Which marks and which `key=value` words an operation may have, by its verb.
_MOVE = ({"->"}, set[str]())
_COLLECTIVE = ({"->"}, {"label", "ranks", "then"})
_VERBS: dict[str, tuple[set[str], set[str]]] = {
    "put": ({"->"}, {"tiles"}),
    "get": _MOVE,
    "reduce_put": ({"->"}, {"tiles", "order"}),
    "clear": _MOVE,
    "copy": ({"->"}, {"delay_us"}),
    "matmul": ({"@", "->", "+->", "and", "late", "scaled"}, {"tiles", "then"}),
    "reduce": ({"->"}, {"tiles", "then"}),
    "apply": ({"->", "reads", "late"}, {"tiles", "function"}),
    "all_gather": _COLLECTIVE,
    "reduce_scatter": _COLLECTIVE,
    "all_reduce": _COLLECTIVE,
    "all_to_all": _COLLECTIVE,
}


def _operation(words: list[str]) -> _Parts:
    if len(words) < 3 or not words[1].endswith(":") or words[2] not in _VERBS:
        raise _Refused(f"cannot read {' '.join(words)[:60]!r}")
    queue, name, verb, *rest = words
    marks, keys = _VERBS[verb]
    lists, values = _grouped(rest, marks | {"wait", "signal"}, keys)
    common = {
        "name": name[:-1],
        "queue": queue,
        "waits": [_wait(word) for word in lists.pop("wait", [])],
        "notifies": [_notify(word) for word in lists.pop("signal", [])],
    }
    return {**common, **_deed(verb, lists, values)}


def _grouped(words: list[str], marks: set[str], keys: set[str]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Words by the mark they follow ("" before any), and the values of `key=value` words. Each at most once."""
    lists: dict[str, list[str]] = {"": []}
    values: dict[str, str] = {}
    mark = ""
    for word in words:
        key, equals, value = word.partition("=")
        if word in marks and word not in lists:
            mark = word
            lists[mark] = []
        elif equals and key in keys and key not in values:
            values[key] = value
        else:
            lists[mark].append(word)
    return lists, values


def _deed(verb: str, lists: dict[str, list[str]], values: dict[str, str]) -> _Parts:
    if verb == "reduce":
        operands = lists[""]
        if set(operands[1::2]) - {"+"}:
            raise _Refused("operands of a reduce stand between `+`")
        tiles = {"tiles": _int(values.get("tiles", "1")), **_then(values)}
        return {"kind": verb, "operands": [_region(word) for word in operands[::2]], "out": _only(lists, "->"), **tiles}
    if verb == "apply":
        return {"kind": verb, **_applied(lists, values)}
    if verb == "matmul":
        tiles = {"tiles": _int(values.get("tiles", "1")), **_then(values)}
        return {"kind": "compute", "function": verb, **_product(lists), **tiles}
    sources = [_region(word) for word in lists[""]]
    moved = {"sources": sources, "destinations": [_region(word) for word in lists.get("->", [])]}
    if _VERBS[verb] is _COLLECTIVE:
        ranks = {"ranks": [_int(rank) for rank in values.get("ranks", "").split(",") if rank], **_then(values)}
        return {"kind": "collective", "function": verb, "label": values.get("label", ""), **ranks, **moved}
    order = values.pop("order", None)
    if order not in (None, "any"):
        raise _Refused(f"order={order[:20]}; what adds says order=any, or nothing")
    numbers = {key: _int(value) for key, value in values.items()}
    return {"kind": verb, **moved, **numbers, **({"unordered": True} if order else {})}


def _then(values: dict[str, str]) -> _Parts:
    then = values.get("then", "")
    if then not in ("", "finished"):
        raise _Refused(f"then={then[:20]}; what ends a sum says then=finished, or nothing")
    return {"finishes": True} if then else {}


def _product(lists: dict[str, list[str]]) -> _Parts:
    """`addend + ... + a... @ b + addend... -> out... and copies...`"""
    if "->" in lists and "+->" in lists:
        raise _Refused("both `->` and `+->`")
    left, right = lists[""], lists.get("@", [])
    first = len(left) - left[::-1].index("+") if "+" in left else 0
    before, a, b, behind = left[:first], left[first:], right[:1], right[1:]
    if not b or set(before[1::2] + behind[::2]) - {"+"} or len(before) % 2 or len(behind) % 2:
        raise _Refused("one region should follow `@`, and addends stand between `+`")
    return {
        "a": [_region(word) for word in a],
        "b": _region(b[0]),
        "out": [_region(word) for word in lists.get("->", lists.get("+->", []))],
        "accumulate": "+->" in lists,
        "addends": [_region(word) for word in (*before[::2], *behind[1::2])],
        "place": len(before) // 2,
        "late_waits": [_wait(word) for word in lists.get("late", [])],
        "scales": [_region(word) for word in lists.get("scaled", [])],
        "copies": [_region(word) for word in lists.get("and", [])],
    }


def _applied(lists: dict[str, list[str]], values: dict[str, str]) -> _Parts:
    ranges = [tuple(map(int, _match(_TERM, word))) for word in values.get("tiles", "").split(",") if word]
    return {
        "function": values.get("function", ""),
        "needs": [_holds(word) for word in lists[""]],
        "late_needs": [_holds(word) for word in lists.get("reads", [])],
        "makes": [_holds(word) for word in lists.get("->", [])],
        "late_waits": [_wait(word) for word in lists.get("late", [])],
        "tiles": ranges,
    }


def _holds(word: str) -> _Parts:
    """`REGION=TENSOR[ROW,COL]/TERMS`; only what is made may have terms, which the type checks."""
    region, equals, rest = word.partition("=")
    place, slash, terms = rest.partition("/")
    if not equals:
        raise _Refused(f"cannot read {word[:60]!r}")
    ranges = [tuple(map(int, _match(_TERM, term))) for term in terms.split(",")] if slash else []
    return {"region": _region(region), **_place(place), **({"terms": ranges} if ranges else {})}


def _match(pattern: re.Pattern[str], word: str) -> tuple[str, ...]:
    match = pattern.fullmatch(word)
    if match is None:
        raise _Refused(f"cannot read {word[:60]!r}")
    return match.groups()


def _int(word: str) -> int:
    return int(_match(_COUNT, word)[0])


def _only(lists: dict[str, list[str]], mark: str) -> _Parts:
    words = lists.get(mark, [])
    if len(words) != 1:
        raise _Refused(f"one region should follow `{mark}`")
    return _region(words[0])


def _region(word: str) -> _Parts:
    buffer, rank, r0, r1, c0, c1 = _match(_REGION, word)
    return {"buffer": buffer, "rank": int(rank), "rows": (int(r0), int(r1)), "cols": (int(c0), int(c1))}


def _wait(word: str) -> _Parts:
    pad, lo, hi, count = _match(_WAIT, word)
    return {"pad": pad, "signals": (int(lo), int(hi)), "count": int(count)}


def _notify(word: str) -> _Parts:
    pad, rank, signal = _match(_NOTIFY, word)
    return {"pad": pad, "rank": int(rank), "signal": int(signal)}


def _place(word: str) -> _Parts:
    tensor, row, col = _match(_PLACE, word)
    return {"tensor": tensor, "row": int(row), "col": int(col)}
