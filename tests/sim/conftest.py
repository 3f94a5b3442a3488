"""A machine on paper whose numbers can be added up in one's head, and short ways to write schedules for it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.hardware.machine import (
    CollectiveCurve,
    ElementWise,
    HeldSms,
    Latencies,
    Latency,
    Machine,
    Share,
    Sharing,
    TileRate,
    load,
)
from overweave.hardware.topology import Bandwidth, Curve, SmCurve


@pytest.fixture
def paper() -> Machine:
    """2 SMs, 10 us a tile, copies at 1 us per 1000 bytes, half as fast each way when two share a port, no latencies."""
    line = Curve(points=((1.0, 1.0), (1e6, 1.0)), source="paper")
    tiles = (
        TileRate("portable", 16, 16, tflops=1e12, overhead_us=10.0, source="paper"),
        TileRate("library", 16, 16, tflops=1e12, overhead_us=10.0, source="paper"),
    )
    push = SmCurve(points=((2.0, 2.0),), source="paper")
    machine = load("h200x4")
    return replace(
        machine,
        name="paper",
        processor=replace(machine.processor, sms=2),
        hbm=Bandwidth(1e9, "paper"),
        local_copies=replace(machine.local_copies, gb_per_s=1e9),
        element_wise=ElementWise(*[Bandwidth(1e9, "paper")] * 3),
        tiles=tiles,
        links=replace(machine.links, push=line, pull=line, all_peers=line, strided=Share(2.0, "paper"), sm_push=push),
        collectives=(CollectiveCurve("all_gather", 2, ((1.0, 1.0), (1e6, 1.0)), "paper"),),
        latency=Latencies(**dict.fromkeys(Latencies.__struct_fields__, Latency(0.0, "paper"))),
        sharing=Sharing(copy_engine=Share(1.0, "paper"), collective=HeldSms(1, "paper")),
    )
