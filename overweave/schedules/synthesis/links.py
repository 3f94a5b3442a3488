"""The links between the GPUs of a machine as a search sees them: who reaches whom without a third GPU, and how fast.

A copy holds a share of both ports and of every link of its route. What no schedule can beat follows from cuts: bytes
that have to enter a part of the machine, over the links that lead there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import permutations

from msgspec import Struct
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.hardware.machine import Machine
from overweave.hardware.topology import Endpoint, Hop

Shared = tuple[Endpoint, Endpoint]  # a link in one direction; or a port: (rank, "out"), ("into", rank)
PORTS = 2  # of a route, in front of its links


class LinkRoute(Struct, frozen=True, eq=False):
    """The way of a copy between two GPUs, over their ports and then over links. gb_per_s: of one copy alone. takes: the
    share of each port and link that it then has. cost: of all links together, for a byte: of two routes into a GPU, the
    one with less burdens the machine less. level: how many costs of the machine's are lower."""

    source: int
    target: int
    takes: dict[Shared, float]
    gb_per_s: float
    cost: float
    level: int = 0

    @property
    def ports(self) -> list[Shared]:
        return [*self.takes][:PORTS]

    @property
    def leaves_by(self) -> Shared:
        """The link by which it leaves its source."""
        return [*self.takes][PORTS]


class Joined:
    """Some GPUs of a machine, as ranks `0 .. ranks - 1`. routes: between any two. near: those that cross no third GPU;
    all where these do not join the GPUs."""

    def __init__(self, machine: Machine, gpus: tuple[int, ...]) -> None:
        self.machine, self.gpus, self.ranks = machine, gpus, len(gpus)
        self.gb_per_s = {hop: curve.peak_gb_per_s for hop, curve in machine.routes.curves.items()}
        # Copies that share a port have so much of their speeds alone, together (sim/ports.py).
        self.port = max(1.0, machine.engines_gb_per_s / machine.links.push.peak_gb_per_s)
        routes = {pair: self._route(*pair) for pair in permutations(range(self.ranks), 2)}
        costs = sorted({route.cost for route in routes.values()})
        self.routes = {pair: replace(route, level=costs.index(route.cost)) for pair, route in routes.items()}
        self.levels = len(costs)
        near = {pair: route for pair, route in self.routes.items() if not self._passes_gpu(*pair)}
        self.near = near if len(_components(set(near), range(self.ranks))) == 1 else self.routes

    @property
    def shares(self) -> dict[Shared, float]:
        """All ports and links, nothing of them taken."""
        return dict.fromkeys((link for route in self.routes.values() for link in route.takes), 1.0)

    def _route(self, source: int, target: int) -> LinkRoute:
        hops = self.machine.routes.between(self.gpus[source], self.gpus[target])
        alone = min(self.machine.links.push.peak_gb_per_s, *(self.gb_per_s[hop] for hop in hops))
        out, into = (self.gpus[source], "out"), ("into", self.gpus[target])
        ports: dict[Shared, float] = {out: 1 / self.port, into: 1 / self.port}
        takes = ports | {hop: alone / self.gb_per_s[hop] for hop in hops}
        return LinkRoute(source, target, takes, alone, round(sum(1 / self.gb_per_s[hop] for hop in hops), 9))

    def _passes_gpu(self, source: int, target: int) -> bool:
        hops = self.machine.routes.between(self.gpus[source], self.gpus[target])
        return any(isinstance(hop[0], int) for hop in hops[1:])

    def alone_us(self, route: LinkRoute, size_bytes: float) -> float:
        """A copy's time with nobody beside it."""
        machine = self.machine
        links_us = machine.routes.time_us(self.gpus[route.source], self.gpus[route.target], size_bytes)
        return max(machine.links.push.time_us(size_bytes), links_us) + machine.latency.flag.us

    def cuts(self) -> Iterator[tuple[frozenset[int], float]]:
        """Parts of the machine with the GB/s of all links that lead there: each GPU, and what is left together where
        the slower links, or one of them, are taken away."""
        hops = self.gb_per_s
        kept = [{hop for hop in hops if hops[hop] > rate} for rate in sorted({*hops.values()})]
        kept += [hops.keys() - {hop, hop[::-1]} for hop in hops]
        parts = {frozenset((gpu,)): frozenset[Endpoint]((gpu,)) for gpu in self.gpus}
        for left in kept:
            parts |= {frozenset(self._ranks_in(part)): part for part in _components(left, self.gpus)}
        for ranks, part in parts.items():
            into = sum(rate for hop, rate in hops.items() if hop[1] in part and hop[0] not in part)
            if 0 < len(ranks) < self.ranks:
                yield ranks, min(into, self.machine.engines_gb_per_s * len(ranks))

    def _ranks_in(self, part: frozenset[Endpoint]) -> list[int]:
        return [place for place in part if isinstance(place, int) and place in self.gpus]


def _components(hops: set[Hop], gpus: Iterable[int]) -> list[frozenset[Endpoint]]:
    part_of: dict[Endpoint, set[Endpoint]] = {gpu: {gpu} for gpu in gpus}
    for one, other in hops:
        joined = part_of.setdefault(one, {one}) | part_of.setdefault(other, {other})
        for place in joined:
            part_of[place] = joined
    return list({frozenset(part) for part in part_of.values()})


@lru_cache(maxsize=64)
def joined(machine: Machine, ranks: int | tuple[int, ...]) -> Joined:
    """The links of some GPUs of a machine: the first ones, or those that are named. Raises InputError for too few, and
    MachineFileError for a GPU that no link reaches."""
    gpus = tuple(range(ranks)) if isinstance(ranks, int) else ranks
    if max(gpus, default=0) >= machine.gpus:
        cure = "Ask for fewer ranks, or another machine"
        raise InputError(f"{max(gpus) + 1} ranks on {machine.name}", f"it has {machine.gpus} GPUs", cure)
    return Joined(machine, gpus)


def gather_bound_us(machine: Machine, ranks: int, shard_bytes: float) -> float:
    """What no all-gather of equal shards can beat, and no reduce-scatter, which is its mirror: the slowest cut."""
    cuts = joined(machine, ranks).cuts() if ranks > 1 else ()
    return max(((ranks - len(part)) * shard_bytes / rate / 1e3 for part, rate in cuts), default=0.0)
