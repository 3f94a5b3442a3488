"""The static mapping of tiles: which rows a tile covers, whose they are, and which channel announces them.

A `TileChannel` is plain data that a kernel gets as a constant: what it says is folded into the kernel. Its arithmetic
is spelled twice, for the host as methods and for the device in `lang/primitives.py`; a test holds them equal.
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
    """A matrix `[rows, cols]` of which each of `shards` ranks owns rows, as torch.chunk deals them, cut into tiles.

    Tiles are numbered shard by shard, in a shard by rows of tiles, and none straddles two shards. Where rows are few,
    the last tiles of a shard are short or empty; they exist all the same, and are announced like the others.
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
        """f_R: whose rows they are."""
        return tile // self.per_shard

    def rows_of(self, tile: int) -> tuple[int, int]:
        """f_S: the rows `[low, high)` that the tile covers."""
        shard = self.rank_of(tile)
        end = min((shard + 1) * self.shard_rows, self.rows)
        low = min(shard * self.shard_rows + tile % self.per_shard // self.across * self.tile_rows, end)
        return low, min(low + self.tile_rows, end)


@dataclass(frozen=True)
class TileChannel:
    """The signals between the tiles of producers and those of consumers: TileLink's BlockChannel, as data.

    tiles: what producers make, and what is pushed and pulled. consumer: the tiles of consumers, of the same matrix; as
    the producers' if None. channels: counters for each shard; a producer's tile adds one to the counter of its rows,
    and a consumer's tile waits for all counters that its rows touch, each to be full. has_peers: there is also a signal
    for each tile and rank that `peer_tile_notify` raises.
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
        """Whether producers and consumers cut the same matrix: then the mapping needs no table."""
        made, read = self.tiles, self.consumed
        return (made.rows, made.shards) == (read.rows, read.shards)

    @property
    def is_same(self) -> bool:
        """Whether a consumers' tile is a producers' tile."""
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
        """Counters of all shards. They are the first signals of the channel."""
        return self.channels * self.world_size

    @property
    def signals(self) -> int:
        """All signals: the counters, and behind them one for each tile and rank if the channel has peers."""
        return self.counters + (self.tiles.count * self.world_size if self.has_peers else 0)

    @property
    def down(self) -> int:
        """Rows of the producers' tiles that one counter stands for; the last ones may stand for fewer."""
        return -(-self.tiles.down // self.channels)

    def counter_of(self, tile: int) -> int:
        """f_C: the counter to which a producer's tile adds one."""
        inside = tile % self.tiles.per_shard // self.tiles.across
        return self.tiles.rank_of(tile) * self.channels + inside // self.down

    def count_of(self, counter: int) -> int:
        """How many tiles add to a counter."""
        part = counter % self.channels
        low, high = (min(self.tiles.down, (part + end) * self.down) for end in (0, 1))
        return (high - low) * self.tiles.across

    def counters_of(self, tile: int) -> tuple[int, int]:
        """The counters `[low, high)` that a consumer's tile waits for."""
        return self.counters_of_rows(*self.consumed.rows_of(tile))

    def counters_of_rows(self, low: int, high: int) -> tuple[int, int]:
        """The counters `[low, high)` that stand for rows `[low, high)`."""
        if low == high:
            return 0, 0
        return self._counter_of_row(low), self._counter_of_row(high - 1) + 1

    def producer_table(self) -> list[list[int]]:
        """The mapping of producers as a dynamic one spells it: one row for each row of tiles (MAPPING_COLUMNS)."""
        first = range(0, self.tiles.count, self.tiles.across)
        return [
            [*self.tiles.rows_of(tile), self.tiles.rank_of(tile), self.counter_of(tile), self.counter_of(tile) + 1]
            for tile in first
        ]

    def consumer_table(self) -> list[list[int]]:
        """The mapping of consumers as a dynamic one spells it."""
        first = range(0, self.consumed.count, self.consumed.across)
        return [[*self.consumed.rows_of(tile), self.consumed.rank_of(tile), *self.counters_of(tile)] for tile in first]

    def _counter_of_row(self, row: int) -> int:
        shard = row // self.tiles.shard_rows
        inside = (row - shard * self.tiles.shard_rows) // self.tiles.tile_rows
        return shard * self.channels + inside // self.down
