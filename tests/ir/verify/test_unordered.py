"""Sums whose parts come in any order: cleared first, added beside each other, read last, and told as what they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from overweave.errors import ScheduleFileError
from overweave.ir.plan import EngineAssignment, Plan
from overweave.ir.schedule import Buffer, Clear, Operation, Queue, Reduce, Schedule, Wait
from overweave.ir.text.files import from_json, to_json
from overweave.ir.text.parse import from_text, to_text
from overweave.ir.verify.plan import MachineLimits, verify_plan
from tests.plans import plan_of, rules, with_schedule

RANKS = 3


def plan(m: int = 96, world_size: int = RANKS, **options: int | str) -> Plan:
    tiles = {"block_m": 16, "block_n": 64, "pieces": 1}
    return plan_of("matmul_reduce_scatter.remote_add", tiles | options, m=m, n=64, world_size=world_size)


def changed(change: Callable[[Operation], Operation | None]) -> Schedule:
    schedule = plan(pieces=2).schedule
    return replace(schedule, operations=tuple(op for op in map(change, schedule.operations) if op is not None))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_it_is_proven_whatever_the_shards(world_size: int):
    """Empty shards, empty pieces, one wave and many."""
    for m, pieces, order, sms in ((0, 1, "ring", 1), (1, 2, "ring", 1), (37, 3, "all_peers", 1), (515, 2, "ring", 132)):
        made = plan(m, world_size, pieces=pieces, order=order, sms=sms)
        assert verify_plan(made, MachineLimits()).refusals == ()
        assert all(goal.unordered == (world_size > 1) for goal in made.schedule.goal)


def hasty(op: Operation) -> Operation:
    """Rank 1 adds to rank 2 whether that has cleared its slot or not; only its next piece waits for that."""
    is_add = op.name == "add.1-2.2"
    return replace(op, waits=tuple(wait for wait in op.waits if wait.pad != "told")) if is_add else op


def overhasty_sum(op: Operation) -> Operation:
    """Rank 0 sums when the first of two parts is there, and waits for the other afterwards."""
    if not op.name.startswith("sum.0."):
        return op
    (arrived,) = op.waits
    return replace(op, waits=(replace(arrived, signals=(0, 1)),))


def twice(op: Operation) -> Operation:
    """Rank 1 adds rank 0's piece where rank 2's belongs."""
    (source,) = op.sources if op.name == "add.1-2.2" else (None,)
    return op if source is None else replace(op, sources=(replace(source, rows=(0, 16)),))


MUTANTS: dict[str, tuple[Callable[[Operation], Operation | None], set[str]]] = {
    "an add before the slot is known to be cleared": (hasty, {"race"}),
    "nothing clears": (lambda op: replace(op, destinations=()) if isinstance(op, Clear) else op, {"unwritten"}),
    "half is cleared": (
        lambda op: (
            replace(op, destinations=(replace(op.destinations[0], rows=(0, 16)),)) if op.name == "clear.1" else op
        ),
        {"unwritten"},
    ),
    "cleared by another rank": (lambda op: replace(op, rank=1) if op.name == "clear.0" else op, {"ownership"}),
    "a sum before all have added": (overhasty_sum, {"signal"}),
    "a part twice, and one not at all": (twice, {"value"}),
    "an add that needs the others to be ordered": (
        lambda op: replace(op, unordered=False) if op.name == "add.1-0.8" else op,
        {"race"},
    ),
    "a part is not added": (
        lambda op: replace(op, sources=(), destinations=()) if op.name == "add.2-0.4" else op,
        {"contributions"},
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_refused(name: str):
    change, expected = MUTANTS[name]
    found = rules(changed(change))
    assert found & expected, found


def test_an_order_may_not_be_claimed():
    schedule = plan().schedule
    claimed = replace(schedule, goal=tuple(replace(goal, unordered=False) for goal in schedule.goal))
    assert "contribution_order" in rules(claimed)


def test_a_next_call_clears_only_what_peers_are_done_with():
    assert "reuse" in rules(replace(plan().schedule, credits=()))


def test_nobody_reads_a_sum_while_it_grows():
    """A rank that looks at its own slot when the first part is there: whoever adds later races with that."""
    schedule = plan().schedule
    (slot,) = schedule.operations[0].writes
    seen = replace(slot, buffer="seen")
    count = next(op for op in schedule.operations if op.name.startswith("sum.0.")).waits[0].count
    waits = (Wait("arrived", (0, 1), count),)
    look = Reduce(name="look", rank=0, queue="looks", waits=waits, operands=(slot,), out=seen)
    looking = replace(
        schedule,
        buffers=(*schedule.buffers, Buffer("seen", 32, 64, "local")),
        queues=(*schedule.queues, Queue("looks", "complete")),
    )
    assert "race" in rules(replace(looking, operations=(*schedule.operations, look)))
    patient = replace(look, waits=(Wait("arrived", (0, 2), count),))
    assert not rules(replace(looking, operations=(*schedule.operations, patient)))


def test_it_is_told_and_read_back():
    schedule = plan().schedule
    text = to_text(schedule)
    assert "main clear.0: clear -> slots@0[0:32,0:64] signal told@1[1] told@2[0]\n" in text
    assert " order=any wait told" in text
    assert "sum any 0:32 32:64 64:96\n" in text
    assert from_text(text) == schedule
    assert from_json(to_json(schedule)) == schedule
    with pytest.raises(ScheduleFileError, match="order=rank"):
        from_text(text.replace("order=any", "order=rank"))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda made: with_slots_of(made, None), "lowering"),
        (lambda made: with_engine(made, "copies.kernel", "copy_engine"), "engine"),
        (lambda made: with_engine(made, "main", "copy_engine"), "engine"),
    ],
)
def test_hardware_that_cannot_is_refused(change: Callable[[Plan], Plan], rule: str):
    assert rule in {refusal.rule for refusal in verify_plan(change(plan()), MachineLimits()).refusals}


def with_slots_of(made: Plan, dtype: None) -> Plan:
    """Parts are added in the dtype in which they travel."""
    buffers = (replace(each, dtype=dtype) if each.name == "slots" else each for each in made.schedule.buffers)
    return with_schedule(made, buffers=tuple(buffers))


def with_engine(made: Plan, queue: str, engine: str) -> Plan:
    engines = (EngineAssignment(one.queue, engine) if one.queue == queue else one for one in made.realization.engines)
    return replace(made, realization=replace(made.realization, engines=tuple(engines)))
