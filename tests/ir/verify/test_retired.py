"""Regions that are written again in a call: behind their Retire, which is behind all readers; no mutant survives."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from campaigns.oracle.random.gathers import gather_by_turns
from overweave.ir.schedule import Buffer, Compute, Copy, Operation, Retire, Schedule
from overweave.ir.text.files import from_json, to_json
from overweave.ir.text.parse import from_text, to_text
from overweave.ir.verify.plan import verify_schedule

RANKS = 3


def in_the_tiles_queue(schedule: Schedule) -> bool:
    return any(each.queue == "tiles" for each in schedule.operations if isinstance(each, Retire))


def drawn(beside: bool) -> Schedule:
    """Two slots, each retired beside the tiles' queue, or in it."""
    schedules = (gather_by_turns(Random(seed), RANKS, 1) for seed in range(40))
    two_slots = (each for each in schedules if each.buffer("slot").rows == 2 and slot_rows(each) == 1)
    return next(each for each in two_slots if in_the_tiles_queue(each) != beside)


def slot_rows(schedule: Schedule) -> int:
    return next(each.regions[0].shape[0] for each in schedule.operations if isinstance(each, Retire))


Change = Callable[[Operation], tuple[Operation, ...]]


def changed(schedule: Schedule, change: Change) -> Schedule:
    return replace(schedule, operations=tuple(each for op in schedule.operations for each in change(op)))


def refused(schedule: Schedule) -> set[str]:
    return {refusal.rule for refusal in verify_schedule(schedule).refusals}


def of_retire(change: Callable[[Retire], Operation]) -> Change:
    return lambda op: (change(op),) if isinstance(op, Retire) else (op,)


def of_region(**fields: Any) -> Change:
    return of_retire(lambda op: replace(op, regions=tuple(replace(each, **fields) for each in op.regions)))


def waiting_behind(pad: str) -> Change:
    """Whoever waits for a pad does it behind what it is to wait for."""

    def change(op: Operation) -> tuple[Operation, ...]:
        if not any(wait.pad == pad for wait in op.waits):
            return (op,)
        behind = Copy(name=f"{op.name}.late", rank=op.rank, queue=op.queue, waits=op.waits, sources=(), destinations=())
        return replace(op, waits=()), behind

    return change


MUTANTS: dict[str, tuple[Change, set[str]]] = {
    "it ends nothing, and the next write is the second": (
        of_retire(lambda op: replace(op, regions=())),
        {"double_write"},
    ),
    "it does not wait for readers": (waiting_behind("multiplied"), {"race"}),
    "the next writer does not wait for it": (waiting_behind("free"), {"race"}),
    "it ends what is still to be written": (of_region(rows=(1, 2)), {"race"}),
    "it ends what a peer has": (of_region(rank=1), {"ownership"}),
    "it ends an input": (of_region(buffer="x"), {"ownership"}),
    "it ends a life twice": (of_retire(lambda op: replace(op, regions=op.regions * 2)), {"stale_read"}),
    "it moves, too": (of_retire(lambda op: replace(op, destinations=op.regions)), {"form"}),
    "it is late on purpose": (of_retire(lambda op: replace(op, delay_us=5)), {"form"}),
}


@pytest.mark.parametrize("beside", [True, False])
def test_it_is_proven_as_it_is(beside: bool):
    schedule = drawn(beside)
    assert refused(schedule) == set()
    assert from_text(to_text(schedule)) == schedule == from_json(to_json(schedule))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_refused(name: str):
    change, rules = MUTANTS[name]
    found = refused(changed(drawn(beside=True), change))
    assert found & rules, found


@pytest.mark.parametrize("beside", [True, False])
def test_what_is_retired_is_not_read(beside: bool):
    """By tiles that come behind it, before anybody writes there again."""
    schedule = drawn(beside)
    *_, last = (op for op in schedule.operations if op.rank == RANKS - 1 and isinstance(op, Compute))
    end = Retire(name="end", rank=last.rank, queue=last.queue, regions=last.a)
    late = replace(last, name="late", waits=(), out=(replace(last.out[0], buffer="more", rows=(0, 1)),))
    whole = replace(
        schedule,
        buffers=(*schedule.buffers, Buffer("more", 1, last.out[0].cols[1], "local")),
        queues=tuple(replace(each, order="complete") for each in schedule.queues),
        operations=(*schedule.operations, end, late),
    )
    (refusal,) = verify_schedule(whole).refusals
    assert refusal.rule == "unwritten"
    assert "end has ended its life" in refusal.message
    assert refused(replace(whole, operations=(*schedule.operations, late, end))) == set()
