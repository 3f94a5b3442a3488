"""Packed kernels: proven for any number of rows, and refused where the queue says what the kernel does not do."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.ir.plan import PackedConfig, Plan, Problem
from overweave.ir.schedule import Notify, Operation, SignalPad, Wait
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.schedules.catalog import build
from overweave.schedules.communication import Split

OPERATOR = "matmul_all_reduce"
PLANS = ("one_shot_packed", "two_shot_packed")


def plan_of(name: str, m: int = 7, n: int = 48, world_size: int = 3) -> Plan:
    problem = Problem(operator=OPERATOR, m=m, n=n, k=16, world_size=world_size, dtype="bfloat16")
    return build(f"{OPERATOR}.{name}", problem, {})


def refusals(plan: Plan) -> str:
    return "\n".join(map(str, verify_plan(plan, MachineLimits()).refusals))


def changed(plan: Plan, name: str, **changes: object) -> Plan:
    """One operation of it replaced."""
    operations = tuple(replace(one, **changes) if one.name == name else one for one in plan.schedule.operations)
    return replace(plan, schedule=replace(plan.schedule, operations=operations))


def operation(plan: Plan, name: str) -> Operation:
    return next(one for one in plan.schedule.operations if one.name == name)


def with_shots(plan: Plan, shots: int) -> Plan:
    return replace(plan, realization=replace(plan.realization, packed=PackedConfig(shots=shots)))


@pytest.mark.parametrize("name", PLANS)
def test_any_number_of_rows_is_proven(name: str):
    for world_size in (2, 3, 8):
        for m in (0, 1, 2, 3, 4, 7, 64, 509):
            plan = plan_of(name, m, world_size=world_size)
            assert refusals(plan) == ""
            packed = plan.realization.packed
            assert packed is not None
            assert packed.shots == (2 if name.startswith("two") and m else 1)


@pytest.mark.parametrize(("name", "shots"), [("one_shot_packed", 2), ("two_shot_packed", 1)])
def test_a_kernel_of_other_shots_is_refused(name: str, shots: int):
    assert "lowering" in refusals(with_shots(plan_of(name), shots))


CHANGES = {
    "a share that waits for more": (
        "share.0-1",
        {"waits": (Wait("summed", (0, 1), 1), Wait("arrived", (0, 2), 1))},
        "when it is made",
    ),
    "a move that rests": ("move.1", {"delay_us": 5}, "waits for nothing else"),
    "a sum that peers hear of": ("sum.0", {"notifies": (Notify("summed", 0, 0), Notify("more", 1, 0))}, "only the own"),
    "a part in tiles": ("push.0-1", {"tiles": 2}, "once, and says so"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_the_kernel_does_not_do_is_refused(what: str):
    name, changes, words = CHANGES[what]
    plan = plan_of("two_shot_packed")
    plan = replace(plan, schedule=replace(plan.schedule, pads=(*plan.schedule.pads, SignalPad("more", 1))))
    assert refusals(plan) == ""
    if what == "a sum that peers hear of":
        plan = changed(plan, "move.1", waits=(Wait("shared", (0, 2), 1), Wait("more", (0, 1), 1)))
    if what == "a part in tiles":
        arrived = (Wait("arrived", (0, 1), 1), Wait("arrived", (1, 2), 2))
        plan = changed(plan, "sum.1", waits=arrived)
    assert words in refusals(changed(plan, name, **changes))


def test_rows_dealt_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Split, "shard", lambda split, rank: ((0, 3), (3, 4), (4, 7))[rank])
    dealt = plan_of("two_shot_packed")
    assert operation(dealt, "sum.1").writes[0].rows == (3, 4)
    assert "the kernel pushes" in refusals(dealt)


def test_ranks_that_own_nothing_are_told_and_heard_all_the_same():
    """The kernel waits for all peers in both shots; that the proof could do without some of them does not matter."""
    plan = plan_of("two_shot_packed", m=1)
    heard = {"move.0": (), "move.1": (Wait("shared", (1, 2), 1),), "move.2": (Wait("shared", (0, 1), 1),)}
    operations = tuple(
        replace(one, waits=heard.get(one.name, one.waits))
        for one in plan.schedule.operations
        if one.name in heard or one.reads
    )
    quiet = replace(plan, schedule=replace(plan.schedule, operations=operations))
    assert refusals(plan) == ""
    assert "rank 1 does not push parts, add its own, push the sum and move" in refusals(quiet)


def test_a_call_that_hears_of_no_peer_may_not_reuse_by_echoes():
    """Here rank 1 would end without a word from rank 0, whose call before that may still run."""
    plan = plan_of("one_shot_packed", m=1, world_size=2)
    silent = replace(plan.schedule, operations=tuple(one for one in plan.schedule.operations if one.name != "push.0-1"))
    deaf = changed(replace(plan, schedule=silent), "sum.1", waits=())
    assert "the call ends on rank 1 without an operation of rank 0" in refusals(deaf)
