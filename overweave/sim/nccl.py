"""What a collective of NCCL takes, inside an island and over several.

Inside an island it takes what the machine's file says. Over several, bytes pass NICs, too, and a call has more steps.
NCCL weighs its algorithms and protocols by a model of its own. This is that model, with the rates of the described
machine: rings and PAT for gathers and scatters, rings and trees for all-reduces; an all-to-all is sends and receives.
Left out: NVLS and CollNet (multicast is off, and no switch adds), limits by channel, and
corrections of trees by size.
SOURCE: ncclTopoTuneModel and its default constants in src/graph/tuning.cc of NCCL 2.30.7.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from math import inf, log2
from typing import NamedTuple

from overweave.hardware.machine import Machine
from overweave.hardware.topology import Hop

EXCHANGE, REDUCE = "all_to_all", "all_reduce"


class _Way(NamedTuple):
    """An algorithm in a protocol. base_us: of a call. inside_us, between_us: of a step inside an island, and to
    another. share: of the bandwidth of NICs. most_gb_per_s: between two islands, and between more."""

    name: str
    base_us: float
    inside_us: float
    between_us: float
    share: float
    most_gb_per_s: tuple[float, float] = (inf, inf)


# A step inside an island over NVLink, which is no shorter than what a host needs to post a step of a ring.
_RINGS = (
    _Way("ring LL", 6.6, 1.0, 2.7, 0.5, (39.0, 20.4)),
    _Way("ring LL128", 14.0, 1.9, 4.0, 0.92),
    _Way("ring Simple", 8.4, 3.4, 14.0, 1.0),
)
_TREES = (
    _Way("tree LL", 6.8, 0.6, 5.0, 0.92 / 3.8, (39.0, 20.4)),
    _Way("tree LL128", 14.0, 1.25, 8.5, 0.92 * 120 / 128),
    _Way("tree Simple", 8.4, 4.0, 14.0, 0.92),
)
_PAT = (_Way("PAT", 8.0, 0.0, 14.0 / 3.5, 0.75),)  # of islands of one rank
_PAT_RANK_US = 2.8  # of each rank beside
_SENDS = _Way("send and receive", 8.4, 3.4, 14.0, 1.0)
# Rings of islands of one rank expose what a step takes as trees do.
_EXPOSED = {ring.name: tree.between_us for ring, tree in zip(_RINGS, _TREES, strict=True)}


PEERS_AT_ONCE, MANY_CHANNELS = 8, 16
IslandRanks = tuple[tuple[int, ...], ...]


class Flow(NamedTuple):
    """Bytes from one rank to one of another island. us: by its NICs alone."""

    source: int
    target: int
    us: float


class SentBytes(NamedTuple):
    """What a rank sends in an all-to-all: bytes to ranks of its island, and to others; peers: those others."""

    rank: int
    inside_bytes: float
    between_bytes: float
    peers: tuple[int, ...]


class CrossingCall(NamedTuple):
    """A collective over several islands. name: its algorithm and protocol. latency_us: of its steps. inside_us: of its
    bytes inside an island. flows: its bytes between islands, which share NICs with each other and with other
    collectives. alone_us: without the call around it."""

    name: str
    latency_us: float
    inside_us: float
    flows: tuple[Flow, ...]
    alone_us: float


def collective_us(machine: Machine, function: str, ranks: tuple[int, ...], total_bytes: float) -> float:
    """Return the time of a collective alone, as a whole call is timed. total_bytes: as of a CollectiveCurve; of an
    all-to-all, what a rank sends, its own part too. Raises InputError."""
    crossing = crossing_of(machine, function, ranks, total_bytes)
    if crossing is not None:
        return machine.latency.call.us + crossing.alone_us
    # A rank sends as many bytes in an all-to-all as in an all-gather of the same total: so that rate is taken.
    return machine.collective_us("all_gather" if function == EXCHANGE else function, len(ranks), total_bytes)


@lru_cache(maxsize=4096)
def crossing_of(machine: Machine, function: str, ranks: tuple[int, ...], total_bytes: float) -> CrossingCall | None:
    """Return the quickest way of a collective over several islands; None inside one. Raises InputError."""
    islands = islands_of(machine, ranks)
    if len(islands) < 2:
        return None
    if function == EXCHANGE:
        return exchange_of(machine, ranks, _all_sent(islands, total_bytes / len(ranks)))
    passed_bytes = total_bytes * (len(ranks) - 1) / len(ranks) * (2 if function == REDUCE else 1)
    flows, inside_us = _ring_flows(machine, islands, passed_bytes), _inside_us(machine, function, islands, total_bytes)
    nic_us, found = _alone_us(machine, flows), list[CrossingCall]()
    for way, steps_us in _ways(function, islands):
        capped_us = passed_bytes / way.most_gb_per_s[len(islands) > 2] / 1e3
        slowed = max(nic_us / way.share, capped_us) / max(nic_us, 1e-9)
        sent = tuple(flow._replace(us=flow.us * slowed) for flow in flows)
        found.append(CrossingCall(way.name, steps_us, inside_us, sent, steps_us + max(inside_us, nic_us * slowed)))
    return min(found, key=lambda each: each.alone_us)


@lru_cache(maxsize=4096)
def exchange_of(machine: Machine, ranks: tuple[int, ...], sent: tuple[SentBytes, ...]) -> CrossingCall:
    """Return how an all-to-all over several islands runs, of which some ranks send so much: sends and receives, those
    of a batch of peers together, in as many batches as the rank with the most peers has.

    SOURCE: NCCL_MAX_DEV_WORK_P2P_PER_BATCH in src/include/device.h of NCCL 2.30.7.
    """
    islands = islands_of(machine, ranks)
    facing, widest = dict(_facing(islands)), max(map(len, islands))
    flows = list[Flow]()
    for each in sent:
        if each.peers:
            target = each.peers[0] if len(each.peers) == 1 else facing.get(each.rank, each.peers[0])
            rate = machine.routes.alone_gb_per_s(each.rank, target)
            flows.append(Flow(each.rank, target, each.between_bytes / rate / 1e3))
    inside_bytes = max((each.inside_bytes for each in sent), default=0.0)
    whole_us = (
        machine.collective_us("all_gather", widest, inside_bytes * widest / (widest - 1)) if inside_bytes else 0.0
    )
    inside_us = max(0.0, whole_us - machine.latency.call.us)
    batches = -(-max((len(each.peers) for each in sent), default=0) // PEERS_AT_ONCE)
    steps_us = (0.0 if inside_us else _SENDS.base_us) + batches * _SENDS.between_us
    nic_us = _alone_us(machine, tuple(flows)) if flows else 0.0
    return CrossingCall(_SENDS.name, steps_us, inside_us, tuple(flows), steps_us + max(inside_us, nic_us))


def _all_sent(islands: IslandRanks, part_bytes: float) -> tuple[SentBytes, ...]:
    """Return what each rank sends if it sends as much to each other one."""
    ranks = {rank for island in islands for rank in island}
    return tuple(
        SentBytes(rank, part_bytes * (len(island) - 1), part_bytes * (len(ranks) - len(island)), others)
        for island in islands
        for others in (tuple(sorted(ranks.difference(island))),)
        for rank in island
    )


@lru_cache(maxsize=4096)
def sms_of(machine: Machine, ranks: tuple[int, ...]) -> int:
    """Return the SMs of a rank's part in a collective of these ranks: one for each channel.

    SOURCE: ncclTopoPostset in src/graph/connect.cc of NCCL 2.30.7: two channels for each NIC of an island's ranks, and
    from sm_90 on twice as many up to 16; here at most what the file says of one island.
    """
    islands, routes = islands_of(machine, ranks), machine.routes
    if len(islands) < 2:
        return machine.sharing.collective.sms
    own = set(islands[0])
    crossed = (routes.between(*pair) for pair in _facing(islands) if pair[0] in own)
    channels = 2 * len({next(hop for hop in hops if hop in routes.nics) for hops in crossed})
    if machine.card is not None and machine.card.capability[0] >= 9 and channels < MANY_CHANNELS:
        channels *= 2
    return min(channels, machine.sharing.collective.sms)


@lru_cache(maxsize=4096)
def islands_of(machine: Machine, ranks: tuple[int, ...]) -> IslandRanks:
    """Return the ranks of a collective, island by island."""
    found: dict[int, list[int]] = {}
    for rank in ranks:
        found.setdefault(machine.routes.island_of[rank], []).append(rank)
    return tuple(map(tuple, found.values()))


def _facing(islands: IslandRanks) -> list[tuple[int, int]]:
    """Return the pairs of ranks by whose NICs an island passes on to the next one, place by place."""
    following = (*islands[1:], islands[0])
    return [pair for pairs in zip(islands, following, strict=True) for pair in zip(*pairs, strict=False)]


def _ring_flows(machine: Machine, islands: IslandRanks, size_bytes: float) -> tuple[Flow, ...]:
    """Return what crosses in rings: as many bytes from each island to the next, in equal parts."""
    pairs, island_of = _facing(islands), machine.routes.island_of
    sharers = Counter(island_of[source] for source, _ in pairs)
    rates = ((source, target, machine.routes.alone_gb_per_s(source, target)) for source, target in pairs)
    return tuple(Flow(one, other, size_bytes / sharers[island_of[one]] / rate / 1e3) for one, other, rate in rates)


def _alone_us(machine: Machine, flows: tuple[Flow, ...]) -> float:
    """Return when the last flow ends if they have the NICs for themselves: links that several share are slower."""
    sharers: Counter[Hop] = Counter()
    for flow in flows:
        sharers.update(machine.routes.between(flow.source, flow.target))
    curves = machine.routes.curves

    def slowest_us(flow: Flow) -> float:
        rate = machine.routes.alone_gb_per_s(flow.source, flow.target)
        hops = machine.routes.between(flow.source, flow.target)
        return flow.us * max(1.0, *(sharers[hop] * rate / curves[hop].peak_gb_per_s for hop in hops))

    return max(map(slowest_us, flows))


def _inside_us(machine: Machine, function: str, islands: IslandRanks, total_bytes: float) -> float:
    """Return the time of the bytes that pass a rank's port inside an island, without the call around them."""
    widest, ranks = max(map(len, islands)), sum(map(len, islands))
    if widest < 2:
        return 0.0
    passed_bytes = total_bytes * (ranks - 1) / ranks
    whole_us = machine.collective_us(function, widest, passed_bytes * widest / (widest - 1))
    return max(0.0, whole_us - machine.latency.call.us)


