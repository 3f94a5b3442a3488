"""The parser of a Schedule's text form (forms.py), then its printer.

The parser turns lines into dicts; msgspec converts them, and checks every name and number.
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
    ParseError,
    WordListField,
    number,
    range_text,
    ranges,
)

_LISTS = ("buffers", "pads", "queues", "credits", "given", "goal", "operations")
_MATMUL_MARKS = {"@", "->", "+->"}


def from_text(text: str) -> Schedule:
    """Parse what `to_text` wrote. Raises ScheduleFileError that names the first line that cannot be read."""
    if len(text) > MAX_BYTES:
        raise _file_error(f"{len(text)} characters, more than {MAX_BYTES}")
    parts: FieldValues = {key: [] for key in _LISTS}
    rank: int | None = None
    for index, line in enumerate(text.split("\n"), 1):
        try:
            rank = _parse_line(line, rank, parts)
        except ParseError as error:
            raise _file_error(f"line {index}: {error}") from None
    try:
        return convert(parts, Schedule)
    except MsgspecError as error:
        raise _file_error(str(error)) from None


def _file_error(error: str) -> ScheduleFileError:
    return ScheduleFileError("read a schedule's text", error[:300], "`overweave show` prints the form")


def _parse_line(line: str, rank: int | None, parts: FieldValues) -> int | None:
    """Parse a line and add its fields to `parts`. Return the rank of the operations that follow. Raises ParseError.

    rank: of an operation in this line; None before the first `rank` line.
    """
    words = line.split()
    if line.startswith("rank "):
        return int(forms.RANK.read(line)["rank"])
    if line.startswith(" ") and rank is not None and words:
        try:
            parts["operations"].append(convert({"rank": rank, **_parse_operation(words)}, Operation))
        except MsgspecError as error:
            raise ParseError(str(error)) from None
    elif words:
        for key, value in _schedule_fields(words, line):
            if isinstance(parts.get(key), list):
                parts[key].append(value)
            elif key in parts:
                raise ParseError(f"a second `{words[0]}` line")
            else:
                parts[key] = value
    return rank


def _schedule_fields(words: list[str], line: str) -> Iterator[tuple[str, Any]]:
    """Yield (field of the Schedule, its value, or an element if it is a list) of a line. Raises ParseError."""
    match words:
        case ["schedule", *_]:
            head = forms.SCHEDULE.read(line)
            if (version := head.pop("version")) != VERSION:
                raise ParseError(f"version {version}; this is a reader of version {VERSION}")
            yield from head.items()
        case ["buffer", _, _, _, _, *storage]:
            yield "buffers", forms.BUFFER.read(" ".join(words[:5])) | _layout_fields(storage)
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
            raise ParseError(f"cannot read {line[:60]!r}")


def _layout_fields(words: list[str]) -> FieldValues:
    """Parse the optional words after a buffer's memory space: its dtype, and how its blocks are laid out.

    `[DTYPE] [counted sent|received] [blocks ROWSxCOLS at CELL... [tops ROW...]]`: `counted` for blocks of which each
    call fills a variable number of rows, `at` for the permutation block -> cell. Raises ParseError.
    """
    match words:
        case []:
            return {}
        case ["counted", blocks, *rest]:
            return {"counted": blocks, **_layout_fields(rest)}
        case ["blocks", size, "at", *places]:
            split = places.index("tops") if "tops" in places else len(places)
            lists = {"places": places[:split]} | ({"tops": places[split + 1 :]} if places[split:] else {})
            numbered = {name: [number(word) for word in words] for name, words in lists.items()}
            return {"blocks": forms.BLOCKS.read(size) | numbered}
        case [dtype, *rest] if dtype != "blocks" and rest[:1] in ([], ["blocks"], ["counted"]):
            return {"dtype": dtype, **_layout_fields(rest)}
    raise ParseError(f"cannot read {' '.join(words)[:60]!r}")


def _parse_operation(words: list[str]) -> FieldValues:
    """Parse `QUEUE NAME: VERB ...` into the fields of an operation. Raises ParseError."""
    if len(words) < 3 or not words[1].endswith(":") or words[2] not in VERBS:
        raise ParseError(f"cannot read {' '.join(words)[:60]!r}")
    queue, name, verb, *rest = words
    specs, is_product = (*VERBS[verb], *SIGNALS), verb == "matmul"
    marks = {spec.mark for spec in specs if isinstance(spec, WordListField) and spec.mark} | (
        _MATMUL_MARKS if is_product else set()
    )
    lists, values = _split_by_marks(rest, marks, {spec.key for spec in specs if isinstance(spec, KeyValueField)})
    parts: FieldValues = {"name": name[:-1], "queue": queue, "kind": verb} | (
        _matmul_fields(lists) if is_product else {}
    )
    if any(spec.field == "label" for spec in specs):
        parts |= {"kind": "collective", "function": verb}
    for spec in specs:
        if isinstance(spec, WordListField):
            parts[spec.field] = _field_value(spec, lists)
        elif spec.key in values:
            parts[spec.field] = spec.read(values[spec.key])
    return parts


def _split_by_marks(words: list[str], marks: set[str], keys: set[str]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Split words by marks such as `->`: return (mark -> the words after it, key -> value of `key=value` words).

    The words before any mark have the mark "". A mark or key that occurs again counts as a word.
    """
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


