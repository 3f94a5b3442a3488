"""Whole plans on the paper machine, timed by hand; every failure to end is told."""

from __future__ import annotations

import re
from itertools import product

import pytest
from msgspec.structs import replace

from overweave.errors import InputError, ScheduleError
from overweave.hardware.machine import ElementWise, HeldSms, Latency, Machine, Share, Sharing, load
from overweave.hardware.topology import Bandwidth
from overweave.ir.epilogue import Epilogue
from overweave.ir.operators.registry import operator_of
from overweave.ir.plan import EngineAssignment, MatmulConfig, Plan, Realization, ReduceConfig
from overweave.ir.problem import Problem
from overweave.ir.schedule import (
    Buffer,
    Collective,
    Compute,
    Copy,
    Credit,
    Notify,
    Operation,
    Put,
    Queue,
    Reduce,
    Region,
    Schedule,
    SignalPad,
    Wait,
)
from overweave.ir.tile_order import TileOrder, TileRow
from overweave.ir.timeline.timeline import Timeline
from overweave.schedules.catalog.catalog import build, names
from overweave.sim.simulate import simulate, total_us
from tests.clock import ends_within

PROBLEM = Problem(operator="test", m=0, n=0, k=0, world_size=2, dtype="bfloat16")
ENGINES = {"main": "library", "copies": "copy_engine", "more": "copy_engine", "tiles": "tile_kernel"}
ENGINES["sums"] = "reduce_kernel"
QUEUES = (
    Queue("main", "complete"),
    Queue("copies", "complete"),
    Queue("more", "complete"),
    Queue("tiles", "issue", after=("main",)),
    Queue("sums", "issue", after=("tiles",)),
)


def plan(*operations: Operation, orders: tuple[TileOrder, ...] = ()) -> Plan:
    return Plan(
        name="test",
        problem=PROBLEM,
        schedule=Schedule(
            name="test",
            world_size=2,
            buffers=(Buffer("x", 1000, 16, "symmetric"), Buffer("w", 16, 16, "input")),
            pads=(SignalPad("pad", 8),),
            queues=QUEUES,
            given=(),
            goal=(),
            operations=operations,
        ),
        realization=Realization(
            dtype="bfloat16",
            engines=tuple(EngineAssignment(queue, engine) for queue, engine in ENGINES.items()),
            matmul=MatmulConfig(block_m=16, block_n=16),
            reduction=ReduceConfig(programs=1),
        ),
        tile_orders=orders,
    )


def rows(rank: int, lo: int, hi: int) -> Region:
    return Region("x", rank, (lo, hi), (0, 16))


def tiles(
    name: str, count: int, *, rank: int = 0, queue: str = "tiles", wait: int | None = None, signal: int | None = None
):
    """`count` tiles of 10 us, which wait for a signal of one and add to another."""
    return Compute(
        name=name,
        rank=rank,
        queue=queue,
        tiles=count if queue == "tiles" else 1,
        a=(rows(rank, 0, 16 * count),),
        b=Region("w", rank, (0, 16), (0, 16)),
        out=(rows(rank, 0, 16 * count),),
        waits=() if wait is None else (Wait("pad", (wait, wait + 1), 1),),
        notifies=() if signal is None else (Notify("pad", rank, signal),),
    )


def put(
    name: str, us: int, *, queue: str = "copies", rank: int = 0, wait: Wait | None = None, signal: int | None = None
):
    """A push to the other rank that takes `us` alone: 1000 bytes are 1 us."""
    peer = 1 - rank
    source, target = (Region("x", each, (0, 1), (0, 500 * us)) for each in (rank, peer))
    notifies = () if signal is None else (Notify("pad", peer, signal),)
    waits = () if wait is None else (wait,)
    return Put(
        name=name, rank=rank, queue=queue, sources=(source,), destinations=(target,), waits=waits, notifies=notifies
    )


def when(timeline: Timeline, name: str, kind: str = "") -> tuple[float, float]:
    (span,) = [span for span in timeline.spans if span.name == name and (not kind or span.kind == kind)]
    return span.begin_us, span.end_us


