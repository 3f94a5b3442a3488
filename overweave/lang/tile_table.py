"""What a fused kernel reads on the device: the columns of its tile table, the tile counter, waits and signals."""

import triton
import triton.language as tl

from overweave.ir.tile_order import ARRIVAL_WORDS, NO_ADDENDS, NO_SIGNAL, OWN_SHARD, TileRow
from overweave.memory.device.copy import move_words
from overweave.memory.device.ptx import COMPLETE_BULK_STORES
from overweave.memory.device.signals import (
    BEGUN,
    CLAIMED,
    MULTIPLIED,
    PARTED,
    READY,
    RECEIVED,
    STORED,
    STRIDE,
    TRACE_COLUMNS,
    notify,
    read_clock,
    wait_for_signals,
    wait_for_signals_at_once,
)

__all__ = [
    "BEGUN",
    "CLAIMED",
    "COLUMNS",
    "MULTIPLIED",
    "PARTED",
    "READY",
    "RECEIVED",
    "STORED",
    "TRACE_COLUMNS",
    "announce_tile",
    "announce_tile_at",
    "away",
    "blocks",
    "push_slices",
    "select_source",
    "claim_tile",
    "complete_bulk_stores",
    "finish_tile",
    "finish_tile_at",
    "notify",
    "part_high",
    "part_low",
    "place_count",
    "read_clock",
    "read_column",
    "read_duties",
    "record_time",
    "tile_number",
    "voided",
    "wait_for_duties",
    "wait_for_signals",
    "wait_for_tile",
]

COLUMNS = tl.constexpr(len(TileRow._fields))
ROW = tl.constexpr(TileRow._fields.index("row"))
ROW_END = tl.constexpr(TileRow._fields.index("row_end"))
COL = tl.constexpr(TileRow._fields.index("col"))
SOURCE = tl.constexpr(TileRow._fields.index("source"))
SOURCE_ROW = tl.constexpr(TileRow._fields.index("source_row"))
WAIT_LO = tl.constexpr(TileRow._fields.index("wait_lo"))
WAIT_HI = tl.constexpr(TileRow._fields.index("wait_hi"))
WAIT_COUNT = tl.constexpr(TileRow._fields.index("wait_count"))
SIGNAL = tl.constexpr(TileRow._fields.index("signal"))
OPERATION = tl.constexpr(TileRow._fields.index("operation"))
ALSO = tl.constexpr(TileRow._fields.index("also"))
ALSO_COUNT = tl.constexpr(TileRow._fields.index("also_count"))
WIDTH = tl.constexpr(TileRow._fields.index("width"))
PLACE = tl.constexpr(TileRow._fields.index("place"))
LATE_LO = tl.constexpr(TileRow._fields.index("late_lo"))
LATE_HI = tl.constexpr(TileRow._fields.index("late_hi"))
LATE_COUNT = tl.constexpr(TileRow._fields.index("late_count"))
WEIGHT = tl.constexpr(TileRow._fields.index("weight"))
INTO = tl.constexpr(TileRow._fields.index("into"))
K_LO = tl.constexpr(TileRow._fields.index("k_lo"))
K_HI = tl.constexpr(TileRow._fields.index("k_hi"))
SHARE = tl.constexpr(TileRow._fields.index("share"))
SHARES = tl.constexpr(TileRow._fields.index("shares"))
PARTIAL = tl.constexpr(TileRow._fields.index("partial"))
FINISHES = tl.constexpr(TileRow._fields.index("finishes"))
TO = tl.constexpr(TileRow._fields.index("to"))
SHIFT = tl.constexpr(TileRow._fields.index("shift"))

# Counters of the shares of a tile: how many of each half are there, and how many halves of the sum are stored.
ARRIVALS = tl.constexpr(ARRIVAL_WORDS)
DONE = tl.constexpr(2)
VOID_SHARE = tl.constexpr(1 << 16)  # what a void share adds beside its one

