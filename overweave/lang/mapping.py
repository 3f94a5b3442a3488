"""The static mapping of tiles: the rows of a tile, the rank that owns them, and the counter that it adds to.

A `TileChannel` is plain data that a kernel gets as a constexpr. The mapping is implemented twice,
for the host as methods and for the device in `lang/primitives.py`; a test compares them.
SOURCE: TileLink, section 4.1 (f_S, f_R, f_C; their BlockChannel).
"""

from __future__ import annotations

from dataclasses import dataclass

from overweave.errors import InputError

# Columns of a dynamic mapping, int32 `[tile rows, COLUMNS]`: the rows `[low, high)` of the tile, the rank they belong
# to, and its channels `[channel, channel_end)`; a producer's tile has one channel.
MAPPING_COLUMNS = ("low", "high", "rank", "channel", "channel_end")


@dataclass(frozen=True)
class Tiles:
    """A matrix `[rows, cols]` divided into tiles. Each of `shards` ranks owns a range of rows, split as by torch.chunk.

    Tiles are numbered shard by shard, row-major within a shard, and none straddles two shards. If rows are few, the
    last tiles of a shard are short or empty; they are signalled like the others. Raises InputError for other values.
    """

    rows: int
    cols: int
    tile_rows: int
    tile_cols: int
    shards: int = 1

    def __post_init__(self) -> None:
        numbers = (self.rows, self.cols, self.tile_rows, self.tile_cols, self.shards)
        if any(type(number) is not int or number < 1 for number in numbers):
            raise InputError("cut a matrix into tiles", f"{self}"[:200], "Every number is an int of at least 1")

    @property
    def shard_rows(self) -> int:
        """Rows of a shard; the last shards may have fewer."""
        return -(-self.rows // self.shards)

    @property
    def down(self) -> int:
        """Rows of tiles in a shard."""
        return -(-self.shard_rows // self.tile_rows)

    @property
    def across(self) -> int:
        """Tiles in a row of tiles."""
        return -(-self.cols // self.tile_cols)

    @property
    def per_shard(self) -> int:
        """Tiles of a shard."""
        return self.down * self.across

    @property
    def count(self) -> int:
        """All tiles."""
        return self.per_shard * self.shards

    def rank_of(self, tile: int) -> int:
        """f_R: the rank that owns a tile's rows."""
        return tile // self.per_shard

    def rows_of(self, tile: int) -> tuple[int, int]:
        """f_S: the rows `[low, high)` that the tile covers."""
        shard = self.rank_of(tile)
        end = min((shard + 1) * self.shard_rows, self.rows)
        low = min(shard * self.shard_rows + tile % self.per_shard // self.across * self.tile_rows, end)
        return low, min(low + self.tile_rows, end)


@dataclass(frozen=True)
class TileChannel:
    """The signals between producers' and consumers' tiles: TileLink's BlockChannel, as data.

    tiles: of producers; also the unit of push and pull. consumer: the tiles of consumers, of the same matrix; None: the
    producers'. channels: counters of each shard. A producer's tile adds one to the counter of its rows; a consumer's
    tile waits until every counter of its rows is full. has_peers: adds a signal for each tile and rank, for
    `peer_tile_notify`.
    """

    tiles: Tiles
    consumer: Tiles | None = None
    channels: int = 1
    has_peers: bool = False

    def __post_init__(self) -> None:
        if type(self.channels) is not int or self.channels < 1:
            found = f"channels={self.channels}"[:60]
            raise InputError("lay out a channel", found, "Give each shard an int of at least 1")
        tiles: object = self.tiles
        consumer: object = self.consumer
        if not isinstance(tiles, Tiles) or not isinstance(consumer, Tiles | None):
            found = f"got {type(tiles).__name__} and {type(consumer).__name__}"
            raise InputError("lay out a channel between tiles", found, "Pass ow.Tiles, and ow.Tiles or None")

    @property
    def consumed(self) -> Tiles:
        """The tiles of consumers."""
        return self.consumer or self.tiles

    @property
    def is_static(self) -> bool:
        """Whether producers' and consumers' tiles are of the same matrix and shards, so that no table is needed."""
        produced, consumed = self.tiles, self.consumed
        return (produced.rows, produced.shards) == (consumed.rows, consumed.shards)

    @property
    def is_same(self) -> bool:
        """Whether consumers have the producers' tiles."""
        return self.consumer is None

    @property
    def world_size(self) -> int:
        """How many ranks own rows."""
        return self.tiles.shards

    @property
    def padded_ranks(self) -> int:
        """The world size as the extent of a tensor on the device: the next power of two."""
        return 1 << (self.world_size - 1).bit_length()

    @property
    def counters(self) -> int:
        """How many counters all shards have. They are the first signals of the channel."""
        return self.channels * self.world_size

    @property
    def signals(self) -> int:
        """How many signals there are: the counters, then, if has_peers, one for each pair of tile and rank."""
        return self.counters + (self.tiles.count * self.world_size if self.has_peers else 0)

    @property
    def down(self) -> int:
        """Rows of producers' tiles for each counter; the last counters of a shard may have fewer."""
        return -(-self.tiles.down // self.channels)

    def counter_of(self, tile: int) -> int:
        """f_C: the counter to which a producer's tile adds one."""
        row_in_shard = tile % self.tiles.per_shard // self.tiles.across
        return self.tiles.rank_of(tile) * self.channels + row_in_shard // self.down

    def count_of(self, counter: int) -> int:
        """How many tiles add to a counter."""
        part = counter % self.channels
        low, high = (min(self.tiles.down, (part + end) * self.down) for end in (0, 1))
        return (high - low) * self.tiles.across

    def counters_of(self, tile: int) -> tuple[int, int]:
        """The counters `[low, high)` that a consumer's tile waits for."""
        return self.counters_of_rows(*self.consumed.rows_of(tile))

    def counters_of_rows(self, low: int, high: int) -> tuple[int, int]:
        """The counters `[low, high)` of the rows `[low, high)`."""
        if low == high:
            return 0, 0
        return self._counter_of_row(low), self._counter_of_row(high - 1) + 1

    def producer_table(self) -> list[list[int]]:
        """Return the producers' mapping as a dynamic table: one row for each row of tiles, with MAPPING_COLUMNS."""
        first = range(0, self.tiles.count, self.tiles.across)
        return [
            [*self.tiles.rows_of(tile), self.tiles.rank_of(tile), self.counter_of(tile), self.counter_of(tile) + 1]
            for tile in first
        ]

    def consumer_table(self) -> list[list[int]]:
        """Return the consumers' mapping as a dynamic table."""
        first = range(0, self.consumed.count, self.consumed.across)
        return [[*self.consumed.rows_of(tile), self.consumed.rank_of(tile), *self.counters_of(tile)] for tile in first]

    def _counter_of_row(self, row: int) -> int:
        """Return the counter of the tile that holds a row."""
        shard = row // self.tiles.shard_rows
        tile_row = (row - shard * self.tiles.shard_rows) // self.tiles.tile_rows
        return shard * self.channels + tile_row // self.down