def test_waves_of_one_kernel(paper: Machine):
    timeline = simulate(plan(tiles("a", 3), tiles("b", 3)), paper)
    assert when(timeline, "a") == (0, 20)
    assert when(timeline, "b") == (10, 30)


def test_a_table_decides_the_order_of_claims(paper: Machine):
    order = TileOrder(0, "tiles", tuple(TileRow(0, 0, 16, 0, 0, 0, 0, 0, 0, -1, each) for each in (1, 1, 0, 1, 0, 0)))
    timeline = simulate(plan(tiles("a", 3), tiles("b", 3), orders=(order,)), paper)
    assert when(timeline, "b") == (0, 20)
    assert when(timeline, "a") == (10, 30)


def test_tiles_wait_for_a_chunk_in_the_prologue_and_the_arrow_shows_it(paper: Machine):
    timeline = simulate(plan(put("p", 25, signal=0), tiles("own", 1, rank=1), tiles("far", 1, rank=1, wait=0)), paper)
    assert when(timeline, "p") == (0, 25)
    assert when(timeline, "far", "wait") == (0, 25)
    assert when(timeline, "far", "compute") == (25, 35)
    assert timeline.exposed_us(1) == 15
    ((source, target),) = [(timeline.spans[arrow.source], timeline.spans[arrow.target]) for arrow in timeline.arrows]
    assert (source.name, target.name, target.kind) == ("p", "far", "compute")


def test_tiles_wait_for_what_they_add_when_their_product_is_done(paper: Machine):
    late = (Wait("pad", (0, 1), 1),)
    far = replace(tiles("far", 1, rank=1), addends=(rows(1, 0, 16),), late_waits=late)
    slow = replace(paper, latency=replace(paper.latency, observe=Latency(2.0, "paper")))
    for us, end in ((25, 27), (5, 12)):  # the product takes 10 us; to look for the addends and to read them, 2 us
        timeline = simulate(plan(put("p", us, signal=0), far), slow, with_tiles=True)
        spans = [span for span in timeline.spans if span.name == "far.0"]
        assert max(span.end_us for span in spans) == pytest.approx(end, abs=0.01)
        assert [span.kind for span in spans] == (["compute", "wait", "compute"] if us == 25 else ["compute"])


def test_a_put_waits_for_the_last_tile_of_its_chunk(paper: Machine):
    wait = Wait("pad", (0, 1), 3)
    timeline = simulate(plan(tiles("a", 3, signal=0), tiles("b", 5), put("p", 4, wait=wait)), paper)
    assert when(timeline, "p", "copy") == (20, 24)


def test_a_complete_queue_runs_one_after_the_other_and_two_share_the_port(paper: Machine):
    serial = simulate(plan(put("p", 10), put("q", 10)), paper)
    assert when(serial, "q") == (10, 20)
    crowded = simulate(plan(put("p", 10), put("q", 10, queue="more")), paper)
    assert when(crowded, "p") == when(crowded, "q") == (0, 20)


def test_kernels_of_a_stream_follow_each_other(paper: Machine):
    out = rows(0, 0, 16)
    total = Reduce(name="sum", rank=0, queue="sums", operands=(rows(0, 0, 16), rows(0, 16, 32)), out=out)
    slow = replace(paper, latency=replace(paper.latency, reduce_tile=Latency(7.0, ""), kernel=Latency(1.0, "")))
    timeline = simulate(plan(tiles("lib", 2, queue="main"), tiles("a", 2), total), slow)
    assert when(timeline, "lib") == (1, 11)
    assert when(timeline, "a") == (12, 22)
    assert when(timeline, "sum") == (23, pytest.approx(23 + 2 * 7, abs=0.01))  # 16 rows in tiles of 8, one program


