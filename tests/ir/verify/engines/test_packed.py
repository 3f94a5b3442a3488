"""Packed kernels: proven for any number of rows, and refused where the queue says what the kernel does not do."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.ir.plan import PackedConfig, PackedExchange, Plan
from overweave.ir.problem import Problem
from overweave.ir.schedule import Copy, Notify, Operation, Region, SignalPad, Wait
from overweave.schedules.catalog.catalog import build
from overweave.schedules.communication import Split
from tests.plans import refusals, with_operations, with_schedule

OPERATORS = {
    "one_shot_packed": "matmul_all_reduce",
    "two_shot_packed": "matmul_all_reduce",
    "scatter_packed": "matmul_reduce_scatter",
    "gather_packed": "all_gather_matmul",
}
EXCHANGES: tuple[PackedExchange, ...] = ("one_shot", "two_shot", "scatter", "gather")


def plan_of(name: str, m: int = 7, n: int = 48, world_size: int = 3) -> Plan:
    operator = OPERATORS[name]
    problem = Problem(operator=operator, m=m, n=n, k=16, world_size=world_size, dtype="bfloat16")
    return build(f"{operator}.{name}", problem, {})


def changed(plan: Plan, name: str, **changes: object) -> Plan:
    """One operation of it replaced."""
    operations = tuple(replace(one, **changes) if one.name == name else one for one in plan.schedule.operations)
    return with_operations(plan, operations)


def operation(plan: Plan, name: str) -> Operation:
    return next(one for one in plan.schedule.operations if one.name == name)


@pytest.mark.parametrize("name", OPERATORS)
def test_any_number_of_rows_is_proven(name: str):
    for world_size in (2, 3, 8):
        for m in (0, 1, 2, 3, 4, 7, 64, 509):
            plan = plan_of(name, m, world_size=world_size)
            assert refusals(plan) == ""
            packed = plan.realization.packed
            assert packed is not None
            assert packed.exchange == (name.removesuffix("_packed") if m else "one_shot")


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("name", OPERATORS)
def test_a_kernel_of_another_exchange_is_refused(name: str, exchange: PackedExchange):
    plan = plan_of(name)
    realization = replace(plan.realization, packed=PackedConfig(exchange=exchange))
    found = refusals(replace(plan, realization=realization))
    assert ("lowering" in found) == (exchange != name.removesuffix("_packed"))


def test_what_was_gathered_may_be_the_callers():
    problem = Problem(operator="all_gather_matmul", m=7, n=48, k=16, world_size=3, dtype="bfloat16")
    plan = build("all_gather_matmul.gather_packed", replace(problem, returns_gathered=True), {})
    assert refusals(plan) == ""
    assert operation(plan, "move.1").writes[0].buffer == "gathered_out"
    assert "collect" not in "".join(one.name for one in plan.schedule.operations)


MORE = (Wait("more", (0, 1), 1),)
# What is changed, of which plan: an operation, its changes, another with its own, and why that is refused.
Change = tuple[str, dict[str, dict[str, object]], str]
CHANGES: dict[str, Change] = {
    "a share that waits for more": (
        "two_shot_packed",
        {"share.0-1": {"waits": (Wait("summed", (0, 1), 1), Wait("arrived", (0, 2), 1))}},
        "when it is written",
    ),
    "a move that rests": ("two_shot_packed", {"move.1": {"delay_us": 5}}, "waits for no more"),
    "a sum that peers hear of": (
        "two_shot_packed",
        {
            "sum.0": {"notifies": (Notify("summed", 0, 0), Notify("more", 1, 0))},
            "move.1": {"waits": (Wait("shared", (0, 2), 1), Wait("summed", (0, 1), 1), *MORE)},
        },
        "only its own",
    ),
    "a part in tiles": (
        "two_shot_packed",
        {
            "push.0-1": {"tiles": 2},
            "sum.1": {"waits": (Wait("arrived", (0, 1), 1), Wait("arrived", (1, 2), 2))},
        },
        "once, and notifies",
    ),
    "a push of a gather that waits": (
        "gather_packed",
        {"push.0-1": {"waits": (Wait("arrived", (0, 2), 1),)}},
        "when it is written",
    ),
    "a gather whose move rests": ("gather_packed", {"move.2": {"delay_us": 5}}, "waits for no more"),
    "a sum of a scatter that peers hear of": (
        "scatter_packed",
        {
            "sum.0": {"notifies": (Notify("more", 1, 0),)},
            "sum.1": {"waits": (Wait("arrived", (0, 2), 1), *MORE)},
        },
        "only its own",
    ),
    "a part of a scatter in tiles": (
        "scatter_packed",
        {
            "push.0-1": {"tiles": 2},
            "sum.1": {"waits": (Wait("arrived", (0, 1), 1), Wait("arrived", (1, 2), 2))},
        },
        "once, and notifies",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_the_kernel_does_not_do_is_refused(what: str):
    name, changes, words = CHANGES[what]
    plan = plan_of(name)
    assert refusals(plan) == ""
    plan = with_schedule(plan, pads=(*plan.schedule.pads, SignalPad("more", 1)))
    for which, fields in changes.items():
        plan = changed(plan, which, **fields)
    assert words in refusals(plan)


def test_a_gather_that_takes_its_rows_from_elsewhere_is_refused():
    """The same values, by way of another rank's copy of them: the kernel has the own ones in hand."""
    plan = plan_of("gather_packed", m=6)
    sent = operation(plan, "push.1-0")
    home = Region("messages", 1, (2, 4), (0, 16))
    kept = Copy(name="keep.1", rank=1, queue="main", sources=sent.reads, destinations=(home,))
    operations = (kept, *plan.schedule.operations)
    queues = tuple(replace(one, after=tuple({"main", "packed"} - {one.name})) for one in plan.schedule.queues)
    around = with_schedule(plan, operations=operations, queues=queues)
    move = operation(plan, "move.1")
    sources = tuple(home if one == sent.reads[0] else one for one in move.reads)
    assert refusals(around) == ""
    assert "reads its own shard in place" in refusals(changed(around, "move.1", sources=sources))


