"""Machines of several hosts: which GPUs are an island, what crosses by NICs, and how a group lies on hosts."""

from __future__ import annotations

import msgspec
import pytest

from overweave.errors import MachineFileError
from overweave.hardware.cards import H200, MachineMatch, hosts_like, machine_for, machine_named, machine_of_ranks
from overweave.hardware.machine import decode, load, names
from overweave.hardware.topology import Bandwidth, Curve, Link, Routes, Topology, check, placed

OF_HOSTS = [name for name in names() if load(name).topology.has_hosts]


def line(gb_per_s: float) -> Curve:
    return Curve(((1.0, gb_per_s), (1e6, gb_per_s)), "paper")


def hosts(gpus: int, nics: str = "nic/1") -> Topology:
    """Hosts of so many GPUs each."""
    links = (
        Link((("gpu", f"switch/{gpus}"),), line(100.0)),
        Link((("gpu", nics),), line(60.0)),
        Link(((nics, "network"),), line(50.0), "messages"),
    )
    return Topology("levels", Bandwidth(160.0, "paper"), links)


def test_each_host_is_an_island_whose_copies_cross_no_nic():
    routes = Routes(hosts(2), 5)
    assert routes.islands == ((0, 1), (2, 3), (4,))
    assert routes.between(2, 3) == ((2, "switch1"), ("switch1", 3))
    assert routes.between(1, 4) == ((1, "nic1"), ("nic1", "network"), ("network", "nic4"), ("nic4", 4))
    assert routes.alone_gb_per_s(1, 4) == 50.0
    assert ("nic1", "network") in routes.nics
    assert (1, "nic1") not in routes.nics
    assert not routes.are_alike(4)


def test_gpus_share_the_nic_that_stands_for_so_many_of_them():
    routes = Routes(hosts(4, "nic/2"), 8)
    assert routes.between(0, 4)[1] == routes.between(1, 5)[1] == ("nic0", "network")
    assert routes.between(2, 6)[1] == ("nic1", "network")


def test_links_that_carry_memory_alone_are_one_island_however_slow():
    assert len(load("a800x4").islands) == len(load("h100_pciex8").islands) == len(load("gb200x72").islands) == 1


@pytest.mark.parametrize("name", OF_HOSTS)
def test_described_hosts_have_eight_gpus_and_say_where_their_numbers_come_from(name: str):
    machine = load(name)
    assert {len(island) for island in machine.islands} == {8}
    assert machine.gpus == 8 * int(name.rpartition("x")[2])
    nics = [link for link in machine.topology.links if link.carries == "messages"]
    assert nics
    assert all("Gb/s" in link.curve.source and "estimate" in link.curve.source for link in nics)


def test_two_and_sixteen_hosts_are_described_of_each_kind():
    kinds = ("h100", "h200", "b200", "h800")
    assert {f"{kind}x8x{count}" for kind in kinds for count in (2, 16)} <= set(OF_HOSTS)


def test_hosts_stand_for_more_of_their_kind_and_one_host_does_not():
    many = machine_of_ranks("h800x8x2", 1024)
    assert (many.gpus, len(many.islands)) == (1024, 128)
    assert len(machine_of_ranks("h800x8x2", 20).islands) == 3
    assert machine_for(machine_named("h800x8x2"), 1025) is None
    assert machine_for(machine_named("h800x8"), 16) is None


def test_ranks_lie_on_hosts_as_a_group_says():
    apart = ((0, 2, 4), (1, 3))  # no neighbours, and not as many on each
    machine = machine_for(MachineMatch("h800x8", "guess"), 5, apart)
    assert (machine.gpus, machine.islands) == (5, apart)
    assert len(machine.routes.between(0, 4)) == 2
    assert len(machine.routes.between(0, 1)) == 4


def test_hosts_that_are_measured_are_joined_as_described_ones_of_their_cards():
    assert hosts_like(load("h200x4")).name == "h200x8x2"
    assert hosts_like(load("h800x8x16")).name == "h800x8x16"
    assert hosts_like(load("l40sx8")) is None
    machine = machine_for(H200, 4, ((0, 1), (2, 3)))
    assert machine.latency == load("h200x4").latency
    assert machine_for(MachineMatch("l40sx8", "guess"), 4, ((0, 1), (2, 3))) is None


def test_more_ranks_than_a_host_has_gpus_are_no_island_of_it():
    assert placed(hosts(2), ((0, 1, 2), (3,))) is None
    assert placed(hosts(2), ((0, 1), (3,))) is None


REFUSED = (
    (msgspec.structs.replace(hosts(2), kind="tree"), "messages alone in a tree"),
    (msgspec.structs.replace(hosts(2), slots=(0, 1)), "2 slots of 4"),
    (msgspec.structs.replace(hosts(2), slots=(0, 1, 2, 2)), "4 slots of 4"),
)


@pytest.mark.parametrize(("wrong", "told"), REFUSED, ids=[told for _, told in REFUSED])
def test_what_no_hosts_are_is_refused(wrong: Topology, told: str):
    with pytest.raises(MachineFileError, match=told) as refused:
        check(wrong, 4)
    assert refused.value.cure


@pytest.mark.parametrize("place", ["nic/0", "nic/x", "nic/" + "9" * 40, "/"])
def test_a_place_without_a_count_is_one_place_of_all(place: str):
    topology = msgspec.to_builtins(hosts(2, place))
    data = msgspec.json.encode({"like": "h200x4", "title": "mine", "topology": topology})
    assert decode(data, "mine.json").routes.between(0, 2) == ((0, place), (place, 2))