def test_a_reduction_beside_the_tiles_is_launched_when_the_first_own_ones_are_stored(paper: Machine):
    own = tiles("own", 1, signal=0)
    operands = rows(0, 0, 16), rows(0, 16, 32)
    total = Reduce(
        name="sum", rank=0, queue="sums", waits=(Wait("pad", (0, 1), 1),), operands=operands, out=rows(0, 32, 48)
    )
    latencies = replace(paper.latency, stream_wait=Latency(2.0, ""), kernel=Latency(1.0, ""))
    behind = plan(own, tiles("late", 3), total)
    queues = tuple(replace(queue, after=()) if queue.name == "sums" else queue for queue in QUEUES)
    beside = replace(behind, schedule=replace(behind.schedule, queues=queues))
    machine = replace(paper, latency=latencies)
    assert when(simulate(beside, machine), "own") == (1, 11)
    assert when(simulate(beside, machine), "sum", "reduce")[0] == 21  # SMs fall free then, long after 11 + 2 + 1
    assert when(simulate(behind, machine), "sum", "reduce")[0] == 22  # a launch behind the tiles
    few = plan(own, total)
    few = replace(few, schedule=replace(few.schedule, queues=queues))
    assert when(simulate(few, machine), "sum", "reduce")[0] == 14


def test_a_library_sum_is_as_many_kernels_as_passes(paper: Machine):
    operands = tuple(rows(0, lo, lo + 16) for lo in (0, 16, 32))
    total = Reduce(name="sum", rank=0, queue="main", operands=operands, out=rows(0, 48, 64))
    behind = tiles("lib", 2, queue="main")
    passes = ElementWise(*[Bandwidth(0.256, "")] * 3)
    slow = replace(paper, element_wise=passes, latency=replace(paper.latency, kernel=Latency(1.0, "")))
    timeline = simulate(plan(total, behind), slow)
    assert when(timeline, "sum") == (1, pytest.approx(4 * 1 + 6 + 10 + 10 + 6))  # bytes of 256 elements at 0.256 GB/s
    assert when(timeline, "lib")[0] == pytest.approx(36 + 1)


def test_a_stream_looks_at_one_signal_after_the_other(paper: Machine):
    machine = replace(paper, latency=replace(paper.latency, stream_wait=Latency(2.0, "")))
    signals = [put("p", 10, signal=0), put("q", 5, signal=1)]
    late = replace(tiles("lib", 1, rank=1, queue="main"), waits=(Wait("pad", (0, 2), 1),))
    assert when(simulate(plan(*signals, late), machine), "lib", "compute") == (15 + 2 * 2, 29)


def test_a_copy_engine_writes_one_flag_after_the_other_and_a_library_call_all_at_once(paper: Machine):
    machine = replace(paper, latency=replace(paper.latency, flag=Latency(3.0, "")))
    told = tuple(Notify("pad", rank, 0) for rank in (0, 1))
    waiting = [tiles(f"t{rank}", 1, rank=rank, wait=0) for rank in (0, 1)]
    # Behind the stream's calls come its own tiles: two flags late, whenever their signal was there.
    for queue, begins in (("copies", (3, 6)), ("main", (6, 3))):
        tell = Copy(name="tell", rank=0, queue=queue, sources=(), destinations=(), notifies=told)
        after = Copy(name="after", rank=0, queue=queue, sources=(), destinations=(), notifies=(Notify("pad", 0, 1),))
        behind = tiles("behind", 1, wait=1)
        timeline = simulate(plan(tell, after, *waiting, behind), machine)
        assert tuple(when(timeline, f"t{rank}", "compute")[0] for rank in (0, 1)) == begins
        assert when(timeline, "behind", "compute")[0] >= (9 if queue == "copies" else 6)


def test_a_collective_starts_when_its_last_member_arrives(paper: Machine):
    def part(rank: int) -> Collective:
        both = rows(rank, 0, 500), rows(rank, 500, 1000)  # 32,000 bytes in all, half of which cross a port: 16 us
        mine = (rows(rank, 0, 500),)
        return Collective(
            name=f"c{rank}", rank=rank, queue="main", function="all_gather", label="g", ranks=(0, 1), sources=mine,
            destinations=both,
        )  # fmt: skip

    timeline = simulate(plan(tiles("late", 4, queue="main"), part(0), part(1)), paper)
    assert when(timeline, "c1", "wait") == (0, 20)
    assert when(timeline, "c0") == when(timeline, "c1", "collective") == (20, 36)