@pytest.mark.parametrize("name", ["two_shot_packed", "scatter_packed"])
def test_rows_dealt_otherwise_are_refused(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Split, "shard", lambda split, rank: ((0, 3), (3, 4), (4, 7))[rank])
    dealt = plan_of(name)
    assert operation(dealt, "sum.1").writes[0].shape[0] == 1
    assert "the kernel pushes" in refusals(dealt)


def test_ranks_that_own_nothing_are_told_and_heard_all_the_same():
    """The kernel waits for all peers in both shots; that the proof could do without some of them does not matter."""
    plan = plan_of("two_shot_packed", m=1)
    heard = {
        "move.0": (Wait("summed", (0, 1), 1),),
        "move.1": (Wait("shared", (1, 2), 1),),
        "move.2": (Wait("shared", (0, 1), 1),),
    }
    operations = tuple(
        replace(one, waits=heard.get(one.name, one.waits))
        for one in plan.schedule.operations
        if one.name in heard or one.reads
    )
    quiet = with_operations(plan, operations)
    assert refusals(plan) == ""
    assert "rank 1 does not push parts, add its own, push the sum and move" in refusals(quiet)


def test_a_call_that_hears_of_no_peer_may_not_reuse_by_echoes():
    """Here rank 1 would end without a word from rank 0, whose call before that may still run."""
    plan = plan_of("one_shot_packed", m=1, world_size=2)
    silent = replace(plan.schedule, operations=tuple(one for one in plan.schedule.operations if one.name != "push.0-1"))
    deaf = changed(replace(plan, schedule=silent), "sum.1", waits=())
    assert "the call ends on rank 1 without an operation of rank 0" in refusals(deaf)
