"""A schedule in the making: names are given, regions are cut, the parts are collected in launch order."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Literal

from msgspec import Struct

from overweave.ir.schedule import (
    Buffer,
    Credit,
    Given,
    Goal,
    Operation,
    Queue,
    Range,
    Region,
    Schedule,
    SignalPad,
    product,
)

Home = Literal["input", "output", "symmetric", "local"]


class Place:
    """A buffer, called with a rank and ranges, gives regions. Rows may be counted from `base`."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer

    def __call__(self, rank: int, rows: Range | None = None, base: int = 0, cols: Range | None = None) -> Region:
        lo, hi = rows or (0, self.buffer.rows)
        return Region(self.buffer.name, rank, (lo - base, hi - base), cols or (0, self.buffer.cols))


class Sharding(Struct, frozen=True):
    """m rows, shards of `size` rows (the last ones shorter or empty), and the extents of the matmul. At random."""

    m: int
    ranks: int
    count: int
    k: int
    n: int
    draws: tuple[int, ...]

    @classmethod
    def draw(cls, rng: Random, ranks: int, pieces: int, even: bool = False) -> Sharding:
        m = (
            ranks * pieces * rng.randint(1, 2)
            if even
            else max(1, ranks * pieces * rng.randint(1, 2) - rng.randint(0, 3))
        )
        draws = tuple(rng.randint(1, 3) for _ in range(7))
        return cls(m, ranks, pieces, rng.randint(1, 2), rng.randint(1, 2), draws)

    @property
    def size(self) -> int:
        return -(-self.m // self.ranks)

    def shard(self, rank: int) -> Range:
        return min(rank * self.size, self.m), min((rank + 1) * self.size, self.m)

    def pieces(self, rank: int) -> tuple[Range, ...]:
        return cut(self.shard(rank), self.count)

    def tiles(self, at: int = 0) -> int:
        """How many tiles the `at`-th chunk has."""
        return self.draws[at % len(self.draws)]


def cut(rows: Range, count: int) -> tuple[Range, ...]:
    """Nearly equal parts."""
    lo, hi = rows
    bounds = [lo + (hi - lo) * part // count for part in range(count + 1)]
    return tuple(zip(bounds, bounds[1:], strict=False))


def rotation(rng: Random, rank: int, ranks: int) -> list[int]:
    """The peers of a rank: from its successor on, from its predecessor back, or shuffled."""
    peers = [(rank + step) % ranks for step in range(1, ranks)]
    kind = rng.randrange(3)
    if kind == 1:
        peers.reverse()
    if kind == 2:
        rng.shuffle(peers)
    return peers


def every_credit(ranks: int) -> tuple[Credit, ...]:
    return tuple(Credit(giver, taker) for giver in range(ranks) for taker in range(ranks) if giver != taker)


class Draft:
    """Collects the parts of a schedule."""

    def __init__(self, name: str, ranks: int) -> None:
        self.name, self.ranks = name, ranks
        self.buffers: list[Buffer] = []
        self.pads: list[SignalPad] = []
        self.queues: list[Queue] = []
        self.given: list[Given] = []
        self.goals: list[Goal] = []
        self.operations: list[Operation] = []

    def buffer(self, name: str, rows: int, cols: int, home: Home) -> Place:
        self.buffers.append(Buffer(name, rows, cols, home))
        return Place(self.buffers[-1])

    def pad(self, name: str, size: int) -> None:
        self.pads.append(SignalPad(name, size))

    def queue(self, name: str, order: Literal["complete", "issue"], after: tuple[str, ...] = ()) -> None:
        self.queues.append(Queue(name, order, after))

    def give(self, region: Region, tensor: str, row: int, col: int) -> None:
        self.given.append(Given(region, tensor, row, col))

    def want(self, region: Region, tensor: str, row: int, col: int, terms: tuple[Range, ...]) -> None:
        self.goals.append(Goal(region, tensor, row, col, terms))

    def want_shard(self, deal: Sharding, rank: int, y: Place, terms: tuple[Range, ...]) -> None:
        """The rank's shard of the product, at the head of `y`."""
        lo, hi = deal.shard(rank)
        self.want(y(rank, (lo, hi), lo), product("a", "b"), lo, 0, terms)

    def add(self, kind: Callable[..., Operation], rank: int, queue: str, **parts: Any) -> None:
        name = f"{kind.__name__.lower()}.{rank}.{len(self.operations)}"
        self.operations.append(kind(name=name, rank=rank, queue=queue, **parts))

    def schedule(self, credits: tuple[Credit, ...]) -> Schedule:
        return Schedule(
            name=self.name,
            world_size=self.ranks,
            buffers=tuple(self.buffers),
            pads=tuple(self.pads),
            queues=tuple(self.queues),
            credits=credits,
            given=tuple(self.given),
            goal=tuple(self.goals),
            operations=tuple(self.operations),
        )
