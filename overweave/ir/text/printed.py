"""The printer of a Schedule's text form (forms.py): one operation per line, exact in both directions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from overweave.ir.schedule import CREDITS, Buffer, Collective, Compute, Goal, Operation, Schedule
from overweave.ir.text import forms
from overweave.ir.text.forms import ADD, REGION, SIGNALS, VERBS, VERSION, KeyValueField, WordListField, range_text
from overweave.ir.text.parse import from_text

__all__ = ["from_text", "to_text"]


def to_text(schedule: Schedule) -> str:
    """Return the schedule as text; `from_text` returns an equal one."""
    return "\n".join(_lines(schedule)) + "\n"


def _lines(schedule: Schedule) -> Iterator[str]:
    """Yield the lines of a schedule."""
    yield f"schedule {schedule.name} world_size={schedule.world_size} version={VERSION}"
    yield from map(_buffer, schedule.buffers)
    yield from map(forms.PAD.show, schedule.pads)
    for queue in schedule.queues:
        yield _spaced(forms.QUEUE.show(queue), *(("after", *queue.after) if queue.after else ()))
    for giver, credits in groupby(schedule.credits, lambda credit: credit.giver):
        yield _spaced("credits", giver, "->", *(credit.taker for credit in credits))
    if schedule.reuse != CREDITS:
        yield forms.REUSE.show(schedule)
    yield from map(forms.GIVEN.show, schedule.given)
    yield from map(_goal, schedule.goal)
    for rank, operations in groupby(schedule.operations, lambda operation: operation.rank):
        yield f"rank {rank}"
        for operation in operations:
            yield f"  {_operation(operation)}"


def _buffer(buffer: Buffer) -> str:
    """Return the line of a buffer."""
    dtype = (buffer.dtype,) if buffer.dtype else ()
    counted = ("counted", buffer.counted) if buffer.counted else ()
    blocks = ("blocks", forms.BLOCKS.show(buffer.blocks), "at", *buffer.blocks.places) if buffer.blocks else ()
    if buffer.blocks and buffer.blocks.tops:
        blocks = (*blocks, "tops", *buffer.blocks.tops)
    return _spaced(forms.BUFFER.show(buffer), *dtype, *counted, *blocks)


def _goal(goal: Goal) -> str:
    order = ("any",) if goal.unordered else ()
    ranges = (*order, *map(range_text, goal.terms))
    return _spaced(forms.GOAL.show(goal), *(("sum", *ranges) if ranges else ()))


def _operation(operation: Operation) -> str:
    """Return one operation as a line, without its rank."""
    verb = operation.function if isinstance(operation, Compute | Collective) else operation.__struct_config__.tag
    fields = [word for slot in (*VERBS[str(verb)], *SIGNALS) for word in _slot_words(slot, operation)]
    product = _product(operation) if isinstance(operation, Compute) else ()
    return _spaced(operation.queue, f"{operation.name}:", verb, *product, *fields)


def _product(compute: Compute) -> tuple[str, ...]:
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