def test_traffic_slows_tiles_while_it_lasts(paper: Machine):
    slow = replace(paper, sharing=Sharing(copy_engine=Share(2.0, ""), collective=HeldSms(1, "")))
    both_ways = simulate(plan(put("p", 6), put("q", 6, rank=1), tiles("a", 2)), slow)
    assert when(both_ways, "a") == (0, 13)  # 6 us at half speed, then 7
    one_way = simulate(plan(put("p", 6), tiles("a", 2)), slow)
    assert when(one_way, "a") == (0, 12)  # half the traffic, half the harm


@pytest.mark.parametrize(("sms", "tiles_us"), [(1, (0, 14)), (2, (4, 14))])
def test_a_collective_holds_sms_while_it_lasts(paper: Machine, sms: int, tiles_us: tuple[int, int]):
    slow = replace(paper, sharing=Sharing(copy_engine=Share(1.0, ""), collective=HeldSms(sms, "")))
    parts = [
        Collective(
            name=f"c{rank}", rank=rank, queue="more", function="all_gather", label="g", ranks=(0, 1),
            sources=(rows(rank, 0, 100),), destinations=(rows(rank, 0, 125), rows(rank, 125, 250)),
        )
        for rank in (0, 1)
    ]  # fmt: skip
    timeline = simulate(plan(*parts, tiles("a", 2)), slow)
    assert when(timeline, "c0") == (0, 4)
    assert when(timeline, "a") == tiles_us
    behind = simulate(plan(tiles("a", 2), *parts), slow)  # it waits until a tile leaves its SM
    assert when(behind, "c0", "wait") == (0, 10)
    assert when(behind, "c0", "collective") == (10, 14)


def test_latencies_stand_where_they_belong(paper: Machine):
    names_of = ("begin", "kernel", "graph", "signal", "flag", "observe", "stream_wait")
    latencies = {name: Latency(float(2**place), "") for place, name in enumerate(names_of)}
    machine = replace(paper, latency=replace(paper.latency, **latencies))
    forth = plan(put("p", 10, signal=0), tiles("far", 2, rank=1, wait=0))
    timeline = simulate(forth, machine)
    assert when(timeline, "p") == (1 + 4, 15)
    assert when(timeline, "far", "compute") == (15 + 16 + 32, 73)
    back = plan(tiles("a", 1, signal=0), put("p", 10, wait=Wait("pad", (0, 1), 1)))
    assert when(simulate(back, machine), "p", "copy") == (1 + 2 + 10 + 8 + 64, 95)


def test_a_call_has_a_head_and_its_stream_joins_what_ran_beside_it(paper: Machine):
    machine = replace(paper, latency=replace(paper.latency, call=Latency(3.0, ""), join=Latency(4.0, "")))
    late, early = (
        simulate(plan(put("p", 30), tiles("a", 2)), machine),
        simulate(plan(put("p", 5), tiles("a", 2)), machine),
    )
    assert when(late, "a") == when(early, "a") == (3, 13)
    assert when(late, "join") == (13, 3 + 30 + 4)
    assert late.total_us == 37
    assert early.total_us == 13


def test_a_collectives_curve_holds_the_call_around_it(paper: Machine):
    part = Collective(
        name="c", rank=0, queue="main", function="all_gather", label="g", ranks=(0, 1),
        sources=(rows(0, 0, 500),), destinations=(rows(0, 0, 500), rows(0, 500, 1000)),
    )  # fmt: skip
    other = replace(part, name="d", rank=1, sources=(rows(1, 0, 500),), destinations=part.destinations)
    machine = replace(paper, latency=replace(paper.latency, call=Latency(3.0, "")))
    for each in (paper, machine):
        assert simulate(plan(part, other), each).total_us == 16


def test_a_delay_rests_first_and_an_empty_copy_still_signals(paper: Machine):
    rest = Copy(
        name="rest", rank=1, queue="main", sources=(), destinations=(), delay_us=40, notifies=(Notify("pad", 1, 0),)
    )
    timeline = simulate(plan(rest, tiles("a", 1, rank=1, wait=0)), paper)
    assert when(timeline, "a") == (40, 50)


