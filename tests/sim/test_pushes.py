"""Pushes by a kernel on the paper machine, timed by hand: they share the SMs with the tiles."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.hardware.machine import Latency, Machine, load
from overweave.ir.plan import CopyConfig, EngineAssignment, Plan
from overweave.ir.problem import Problem
from overweave.ir.schedule import Copy, Notify, Operation, Put, Queue, Wait
from overweave.schedules.catalog.catalog import build
from overweave.sim.realize import realize
from overweave.sim.simulate import simulate, total_us
from tests.sim.test_simulate import QUEUES, plan, rows, tiles, when

END = Copy(name="end", rank=1, queue="main", waits=(Wait("pad", (0, 1), 2),), sources=(), destinations=())


def pushes(*operations: Operation) -> Plan:
    """The plan with its pushes moved by a kernel of one program, beside the tiles."""
    made = plan(*operations, END)
    engines = tuple(
        EngineAssignment(one.queue, "copy_kernel") if one.queue == "copies" else one for one in made.realization.engines
    )
    queues = tuple(Queue("copies", "issue") if queue.name == "copies" else queue for queue in QUEUES)
    realization = replace(made.realization, engines=engines, copy=CopyConfig(programs=1))
    return replace(made, schedule=replace(made.schedule, queues=queues), realization=realization)


def push(waits: tuple[Wait, ...] = ()) -> Put:
    """8 us on one SM, in two tiles."""
    return Put(
        name="p",
        rank=0,
        queue="copies",
        waits=waits,
        notifies=(Notify("pad", 1, 0),),
        sources=(rows(0, 0, 250),),
        destinations=(rows(1, 0, 250),),
        tiles=2,
    )


def test_tiles_get_the_sms_of_pushes_that_are_done(paper: Machine):
    """Five tiles of 10 us: on one SM at 0, 10 and 20, on the other, once it is free, at 8 and 18."""
    timeline = simulate(pushes(push(), tiles("t", 5)), paper)
    assert when(timeline, "p") == pytest.approx((0.0, 8.0))
    assert when(timeline, "t") == pytest.approx((0.0, 30.0))


def test_tiles_leave_sms_to_pushes_that_wait_for_them(paper: Machine):
    """One tile after the other on one SM, and the push is launched when its chunk is there."""
    waiting = push((Wait("pad", (1, 2), 1),))
    timeline = simulate(pushes(tiles("t", 1, signal=1), tiles("u", 2), waiting), paper)
    assert when(timeline, "u") == pytest.approx((10.0, 30.0))
    assert when(timeline, "p", "copy") == pytest.approx((10.0, 18.0))


def test_tiles_are_launched_once_pushes_that_wait_for_nothing_have_their_sms(paper: Machine):
    slow = replace(paper, latency=replace(paper.latency, stream_wait=Latency(3.0, "")))
    assert when(simulate(pushes(push(), tiles("t", 1)), slow), "t") == pytest.approx((3.0, 13.0))


def test_who_waits_for_a_push_waits_for_its_last_tile(paper: Machine):
    assert total_us(pushes(push()), paper) == pytest.approx(8.0)


def test_a_schedule_without_engines_gets_the_kernel_for_pushes_in_issue_order():
    problem = Problem(operator="all_gather_matmul", m=512, n=512, k=512, world_size=2, dtype="bfloat16")
    built = build("all_gather_matmul.push", problem, {"mover": "copy_kernel"})
    assert realize(built.schedule, load("h200x4")).realization.engine_of("copies.kernel") == "copy_kernel"


def test_small_shards_are_gathered_sooner_by_a_kernel():
    """The reason for it: a copy engine is slow to start. Large ones are not."""
    machine = load("h200x4")
    for m, wins in ((256, True), (8192, False)):
        problem = Problem(operator="all_gather_matmul", m=m, n=1024, k=4096, world_size=4, dtype="bfloat16")
        engine, kernel = (
            total_us(build("all_gather_matmul.push", problem, {"kernel": "hopper", "mover": mover}), machine)
            for mover in ("copy_engine", "copy_kernel")
        )
        assert (kernel < engine) == wins
