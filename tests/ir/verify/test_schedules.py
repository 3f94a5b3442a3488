"""Each rule of verify_schedule, provoked once on a schedule that a reader can hold in mind."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.errors import ScheduleRefused
from overweave.ir.schedule import (
    Buffer,
    Collective,
    Copy,
    Credit,
    Get,
    Goal,
    InitialContents,
    Notify,
    Queue,
    Reduce,
    ReducePut,
    Region,
    Schedule,
    SignalPad,
    Wait,
)
from overweave.ir.verify.plan import verify_schedule
from tests.ir.two_ranks import RANKS, altered, exchange, put, sums, take, total, whole


def refused(schedule: Schedule, rule: str, *words: str):
    """The first refusal of this rule; its text holds the words."""
    verdict = verify_schedule(schedule)
    found = [refusal for refusal in verdict.refusals if refusal.rule == rule]
    assert found, f"{rule} expected, but {[str(refusal) for refusal in verdict.refusals]}"
    for word in words:
        assert word in str(found[0])
    return found[0]


@pytest.mark.parametrize("schedule", [exchange(), sums()], ids=["exchange", "sums"])
def test_right_schedules_are_proven(schedule):
    assert verify_schedule(schedule).refusals == ()
    verify_schedule(schedule).raise_if_refused()


def test_a_refusal_names_operation_rank_and_region_and_can_be_raised():
    verdict = verify_schedule(exchange(put(0), put(1), take(0, waits=()), take(1)))
    assert not verdict.ok
    with pytest.raises(ScheduleRefused, match=r"verify exchange: \[signal\] put\.1, rank 1: notifies arrived@0\[0\]"):
        verdict.raise_if_refused()


def test_too_large():
    refused(exchange(world_size=2**31 - 1), "too_large", "2147483647 ranks")


def test_waiting_for_millions_of_signals_is_not_tried():
    many = take(0, waits=(Wait("arrived", (0, 2**31 - 1), 1),))
    refused(exchange(put(0), put(1), many, take(1), pads=(SignalPad("arrived", 2**31 - 1),)), "too_large")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"queue": "nowhere"}, "queue nowhere does not exist"),
        ({"sources": (whole("nothing", 0),)}, "buffer nothing does not exist"),
        ({"notifies": (Notify("no", 1, 0),)}, "notifies pad no"),
        ({"waits": (Wait("no", (0, 1), 1),)}, "waits for pad no"),
        ({"name": "put.1"}, "two operations are called put.1"),
    ],
)
def test_name(change, words):
    refused(exchange(put(0, **change), put(1), take(0), take(1)), "name", words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sources": (whole("x", 0, (1, 3)),)}, "x@0[1:3,0:4]"),
        ({"sources": (whole("x", 0, (2, 1)),)}, "out of bounds"),
        ({"destinations": (whole("slot", 2),)}, "slot@2"),
        ({"notifies": (Notify("arrived", 1, 2),)}, "2 signals on each of 2 ranks"),
        ({"waits": (Wait("arrived", (1, 3), 1),)}, "arrived[1:3]"),
        ({"rank": 2}, "put.0, rank 2"),
    ],
)
def test_bounds(change, words):
    refused(exchange(put(0, **change), put(1), take(0), take(1)), "bounds", words)


def test_bounds_of_credits():
    refused(exchange(credits=(Credit(0, 2),)), "bounds", "credit from rank 0 to 2")


def test_form():
    narrow = Region("slot", 1, (0, 1), (0, 4))
    refused(exchange(put(0, destinations=(narrow,)), put(1), take(0), take(1)), "form", "does not fit slot@1[0:1,0:4]")
    refused(altered(sums(), total_0=total(0, operands=())), "form", "nothing to sum")
    refused(altered(sums(), total_0=total(0, tiles=0)), "form", "at least one tile")
    first = sums().operations[0]
    refused(altered(sums(), multiply_0=replace(first, b=whole("w", 0))), "form", "does not have the shape")


def test_form_of_collectives():
    def part(rank, **changes):
        sources, destinations = (whole("x", rank),), tuple(whole("y", rank, rows) for rows in ((0, 2), (2, 4)))
        made = Collective(
            name=f"gather.{rank}", rank=rank, queue="main", function="all_gather", label="g", ranks=RANKS,
            sources=sources, destinations=destinations,
        )  # fmt: skip
        return replace(made, **changes)

    wide = (Buffer("x", 2, 4, "input"), Buffer("y", 4, 4, "output"))
    goal = tuple(Goal(whole("y", rank, (0, 4)), "a", 0, 0) for rank in RANKS)
    good = exchange(part(0), part(1), buffers=wide, goal=goal)
    assert verify_schedule(good).ok
    refused(altered(good, gather_1=None), "form", "lacks its part on ranks [1]")
    refused(altered(good, gather_1=part(1, ranks=(1, 0))), "form", "says otherwise")
    shorter = part(1, sources=(whole("x", 1, (0, 1)),))
    refused(altered(good, gather_1=shorter), "form", "does not fit")


def reduced_by_library(*, apart: bool = False, **changes) -> Schedule:
    """Each rank's product, all-reduced: in place, or from `part` to `y`. changes: of rank 1's part of that."""
    source = "part" if apart else "y"
    operations = []
    for rank in RANKS:
        made = Collective(
            name=f"reduce.{rank}", rank=rank, queue="main", function="all_reduce", label="r", ranks=RANKS,
            sources=(whole(source, rank),), destinations=(whole("y", rank),),
        )  # fmt: skip
        product_of = replace(sums().operations[3 * rank], out=(whole(source, rank),), tiles=1, notifies=())
        operations += [product_of, replace(made, **changes) if rank else made]
    return sums(operations=tuple(operations), pads=())


@pytest.mark.parametrize("apart", [False, True])
def test_all_reduce(apart: bool):
    good = reduced_by_library(apart=apart)
    assert verify_schedule(good).ok
    backwards = tuple(replace(goal, terms=goal.terms[::-1]) for goal in good.goal)
    refused(replace(good, goal=backwards), "contribution_order", "sums [0:4] + [4:8]")
    refused(altered(good, multiply_1=None), "unwritten", "no input or operation writes it")
    shorter = (whole("y", 1, (0, 1)),)
    refused(reduced_by_library(apart=apart, sources=shorter, destinations=shorter), "form", "does not fit")
    refused(reduced_by_library(apart=apart, destinations=(whole("y", 1),) * 2), "form", "has 1 and 1")


def test_all_reduce_in_place_needs_order():
    """Who reads the product beside the reduction may find the sum."""
    reader = Copy(name="read", rank=0, queue="copies", sources=(whole("y", 0),), destinations=(whole("part", 0),))
    good = reduced_by_library()
    refused(replace(good, operations=(*good.operations, reader)), "race", "no path leads")


def test_a_tile_wise_sum_is_counted_in_tiles():
    """A sum of three tiles says so three times: who waits for one of them has not waited."""
    notifies = (Notify("computed", 0, 1),)
    pads = (SignalPad("arrived", 2), SignalPad("computed", 2))
    tiled = total(0, queue="sums", notifies=notifies, tiles=3, out=whole("part", 0, (2, 4)))
    move = Reduce(
        name="move",
        rank=0,
        queue="main",
        waits=(Wait("computed", (1, 2), 3),),
        operands=(tiled.out,),
        out=whole("y", 0),
    )
    buffers = tuple(replace(one, rows=4) if one.name == "part" else one for one in sums().buffers)
    queues = (*sums().queues, Queue("sums", "issue", ("main",)))
    good = sums(pads=pads, buffers=buffers, queues=queues)
    operations = tuple(
        one for each in good.operations for one in ((tiled, move) if each.name == "total.0" else (each,))
    )
    good = replace(good, operations=operations)
    assert verify_schedule(good).ok
    refused(altered(good, move=replace(move, waits=(Wait("computed", (1, 2), 1),))), "signal", "add 3 to it")


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        (put(0, destinations=(whole("slot", 0),)), "where it pushes to must lie on a peer"),
        (put(0, sources=(whole("x", 1),)), "what it pushes must lie on its own rank"),
        (put(0, destinations=(whole("x", 1),)), "an input is only read"),
        (
            Get(name="put.0", rank=0, queue="copies", sources=(whole("x", 0),), destinations=(whole("slot", 0),)),
            "pulls",
        ),
        (Copy(name="put.0", rank=0, queue="copies", sources=(whole("x", 1),), destinations=(whole("y", 0),)), "copies"),
    ],
)
def test_ownership(operation, words):
    refused(exchange(operation, put(1), take(0), take(1)), "ownership", words)


def test_ownership_of_local_buffers():
    stolen = total(0, operands=(whole("part", 1), whole("slot", 0)))
    refused(altered(sums(), total_0=stolen), "ownership", "part@1", "its own rank's only")


def test_signal():
    refused(
        exchange(put(0, notifies=()), put(1), take(0), take(1)), "signal", "arrived@1[0], which no operation notifies"
    )
    miscounted = take(0, waits=(Wait("arrived", (0, 1), 2),))
    refused(exchange(put(0), put(1), miscounted, take(1)), "signal", "until arrived@0[0] is 2, but put.1 add 1")
    deaf = take(0, waits=())
    refused(exchange(put(0), put(1), deaf, take(1)), "signal", "put.1", "no operation on rank 0 waits")


def test_deadlock_tells_the_cycle():
    crossed = exchange(take(0), put(0), take(1), put(1))
    said = refused(crossed, "deadlock").message
    assert "take.0 waits for arrived@0[0] from put.1 on rank 1, which stands behind take.1" in said
    assert "take.1, which waits for arrived@1[0] from put.0 on rank 0, which stands behind take.0" in said


def test_one_rank_first_is_no_deadlock():
    assert verify_schedule(exchange(put(0), take(0), take(1), put(1))).ok


def test_race_tells_the_missing_path():
    silent = exchange(put(0, notifies=()), put(1), take(0), take(1, waits=()))
    said = refused(silent, "race", "take.1, rank 1, slot@1[0:2,0:4]").message
    assert "take.1 reads what put.0 on rank 0 writes, and no path leads from one to the other" in said
    assert "put.0 notifies nothing, take.1 waits for nothing" in said


def test_issue_order_is_not_completion_order():
    stage = Copy(name="stage.0", rank=0, queue="copies", sources=(whole("x", 0),), destinations=(whole("own", 0),))
    buffers = (*exchange().buffers, Buffer("own", 2, 4, "local"))
    staged = exchange(stage, put(0, sources=(whole("own", 0),)), put(1), take(0), take(1), buffers=buffers)
    assert verify_schedule(staged).ok
    loose = replace(staged, queues=(Queue("copies", "issue"), Queue("main", "complete")))
    refused(loose, "race", "put.0", "queue copies orders by issue, not by completion")


def test_kernel_boundaries_are_completion_order():
    stage = Copy(name="stage.0", rank=0, queue="first", sources=(whole("x", 0),), destinations=(whole("own", 0),))
    buffers = (*exchange().buffers, Buffer("own", 2, 4, "local"))
    operations = (stage, put(0, sources=(whole("own", 0),)), put(1), take(0), take(1))
    queues = (Queue("first", "issue"), Queue("copies", "issue", ("first",)), Queue("main", "complete"))
    assert verify_schedule(exchange(*operations, buffers=buffers, queues=queues)).ok
    apart = replace(queues[1], after=())
    refused(exchange(*operations, buffers=buffers, queues=(queues[0], apart, queues[2])), "race", "put.0")


def test_stale_read():
    early = take(1, queue="copies", waits=())
    signalled = exchange(put(0, waits=(Wait("taken", (0, 1), 1),), notifies=()), put(1), take(0), early)
    told = replace(signalled, pads=(*signalled.pads, SignalPad("taken", 1)))
    operations = (early, *told.operations[:3])
    early_and_told = replace(early, notifies=(Notify("taken", 0, 0),))
    refused(replace(told, operations=(early_and_told, *operations[1:])), "stale_read", "take.1", "only after it")


def test_unwritten():
    refused(exchange(put(0), put(1), take(0), take(1), goal=(Goal(whole("y", 0), "a", 2, 0),), given=()), "unwritten")
    half = InitialContents(Region("x", 0, (0, 1), (0, 4)), "a", 0, 0)
    refused(exchange(given=(half, exchange().given[1])), "unwritten", "x@0[0:2,0:4]")


def test_double_write():
    again = put(0, name="again.0", notifies=())
    refused(exchange(put(0), again, put(1), take(0), take(1)), "double_write", "slot@1", "put.0 on rank 0")


def test_value():
    refused(exchange(goal=(Goal(whole("y", 0), "a", 0, 0),)), "value", "begins with a[2,0], not with a[0,0]")
    crossed = (*sums().given[:1], InitialContents(whole("w", 0, (0, 4)), "b", 4, 0), *sums().given[2:])
    refused(sums(given=crossed), "value", "columns [0:4] of a meet rows [4:8] of b")


def test_contributions():
    twice = total(0, operands=(whole("part", 0), whole("slot", 0), whole("part", 0)))
    refused(altered(sums(), total_0=twice), "contributions", "y@0", "has [0:4] too often")
    lonely = total(0, operands=(whole("part", 0),))
    refused(altered(sums(), total_0=lonely), "contributions", "lacks [4:8]")


def test_contribution_order():
    swapped = total(0, operands=(whole("slot", 0), whole("part", 0)))
    refused(altered(sums(), total_0=swapped), "contribution_order", "sums [4:8] + [0:4], not [0:4] + [4:8]")


def test_reuse_needs_the_credit_of_whoever_still_reads():
    said = refused(exchange(credits=(Credit(0, 1),)), "reuse", "put.0, rank 0, slot@1").message
    assert "no credit from rank 1 to rank 0" in said


def test_reuse_of_a_pad_needs_the_credit_of_its_owner():
    def sends(rank):
        return put(rank, sources=(), destinations=())

    nothing = exchange(sends(0), sends(1), take(0, sources=(), destinations=()), take(1), goal=(), credits=())
    empty = altered(nothing, take_1=take(1, sources=(), destinations=()))
    refused(empty, "reuse", "notify arrived@1[0] before rank 1 has zeroed it")


def test_a_peer_may_use_a_callers_buffer_only_during_its_call():
    into_y = (put(0, destinations=(whole("y", 1),)), put(1, destinations=(whole("y", 0),)))
    idle = tuple(take(rank, sources=(), destinations=()) for rank in RANKS)
    refused(exchange(*into_y, *idle), "caller_memory", "put.0", "no operation of rank 1 comes before it")
    begun = tuple(
        Copy(
            name=f"begin.{r}",
            rank=r,
            queue="main",
            notifies=(Notify("arrived", 1 - r, 1),),
            sources=(),
            destinations=(),
        )
        for r in RANKS
    )
    polite = tuple(replace(move, waits=(Wait("arrived", (1, 2), 1),)) for move in into_y)
    assert verify_schedule(exchange(*begun, *polite, *idle)).ok


def test_an_empty_part_of_a_callers_buffer_is_nobodys():
    """A chunk without rows moves nothing, so it does not matter whether its peer has begun its call."""
    empty = put(0, sources=(whole("x", 0, (0, 0)),), destinations=(whole("y", 1, (0, 0)),))
    idle = take(1, sources=(), destinations=())
    assert verify_schedule(exchange(empty, put(1), take(0), idle, goal=exchange().goal[:1])).ok


def test_accumulation_needs_order():
    """Rank 1 adds its part to what rank 0 computed for itself; rank 0 reads the total when told."""
    buffers = tuple(buffer for buffer in sums().buffers if buffer.name != "slot")
    buffers = tuple(replace(buffer, home="symmetric") if buffer.name == "part" else buffer for buffer in buffers)
    parts = [replace(sums().operations[at], notifies=(), tiles=1) for at in (0, 3)]
    add = ReducePut(
        name="add.1", rank=1, queue="main", waits=(Wait("computed", (0, 1), 1),), notifies=(Notify("arrived", 0, 0),),
        sources=(whole("part", 1),), destinations=(whole("part", 0),),
    )  # fmt: skip
    told = replace(parts[0], notifies=(Notify("computed", 1, 0),))
    done = take(0, sources=(whole("part", 0),))
    ordered = sums(operations=(told, parts[1], add, done), buffers=buffers, goal=sums().goal[:1])
    assert verify_schedule(ordered).ok
    hasty = replace(add, waits=())
    refused(replace(ordered, operations=(parts[0], parts[1], hasty, done)), "race", "add.1", "part@0")
    both = replace(done, waits=())
    loose = replace(ordered, operations=(told, parts[1], replace(add, notifies=()), both))
    refused(loose, "race")


def test_empty_chunks_still_signal_and_everything_may_be_empty():
    nothing = (0, 0)
    empty = exchange(
        *(put(r, sources=(whole("x", r, nothing),), destinations=(whole("slot", 1 - r, nothing),)) for r in RANKS),
        *(take(r, sources=(), destinations=()) for r in RANKS),
        goal=(),
    )
    assert verify_schedule(empty).ok
    assert verify_schedule(replace(empty, operations=(), given=())).ok
