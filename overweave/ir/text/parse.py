"""The parser of a Schedule's text form (forms.py) and, behind it, its printer.

Lines become dicts, and msgspec checks every name and number.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from msgspec import MsgspecError, convert

from overweave.errors import ScheduleFileError
from overweave.ir.schedule import CREDITS, Buffer, Collective, Compute, Goal, Operation, Schedule
from overweave.ir.text import forms
from overweave.ir.text.forms import (
    ADD,
    MAX_BYTES,
    REGION,
    SIGNALS,
    VERBS,
    VERSION,
    FieldValues,
    KeyValueField,
    Refused,
    WordListField,
    number,
    range_text,
    ranges,
)

_LISTS = ("buffers", "pads", "queues", "credits", "given", "goal", "operations")
_FACTORS = {"@", "->", "+->"}


def from_text(text: str) -> Schedule:
    """Return the schedule that `to_text` wrote. Raises ScheduleFileError with the first line that cannot be read."""
    if len(text) > MAX_BYTES:
        raise _file_error(f"{len(text)} characters, more than {MAX_BYTES}")
    parts: FieldValues = {key: [] for key in _LISTS}
    rank: int | None = None
    for index, line in enumerate(text.split("\n"), 1):
        try:
            rank = _line(line, rank, parts)
        except Refused as error:
            raise _file_error(f"line {index}: {error}") from None
    try:
        return convert(parts, Schedule)
    except MsgspecError as error:
        raise _file_error(str(error)) from None


def _file_error(error: str) -> ScheduleFileError:
    return ScheduleFileError("read a schedule's text", error[:300], "`overweave show` prints the form")


def _line(line: str, rank: int | None, parts: FieldValues) -> int | None:
    """Add a line's fields to `parts`, and return the rank of the operations that follow. Raises Refused."""
    words = line.split()
    if line.startswith("rank "):
        return int(forms.RANK.read(line)["rank"])
    if line.startswith(" ") and rank is not None and words:
        try:
            parts["operations"].append(convert({"rank": rank, **_operation(words)}, Operation))
        except MsgspecError as error:
            raise Refused(str(error)) from None
    elif words:
        for key, value in _section(words, line):
            if isinstance(parts.get(key), list):
                parts[key].append(value)
            elif key in parts:
                raise Refused(f"a second `{words[0]}` line")
            else:
                parts[key] = value
    return rank


def _section(words: list[str], line: str) -> Iterator[tuple[str, Any]]:
    """Yield the fields of the Schedule to which a line adds. Raises Refused."""
    match words:
        case ["schedule", *_]:
            head = forms.SCHEDULE.read(line)
            if (version := head.pop("version")) != VERSION:
                raise Refused(f"version {version}; this is a reader of version {VERSION}")
            yield from head.items()
        case ["buffer", _, _, _, _, *storage]:
            yield "buffers", forms.BUFFER.read(" ".join(words[:5])) | _storage(storage)
        case ["pad", *_]:
            yield "pads", forms.PAD.read(line)
        case ["queue", _, _, *after] if after[:1] in ([], ["after"]):
            yield "queues", forms.QUEUE.read(" ".join(words[:3])) | {"after": after[1:]}
        case ["credits", giver, "->", *takers]:
            for taker in takers:
                yield "credits", {"giver": number(giver), "taker": number(taker)}
        case ["reuse", *_]:
            yield "reuse", forms.REUSE.read(line)["reuse"]
        case ["given", *_]:
            yield "given", forms.GIVEN.read(line)
        case ["goal", _, "=", _, *sums] if sums[:1] in ([], ["sum"]):
            unordered = sums[1:2] == ["any"]
            terms = {"terms": ranges(sums[1 + unordered :]), "unordered": unordered}
            yield "goal", forms.GOAL.read(" ".join(words[:4])) | terms
        case _:
            raise Refused(f"cannot read {line[:60]!r}")


