"""Products that the library sums or exchanges, a collective for each group of waves, beside the tiles of the next ones.

Tiles run in the order of their table, so many at once: a wave. A partition says how many waves each group has. Tiles
store block by block, so that the blocks of a group are one stretch of memory, and one counter of the group tells a
stream, which takes no SM, when the library may start; behind the last group a kernel puts the blocks where they belong.
All collectives stand in one queue, group by group on every rank.
SOURCE: FlashOverlap (arXiv 2504.19519), 3.2 signals by groups of waves, 3.3 reordering before and after communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.blocks import Blocks
from overweave.ir.schedule import Buffer, Collective, Goal, Notify, Operation, Queue, Range, Reduce, Region, Wait
from overweave.ir.tensors import product
from overweave.schedules.communication import (
    COMPLETE,
    COMPUTED,
    EXCHANGES,
    GATHERED,
    ISSUE,
    MAIN,
    STAGED,
    SUMMED,
    SUMS,
    TILES,
    A,
    B,
    Communication,
    MatmulChunk,
    Split,
    Y,
    communicated,
)
from overweave.schedules.records.record import MethodInputs
from overweave.schedules.tiles.order import swizzled

Partition = tuple[int, ...]
Function = Literal["all_reduce", "reduce_scatter", "all_to_all"]
TileBlock = tuple[int, int]  # its row and column among the blocks of a shard, or of the whole
WavePart = tuple[Range, Range]  # rows and columns, of blocks
Steps = Iterator[Operation | MatmulChunk]
MOST_GROUPS = 4


@lru_cache(maxsize=1 << 5)
def _shared(blocks: Blocks) -> Blocks:
    """One object for equal ones: what is cached of blocks (`memory_image`) is else found by comparing all places."""
    return blocks


def wave_tiles(sms: int, members: int) -> int:
    """How many tiles are one wave on so many SMs, where equal parts of every member's rows go to each."""
    return max(1, sms // members) * members


def count_waves(tiles: int, sms: int, members: int) -> int:
    return -(-tiles // wave_tiles(sms, members))


def even_partition(waves: int) -> Partition:
    """At most MOST_GROUPS groups of equally many waves, the longer ones first."""
    groups = max(1, min(waves, MOST_GROUPS))
    return tuple((waves + groups - 1 - at) // groups for at in range(groups)) if waves else ()


class WaveAssignment(NamedTuple):
    """The tiles of one rank: what is dealt to each member, all alike.

    shards: the rows of each member; one member stands for all where everybody gets all sums. groups: of each member the
    blocks of each group, in order. height, width: of a block. in_strips: a member's rows are no shard, but of each band
    of tiles its strip, a tile's rows; the last band may have lower strips (`strip_rows`).
    """

    shards: tuple[Range, ...]
    cols: int
    height: int
    width: int
    groups: tuple[tuple[TileBlock, ...], ...]
    in_strips: bool = False

    @property
    def members(self) -> int:
        return len(self.shards)

    @property
    def rows(self) -> int:
        return max(hi - lo for lo, hi in self.shards)

    def whole_rows(self, member: int, rows: Range) -> Range:
        """Rows of the whole that rows of a member's blocks are; of strips, the rows of one."""
        lo, hi = self.shards[member]
        first, end = rows[0] * self.height, min(rows[1] * self.height, hi - lo)
        lo = first * (self.members - 1) + member * (end - first) if self.in_strips else lo
        return lo + first, lo + end

    def parts(self, at: int) -> list[WavePart]:
        """Rectangles of a group's blocks, each of which is one stretch of rows of the whole."""
        found = rectangles(self.groups[at])
        if not self.in_strips:
            return found
        return [((row, row + 1), cols) for (top, bottom), cols in found for row in range(top, bottom)]

    def multiplied(self, at: int) -> Iterator[WavePart]:
        """What tiles of a group multiply together: rows of the whole, and columns. Strips of whole tiles lie side by
        side, band below band; of a last band with lower ones each is a tile of its own.
        """
        whole = self.rows // self.height if self.in_strips else 0  # bands
        for (top, bottom), cols in rectangles(self.groups[at]) if self.in_strips else ():
            end = min(bottom, whole)
            if top < end:
                band = self.height * self.members
                yield (top * band, end * band), self.part(0, ((top, top + 1), cols))[1]
        for member in range(self.members):
            for (top, bottom), cols in self.parts(at):
                if bottom > whole:
                    yield self.whole_rows(member, (top, bottom)), self.part(member, ((top, bottom), cols))[1]

    def part(self, member: int, part: WavePart) -> WavePart:
        """Rows, counted from the member's first, and columns of blocks side by side."""
        (top, bottom), (left, right) = part
        lo, hi = self.shards[member]
        rows = top * self.height, min(bottom * self.height, hi - lo)
        return rows, (left * self.width, min(right * self.width, self.cols))


def dealt(work: MethodInputs) -> WaveAssignment:
    """The tiles of a rank in their order, cut into groups. Raises InputError for a partition that does not fit."""
    config, split, settings = work.config, work.split, work.settings
    assert config is not None, "tiles of a kernel"
    everywhere, asked = work.problem.record.shares_sums, f"build {work.method.full_name}"
    shards = ((0, split.rows),) if everywhere else tuple(split.shard(rank) for rank in range(split.world_size))
    if work.problem.strip and split.rows % split.world_size:
        found = f"rows=cyclic deals as many rows to each of {split.world_size} ranks, and there are {split.rows}"
        raise InputError(asked, found, "Use rows=own, or pad the rows")
    heights = _heights(work)
    if len(heights) > 1:
        found = f"shards have {' or '.join(map(str, heights))} rows of tiles of {config.block_m} rows"
        raise InputError(asked, f"groups have equal parts of shards, and {found}", "Leave groups out, or pad the rows")
    rows = heights[0] * config.block_m
    order = [
        (row // config.block_m, col // config.block_n)
        for row, col in swizzled((0, rows), (0, work.problem.n), config.block_m, config.block_n, config.group_m)
    ]
    sms = settings.sms - settings.library_sms
    if sms < 1:
        found = f"library_sms={settings.library_sms} of {settings.sms} leave none to tiles"
        raise InputError(asked, found, "Use fewer: a library's collective takes 16 to 32")
    waves = count_waves(len(order) * len(shards), sms, len(shards))
    partition = settings.groups or even_partition(waves)
    if sum(partition) != waves:
        found = f"groups={'+'.join(map(str, partition))} are {sum(partition)} waves of {waves}"
        even = "+".join(map(str, even_partition(waves)))
        raise InputError(asked, found, f"Partition {waves} waves, as in groups={even}")
    each = wave_tiles(sms, len(shards)) // len(shards)
    groups, in_strips = tuple(_cut(order, partition, each)), work.problem.strip > 0
    return WaveAssignment(shards, work.problem.n, config.block_m, config.block_n, groups, in_strips)


def _heights(work: MethodInputs) -> list[int]:
    """How many rows of tiles shards have: one number if all have as many, or everybody gets all sums."""
    config, split = work.config, work.split
    assert config is not None, "tiles of a kernel"
    shards = [split.shard(rank) for rank in range(split.world_size)]
    heights = [split.rows] if work.problem.record.shares_sums else [hi - lo for lo, hi in shards]
    return sorted({-(-height // config.block_m) for height in heights})


def _cut(order: Sequence[TileBlock], partition: Partition, each: int) -> Iterator[tuple[TileBlock, ...]]:
    """The tiles of each group. each: of a wave, of one member."""
    first = 0
    for waves in partition:
        yield tuple(order[first : first + waves * each])
        first += waves * each


def rectangles(blocks: Iterable[TileBlock]) -> list[WavePart]:
    """Few rectangles of blocks, of which none overlaps another: strips of a column, joined where they are alike."""
    columns: dict[int, list[int]] = {}
    for row, col in sorted(blocks):
        columns.setdefault(col, []).append(row)
    found: dict[tuple[Range, int], WavePart] = {}  # by rows, and the column behind the last
    for col, rows in sorted(columns.items()):
        cuts = [at for at, row in enumerate(rows) if at == 0 or row != rows[at - 1] + 1] + [len(rows)]
        for lo, hi in zip(cuts, cuts[1:], strict=False):
            span = (rows[lo], rows[hi - 1] + 1)
            _, (left, _) = found.pop((span, col), (span, (col, col)))
            found[span, col + 1] = (span, (left, col + 1))
    return list(found.values())


def is_at_once(work: MethodInputs) -> bool:
    """Whether sums have no groups: none are asked for, and it is a group of one, or one shard has a row of tiles less
    than the others."""
    in_shards = not work.problem.strip
    return work.settings.groups is None and (work.split.world_size == 1 or (in_shards and len(_heights(work)) > 1))


def in_groups(work: MethodInputs, function: Function) -> Communication:
    """The tiles of each group and its collective, then what puts what it brought in place. function: the collective."""
    problem, split = work.problem, work.split
    ranks = range(split.world_size if split.rows else 0)
    y = Buffer(Y, split.shard_size if function == "reduce_scatter" else split.rows, problem.n, "output")
    if not ranks:
        return communicated(split.world_size, (), (y,))
    tiles = dealt(work)
    how = _Groups(tiles, split, function)
    steps = [step for rank in ranks for step in how.steps(rank, work)]
    staged, total = how.buffers()
    goals = (goal for rank in ranks for goal in how.goals(rank, work))
    made = communicated(split.world_size, steps, (y,), goal=goals)
    return replace(
        made,
        buffers=(y, staged, *(() if function == "all_reduce" else (total,))),
        queues=(Queue(EXCHANGES, COMPLETE), Queue(SUMS, ISSUE, after=(MAIN, TILES, EXCHANGES))),
    )


class _Groups(NamedTuple):
    tiles: WaveAssignment
    split: Split
    function: Function

    @property
    def landing(self) -> str:
        return {"all_reduce": STAGED, "reduce_scatter": SUMMED, "all_to_all": GATHERED}[self.function]

    def buffers(self) -> tuple[Buffer, Buffer]:
        """What tiles store: of each group one member's blocks behind the other's; and a member's sums, or what all
        members have for it, whose blocks lie as theirs do."""
        tiles, wide = self.tiles, -(-self.tiles.cols // self.tiles.width)
        high = sum(map(len, tiles.groups)) // wide
        lines = sorted(
            (tiles.whole_rows(member, (row, row + 1))[0], member, row)
            for member in range(tiles.members)
            for row in range(high)
        )
        line = {(member, row): at for at, (_, member, row) in enumerate(lines)}
        staged, own, first = [0] * (tiles.members * high * wide), [0] * (high * wide), 0
        for group in tiles.groups:
            for at, (row, col) in enumerate(group):
                own[row * wide + col] = first + at
                for member in range(tiles.members):
                    place = first * tiles.members + member * len(group) + at
                    staged[line[member, row] * wide + col] = place
            first += len(group)
        tops = tuple(top for top, _, _ in lines)
        tops = () if tops == tuple(range(0, len(tops) * tiles.height, tiles.height)) else tops
        size, cols = (tiles.height, tiles.width), tiles.cols
        stored = Buffer(STAGED, self.split.rows, cols, "local", blocks=_shared(Blocks(*size, tuple(staged), tops)))
        if self.function == "all_to_all":
            return stored, replace(stored, name=GATHERED)
        return stored, Buffer(SUMMED, tiles.rows, cols, "local", blocks=_shared(Blocks(*size, tuple(own))))

    def steps(self, rank: int, work: MethodInputs) -> Steps:
        """A rank's tiles group by group, the collectives in the same order, and the restoring move behind them."""
        for at in range(len(self.tiles.groups)):
            for number, (rows, cols) in enumerate(self.tiles.multiplied(at)):
                yield MatmulChunk(
                    name=f"multiply.{rank}.{at}.{number}",
                    rank=rank,
                    rows=rows,
                    weight_cols=cols,
                    region=Region(STAGED, rank, rows, cols),
                    notifies=(Notify(COMPUTED, rank, at),),
                )
        for at in range(len(self.tiles.groups)):
            yield self.collective(rank, at, self.tiles.parts(at))
        first, end = self.split.shard(rank) if self.function == "reduce_scatter" else (0, self.split.rows)
        height = end - first
        source = Region(self.landing, rank, (0, height), (0, self.tiles.cols))
        if height:
            blocks = work.sums
            tiles = -(-height // blocks.block_m) * -(-self.tiles.cols // blocks.block_n)
            out = replace(source, buffer=Y)
            yield Reduce(name=f"restore.{rank}", rank=rank, queue=SUMS, operands=(source,), out=out, tiles=tiles)

    def staged(self, rank: int, member: int, part: WavePart) -> Region:
        """Blocks of a member's rows that a rank stores."""
        return Region(STAGED, rank, self.tiles.whole_rows(member, part[0]), self.tiles.part(member, part)[1])

    def collective(self, rank: int, at: int, parts: list[WavePart]) -> Collective:
        """A rank's part of the sums of a group."""
        sources = tuple(self.staged(rank, member, part) for member in range(self.tiles.members) for part in parts)
        destinations = tuple(replace(source, buffer=self.landing) for source in sources)
        if self.function == "reduce_scatter":
            destinations = tuple(Region(SUMMED, rank, *self.tiles.part(rank, part)) for part in parts)
        return Collective(
            name=f"{self.function}.{rank}.{at}",
            rank=rank,
            queue=EXCHANGES,
            waits=(Wait(COMPUTED, (at, at + 1), 1),),
            function=self.function,
            label=f"{self.function}.{at}",
            ranks=tuple(range(self.split.world_size)),
            sources=sources,
            destinations=destinations,
        )

    def goals(self, rank: int, work: MethodInputs) -> Iterator[Goal]:
        """What a rank has in the end: sums of its rows, in rank order."""
        first = 0
        for lo, hi in work.problem.result_ranges(rank):
            region = Region(Y, rank, (first, first + hi - lo), (0, self.tiles.cols))
            yield Goal(region, product(A, B), lo, 0, work.held)
            first += hi - lo
