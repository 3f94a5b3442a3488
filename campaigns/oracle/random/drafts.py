"""A schedule in the making: names are given, regions are cut, the parts are collected in launch order."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from overweave.ir.blocks import Blocks
from overweave.ir.schedule import (
    Buffer,
    Clear,
    Compute,
    Copy,
    Credit,
    Get,
    Goal,
    InitialContents,
    Notify,
    Operation,
    Put,
    Queue,
    Range,
    ReducePut,
    Region,
    Schedule,
    SignalPad,
    Wait,
)
from overweave.ir.tensors import product

Home = Literal["input", "output", "symmetric", "local"]
Counted = Literal["sent", "received"] | None
At = tuple[int, str]  # rank and queue
Waits = tuple[Wait, ...]
Notifies = tuple[Notify, ...]
Terms = tuple[Range, ...]


class Place:
    """A buffer, called with a rank and ranges, gives regions. Rows may be counted from `base`."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer

    def __call__(self, rank: int, rows: Range | None = None, base: int = 0, cols: Range | None = None) -> Region:
        lo, hi = rows or (0, self.buffer.rows)
        return Region(self.buffer.name, rank, (lo - base, hi - base), cols or (0, self.buffer.cols))


class Sharding(Struct, frozen=True):
    """`m` rows dealt to ranks, each shard cut into `count` pieces; the extents of the matmul. Drawn at random."""

    m: int
    ranks: int
    count: int
    k: int
    n: int

    @classmethod
    def draw(cls, rng: Random, ranks: int, pieces: int, even: bool = False) -> Sharding:
        """even: all shards are of one size; else the last ones may be shorter, or empty."""
        m = ranks * pieces * rng.randint(1, 2)
        return cls(m if even else max(1, m - rng.randint(0, 3)), ranks, pieces, rng.randint(1, 2), rng.randint(1, 2))

    @property
    def size(self) -> int:
        return -(-self.m // self.ranks)

    def shard(self, rank: int) -> Range:
        return min(rank * self.size, self.m), min((rank + 1) * self.size, self.m)

    def pieces(self, rank: int) -> Terms:
        return cut(self.shard(rank), self.count)

    def terms(self, order: list[int]) -> Terms:
        """The parts of the reduced axis that ranks hold, in this order."""
        return tuple((rank * self.k, (rank + 1) * self.k) for rank in order)


def cut(rows: Range, count: int) -> Terms:
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


def one(pad: str, signal: int, count: int = 1) -> Waits:
    """Waits for one signal."""
    return (Wait(pad, (signal, signal + 1), count),)


def tell(pad: str, rank: int, signal: int) -> Notifies:
    """Notifies one signal."""
    return (Notify(pad, rank, signal),)


class Draft:
    """Collects the parts of a schedule."""

    def __init__(self, name: str, ranks: int) -> None:
        self.name, self.ranks = name, ranks
        self.buffers: list[Buffer] = []
        self.pads: list[SignalPad] = []
        self.queues: list[Queue] = []
        self.given: list[InitialContents] = []
        self.goals: list[Goal] = []
        self.operations: list[Operation] = []

    def buffer(
        self, name: str, rows: int, cols: int, home: Home, blocks: Blocks | None = None, counted: Counted = None
    ) -> Place:
        self.buffers.append(Buffer(name, rows, cols, home, blocks=blocks, counted=counted))
        return Place(self.buffers[-1])

    def pad(self, name: str, size: int) -> None:
        self.pads.append(SignalPad(name, size))

    def queue(self, name: str, order: Literal["complete", "issue"] = "complete", after: tuple[str, ...] = ()) -> None:
        self.queues.append(Queue(name, order, after))

    def give(self, region: Region, tensor: str, row: int, col: int) -> None:
        self.given.append(InitialContents(region, tensor, row, col))

    def give_gathered(self, rank: int, deal: Sharding, x: Region, w: Region) -> None:
        """A row shard of `a`, and the rank's own columns of `b`."""
        self.give(x, "a", deal.shard(rank)[0], 0)
        self.give(w, "b", 0, rank * deal.n)

    def give_split(self, rank: int, deal: Sharding, x: Region, w: Region) -> None:
        """The rank's part of the reduced axis: columns of `a`, rows of `b`."""
        self.give(x, "a", 0, rank * deal.k)
        self.give(w, "b", rank * deal.k, 0)

    def want(self, region: Region, tensor: str, row: int, col: int, terms: Terms) -> None:
        self.goals.append(Goal(region, tensor, row, col, terms))

    def want_in_any_order(self) -> None:
        """What was wanted last is a sum in any order."""
        self.goals[-1] = replace(self.goals[-1], unordered=True)

    def want_shard(self, deal: Sharding, rank: int, y: Place, order: list[int]) -> None:
        """The rank's shard of the product, at the head of `y`, with the ranks' parts added in this order."""
        lo, hi = deal.shard(rank)
        self.want(y(rank, (lo, hi), lo), product("a", "b"), lo, 0, deal.terms(order))

    def named(self, what: str, rank: int) -> str:
        return f"{what}.{rank}.{len(self.operations)}"

    def add(
        self,
        kind: Callable[..., Operation],
        what: str,
        at: At,
        waits: Waits = (),
        notifies: Notifies = (),
        **its_own: object,
    ) -> None:
        """its_own: the fields that operations of this kind have beside those of all operations."""
        name = self.named(what, at[0])
        self.operations.append(kind(name=name, rank=at[0], queue=at[1], waits=waits, notifies=notifies, **its_own))

    def move(
        self,
        kind: type[Put | Get | Copy | ReducePut],
        at: At,
        parts: tuple[Region, Region],
        waits: Waits = (),
        notifies: Notifies = (),
    ) -> None:
        """parts: from where, and to where."""
        self.add(kind, kind.__name__.lower(), at, waits, notifies, sources=parts[:1], destinations=parts[1:])

    def clear(self, at: At, region: Region, notifies: Notifies) -> None:
        self.add(Clear, "clear", at, (), notifies, destinations=(region,))

    def in_any_order(self) -> None:
        """The move that was added last adds while others do."""
        last = self.operations[-1]
        assert isinstance(last, ReducePut)
        self.operations[-1] = replace(last, unordered=True)

    def in_tiles(self, count: int) -> None:
        """The move that was added last is one of several instances, as a kernel's is. Only Puts may be."""
        last = self.operations[-1]
        assert isinstance(last, Put)
        self.operations[-1] = replace(last, tiles=count)

    def idle(self, at: At, waits: Waits) -> None:
        """Only waits."""
        self.add(Copy, "idle", at, waits, sources=(), destinations=())

    def multiply(
        self, at: At, parts: tuple[Region, Region, Region], waits: Waits = (), notifies: Notifies = (), tiles: int = 1
    ) -> None:
        """parts: `a`, `b` and `out`."""
        a, b, out = parts
        self.add(Compute, "multiply", at, waits, notifies, a=(a,), b=b, out=(out,), tiles=tiles)

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
