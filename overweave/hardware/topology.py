"""The topology of a machine: links between pairs of places, and the links that a transfer crosses.

A place is a GPU, by its rank, or what joins GPUs, by its name: a switch, a PCIe bridge, a NIC, a network. A transfer
takes the route of the fewest links and shares each of them with other transfers. GPUs that reach each other's memory
are an island; between islands links carry messages of a library alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from itertools import combinations, pairwise
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from overweave.errors import MachineFileError

# Wider than any measured value, and narrow enough that no time and no sum of times is infinite.
Positive = Annotated[float, Meta(ge=1e-9, le=1e18)]
Points = Annotated[tuple[tuple[Positive, Positive], ...], Meta(min_length=1, max_length=1000)]


class Bandwidth(Struct, frozen=True, forbid_unknown_fields=True):
    gb_per_s: Positive
    source: str


class Curve(Struct, frozen=True, forbid_unknown_fields=True):
    """Points (bytes, GB/s), growing in bytes, of one transfer in a busy queue, without its launch.

    Between points time grows linearly with size; there is no fitted constant.
    """

    points: Points
    source: str

    def time_us(self, size_bytes: float) -> float:
        """Return the time of a transfer. Below the first point its time holds, beyond the last its rate."""
        return interpolated_us(self.points, size_bytes)

    @property
    def peak_gb_per_s(self) -> float:
        return max(rate for _, rate in self.points)


class SmCurve(Struct, frozen=True, forbid_unknown_fields=True):
    """Points (SMs, GB/s), growing in SMs, of loads and stores between GPUs by a kernel on that many SMs."""

    points: Points
    source: str

    def gb_per_s(self, sms: int) -> float:
        """Return the bandwidth: in proportion below the first point, linear between points, constant beyond the
        last."""
        known = ((0.0, 0.0), *self.points)
        for (low, low_rate), (high, high_rate) in pairwise(known):
            if sms <= high:
                return low_rate + (high_rate - low_rate) * (sms - low) / (high - low)
        return known[-1][1]


def interpolated_us(points: Points, size_bytes: float) -> float:
    """Return the time of a transfer, linear in bytes between `points` (bytes, GB/s). 1 GB/s is 1e3 bytes/us."""
    times = [(size, size / rate / 1e3) for size, rate in points]
    if size_bytes <= times[0][0]:
        return times[0][1]
    for (low, low_us), (high, high_us) in pairwise(times):
        if size_bytes <= high:
            return low_us + (high_us - low_us) * (size_bytes - low) / (high - low)
    return times[-1][1] * size_bytes / times[-1][0]


Endpoint = int | str
EACH_GPU = "gpu"  # in a pair of a file: each GPU; twice in a pair: every two GPUs
FOR_EVERY = "/"  # NAME/COUNT in a pair of a file: a place of its own for every COUNT GPUs, as "nvswitch/8"
MOST_LINKS = 1 << 17  # every two of 512 GPUs
MOST_OF_A_HOST, MOST_DIGITS = 128, 4  # GPUs; digits of COUNT
MEMORY: Literal["memory"] = "memory"
MESSAGES: Literal["messages"] = "messages"
TopologyKind = Literal["switch", "full_mesh", "closed_ring", "tree", "levels"]
Hop = tuple[Endpoint, Endpoint]  # a link in one direction


class Link(Struct, frozen=True, forbid_unknown_fields=True):
    """Equal links between pairs of places, each with `curve` in either direction.

    carries: what crosses it: reads and writes of a peer's memory, or a library's messages alone, as between hosts.
    """

    between: tuple[tuple[Endpoint, Endpoint], ...]
    curve: Curve
    carries: Literal["memory", "messages"] = MEMORY


class Topology(Struct, frozen=True, forbid_unknown_fields=True, cache_hash=True):
    """The links of a machine, and the port through which a GPU passes all its bytes in one direction.

    kind: checked against the links. switch: every GPU has a link to one switch that never blocks. full_mesh: every two
    GPUs have a link. closed_ring: every GPU has a link to the next. tree: one route between any two places, as PCIe
    bridges have. levels: GPUs in groups, joined by slower links: pairs of one host, or hosts by a network.
    slots: of each GPU its number among those of `NAME/COUNT` places; (): its own.
    """

    kind: TopologyKind
    port: Bandwidth
    links: tuple[Link, ...]
    slots: tuple[int, ...] = ()

    def hops(self, gpus: int, carries: tuple[str, ...] = (MEMORY, MESSAGES)) -> dict[Hop, Curve]:
        """Return every link in every direction, with its curve. carries: of links that carry one of these."""
        curves: dict[Hop, Curve] = {}
        slots = self.slots or tuple(range(gpus))
        for link in self.links:
            for one, other in link.between if link.carries in carries else ():
                for pair in _pairs(one, other, slots):
                    curves[pair] = curves[pair[::-1]] = link.curve
        return curves

    @property
    def has_hosts(self) -> bool:
        """Whether some links carry messages alone."""
        return any(link.carries == MESSAGES for link in self.links)


class Routes:
    """The links that transfers between the GPUs of a topology cross."""

    def __init__(self, topology: Topology, gpus: int) -> None:
        self.curves = topology.hops(gpus)
        self.peaks_gb_per_s = {hop: curve.peak_gb_per_s for hop, curve in self.curves.items()}
        self.nics = frozenset(topology.hops(gpus, (MESSAGES,)))  # links that carry messages alone, in either direction
        self.islands = _islands(topology, gpus)
        self.island_of = {gpu: at for at, island in enumerate(self.islands) for gpu in island}
        self._neighbours: dict[Endpoint, list[Endpoint]] = {}  # place -> the places it has links to
        for one, other in self.curves:
            self._neighbours.setdefault(one, []).append(other)
        self._previous: dict[int, dict[Endpoint, Endpoint]] = {}  # source -> (place -> place before it on the route)
        self._routes: dict[tuple[int, int], tuple[Hop, ...]] = {}  # (source, target) -> hops

    def between(self, source: int, target: int) -> tuple[Hop, ...]:
        """Return the fewest links from one GPU to another, in order. Raises MachineFileError if there is no route."""
        if (source, target) not in self._routes:
            self._routes[source, target] = self._route(source, target)
        return self._routes[source, target]

    def alone_gb_per_s(self, source: int, target: int) -> float:
        """Return the peak of the slowest link of the route."""
        return min(self.peaks_gb_per_s[hop] for hop in self.between(source, target))

    def time_us(self, source: int, target: int, size_bytes: float) -> float:
        """Return the time of a transfer alone, as far as the links limit it."""
        return max(self.curves[hop].time_us(size_bytes) for hop in self.between(source, target))

    def are_alike(self, gpus: int) -> bool:
        """Whether all pairs of GPUs are joined by as many links, equally fast."""
        if len(self.islands) > 1:
            return False
        routes = (self.between(one, other) for one, other in combinations(range(gpus), 2))
        return len({tuple(self.peaks_gb_per_s[hop] for hop in route) for route in routes}) <= 1

    def _route(self, source: int, target: int) -> tuple[Hop, ...]:
        """Return the hops of `between`, followed back from the target."""
        if source not in self._previous:
            self._previous[source] = self._origins(source)
        origins = self._previous[source]
        if target not in origins:
            cure = "Give the file a link between the two, or to a switch that both have"
            raise MachineFileError("topology", f"no route from GPU {source} to GPU {target}", cure)
        hops: list[Hop] = []
        place: Endpoint = target
        while place != source:
            hops.append((origins[place], place))
            place = origins[place]
        return tuple(reversed(hops))

    def _origins(self, source: int) -> dict[Endpoint, Endpoint]:
        """Return place -> the place before it on the shortest route from `source`."""
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
    """Return the routes of a topology."""
    return Routes(topology, gpus)


def with_more_gpus(topology: Topology, gpus: int, count: int) -> Topology | None:
    """Return the topology with `count` GPUs: more at each switch and bridge, and pairs like the first ones. None for a
    ring, which has no place for more."""
    if topology.kind == "closed_ring":
        return None
    return replace(topology, links=tuple(_repeat_link(link, gpus, count) for link in topology.links))


def placed(topology: Topology, islands: tuple[tuple[int, ...], ...]) -> Topology | None:
    """Return a topology of hosts whose ranks lie as `islands` say, each island on a host of its own. None if an island
    is larger than a host, or a rank is not there once."""
    ranks = sorted(rank for island in islands for rank in island)
    size = len(Routes(topology, MOST_OF_A_HOST).islands[0])
    if ranks != list(range(len(ranks))) or size < max(map(len, islands)):
        return None
    slots = {rank: host * size + place for host, island in enumerate(islands) for place, rank in enumerate(island)}
    return replace(topology, slots=tuple(slots[rank] for rank in ranks))


def _repeat_link(link: Link, gpus: int, count: int) -> Link:
    pairs = list(link.between)
    for first in range(gpus, count, gpus):
        for pair in link.between:
            shifted = tuple(place + first if isinstance(place, int) else place for place in pair)
            if shifted != pair and all(place < count for place in shifted if isinstance(place, int)):
                pairs.append((shifted[0], shifted[1]))
    return replace(link, between=tuple(pairs))


def check(topology: Topology, gpus: int) -> None:
    """Raise MachineFileError for a missing link, a link faster than its port, or a GPU that cannot be reached,
    and for more links than anybody has."""
    count = sum(_pair_count(one, other, gpus) for link in topology.links for one, other in link.between)
    if count > MOST_LINKS:
        raise MachineFileError("topology", f"{count} links", f"Name each link once: at most {MOST_LINKS}")
    if topology.has_hosts and topology.kind != "levels":
        found = f"a link that carries messages alone in a {topology.kind}"
        raise MachineFileError("topology", found, "Say that its kind is levels: such links part hosts")
    if topology.slots and (len(topology.slots) != gpus or len({*topology.slots}) != gpus):
        raise MachineFileError("topology", f"{len(topology.slots)} slots of {gpus} GPUs", "Give each GPU its own")
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
    """Raise MachineFileError if the links are not of the kind."""
    missing = [pair for pair in _REQUIRED_LINKS[kind](hops, gpus) if pair not in hops]
    if missing:
        found = f"no link between {missing[0][0]} and {missing[0][1]}"
        more = f", and {len(missing) - 1} more are missing" if missing[1:] else ""
        raise MachineFileError(f"{kind} topology", found + more, "Add the pair to a link, or name another kind")


def _all_pairs(hops: dict[Hop, Curve], gpus: int) -> list[Hop]:
    return list(combinations(range(gpus), 2))


def _ring_pairs(hops: dict[Hop, Curve], gpus: int) -> list[Hop]:
    return [(rank, (rank + 1) % gpus) for rank in range(gpus if gpus > 2 else gpus - 1)]


def _switch_pairs(hops: dict[Hop, Curve], gpus: int) -> list[Hop]:
    switches = {place for hop in hops for place in hop if isinstance(place, str)}
    if len(switches) != 1:
        raise MachineFileError("switch topology", f"{len(switches)} switches", "Join all GPUs to one switch")
    return [(rank, min(switches)) for rank in range(gpus)]


def _check_tree(hops: dict[Hop, Curve], gpus: int) -> list[Hop]:
    """Return no links; raise MachineFileError for a cycle."""
    places = {place for hop in hops for place in hop}
    if len(hops) // 2 >= len(places):
        found = f"{len(hops) // 2} links between {len(places)} places"
        raise MachineFileError("tree topology", found, "A tree has one way between two places: leave links out")
    return []


def _no_pairs(hops: dict[Hop, Curve], gpus: int) -> list[Hop]:
    return []


# Kind -> the function that returns the links which it must have.
_REQUIRED_LINKS: dict[TopologyKind, Callable[[dict[Hop, Curve], int], list[Hop]]] = {
    "switch": _switch_pairs,
    "full_mesh": _all_pairs,
    "closed_ring": _ring_pairs,
    "tree": _check_tree,
    "levels": _no_pairs,
}


def _pair_count(one: Endpoint, other: Endpoint, gpus: int) -> int:
    """How many links a pair of a file stands for."""
    if one == other == EACH_GPU:
        return gpus * (gpus - 1) // 2
    return gpus if _is_each(one) or _is_each(other) else 1


def _pairs(one: Endpoint, other: Endpoint, slots: tuple[int, ...]) -> list[Hop]:
    """Return the pairs of places that a pair of a file stands for."""
    if one == other == EACH_GPU:
        return list(combinations(range(len(slots)), 2))
    if _is_each(one) or _is_each(other):
        pairs = ((_place(one, gpu, slot), _place(other, gpu, slot)) for gpu, slot in enumerate(slots))
        return list(dict.fromkeys(pairs))
    return [(one, other)]


def _is_each(place: Endpoint) -> bool:
    """Whether a place of a file stands for one of each GPU, or of every so many GPUs."""
    return place == EACH_GPU or _every(place) > 0


def _every(place: Endpoint) -> int:
    """How many GPUs have a place in common; 0 for a place that stands for itself."""
    count = place.rpartition(FOR_EVERY)[2] if isinstance(place, str) and FOR_EVERY in place else ""
    return int(count) if count.isascii() and count.isdigit() and len(count) <= MOST_DIGITS else 0


def _place(place: Endpoint, gpu: int, slot: int) -> Endpoint:
    """Return the place of one GPU that a place of a file stands for."""
    if place == EACH_GPU:
        return gpu
    every = _every(place)
    return f"{str(place).rpartition(FOR_EVERY)[0]}{slot // every}" if every else place


def _islands(topology: Topology, gpus: int) -> tuple[tuple[int, ...], ...]:
    """Return the GPUs that reach each other's memory, by their first ones; all, if every link carries memory."""
    if not topology.has_hosts:
        return (tuple(range(gpus)),)
    root: dict[Endpoint, Endpoint] = {}  # place -> a place that it is joined to; the last one of a chain to itself

    def find(place: Endpoint) -> Endpoint:
        while root.setdefault(place, place) != place:
            place = root[place]
        return place

    for one, other in topology.hops(gpus, (MEMORY,)):
        root[find(one)] = find(other)
    islands: dict[Endpoint, list[int]] = {}
    for gpu in range(gpus):
        islands.setdefault(find(gpu), []).append(gpu)
    return tuple(map(tuple, islands.values()))
