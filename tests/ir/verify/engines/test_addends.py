"""Computes that add what others sent to their product: form, text, values in order, late waits, deadlock, tables."""

from __future__ import annotations

from itertools import product

import pytest
from msgspec.structs import replace

from overweave.ir.plan import Plan
from overweave.ir.schedule import LIMIT, Compute, Copy, Credit, Notify, Region, Schedule, SignalPad, Wait
from overweave.ir.text.files import from_json, to_json
from overweave.ir.text.parse import from_text, to_text
from overweave.ir.tile_order import NO_ADDENDS, TileRow
from overweave.ir.verify.plan import verify_schedule
from tests.ir.two_ranks import RANKS, altered, sums, whole
from tests.plans import plan_of, rules


def add(rank: int, /, **changes) -> Compute:
    """The own product, added to what the peer put into the slot: rank 0's part first."""
    made = Compute(
        name=f"total.{rank}",
        rank=rank,
        queue="main",
        a=(whole("x", rank),),
        b=whole("w", rank, (0, 4)),
        out=(whole("y", rank),),
        addends=(whole("slot", rank),),
        place=rank,
        late_waits=(Wait("arrived", (0, 1), 1),),
        tiles=2,
    )
    return replace(made, **changes)


def adding(**operations) -> Schedule:
    return altered(sums(), **{f"total_{rank}": add(rank) for rank in RANKS} | operations)


def halves(buffer: str, rank: int) -> tuple[Region, Region]:
    return whole(buffer, rank, (0, 1)), whole(buffer, rank, (1, 2))


def test_a_sum_in_the_own_tiles_is_proven():
    assert verify_schedule(adding()).refusals == ()


def test_it_is_told_as_the_sum_it_computes():
    schedule = adding(total_0=add(0, addends=(whole("slot", 0),) * 2, place=1, waits=(Wait("arrived", (1, 2), 1),)))
    text = to_text(schedule)
    told = "slot@0[0:2,0:4] + x@0[0:2,0:4] @ w@0[0:4,0:4] + slot@0[0:2,0:4] -> y@0[0:2,0:4]"
    assert f"main total.0: matmul {told} tiles=2 late arrived[0:1]>=1 wait arrived[1:2]>=1\n" in text
    assert from_text(text) == schedule
    assert from_json(to_json(schedule)) == schedule


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"place": 2}, "form"),
        ({"addends": ()}, "form"),
        ({"accumulate": True}, "form"),
        ({"addends": (whole("slot", 0, (0, 1)),)}, "form"),
        ({"a": halves("x", 0), "out": halves("y", 0)}, "form"),
        ({"late_waits": (Wait("arrived", (0, 3), 1),)}, "bounds"),
        ({"late_waits": (Wait("nowhere", (0, 1), 1),)}, "name"),
        ({"late_waits": (Wait("arrived", (0, 1), 2),)}, "signal"),
        ({"late_waits": ()}, "signal"),  # the peer's signal is waited for by nobody
        ({"addends": (whole("y", 1),)}, "caller_memory"),
        ({"addends": (whole("part", 1),)}, "ownership"),
        ({"place": 1}, "contribution_order"),
        ({"addends": (whole("part", 0),)}, "contributions"),
        ({"addends": (whole("slot", 0),) * 2}, "contributions"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_it_is_refused(changes, rule):
    assert rule in rules(adding(total_0=add(0, **changes)))


def test_a_late_wait_guards_addends_only():
    """Where the product itself reads what the late wait is for, or the addends are read by another, it is a race."""
    staged = Copy(
        name="stage.0",
        rank=0,
        queue="copies",
        sources=(whole("x", 0),),
        destinations=(whole("part", 0, (2, 4)),),
        notifies=(Notify("staged", 0, 0),),
    )
    base = adding()
    buffers = tuple(replace(one, rows=4) if one.name == "part" else one for one in base.buffers)
    base = replace(base, buffers=buffers, pads=(*base.pads, SignalPad("staged", 1)))
    base = replace(base, operations=(staged, *base.operations))
    arrived, there = Wait("arrived", (0, 1), 1), Wait("staged", (0, 1), 1)
    for waits, late, found in (
        ((there,), (arrived,), set()),
        ((arrived, there), (), set()),
        ((), (arrived, there), {"race"}),
        ((arrived,), (there,), {"race"}),
    ):
        total = add(0, a=(whole("part", 0, (2, 4)),), waits=waits, late_waits=late)
        assert rules(altered(base, total_0=total)) == found


def test_what_its_late_wait_saw_has_happened_for_those_who_wait_for_it():
    """The sum is handed on: who waits for its tiles may read what the addends' sender wrote."""
    schedule = adding(total_0=add(0, notifies=(Notify("done", 0, 0),)))
    reader = Copy(
        name="read.0",
        rank=0,
        queue="copies",
        waits=(Wait("done", (0, 1), 2),),
        sources=(whole("slot", 0),),
        destinations=(whole("kept", 0),),
    )
    kept = replace(schedule.buffers[2], name="kept")
    schedule = replace(
        schedule,
        buffers=(*schedule.buffers, kept),
        pads=(*schedule.pads, SignalPad("done", 1)),
        operations=(*schedule.operations, reader),
    )
    assert rules(schedule) == set()


def test_it_is_judged_as_if_it_waited_before_it_started():
    schedule = adding()
    first = sorted(schedule.operations, key=lambda operation: not operation.name.startswith("total"))
    assert rules(replace(schedule, operations=tuple(first))) == {"deadlock"}


def made(**options: int | str) -> Plan:
    tiles = {"block_m": 16, "block_n": 16, "pieces": 2, "sums": "epilogue"}
    return plan_of("matmul_reduce_scatter.scatter", tiles | options, n=40, k=16)


@pytest.mark.slow
def test_every_change_of_a_tile_that_adds_is_refused():
    plan = made()
    assert rules(plan) == set()
    order = plan.tile_orders[1]
    at = next(at for at, row in enumerate(order.rows) if row.place != NO_ADDENDS)
    for field, by in product(TileRow._fields, (-1, 1, LIMIT)):
        if field in ("wait_count", "also_count") or (field == "width" and by == LIMIT):
            continue  # of waits that it has not
        row = order.rows[at]._replace(**{field: getattr(order.rows[at], field) + by})
        changed = replace(order, rows=(*order.rows[:at], row, *order.rows[at + 1 :]))
        tables = tuple(changed if one == order else one for one in plan.tile_orders)
        assert rules(replace(plan, tile_orders=tables)) == {"lowering"}, f"{field} changed by {by}"


def test_what_a_late_wait_is_for_has_begun_its_call_too():
    """Rank 1 stores its sum at rank 0 when rank 0's part has come: then rank 0 has begun, and owes no credit."""
    kept = whole("kept", 0)
    base = sums()
    multiply, push = base.operations[:2]
    total = add(1, out=(kept,), notifies=(Notify("done", 0, 0),))
    done = (Wait("done", (0, 1), 2),)
    take = Copy(name="take.0", rank=0, queue="main", waits=done, sources=(kept,), destinations=(whole("y", 0),))
    schedule = replace(
        base,
        buffers=(*base.buffers, replace(base.buffers[3], name="kept")),
        pads=(*base.pads, SignalPad("done", 1)),
        operations=(multiply, push, total, take),
        goal=base.goal[:1],
        credits=(Credit(1, 0),),
    )
    assert verify_schedule(schedule).refusals == ()
    assert rules(replace(schedule, credits=())) == {"reuse"}