# Slices that tiles carry: columns of their tiles' rows, and of the table of addresses (memory/lower.py).
SLICES_BEFORE, CLAIMS_SLICES = COL, WIDTH
SLICE_TARGET = tl.constexpr(0)
SLICE_SIGNALS = tl.constexpr(1)
SLICE_ORIGIN = tl.constexpr(2)
SLICE_WIDTH = tl.constexpr(3)
SLICE_COLUMNS = tl.constexpr(4)
SLICE_CLAIMS = tl.constexpr(3)  # their counter, behind those of tiles, sums and pushes
SLICE_BLOCK = tl.constexpr(4096)  # int32 under way at a time

COMPLETE_ASSEMBLY = tl.constexpr(COMPLETE_BULK_STORES)
FROM_OWN_SHARD = tl.constexpr(OWN_SHARD)
SIGNALS_NOBODY = tl.constexpr(NO_SIGNAL)
ADDS_NOTHING = tl.constexpr(NO_ADDENDS)


@triton.jit
def claim_tile(claims):
    """The next row of the table. Rows go out in table order, so a block that runs never waits for one that does not."""
    return tl.atomic_add(claims, 1, sem="relaxed", scope="gpu")


@triton.jit
def read_column(table, tile, COLUMN: tl.constexpr, DIVISOR: tl.constexpr = 1):
    """One entry of a row of the table, known to be a multiple of DIVISOR: what is loaded tells the compiler nothing."""
    return tl.multiple_of(tl.load(table + tile * COLUMNS + COLUMN), DIVISOR)


@triton.jit
def wait_for_tile(table, tile, signals, words, limits, world_size):
    """Prologue: waits for the signals that the row names. 1, or 0 if the wait is void."""
    return wait_for_signals(
        signals,
        read_column(table, tile, WAIT_LO),
        read_column(table, tile, WAIT_HI),
        read_column(table, tile, WAIT_COUNT),
        read_column(table, tile, ALSO),
        read_column(table, tile, ALSO_COUNT),
        read_column(table, tile, OPERATION),
        words,
        limits,
        world_size,
    )


@triton.jit
def read_duties(table, tile):
    """What the row waits for, read ahead of the wait: low, high, count, and one more signal with its own count."""
    low, high = read_column(table, tile, WAIT_LO), read_column(table, tile, WAIT_HI)
    count = read_column(table, tile, WAIT_COUNT)
    return low, high, count, read_column(table, tile, ALSO), read_column(table, tile, ALSO_COUNT)


@triton.jit
def wait_for_duties(duties, operation, signals, words, limits, world_size):
    """Waits as a tile's duties say, where they may be many signals: all are polled together. 1, or 0 if it is void."""
    low, high, count, also, also_count = duties
    return wait_for_signals_at_once(
        signals, low, high, count, also, also_count, operation, words, limits, world_size
    )  # fmt: skip


@triton.jit
def finish_tile(table, tile, signals, verdict):
    """Epilogue: signals that the tile is stored, unless nobody asked or the tile is void."""
    signal = read_column(table, tile, SIGNAL)
    if signal != SIGNALS_NOBODY:
        notify(signals + signal * STRIDE, verdict == 1)


@triton.jit
def announce_tile(table, tile, signals):
    """Epilogue of a kernel that waits for nothing: signals that the tile is stored, unless nobody asked."""
    finish_tile(table, tile, signals, tl.full((), 1, tl.int32))


@triton.jit
def place_count(table, tile, places, world_size):
    """At how many places a tile stores what it computed: at its own, at a peer's, or at every rank's."""
    return tl.load(_place(table, tile, places, 0, world_size) - 1).to(tl.int32)


