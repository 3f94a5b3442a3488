"""Copies: alone, sharing a port, and what they tell the SMs."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.hardware.machine import Machine
from overweave.hardware.topology import Bandwidth, Curve, Link, Topology
from overweave.sim.cost import Segment
from overweave.sim.events import EventQueue
from overweave.sim.ports import Ports


@pytest.fixture
def run(paper: Machine):
    """Runs copies (start, source, target, alone) and returns when each ended, and the loads of rank 0 by time."""

    def run(*copies: tuple[float, int, int, float], machine: Machine = paper):
        clock, ends, loads = EventQueue(), {}, []
        ports = Ports(clock, machine, lambda rank, load: loads.append((clock.now, load)) if rank == 0 else None)
        for number, (start, source, target, alone) in enumerate(copies):
            segment = Segment(source, target, alone)
            done = lambda number=number: ends.update({number: round(clock.now, 6)})  # noqa: E731
            clock.at(start, lambda segment=segment, done=done: ports.copy(segment, done))
        clock.run()
        return [ends[number] for number in range(len(copies))], loads

    return run


def joined(paper: Machine, kind: str, *links: tuple[float, tuple[tuple[int | str, int | str], ...]]) -> Machine:
    """The machine whose copies reach 1 GB/s alone and 3 through a port, with links of so many GB/s."""
    made = tuple(Link(pairs, Curve(((1.0, rate),), "paper")) for rate, pairs in links)
    topology = Topology(kind, Bandwidth(9.0, "paper"), made)
    return replace(paper, topology=topology, links=replace(paper.links, all_peers=Curve(((1.0, 3.0),), "paper")))


def test_on_a_mesh_copies_to_all_peers_are_as_fast_as_one_and_copies_on_one_link_share_it(run, paper):
    mesh = joined(paper, "full_mesh", (1.0, (("gpu", "gpu"),)))
    ends, loads = run((0, 0, 1, 10.0), (0, 0, 2, 10.0), (0, 0, 3, 10.0), machine=mesh)
    assert ends == [10.0] * 3
    assert max(load for _, load in loads) == 0.5  # full traffic, out only
    assert run((0, 0, 1, 10.0), (0, 0, 1, 10.0), machine=mesh)[0] == [20.0] * 2


def test_a_copy_past_a_neighbour_of_a_ring_shares_the_links_that_it_crosses(run, paper):
    ring = joined(paper, "closed_ring", (1.0, ((0, 1), (1, 2), (2, 3), (3, 0))))
    assert run((0, 0, 2, 10.0), (0, 2, 0, 10.0), machine=ring)[0] == [10.0] * 2  # a link has two directions
    assert run((0, 0, 2, 10.0), (0, 1, 2, 10.0), machine=ring)[0] == [20.0] * 2


def test_copies_between_the_branches_of_a_tree_share_its_trunk(run, paper):
    branches = ((0, "left"), (1, "left"), (2, "right"), (3, "right"))
    tree = joined(paper, "tree", (2.0, branches), (1.0, (("left", "right"),)))
    assert run((0, 0, 2, 10.0), (0, 1, 3, 10.0), machine=tree)[0] == [20.0] * 2
    assert run((0, 0, 1, 10.0), (0, 2, 3, 10.0), machine=tree)[0] == [10.0] * 2


def test_a_copy_within_a_rank_loads_its_memory_where_a_dma_engine_makes_it(run, paper):
    dma = replace(paper, local_copies=replace(paper.local_copies, by="dma", gb_per_s=1.0))
    ends, loads = run((0, 0, 0, 10.0), machine=dma)
    assert ends == [10.0]
    assert loads == [(0.0, 0.5), (10.0, 0.0)]
