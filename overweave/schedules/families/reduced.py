"""What one-shot and two-shot all-reduces share: their buffers, and where each rank's part lies in them."""

from __future__ import annotations

from msgspec import Struct

from overweave.ir.plan import ReduceConfig
from overweave.ir.schedule import Buffer, Range, Region
from overweave.schedules.communication import Chunk, Split, Sums, region, shifted


class Summing(Struct, frozen=True):
    """How an all-reduce adds: who does, the tiles of sums, which are counted, and whether whoever moves a sum to the
    caller's `y` norms its rows.
    """

    sums: Sums = "kernel"
    blocks: ReduceConfig = ReduceConfig()
    is_normed: bool = False


class Reduced(Struct, frozen=True):
    """partial: a rank's own product. slots: what peers put there, a part for each source. total: sums that peers read,
    or put there.
    """

    split: Split
    partial: Buffer
    slots: Buffer
    total: Buffer
    y: Buffer
    summing: Summing
    behind: dict[str, tuple[Region, ...]] = {}

    @property
    def size(self) -> int:
        return self.split.world_size

    @property
    def rows(self) -> Range:
        return 0, self.split.rows

    def multiplied(self, rank: int, out: Buffer) -> Chunk:
        """The whole partial, by one matmul."""
        return Chunk(name=f"multiply.{rank}", rank=rank, rows=self.rows, region=region(out, rank, self.rows))

    def slot(self, rank: int, source: int, rows: Range) -> Region:
        """Where rows from a source lie in the slots of a rank; they count from the first one it is sent."""
        return region(self.slots, rank, shifted(rows, source * (self.slots.rows // self.size)))

    def in_slot(self, rank: int, source: int, rows: Range) -> Region:
        """Where rows of a rank's own shard lie in its slots, from a source."""
        return self.slot(rank, source, shifted(rows, -self.split.shard(rank)[0]))

    def sum_tiles(self, rows: Range) -> int:
        """How many tiles sum so many rows."""
        blocks = self.summing.blocks
        return -(-(rows[1] - rows[0]) // blocks.block_m) * -(-self.total.cols // blocks.block_n)
