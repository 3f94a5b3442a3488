"""Collectives of NCCL over several islands: by which way, in how many steps, and how they share NICs."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.hardware.cards import machine_of_ranks
from overweave.hardware.machine import load
from overweave.ir.plan import LIBRARY, EngineAssignment, Plan, Realization
from overweave.ir.problem import Problem
from overweave.ir.schedule import Buffer, Collective, Queue, Region, Schedule
from overweave.sim.cost import Segment
from overweave.sim.events import EventQueue
from overweave.sim.nccl import SentBytes, collective_us, crossing_of, exchange_of, sms_of
from overweave.sim.ports import Ports
from overweave.sim.simulate import simulate, total_us

H800, A100 = load("h800x8x2"), load("a100x8x2")
ALL, COLUMN = tuple(range(16)), (0, 8)
MIB = 1 << 20
NIC_GB_PER_S = 46.0


def test_inside_an_island_the_curve_of_the_file_says_what_a_collective_takes():
    ranks = tuple(range(8))
    assert crossing_of(H800, "all_gather", ranks, 64 * MIB) is None
    assert collective_us(H800, "all_gather", ranks, 64 * MIB) == H800.collective_us("all_gather", 8, 64 * MIB)
    assert collective_us(H800, "all_to_all", ranks, MIB) == H800.collective_us("all_gather", 8, MIB)


def test_a_column_of_ranks_takes_a_step_and_its_bytes_over_one_nic():
    found = crossing_of(H800, "all_gather", COLUMN, 64 * MIB)
    # SOURCE: tuning.cc of NCCL 2.30.7: 8.4 us a call, and of islands of one rank 14 us a step.
    assert found.alone_us == pytest.approx(8.4 + 14.0 + 32 * MIB / NIC_GB_PER_S / 1e3)
    assert (found.name, found.inside_us, len(found.flows)) == ("ring Simple", 0.0, 2)
    assert crossing_of(H800, "all_reduce", COLUMN, 64 * MIB).alone_us > 1.9 * found.alone_us


def test_hosts_use_all_their_nics_and_are_no_quicker_than_nvlink():
    whole = crossing_of(H800, "all_gather", ALL, 256 * MIB)
    assert [flow.us for flow in whole.flows] == pytest.approx([whole.flows[0].us] * 16)
    assert whole.flows[0].us == pytest.approx(256 * MIB * 15 / 16 / 8 / NIC_GB_PER_S / 0.92 / 1e3, rel=0.01)
    assert whole.alone_us > whole.inside_us > H800.collective_us("all_gather", 8, 256 * MIB)


def test_small_calls_take_protocols_of_low_latency_and_all_reduces_trees():
    assert crossing_of(H800, "all_gather", ALL, 1 << 16).name == "ring LL"
    many = machine_of_ranks("h800x8x2", 256)
    of_all = tuple(range(256))
    assert crossing_of(many, "all_reduce", of_all, 1 << 16).name == "tree LL"
    # Rings pass every rank, trees every doubling of the islands.
    ring, tree = (crossing_of(many, function, of_all, 1 << 16) for function in ("all_gather", "all_reduce"))
    assert ring.latency_us > 4 * tree.latency_us
    columns = tuple(range(0, 256, 8))
    assert crossing_of(many, "all_gather", columns, 1 << 16).name in ("PAT", "ring LL")


def test_two_gpus_that_share_a_nic_have_half_of_it_each():
    alone = crossing_of(A100, "all_gather", (0, 8), 64 * MIB)
    both = crossing_of(A100, "all_gather", (0, 1, 8, 9), 64 * MIB)
    assert alone.flows[0].us == pytest.approx(32 * MIB / 23.0 / 1e3)
    assert both.alone_us - both.latency_us == pytest.approx(48 * MIB / 23.0 / 1e3)


def test_an_all_to_all_sends_what_is_meant_for_other_hosts_and_no_more():
    found = crossing_of(H800, "all_to_all", ALL, 64 * MIB)
    assert found.flows[0].us == pytest.approx(32 * MIB / NIC_GB_PER_S / 1e3)
    assert crossing_of(H800, "all_to_all", COLUMN, 64 * MIB).flows[0].us == pytest.approx(found.flows[0].us)


def test_a_rank_that_sends_to_one_other_takes_what_that_takes():
    sent = SentBytes(0, 0.0, 32 * MIB, (8,)), SentBytes(8, 0.0, 0.0, ())
    found = exchange_of(H800, COLUMN, sent)
    assert [(flow.source, flow.target) for flow in found.flows] == [(0, 8)]
    assert found.alone_us == pytest.approx(8.4 + 14.0 + 32 * MIB / NIC_GB_PER_S / 1e3)
    many = machine_of_ranks("h800x8x2", 256)
    nine, eight = (
        exchange_of(many, tuple(range(0, 256, 8)), (SentBytes(0, 0.0, MIB, tuple(range(8, 8 * count + 8, 8))),))
        for count in (9, 8)
    )
    assert nine.latency_us - eight.latency_us == pytest.approx(14.0)


def test_a_rank_holds_sms_by_the_nics_of_its_island():
    assert sms_of(H800, ALL) == 16
    assert sms_of(H800, COLUMN) == 4
    assert sms_of(A100, COLUMN) == 2
    assert sms_of(H800, tuple(range(8))) == H800.sharing.collective.sms
    few = replace(H800, sharing=replace(H800.sharing, collective=replace(H800.sharing.collective, sms=3)))
    assert sms_of(few, ALL) == 3


def test_islands_of_unlike_sizes_pass_on_by_as_many_nics_as_both_have():
    found = crossing_of(H800, "all_gather", (0, 1, 2, 8), 4 * MIB)
    assert [(flow.source, flow.target) for flow in found.flows] == [(0, 8), (8, 0)]


def columns_at_once(*columns: tuple[int, int]) -> Plan:
    """Of each pair of ranks an all-gather of 64 MiB, all begun together."""
    rows = 8192
    buffers = Buffer("x", rows, 2048, "input"), Buffer("y", 2 * rows, 2048, "output")
    operations = [
        Collective(
            name=f"gather.{rank}",
            rank=rank,
            queue="main",
            function="all_gather",
            label=f"gather.{pair[0]}",
            ranks=pair,
            sources=(Region("x", rank, (0, rows), (0, 2048)),),
            destinations=tuple(Region("y", rank, (at * rows, (at + 1) * rows), (0, 2048)) for at in range(2)),
        )
        for pair in columns
        for rank in pair
    ]
    schedule = Schedule(
        name="columns",
        world_size=16,
        buffers=buffers,
        queues=(Queue("main", "complete"),),
        given=(),
        goal=(),
        operations=tuple(operations),
    )
    problem = Problem(operator="matmul", m=rows, n=1, k=1, world_size=16, dtype="bfloat16")
    engines = (EngineAssignment("main", LIBRARY),)
    return Plan(
        name="columns", problem=problem, schedule=schedule, realization=Realization(dtype="bfloat16", engines=engines)
    )


def test_collectives_that_cross_by_one_nic_at_once_share_it():
    """Ranks 0 and 1 of these A100s have a NIC in common, ranks 0 and 2 have not; H800s have one each."""
    apart_us = total_us(columns_at_once((0, 8)), A100)
    assert total_us(columns_at_once((0, 8), (2, 10)), A100) == pytest.approx(apart_us)
    shared_us, bytes_us = total_us(columns_at_once((0, 8), (1, 9)), A100), 32 * MIB / 23.0 / 1e3
    assert shared_us - apart_us == pytest.approx(bytes_us)
    one_us = total_us(columns_at_once((0, 8)), H800)
    assert total_us(columns_at_once(*((rank, rank + 8) for rank in range(8))), H800) == pytest.approx(one_us)


def test_a_simulated_collective_takes_what_it_takes_alone():
    timeline = simulate(columns_at_once((0, 8)), H800)
    latency = H800.latency
    alone_us = crossing_of(H800, "all_gather", (0, 8), 64 * MIB).alone_us
    assert timeline.busy_us(0, ("collective",)) == pytest.approx(alone_us, abs=2 * latency.flag.us)


def test_what_crosses_by_a_nic_takes_nothing_from_copies_inside_a_host():
    ended: dict[int, float] = {}
    loads: list[tuple[int, float]] = []
    clock = EventQueue()
    ports = Ports(clock, H800, lambda rank, load: loads.append((rank, load)))
    for target in (1, 8):
        ports.copy(Segment(0, target, 100.0), lambda target=target: ended.update({target: clock.now}))
    clock.run()
    assert ended == {1: pytest.approx(100.0), 8: pytest.approx(100.0)}
    assert {rank for rank, _ in loads} == {0, 1}