WayTime = tuple[_Way, float]


def _ways(function: str, islands: IslandRanks) -> list[WayTime]:
    """Return the ways of a collective, with the time of the steps beyond those of one island."""
    ranks, count, widest = sum(map(len, islands)), len(islands), max(map(len, islands))
    rounds = 2 if function == REDUCE else 1

    def base_us(way: _Way) -> float:  # what a file says of an island holds it
        return 0.0 if widest > 1 else way.base_us

    def ring_us(way: _Way) -> float:
        between_us = way.between_us if widest > 1 else _EXPOSED[way.name]
        inside = ranks - 1 - (count - 1) - (widest - 1)
        return base_us(way) + rounds * (inside * way.inside_us + (count - 1) * between_us)

    def tree_us(way: _Way) -> float:
        return base_us(way) + 2 * log2(count) * way.between_us

    def pat_us(way: _Way) -> float:
        return base_us(way) + log2(count) * way.between_us + ranks * _PAT_RANK_US

    def priced(ways: tuple[_Way, ...], us: Callable[[_Way], float]) -> list[WayTime]:
        return [(way, us(way)) for way in ways]

    if function == REDUCE:
        return priced(_RINGS, ring_us) + priced(_TREES, tree_us)
    return priced(_RINGS, ring_us) + (priced(_PAT, pat_us) if widest == 1 else [])