def _storage(words: list[str]) -> FieldValues:
    """Return the fields of a buffer from the words behind its home, all of them optional. Raises Refused. `DTYPE
    counted BLOCKS blocks ROWSxCOLS at PLACES tops ROWS`"""
    match words:
        case []:
            return {}
        case ["counted", blocks, *rest]:
            return {"counted": blocks, **_storage(rest)}
        case ["blocks", size, "at", *places]:
            split = places.index("tops") if "tops" in places else len(places)
            lists = {"places": places[:split]} | ({"tops": places[split + 1 :]} if places[split:] else {})
            numbered = {name: [number(word) for word in words] for name, words in lists.items()}
            return {"blocks": forms.BLOCKS.read(size) | numbered}
        case [dtype, *rest] if dtype != "blocks" and rest[:1] in ([], ["blocks"], ["counted"]):
            return {"dtype": dtype, **_storage(rest)}
    raise Refused(f"cannot read {' '.join(words)[:60]!r}")


def _operation(words: list[str]) -> FieldValues:
    """Return the fields of an operation from the words of its line. Raises Refused."""
    if len(words) < 3 or not words[1].endswith(":") or words[2] not in VERBS:
        raise Refused(f"cannot read {' '.join(words)[:60]!r}")
    queue, name, verb, *rest = words
    slots, is_product = (*VERBS[verb], *SIGNALS), verb == "matmul"
    marks = {slot.mark for slot in slots if isinstance(slot, WordListField) and slot.mark} | (
        _FACTORS if is_product else set()
    )
    lists, values = _grouped(rest, marks, {slot.key for slot in slots if isinstance(slot, KeyValueField)})
    parts: FieldValues = {"name": name[:-1], "queue": queue, "kind": verb} | (_product(lists) if is_product else {})
    if any(slot.field == "label" for slot in slots):
        parts |= {"kind": "collective", "function": verb}
    for slot in slots:
        if isinstance(slot, WordListField):
            parts[slot.field] = _words(slot, lists)
        elif slot.key in values:
            parts[slot.field] = slot.read(values[slot.key])
    return parts


