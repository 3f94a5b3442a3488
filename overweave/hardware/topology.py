"""How the GPUs of a machine are joined: links between pairs of places, and the links that a transfer crosses.

A place is a GPU, by its rank, or what joins GPUs, by its name: a switch, a PCIe bridge, a network. A transfer takes the
route of the fewest links and is shared out on each of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from itertools import combinations
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from overweave.errors import MachineFileError
from overweave.hardware.curves import Bandwidth, Curve

Endpoint = int | str
EACH_GPU = "gpu"  # in a pair of a file, every GPU in its turn; two of them, every two GPUs
MOST_LINKS = 1 << 17  # every two of 512 GPUs
TopologyKind = Literal["switch", "full_mesh", "closed_ring", "tree", "levels"]
Hop = tuple[Endpoint, Endpoint]  # a link in one direction


class Link(Struct, frozen=True, forbid_unknown_fields=True):
    """Links that are alike, between pairs of places, each with `curve` in either direction."""

    between: tuple[tuple[Endpoint, Endpoint], ...]
    curve: Curve


class Topology(Struct, frozen=True, forbid_unknown_fields=True, cache_hash=True):
    """The links of a machine, and the port through which a GPU passes all its bytes in one direction.

    kind, which the links are held against. switch: every GPU has a link to one switch that never blocks. full_mesh:
    every two GPUs have a link. closed_ring: every GPU has a link to the next. tree: one way between any two places, as
    PCIe bridges have. levels: islands of GPUs, joined by slower links.
    """

    kind: TopologyKind
    port: Bandwidth
    links: tuple[Link, ...]

    def hops(self, gpus: int) -> dict[Hop, Curve]:
        """Every link in every direction, for so many GPUs."""
        found: dict[Hop, Curve] = {}
        for link in self.links:
            for one, other in link.between:
                for pair in _pairs(one, other, gpus):
                    found[pair] = found[pair[::-1]] = link.curve
        return found


class Routes:
    """The links that transfers between the GPUs of a topology cross."""

    def __init__(self, topology: Topology, gpus: int) -> None:
        self.curves = topology.hops(gpus)
        self._neighbours: dict[Endpoint, list[Endpoint]] = {}
        for one, other in self.curves:
            self._neighbours.setdefault(one, []).append(other)
        self._towards: dict[int, dict[Endpoint, Endpoint]] = {}
        self._found: dict[tuple[int, int], tuple[Hop, ...]] = {}

    def between(self, source: int, target: int) -> tuple[Hop, ...]:
        """The fewest links from one GPU to another, in order. Raises MachineFileError where there is no way."""
        if (source, target) not in self._found:
            self._found[source, target] = self._route(source, target)
        return self._found[source, target]

    def alone_gb_per_s(self, source: int, target: int) -> float:
        """What the slowest link of the route reaches."""
        return min(self.curves[hop].peak_gb_per_s for hop in self.between(source, target))

    def time_us(self, source: int, target: int, size_bytes: float) -> float:
        """Of a transfer alone, as far as the links limit it."""
        return max(self.curves[hop].time_us(size_bytes) for hop in self.between(source, target))

    def are_alike(self, gpus: int) -> bool:
        """Whether all pairs of GPUs are joined alike: by as many links, as fast."""
        routes = (self.between(one, other) for one, other in combinations(range(gpus), 2))
        return len({tuple(self.curves[hop].peak_gb_per_s for hop in route) for route in routes}) <= 1

    def _route(self, source: int, target: int) -> tuple[Hop, ...]:
        if source not in self._towards:
            self._towards[source] = self._origins(source)
        origins = self._towards[source]
        if target not in origins:
            cure = "Give the file a link between the two, or to a switch that both have"
            raise MachineFileError("topology", f"no way from GPU {source} to GPU {target}", cure)
        hops: list[Hop] = []
        place: Endpoint = target
        while place != source:
            hops.append((origins[place], place))
            place = origins[place]
        return tuple(reversed(hops))

    def _origins(self, source: int) -> dict[Endpoint, Endpoint]:
        """From where the nearest way from `source` comes to each place."""
        origins: dict[Endpoint, Endpoint] = {source: source}
        waiting = deque[Endpoint]([source])
        while waiting:
            place = waiting.popleft()
            for other in self._neighbours.get(place, ()):
                if other not in origins:
                    origins[other] = place
                    waiting.append(other)
        return origins


@lru_cache(maxsize=64)
def routes(topology: Topology, gpus: int) -> Routes:
    """Of a topology with so many GPUs."""
    return Routes(topology, gpus)


def widened(topology: Topology, gpus: int, wanted: int) -> Topology | None:
    """The same with more GPUs: as many more at each switch and bridge, and pairs as the first ones. None for a ring, of
    which every GPU is a part.
    """
    if topology.kind == "closed_ring":
        return None
    return replace(topology, links=tuple(_repeated(link, gpus, wanted) for link in topology.links))


def _repeated(link: Link, gpus: int, wanted: int) -> Link:
    pairs = list(link.between)
    for first in range(gpus, wanted, gpus):
        for pair in link.between:
            moved = tuple(place + first if isinstance(place, int) else place for place in pair)
            if moved != pair and all(place < wanted for place in moved if isinstance(place, int)):
                pairs.append((moved[0], moved[1]))
    return replace(link, between=tuple(pairs))


def check(topology: Topology, gpus: int) -> None:
    """Raises MachineFileError for a link that is missing, a link faster than its port, a GPU that cannot be reached,
    and for more links than anybody has."""
    count = sum(_pair_count(one, other, gpus) for link in topology.links for one, other in link.between)
    if count > MOST_LINKS:
        raise MachineFileError("topology", f"{count} links", f"Name each link once: at most {MOST_LINKS}")
    hops = topology.hops(gpus)
    for (one, other), curve in hops.items():
        is_of_gpu = isinstance(one, int) or isinstance(other, int)
        if is_of_gpu and curve.peak_gb_per_s > topology.port.gb_per_s:
            found = f"{curve.peak_gb_per_s:g} GB/s between {one} and {other}, {topology.port.gb_per_s:g} at the port"
            raise MachineFileError("topology", found, "A GPU passes all its links through its port: raise the port")
    strange = {place for hop in hops for place in hop if isinstance(place, int) and not 0 <= place < gpus}
    if strange:
        raise MachineFileError("topology", f"a link of GPU {min(strange)} of {gpus}", "Number the GPUs from 0")
    _check_kind(topology.kind, hops, gpus)
    if gpus > 1:
        reached = Routes(topology, gpus)
        for target in range(1, gpus):
            reached.between(0, target)


def _check_kind(kind: TopologyKind, hops: dict[Hop, Curve], gpus: int) -> None:
    """Whether the links make what the file calls them."""
    missing = [pair for pair in _WANTED[kind](hops, gpus) if pair not in hops]
    if missing:
        found = f"no link between {missing[0][0]} and {missing[0][1]}"
        more = f", and {len(missing) - 1} more are missing" if missing[1:] else ""
        raise MachineFileError(f"{kind} topology", found + more, "Add the pair to a link, or name another kind")


def _every_two(hops: dict[Hop, Curve], gpus: int) -> list[Hop]:
    return list(combinations(range(gpus), 2))


def _each_to_the_next(hops: dict[Hop, Curve], gpus: int) -> list[Hop]:
    return [(rank, (rank + 1) % gpus) for rank in range(gpus if gpus > 2 else gpus - 1)]


def _each_to_one_switch(hops: dict[Hop, Curve], gpus: int) -> list[Hop]:
    switches = {place for hop in hops for place in hop if isinstance(place, str)}
    if len(switches) != 1:
        raise MachineFileError("switch topology", f"{len(switches)} switches", "Join all GPUs to one switch")
    return [(rank, min(switches)) for rank in range(gpus)]


def _no_second_way(hops: dict[Hop, Curve], gpus: int) -> list[Hop]:
    """A tree wants no link, but fewer links than places."""
    places = {place for hop in hops for place in hop}
    if len(hops) // 2 >= len(places):
        found = f"{len(hops) // 2} links between {len(places)} places"
        raise MachineFileError("tree topology", found, "A tree has one way between two places: leave links out")
    return []


def _none(hops: dict[Hop, Curve], gpus: int) -> list[Hop]:
    return []


# The links that each kind must have.
_WANTED: dict[TopologyKind, Callable[[dict[Hop, Curve], int], list[Hop]]] = {
    "switch": _each_to_one_switch,
    "full_mesh": _every_two,
    "closed_ring": _each_to_the_next,
    "tree": _no_second_way,
    "levels": _none,
}


def _pair_count(one: Endpoint, other: Endpoint, gpus: int) -> int:
    """How many links a pair of a file stands for."""
    if one == other == EACH_GPU:
        return gpus * (gpus - 1) // 2
    return gpus if EACH_GPU in (one, other) else 1


def _pairs(one: Endpoint, other: Endpoint, gpus: int) -> list[Hop]:
    """What a pair of a file stands for."""
    if one == other == EACH_GPU:
        return list(combinations(range(gpus), 2))
    if EACH_GPU in (one, other):
        place = other if one == EACH_GPU else one
        return [(rank, place) for rank in range(gpus)]
    return [(one, other)]
