"""Machines whose GPUs are joined as no template expects: MI300X and GH200 with other links."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from overweave.hardware.machine import Machine, load
from overweave.hardware.topology import Endpoint, Link, Topology, TopologyKind


def joined_by(kind: TopologyKind, pairs: Iterable[tuple[Endpoint, Endpoint]], gpus: int = 8) -> Machine:
    """GPUs of mi300x8 with these links."""
    base = load("mi300x8")
    links = (Link(tuple(pairs), base.topology.links[0].curve),)
    return replace(base, name=f"{kind}{gpus}", gpus=gpus, topology=replace(base.topology, kind=kind, links=links))


def mesh(gpus: int = 8, without: tuple[int, int] | None = None) -> Machine:
    """Every two GPUs joined, but one pair."""
    pairs = [(one, other) for other in range(gpus) for one in range(other) if (one, other) != without]
    return joined_by("levels" if without else "full_mesh", pairs, gpus)


def ring(gpus: int = 8, is_broken: bool = False) -> Machine:
    """Every GPU joined to the next one; a broken ring is a chain."""
    pairs = [(rank, (rank + 1) % gpus) for rank in range(gpus - is_broken)]
    return joined_by("levels" if is_broken else "closed_ring", pairs, gpus)


def tree(gpus: int, fan: int = 4) -> Machine:
    """Bridges of so many GPUs, all at one root."""
    bridges = [f"bridge{index}" for index in range(gpus // fan)]
    pairs: list[tuple[Endpoint, Endpoint]] = [(rank, bridges[rank // fan]) for rank in range(gpus)]
    return joined_by("tree", pairs + [(bridge, "root") for bridge in bridges], gpus)


def scattered_pairs() -> Machine:
    """h100_nvlx8, whose pairs by NVLink are 0 and 4, 1 and 5, ...: no neighbours by rank."""
    base = load("h100_nvlx8")
    fast, *slow = base.topology.links
    pairs = tuple((rank, rank + 4) for rank in range(4))
    topology: Topology = replace(base.topology, links=(replace(fast, between=pairs), *slow))
    return replace(base, name="h100_nvlx8.scattered", topology=topology)
