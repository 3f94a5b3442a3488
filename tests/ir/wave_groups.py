"""A small schedule with a permuted buffer: tiles in waves, and one library all-reduce for the tiles of each wave.

The tiles of a wave are scattered in the product, and one stretch of memory in the buffer that they are staged in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from overweave.ir.blocks import Blocks
from overweave.ir.plan import LIBRARY, EngineAssignment, Plan, Realization
from overweave.ir.problem import Problem
from overweave.ir.schedule import (
    Buffer,
    Collective,
    Compute,
    Copy,
    Credit,
    Goal,
    InitialContents,
    Notify,
    Queue,
    Region,
    Schedule,
    SignalPad,
    Wait,
)

Rectangle = tuple[tuple[int, int], tuple[int, int]]


def order_of(rows: int, cols: int, height: int) -> list[tuple[int, int]]:
    """Blocks in the order of their tiles: column by column through bands of `height` blocks."""
    bands = [range(top, min(top + height, rows)) for top in range(0, rows, height)]
    return [(row, col) for band in bands for col in range(cols) for row in band]


def rectangles(tiles: Iterable[tuple[int, int]]) -> list[Rectangle]:
    """The fewest rectangles of blocks, column strips joined where they are as high as their neighbours."""
    columns: dict[int, list[int]] = {}
    for row, col in sorted(tiles):
        columns.setdefault(col, []).append(row)
    found: list[Rectangle] = []
    for col, rows in sorted(columns.items()):
        cuts = [at for at, row in enumerate(rows) if at == 0 or row != rows[at - 1] + 1] + [len(rows)]
        for lo, hi in zip(cuts, cuts[1:], strict=False):
            span = (rows[lo], rows[hi - 1] + 1)
            beside = [at for at, one in enumerate(found) if one[0] == span and one[1][1] == col]
            if beside:
                found[beside[0]] = (span, (found[beside[0]][1][0], col + 1))
            else:
                found.append((span, (col, col + 1)))
    return found


def wave_groups(world_size: int, sizes: tuple[int, int, int], block: tuple[int, int], wave: int, height: int) -> Plan:
    """sizes: m, n, and the k of all ranks. wave: tiles of a group. height: blocks of a band of the tile order."""
    (m, n, k), (block_m, block_n) = sizes, block
    shards = [(rank * k // world_size, (rank + 1) * k // world_size) for rank in range(world_size)]
    wide = -(-n // block_n)
    order = order_of(-(-m // block_m), wide, height)
    places = [0] * len(order)
    for place, (row, col) in enumerate(order):
        places[row * wide + col] = place
    groups = [rectangles(order[first : first + wave]) for first in range(0, len(order), wave)]
    staged = Buffer("staged", m, n, "local", blocks=Blocks(block_m, block_n, tuple(places)))
    shard = k // world_size
    schedule = Schedule(
        name="wave_groups",
        world_size=world_size,
        buffers=(Buffer("x", m, shard, "input"), Buffer("w", shard, n, "input"), Buffer("y", m, n, "output"), staged),
        pads=(SignalPad("computed", sum(map(len, groups))),),
        queues=(
            Queue("tiles", "complete"),
            Queue("groups", "complete"),
            Queue("main", "complete", after=("groups", "tiles")),
        ),
        credits=tuple(Credit(a, b) for a in range(world_size) for b in range(world_size) if a != b),
        given=tuple(
            given
            for rank, (first, _) in enumerate(shards)
            for given in (
                InitialContents(Region("x", rank, (0, m), (0, shard)), "a", 0, first),
                InitialContents(Region("w", rank, (0, shard), (0, n)), "b", first, 0),
            )
        ),
        goal=tuple(Goal(Region("y", rank, (0, m), (0, n)), "a@b", 0, 0, tuple(shards)) for rank in range(world_size)),
        operations=tuple(
            one for rank in range(world_size) for one in of_rank(rank, staged, groups, (shard, len(shards)))
        ),
    )
    names = ("tiles", "groups", "main")
    return Plan(
        name="wave_groups",
        problem=Problem(operator="matmul_all_reduce", m=m, n=n, k=shard, world_size=world_size, dtype="float32"),
        schedule=schedule,
        realization=Realization(dtype="float32", engines=tuple(EngineAssignment(name, LIBRARY) for name in names)),
    )


def of_rank(
    rank: int, staged: Buffer, groups: list[list[Rectangle]], shards: tuple[int, int]
) -> Iterator[Compute | Collective | Copy]:
    """The products of each group, then its sum; at the end the whole result. shards: the own k, and how many ranks."""
    (depth, world_size), blocks, signal = shards, staged.blocks, 0
    assert blocks is not None
    for at, group in enumerate(groups):
        first, parts = signal, []
        for (top, bottom), (left, right) in group:
            rows = top * blocks.rows, min(bottom * blocks.rows, staged.rows)
            cols = left * blocks.cols, min(right * blocks.cols, staged.cols)
            parts.append(Region("staged", rank, rows, cols))
            yield Compute(
                name=f"multiply.{rank}.{signal}",
                rank=rank,
                queue="tiles",
                notifies=(Notify("computed", rank, signal),),
                a=(Region("x", rank, rows, (0, depth)),),
                b=Region("w", rank, (0, depth), cols),
                out=(parts[-1],),
            )
            signal += 1
        yield Collective(
            name=f"sum.{rank}.{at}",
            rank=rank,
            queue="groups",
            waits=(Wait("computed", (first, signal), 1),),
            function="all_reduce",
            label=f"sum.{at}",
            ranks=tuple(range(world_size)),
            sources=tuple(parts),
            destinations=tuple(parts),
        )
    whole = (0, staged.rows), (0, staged.cols)
    sources, destinations = (Region("staged", rank, *whole),), (Region("y", rank, *whole),)
    yield Copy(name=f"restore.{rank}", rank=rank, queue="main", sources=sources, destinations=destinations)