def test_a_copy_within_a_rank_needs_an_sm(paper: Machine):
    inside = Copy(name="inside", rank=0, queue="copies", sources=(rows(0, 0, 1),), destinations=(rows(0, 1, 2),))
    timeline = simulate(plan(tiles("a", 4), inside), paper)
    assert when(timeline, "inside")[0] == 20
    behind_its_waiter = plan(replace(inside, notifies=(Notify("pad", 0, 0),)), tiles("b", 2, wait=0))
    machine = replace(paper, latency=replace(paper.latency, graph=Latency(1.0, "")))
    with pytest.raises(ScheduleError, match=r"waits for ever: inside, b"):
        simulate(behind_its_waiter, machine)


def test_what_never_ends_is_told(paper: Machine):
    with pytest.raises(ScheduleError, match="waits for ever: a"):
        simulate(plan(tiles("a", 1, wait=3)), paper)


def test_plans_that_cannot_be_run_are_refused(paper: Machine):
    valid = plan(tiles("a", 1))
    with pytest.raises(ScheduleError, match="engine"):
        simulate(replace(valid, realization=replace(valid.realization, engines=())), paper)
    with pytest.raises(ScheduleError, match="config"):
        simulate(replace(valid, realization=replace(valid.realization, matmul=None)), paper)
    row = TileRow(0, 0, 16, 0, 0, 0, 0, 0, 0, -1, 7)
    with pytest.raises(ScheduleError, match="tile order"):
        simulate(replace(valid, tile_orders=(TileOrder(0, "tiles", (row,)),)), paper)
    with pytest.raises(InputError, match="9 ranks on 4 GPUs"):
        simulate(replace(valid, schedule=replace(valid.schedule, world_size=9)), paper)


def test_the_head_of_a_call_stands_only_where_there_is_something_to_give_back(paper: Machine):
    machine = replace(paper, latency=replace(paper.latency, begin=Latency(5.0, "")))
    bare = plan(tiles("a", 1))
    bare = replace(bare, schedule=replace(bare.schedule, pads=()))
    assert total_us(bare, machine) == 10
    assert total_us(replace(bare, schedule=replace(bare.schedule, credits=(Credit(0, 1),))), machine) == 15


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_every_schedule_of_the_catalog_ends(name: str):
    machine = load("h200x4")
    for world_size, m in product((1, 2, 3, 4), (0, 3, 1000)):
        operator = operator_of(name.split(".")[0])
        rows = operator.whole_rows(m, world_size)
        problem = Problem(operator=operator.name, m=rows, n=512, k=256, world_size=world_size, dtype="bfloat16")
        built = build(name, problem, {})
        timeline = simulate(built, machine)
        ran = {span.name for span in timeline.spans if span.kind not in ("wait", "begin")}
        worked = {each.name for each in built.schedule.operations if any(not region.is_empty for region in each.writes)}
        assert worked <= ran, (world_size, m)
        tiled = simulate(built, machine, with_tiles=True)
        assert tiled.total_us == timeline.total_us, (world_size, m)
        programs = [span for span in tiled.spans if span.kind != "wait" and re.search(r"\.\d{3}$", span.track)]
        assert len(programs) >= sum(len(order.rows) for order in built.tile_orders), (world_size, m)


@pytest.mark.parametrize("name", ["sequential", "push"])
def test_a_gate_is_a_second_product(name: str):
    """Of twice the columns, but for what a call costs anyway."""
    shape = {"operator": "all_gather_matmul", "m": 4096, "k": 8192, "world_size": 2, "dtype": "bfloat16"}
    gated = Problem(**shape, n=2048, epilogue=Epilogue(activation="silu", gate=True))
    plans = (build(f"all_gather_matmul.{name}", one, {}) for one in (gated, Problem(**shape, n=4096)))
    gated_us, wide_us = (total_us(plan, load("h200x4")) for plan in plans)
    assert gated_us == pytest.approx(wide_us, rel=0.15)


def test_ten_thousand_tiles_in_a_fifth_of_a_second():
    problem = Problem(operator="all_gather_matmul", m=16384, n=8192, k=4096, world_size=4, dtype="bfloat16")
    built = build("all_gather_matmul.push", problem, {"pieces": 8})
    assert sum(len(order.rows) for order in built.tile_orders) > 10_000
    ends_within(0.2, lambda: simulate(built, load("h200x4")))