def _field_value(spec: WordListField, lists: dict[str, list[str]]) -> object:
    """Read the words of a field: a list, or its only word if `is_one`. Raises ParseError."""
    words = lists.get(spec.mark, [])
    if spec.is_one and len(words) != 1:
        raise ParseError(f"one region should follow `{spec.mark}`")
    if spec.between and set(words[1::2]) - {spec.between}:
        raise ParseError(f"{spec.field} stand between `{spec.between}`")
    read = [spec.read(word) for word in (words[::2] if spec.between else words)]
    return read[0] if spec.is_one else read


def _matmul_fields(lists: dict[str, list[str]]) -> FieldValues:
    """Parse a matmul, `addend + ... + a... @ b + addend... -> out...`, into its fields. Raises ParseError."""
    if "->" in lists and "+->" in lists:
        raise ParseError("both `->` and `+->`")
    left, right = lists[""], lists.get("@", [])
    first = len(left) - left[::-1].index(ADD) if ADD in left else 0
    before, a, b, after = left[:first], left[first:], right[:1], right[1:]
    if not b or set(before[1::2] + after[::2]) - {ADD} or len(before) % 2 or len(after) % 2:
        raise ParseError("one region should follow `@`, and addends stand between `+`")
    regions = {"a": a, "addends": [*before[::2], *after[1::2]], "out": lists.get("->", lists.get("+->", []))}
    return {
        **{field: [forms.REGION.read(word) for word in words] for field, words in regions.items()},
        "kind": "compute",
        "function": "matmul",
        "b": forms.REGION.read(b[0]),
        "accumulate": "+->" in lists,
        "place": len(before) // 2,
    }


# The printer: one operation per line; what it prints is parsed to an equal Schedule.


def to_text(schedule: Schedule) -> str:
    """Return the schedule as text; `from_text` returns an equal one."""
    return "\n".join(_lines(schedule)) + "\n"


def _lines(schedule: Schedule) -> Iterator[str]:
    """Yield the lines of a schedule."""
    yield f"schedule {schedule.name} world_size={schedule.world_size} version={VERSION}"
    yield from map(_buffer_text, schedule.buffers)
    yield from map(forms.PAD.show, schedule.pads)
    for queue in schedule.queues:
        yield _join(forms.QUEUE.show(queue), *(("after", *queue.after) if queue.after else ()))
    for giver, credits in groupby(schedule.credits, lambda credit: credit.giver):
        yield _join("credits", giver, "->", *(credit.taker for credit in credits))
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
    return _join(forms.BUFFER.show(buffer), *dtype, *counted, *blocks)


def _goal_text(goal: Goal) -> str:
    order = ("any",) if goal.unordered else ()
    ranges = (*order, *map(range_text, goal.terms))
    return _join(forms.GOAL.show(goal), *(("sum", *ranges) if ranges else ()))


def _operation_text(operation: Operation) -> str:
    """Return one operation as a line, without its rank."""
    verb = operation.function if isinstance(operation, Compute | Collective) else operation.__struct_config__.tag
    fields = [word for spec in (*VERBS[str(verb)], *SIGNALS) for word in _field_words(spec, operation)]
    product = _product_text(operation) if isinstance(operation, Compute) else ()
    return _join(operation.queue, f"{operation.name}:", verb, *product, *fields)


def _product_text(compute: Compute) -> tuple[str, ...]:
    """Return the words of a matmul, `addend + ... + a... @ b + addend... -> out...`."""
    addends = tuple(map(REGION.show, compute.addends))
    before = [word for part in addends[: compute.place] for word in (part, ADD)]
    after = [word for part in addends[compute.place :] for word in (ADD, part)]
    a, out = map(REGION.show, compute.a), map(REGION.show, compute.out)
    arrow = "+->" if compute.accumulate else "->"
    return (*before, *a, "@", REGION.show(compute.b), *after, arrow, *out)


def _field_words(spec: WordListField | KeyValueField, operation: Operation) -> Iterator[str]:
    """Yield the words of one field of an operation."""
    value = getattr(operation, spec.field)
    if isinstance(spec, KeyValueField):
        if value != spec.default:
            yield f"{spec.key}={spec.show(value)}"
        return
    values = (value,) if spec.is_one else value
    if spec.mark and (values or (spec.shown_with and getattr(operation, spec.shown_with))):
        yield spec.mark
    for index, each in enumerate(values):
        if index and spec.between:
            yield spec.between
        yield spec.show(each)


def _join(*words: object) -> str:
    return " ".join(map(str, words))
