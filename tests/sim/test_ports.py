"""Copies: alone, sharing a port, and what they tell the SMs."""

from __future__ import annotations

import pytest

from overweave.hardware.machine import Machine
from overweave.sim.cost import Segment
from overweave.sim.events import Clock
from overweave.sim.ports import Ports


@pytest.fixture
def run(paper: Machine):
    """Runs copies (start, source, target, alone) and returns when each ended, and the loads of rank 0 by time."""

    def run(*copies: tuple[float, int, int, float]):
        clock, ends, loads = Clock(), {}, []
        ports = Ports(clock, paper, lambda rank, load: loads.append((clock.now, load)) if rank == 0 else None)
        for number, (start, source, target, alone) in enumerate(copies):
            segment = Segment(source, target, alone)
            done = lambda number=number: ends.update({number: round(clock.now, 6)})  # noqa: E731
            clock.at(start, lambda segment=segment, done=done: ports.copy(segment, done))
        clock.run()
        return [ends[number] for number in range(len(copies))], loads

    return run


def test_a_ring_does_not_slow_down(run):
    ends, loads = run((0, 0, 1, 10.0), (0, 1, 2, 10.0), (0, 2, 3, 10.0), (0, 3, 0, 10.0))
    assert ends == [10.0] * 4
    assert [load for _, load in loads][-2:] == [1.0, 0.0]


def test_copies_out_of_one_port_share_it_while_they_overlap(run):
    ends, _ = run((0, 0, 1, 10.0), (5, 0, 2, 10.0))
    assert ends == [15.0, 20.0]  # 5 alone, 10 shared for 5 of each, 5 alone


def test_copies_into_one_port_share_it(run):
    ends, _ = run((0, 1, 0, 10.0), (0, 2, 0, 10.0), (0, 3, 0, 10.0))
    assert ends == [30.0] * 3


def test_a_copy_within_a_rank_uses_no_port(run):
    ends, loads = run((0, 0, 0, 10.0), (0, 0, 1, 10.0))
    assert ends == [10.0, 10.0]
    assert max(load for _, load in loads) == 0.5