def _grouped(words: list[str], marks: set[str], keys: set[str]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return mark -> the words behind it ("" before any mark), and key -> value of `key=value` words. Each at most
    once."""
    lists: dict[str, list[str]] = {"": []}
    values: dict[str, str] = {}
    mark = ""  # the last one
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


def _words(slot: WordListField, lists: dict[str, list[str]]) -> object:
    """Return the value of a field of words: a list, or the only one. Raises Refused."""
    words = lists.get(slot.mark, [])
    if slot.is_one and len(words) != 1:
        raise Refused(f"one region should follow `{slot.mark}`")
    if slot.between and set(words[1::2]) - {slot.between}:
        raise Refused(f"{slot.field} stand between `{slot.between}`")
    read = [slot.read(word) for word in (words[::2] if slot.between else words)]
    return read[0] if slot.is_one else read


def _product(lists: dict[str, list[str]]) -> FieldValues:
    """Return the fields of a matmul: `addend + ... + a... @ b + addend... -> out...`. Raises Refused."""
    if "->" in lists and "+->" in lists:
        raise Refused("both `->` and `+->`")
    left, right = lists[""], lists.get("@", [])
    first = len(left) - left[::-1].index(ADD) if ADD in left else 0
    before, a, b, after = left[:first], left[first:], right[:1], right[1:]
    if not b or set(before[1::2] + after[::2]) - {ADD} or len(before) % 2 or len(after) % 2:
        raise Refused("one region should follow `@`, and addends stand between `+`")
    regions = {"a": a, "addends": [*before[::2], *after[1::2]], "out": lists.get("->", lists.get("+->", []))}
    return {
        **{field: [forms.REGION.read(word) for word in words] for field, words in regions.items()},
        "kind": "compute",
        "function": "matmul",
        "b": forms.REGION.read(b[0]),
        "accumulate": "+->" in lists,
        "place": len(before) // 2,
    }


# The printer of a Schedule's text form (forms.py): one operation per line, exact in both directions.


def to_text(schedule: Schedule) -> str:
    """Return the schedule as text; `from_text` returns an equal one."""
    return "\n".join(_lines(schedule)) + "\n"


def _lines(schedule: Schedule) -> Iterator[str]:
    """Yield the lines of a schedule."""
    yield f"schedule {schedule.name} world_size={schedule.world_size} version={VERSION}"
    yield from map(_buffer_text, schedule.buffers)
    yield from map(forms.PAD.show, schedule.pads)
    for queue in schedule.queues:
        yield _spaced(forms.QUEUE.show(queue), *(("after", *queue.after) if queue.after else ()))
    for giver, credits in groupby(schedule.credits, lambda credit: credit.giver):
        yield _spaced("credits", giver, "->", *(credit.taker for credit in credits))
    if schedule.reuse != CREDITS:
        yield forms.REUSE.show(schedule)
    yield from map(forms.GIVEN.show, schedule.given)
    yield from map(_goal_text, schedule.goal)
    for rank, operations in groupby(schedule.operations, lambda operation: operation.rank):
        yield f"rank {rank}"
        for operation in operations:
            yield f"  {_operation_text(operation)}"


def _buffer_text(buffer: Buffer) -> str:
    """Return the line of a buffer."""
    dtype = (buffer.dtype,) if buffer.dtype else ()
    counted = ("counted", buffer.counted) if buffer.counted else ()
    blocks = ("blocks", forms.BLOCKS.show(buffer.blocks), "at", *buffer.blocks.places) if buffer.blocks else ()
    if buffer.blocks and buffer.blocks.tops:
        blocks = (*blocks, "tops", *buffer.blocks.tops)
    return _spaced(forms.BUFFER.show(buffer), *dtype, *counted, *blocks)


def _goal_text(goal: Goal) -> str:
    order = ("any",) if goal.unordered else ()
    ranges = (*order, *map(range_text, goal.terms))
    return _spaced(forms.GOAL.show(goal), *(("sum", *ranges) if ranges else ()))


def _operation_text(operation: Operation) -> str:
    """Return one operation as a line, without its rank."""
    verb = operation.function if isinstance(operation, Compute | Collective) else operation.__struct_config__.tag
    fields = [word for slot in (*VERBS[str(verb)], *SIGNALS) for word in _slot_words(slot, operation)]
    product = _product_text(operation) if isinstance(operation, Compute) else ()
    return _spaced(operation.queue, f"{operation.name}:", verb, *product, *fields)


def _product_text(compute: Compute) -> tuple[str, ...]:
    """Return the words of a matmul: `addend + ... + a... @ b + addend... -> out...`"""
    addends = tuple(map(REGION.show, compute.addends))
    before = [word for part in addends[: compute.place] for word in (part, ADD)]
    after = [word for part in addends[compute.place :] for word in (ADD, part)]
    a, out = map(REGION.show, compute.a), map(REGION.show, compute.out)
    arrow = "+->" if compute.accumulate else "->"
    return (*before, *a, "@", REGION.show(compute.b), *after, arrow, *out)


def _slot_words(slot: WordListField | KeyValueField, operation: Operation) -> Iterator[str]:
    """Yield the words of one field of an operation."""
    value = getattr(operation, slot.field)
    if isinstance(slot, KeyValueField):
        if value != slot.default:
            yield f"{slot.key}={slot.show(value)}"
        return
    values = (value,) if slot.is_one else value
    if slot.mark and (values or (slot.shown_with and getattr(operation, slot.shown_with))):
        yield slot.mark
    for index, each in enumerate(values):
        if index and slot.between:
            yield slot.between
        yield slot.show(each)


def _spaced(*words: object) -> str:
    return " ".join(map(str, words))
