"""Topologies: which links a transfer crosses, and what a file may not say of them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from overweave.errors import MachineFileError
from overweave.hardware.machine import decode, load, names
from overweave.hardware.topology import Bandwidth, Curve, Link, Routes, Topology, check
from tests.clock import ends_within

PORT = Bandwidth(100.0, "paper")


def topology(kind: str, *links: tuple[float, tuple[tuple[int | str, int | str], ...]]) -> Topology:
    made = tuple(Link(pairs, Curve(((1.0, rate), (1e6, rate)), "paper")) for rate, pairs in links)
    return Topology(kind, PORT, made)


def test_a_transfer_takes_the_fewest_links():
    ring = Routes(topology("closed_ring", (50, ((0, 1), (1, 2), (2, 3), (3, 4), (4, 0)))), 5)
    assert ring.between(0, 2) == ((0, 1), (1, 2))
    assert ring.between(0, 3) == ((0, 4), (4, 3))
    mesh = Routes(topology("full_mesh", (50, (("gpu", "gpu"),))), 8)
    assert mesh.between(6, 1) == ((6, 1),)


def test_the_slowest_link_of_a_route_says_how_long_a_transfer_takes():
    islands = (50, ((0, "left"), (1, "left"), (2, "right"), (3, "right")))
    levels = Routes(topology("levels", islands, (2, (("left", "right"),))), 4)
    assert levels.alone_gb_per_s(0, 1) == 50
    assert levels.alone_gb_per_s(0, 3) == 2
    assert levels.time_us(0, 3, 1e6) == pytest.approx(500.0)


def test_a_switch_and_a_mesh_have_as_many_gpus_as_the_machine():
    assert Routes(topology("switch", (50, (("gpu", "switch"),))), 64).between(63, 5) == ((63, "switch"), ("switch", 5))
    assert len(topology("full_mesh", (50, (("gpu", "gpu"),))).hops(8)) == 56


REFUSED = (
    (topology("full_mesh", (50, ((0, 1), (1, 2)))), "no link between 0 and 2"),
    (topology("closed_ring", (50, ((0, 1), (1, 2)))), "no link between 2 and 0"),
    (topology("switch", (50, ((0, "switch"), (2, "switch")))), "no link between 1 and switch"),
    (topology("switch", (50, ((0, "a"), (1, "a"), (2, "b")))), "2 switches"),
    (topology("levels", (50, ((0, 1), (2, "network")))), "no route from GPU 0 to GPU 2"),
    (topology("tree", (50, ((0, "cpu"), (1, "cpu"), (2, "cpu"), (0, 1)))), "one way between two places"),
    (topology("full_mesh", (101, (("gpu", "gpu"),))), "101 GB/s between 0 and 1, 100 at the port"),
    (topology("levels", (50, ((0, 1), (1, 2), (2, 3)))), "GPU 3 of 3"),
)


@pytest.mark.parametrize(("wrong", "told"), REFUSED, ids=[told for _, told in REFUSED])
def test_what_no_machine_has_is_refused_with_a_cure(wrong: Topology, told: str):
    with pytest.raises(MachineFileError, match=told) as refused:
        check(wrong, 3)
    assert refused.value.cure


def changed(**fields: object) -> bytes:
    return msgspec.json.encode({"like": "h200x4", "title": "another", **fields})


def test_a_file_that_is_like_another_names_whose_its_numbers_are():
    machine = decode(changed(latency={"call": {"us": 9.0, "source": "mine"}}), "mine.json")
    assert (machine.latency.call.us, machine.latency.call.source) == (9.0, "mine")
    assert machine.latency.kernel.us == load("h200x4").latency.kernel.us
    assert machine.latency.kernel.source.startswith("as h200x4: fitted")


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (changed(links={"push": {"points": [[2, 1], [1, 1]], "source": "mine"}}), "out of order: 2, 1"),
        (changed(links={"sm_push": {"points": [[2, 1], [2, 1]], "source": "mine"}}), "out of order: 2, 2"),
        (changed(hbm={"gb_per_s": -1, "source": "mine"}), "hbm"),
        (changed(colour="red"), "colour"),
        (b"no JSON", "malformed"),
        (b"[" * 10_000, "Recursion|recursion|depth"),
    ],
)
def test_a_file_that_describes_no_machine_is_refused(data: bytes, told: str):
    with pytest.raises(MachineFileError, match=told) as refused:
        decode(data, "mine.json")
    assert refused.value.cure


def test_the_machines_of_the_papers_are_there():
    gpus = {name: load(name).gpus for name in names()}
    assert {name for name, count in gpus.items() if count == 8} >= {
        "h100x8",
        "h200x8",
        "a100x8",
        "a100_pciex8",
        "mi300x8",
    }
    assert {name for name, count in gpus.items() if count == 4} >= {"h200x4", "rtx4090x4", "a800x4"}


def test_a_field_with_a_typing_error_is_told_with_its_file_and_the_nearest_name():
    data = msgspec.json.encode(msgspec.to_builtins(load("h200x4")) | {"gpu": 4})
    with pytest.raises(MachineFileError, match=r"mine.json.*`gpu`.*nearest first: gpus"):
        decode(data, "mine.json")


@pytest.mark.parametrize(
    ("told", "changed"),
    [
        ("stands twice", lambda data: data.replace(b'"gpus":', b'"gpus":4,"gpus":', 1)),
        ("<= 1024", lambda data: data.replace(b'"gpus":4', b'"gpus":1000000000', 1)),
        (
            ">= 1e-09",
            lambda data: data.replace(
                b'"hbm":{"gb_per_s":', b'"hbm":{"gb_per_s":1e-320,"source":"x"},"h":{"gb_per_s":', 1
            ),
        ),
        ("not printed", lambda data: data.replace(b'"title":"', b'"title":"\\u001b[2J', 1)),
        ("more than", lambda data: data + b" " * (1 << 20)),
        ("like 'mine.json'", lambda data: b'{"like": "mine.json"}'),
    ],
)
def test_what_no_machine_file_holds_is_refused(told: str, changed: Callable[[bytes], bytes]):
    data = msgspec.json.encode(msgspec.to_builtins(load("h200x4")))
    assert changed(data) != data
    with pytest.raises(MachineFileError, match=told):
        decode(changed(data), "mine.json")


def _joined(kind: str, gpus: int, between: list[list[object]]) -> bytes:
    told = msgspec.to_builtins(load("h200x4"))
    links = [{**link, "between": between} for link in told["topology"]["links"]]
    return msgspec.json.encode(told | {"gpus": gpus, "topology": {**told["topology"], "kind": kind, "links": links}})


@pytest.mark.parametrize(
    "between", [[["gpu", "gpu"]] * 1000, [["gpu", f"s{at}"] for at in range(1000)]], ids=["mesh", "names"]
)
def test_more_links_than_anybody_has_are_refused_before_they_are_listed(between: list[list[object]]):
    def read() -> None:
        with pytest.raises(MachineFileError, match="at most 131072"):
            decode(_joined("levels", 1024, between), "mine.json")

    ends_within(0.2, read)


@pytest.mark.slow
def test_every_two_of_512_gpus_may_be_joined():
    ends_within(1.0, lambda: decode(_joined("full_mesh", 512, [["gpu", "gpu"]]), "mine.json"))