@triton.jit
def away(table, tile, places, place, world_size, pointer):
    """How many elements behind `pointer` a place lies, in bytes of 16."""
    distance = tl.load(_place(table, tile, places, place, world_size))
    return tl.multiple_of(distance, 128 // pointer.dtype.element_ty.primitive_bitwidth)


@triton.jit
def finish_tile_at(table, tile, places, verdict, world_size):
    """Epilogue: signals, wherever somebody waits for it, that the tile is stored there, unless the tile is void."""
    signal = read_column(table, tile, SIGNAL)
    if signal != SIGNALS_NOBODY:
        for place in range(place_count(table, tile, places, world_size)):
            address = tl.load(_place(table, tile, places, place, world_size) + 1)
            if address != 0:
                notify(address.to(tl.pointer_type(tl.int32)) + signal * STRIDE, verdict == 1)


@triton.jit
def announce_tile_at(table, tile, places, world_size):
    """The same, of a kernel that waits for nothing."""
    finish_tile_at(table, tile, places, tl.full((), 1, tl.int32), world_size)


@triton.jit
def _place(table, tile, places, place, world_size):
    """Of an operation: how many places, then for each how far away it is and where its signals are."""
    return places + read_column(table, tile, OPERATION) * (1 + 2 * world_size) + 1 + 2 * place


@triton.jit
def push_slices(table, tile, claims, targets, source, first, slices, BULK: tl.constexpr):
    """Before a tile: moves slices of what goes to peers, at least one while there are any, and as many more as its row
    says. Each is announced where it lands, after it.

    first: the row of the first slice. source: the tensor of the caller's that slices come from, if any does.
    """
    if read_column(table, tile, CLAIMS_SLICES) != 0:
        before = read_column(table, tile, SLICES_BEFORE)
        slice = claim_tile(claims + SLICE_CLAIMS)
        while slice < slices:
            push_slice(table, first + slice, targets, source, BULK)
            following = slices
            if slice + 1 < before:
                following = claim_tile(claims + SLICE_CLAIMS)
            slice = following


@triton.jit
def push_slice(table, row, targets, source, BULK: tl.constexpr):
    """Whole rows to a peer, and one more on the peer's signal."""
    addresses = targets + read_column(table, row, OPERATION) * SLICE_COLUMNS
    width = tl.multiple_of(tl.load(addresses + SLICE_WIDTH), 4)
    start, source_row = read_column(table, row, ROW), read_column(table, row, SOURCE_ROW)
    count = tl.multiple_of(((read_column(table, row, ROW_END) - start) * width).to(tl.int32), 4)
    words = tl.pointer_type(tl.int32)
    origin = tl.load(addresses + SLICE_ORIGIN).to(words)
    if read_column(table, row, SOURCE) == FROM_OWN_SHARD:
        origin = source.to(words, bitcast=True)
    target = tl.load(addresses + SLICE_TARGET).to(words)
    origin, target = tl.multiple_of(origin, 16), tl.multiple_of(target, 16)
    move_words(target + start * width, origin + source_row * width, count, SLICE_BLOCK, BULK, ALONE=False)
    signals = tl.load(addresses + SLICE_SIGNALS).to(words)
    notify(signals + read_column(table, row, SIGNAL) * STRIDE, count >= 0)


@triton.jit
def tile_number(table, tile):
    """The author's number of the tile in a row of the table."""
    return read_column(table, tile, ROW)


@triton.jit
def select_source(table, tile, own, arrived, row_elements):
    """Where the tile finds its rows of a tensor: the caller's shard, moved back by the rows before it, or `arrived`."""
    before = read_column(table, tile, SOURCE_ROW).to(tl.int64) * row_elements
    return tl.where(read_column(table, tile, SOURCE) == FROM_OWN_SHARD, own - before, arrived)


@triton.jit
def blocks(extent, block):
    """How many blocks cover an axis; the last one may be short."""
    return (extent + block - 1) // block


@triton.jit
def part_low(table, part, low):
    """Where a loop that begins at `low` begins within a part of what it walks."""
    return tl.maximum(read_column(table, part, ROW), low)


@triton.jit
def part_high(table, part, high):
    """Where a loop that ends at `high` ends within a part of what it walks."""
    return tl.minimum(read_column(table, part, ROW_END), high)


@triton.jit
def voided(value, verdict):
    """What a tile stores: its value, or NaN if what it waited for did not come. Integers have no NaN and stay."""
    if value.dtype.is_floating():
        value = tl.where(verdict == 1, value, tl.full(value.shape, float("nan"), tl.float32).to(value.dtype))
    return value


@triton.jit
def complete_bulk_stores():
    """Waits until the bulk-tensor stores of this block are complete: only then may they be announced."""
    tl.inline_asm_elementwise(COMPLETE_ASSEMBLY, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def record_time(trace, tile, COLUMN: tl.constexpr, TRACED: tl.constexpr):
    """Writes the device clock into the trace, if there is one."""
    if TRACED:
        tl.store(trace + tile * TRACE_COLUMNS + COLUMN, read_clock())
