"""A time-expanded greedy search: which chunk each link carries when, until every rank has every chunk.

Whenever a link is free, it takes a chunk that its source has and its target lacks: of those that the fewest ranks have,
one of the owner whom the target meets next. A chunk that a nearer rank has, or is getting, is left for that one to pass
on. Several passes break ties at random, always alike; the shortest is kept.
SOURCE: TACOS (Won et al., MICRO 2024): links and chunks are matched step by step on a time-expanded network.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from overweave.hardware.machine import Machine
from overweave.schedules.synthesis.links import Joined, LinkRoute, Shared, joined

SOON = 1e-9  # us, and shares
MOST_PASSES, MOST_TRANSFERS = 16, 3000  # of one search: passes, and the transfers of all of them together
LEAST_SHARE = 0.45  # of its speed alone, with which a copy may start beside others


class Transfer(NamedTuple):
    """A chunk on its way. chunk: owner * pieces + piece. length: so many chunks of one owner, from this one on."""

    source: int
    target: int
    chunk: int
    begin_us: float
    end_us: float
    length: int = 1


Running = tuple[float, int, Transfer, LinkRoute, float]  # when it ends, a number, what, on which route, at which speed


@lru_cache(maxsize=128)
def gathered(machine: Machine, ranks: int | tuple[int, ...], pieces: int, chunk_bytes: int) -> tuple[Transfer, ...]:
    """All transfers of an all-gather of `pieces` equal chunks of every rank, in the order in which they begin. ranks:
    how many, or which GPUs are ranks 0, 1, ...

    Raises InputError for a machine with too few GPUs, and MachineFileError for one that links do not join.
    """
    graph = joined(machine, ranks)
    passes = max(1, min(MOST_PASSES, MOST_TRANSFERS // max(1, graph.ranks * (graph.ranks - 1) * pieces)))
    tried = (_Pass(graph, pieces, chunk_bytes, seed).run() for seed in range(passes))
    best = min(tried, key=lambda transfers: (ends_us(transfers), sum(one.end_us for one in transfers)))
    return tuple(sorted(best, key=lambda one: (one.begin_us, one.end_us)))


def ends_us(transfers: Iterable[Transfer]) -> float:
    return max((one.end_us for one in transfers), default=0.0)


def speed(route: LinkRoute, free: Mapping[Shared, float]) -> float:
    """The share of its speed alone with which a copy could start beside others."""
    return min(1.0, *(free[link] / taken for link, taken in route.takes.items()))


def _halved(graph: Joined) -> dict[LinkRoute, float]:
    """The speeds at which two copies at once leave no link idle that one alone could not fill, as far as ports hold two
    on every link."""
    links: defaultdict[int, set[Shared]] = defaultdict(set)
    for route in graph.near.values():
        links[route.source].add(route.leaves_by)
    most = {source: graph.port / 2 / len(leaving) for source, leaving in links.items()}

    def half(route: LinkRoute, link: Shared, taken: float) -> float:
        is_held = link in route.ports or 0.5 / taken <= most[route.source] + SOON
        return 0.5 / taken if 0.5 < taken < 1 and is_held else 1.0

    return {
        route: min(half(route, link, taken) for link, taken in route.takes.items()) for route in graph.near.values()
    }


class _Pass:
    """One search. Sets of chunks are the bits of ints.

    have, lacks: of each rank; what is on its way is in neither. by_holders[n]: the chunks that n ranks have or get.
    nearer[target][level]: what ranks on lower levels have or get, from whom the target has it cheaper.
    free: the share of each link that is left. on_link: the routes over it. most: the highest speed of a route.
    is_direct: what is a rank's own goes first. is_steady: a rank goes on sending to the same one.
    """

    def __init__(self, graph: Joined, pieces: int, chunk_bytes: int, seed: int) -> None:
        self.graph, self.pieces, self.chunk_bytes = graph, pieces, chunk_bytes
        self.random, self.is_random = random.Random(seed), seed >= 8
        self.is_direct, self.is_steady = seed % 2 == 0, seed // 2 % 2 == 0
        self.most = _halved(graph) if seed // 4 % 2 else dict.fromkeys(graph.near.values(), 1.0)
        self.started, self.last = 0, list(range(graph.ranks))
        ranks, own = graph.ranks, (1 << pieces) - 1
        self.have = [own << rank * pieces for rank in range(ranks)]
        self.own = list(self.have)
        every = (1 << ranks * pieces) - 1
        self.lacks = [every & ~have for have in self.have]
        self.by_holders = [0, every, *[0] * ranks]
        self.holders = [1] * (ranks * pieces)
        self.free = graph.shares
        self.on_link: defaultdict[Shared, list[LinkRoute]] = defaultdict(list)
        self.leaving: list[list[LinkRoute]] = [[] for _ in range(ranks)]
        for route in graph.near.values():
            self.leaving[route.source].append(route)
            for link in route.takes:
                self.on_link[link].append(route)
        self.nearer = [[0] * (graph.levels + 1) for _ in range(ranks)]
        for rank, have in enumerate(self.have):
            self._announce(rank, have)

    def run(self) -> list[Transfer]:
        """All transfers, as they end."""
        running: list[Running] = []
        done: list[Transfer] = []
        self._start(0.0, list(self.graph.near.values()), running)
        while running:
            now, touched = running[0][0], dict[LinkRoute, None]()
            while running and running[0][0] <= now + SOON:
                _, _, transfer, route, share = heapq.heappop(running)
                done.append(transfer)
                self.have[transfer.target] |= 1 << transfer.chunk
                for link in route.takes:
                    self.free[link] += share * route.takes[link]
                    touched |= dict.fromkeys(self.on_link[link])
                touched |= dict.fromkeys(self.leaving[transfer.target])
            self._start(now, list(touched), running)
        return done

    def _start(self, now: float, routes: list[LinkRoute], running: list[Running]) -> None:
        """Start what fits on routes that may have become free."""
        waiting = [(key, number, route) for number, route in enumerate(routes) if (key := self._next(route))]
        heapq.heapify(waiting)
        while waiting:
            before, number, route = waiting[0]
            key = self._next(route)
            if key is None:
                heapq.heappop(waiting)
            elif key[:2] > before[:2]:
                heapq.heapreplace(waiting, (key, number, route))
            else:
                share = min(speed(route, self.free), self.most[route])
                self._take(route, key[-1], share)
                end_us = now + self.graph.alone_us(route, self.chunk_bytes) / share
                transfer = Transfer(route.source, route.target, key[-1], now, end_us)
                self.started += 1
                heapq.heappush(running, (end_us, self.started, transfer, route, share))

    def _next(self, route: LinkRoute) -> tuple[bool, int, float, int] | None:
        """Return a route's place in the order of starting, and the chunk that it would carry now; None without one.

        First come routes that go on, if they are to be steady, then the chunks that the fewest ranks have.
        """
        source, target, free = route.source, route.target, self.free
        for link, taken in route.takes.items():  # ports first: most of them are taken
            if free[link] < LEAST_SHARE * taken:
                return None
        wanted = self.have[source] & self.lacks[target] & ~self.nearer[target][route.level]
        if not wanted:
            return None
        is_new = self.is_steady and self.last[source] != target
        tie = self.random.random() if self.is_random else (target - source) % self.graph.ranks
        if self.is_direct and (own := wanted & self.own[source]):
            return is_new, 0, tie, _lowest(own)
        holders, rare = next((count, rare) for count, chunks in enumerate(self.by_holders) if (rare := wanted & chunks))
        first = (target + 1) * self.pieces  # of the owner whom the target meets next
        later = rare >> first
        return is_new, holders, tie, first + _lowest(later) if later else _lowest(rare)

    def _take(self, route: LinkRoute, chunk: int, share: float) -> None:
        bit, count = 1 << chunk, self.holders[chunk]
        self.lacks[route.target] &= ~bit
        self.holders[chunk] = count + 1
        self.by_holders[count] &= ~bit
        self.by_holders[count + 1] |= bit
        self.last[route.source] = route.target
        for link, taken in route.takes.items():
            self.free[link] -= share * taken
        self._announce(route.target, bit)

    def _announce(self, rank: int, chunks: int) -> None:
        """Others leave it to this rank to pass on chunks where it is nearer."""
        for route in self.leaving[rank]:
            nearer = self.nearer[route.target]
            for level in range(route.level + 1, len(nearer)):
                nearer[level] |= chunks


def _lowest(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


@lru_cache(maxsize=128)
def traded(machine: Machine, ranks: int | tuple[int, ...], pieces: int, chunk_bytes: int) -> tuple[Transfer, ...]:
    """All transfers of an all-to-all, straight from every rank to every other, in the order in which they begin. chunk:
    the piece of the block.

    Of the copies that fit, the one with most bytes left on its busiest link goes first. Raises as `gathered`.
    """
    graph = joined(machine, ranks)
    left: defaultdict[Shared, float] = defaultdict(float)  # to pass over each link
    for route in graph.routes.values():
        for link, taken in route.takes.items():
            left[link] += pieces * taken / route.gb_per_s
    waiting = [(route, piece) for piece in range(pieces) for route in graph.routes.values()]
    free, running, done = graph.shares, list[tuple[float, int, LinkRoute, float]](), list[Transfer]()

    def place(each: tuple[LinkRoute, int]) -> tuple[float, int]:
        return -max(left[link] for link in each[0].takes), (each[0].target - each[0].source) % graph.ranks

    now = 0.0
    while waiting:
        later = []
        for route, piece in sorted(waiting, key=place):
            share = speed(route, free)
            if share < LEAST_SHARE:
                later.append((route, piece))
                continue
            for link, taken in route.takes.items():
                free[link] -= share * taken
                left[link] -= taken / route.gb_per_s
            end_us = now + graph.alone_us(route, chunk_bytes) / share
            done.append(Transfer(route.source, route.target, piece, now, end_us))
            heapq.heappush(running, (end_us, len(done), route, share))
        waiting, now = later, running[0][0]
        while running and running[0][0] <= now + SOON:
            _, _, route, share = heapq.heappop(running)
            for link, taken in route.takes.items():
                free[link] += share * taken
    return tuple(done)
