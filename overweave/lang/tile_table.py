"""Device functions of a fused kernel: its tile table, the work counter, waits, notifies and pushes.

A verdict is 1, or 0 if a wait timed out: then the tile is stored as NaN and its signal is not raised.
"""

import triton
import triton.language as tl

from overweave.ir.tile_order import NO_ADDENDS, NO_SIGNAL, OWN_SHARD, TileRow
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
    wait_for_signals_by_lanes,
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
    "claim_tile",
    "complete_bulk_stores",
    "finish_tile",
    "finish_tile_at",
    "notify",
    "part_high",
    "part_low",
    "place_count",
    "push_slices",
    "read_clock",
    "read_column",
    "read_duties",
    "record_time",
    "select_source",
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
FINISHES = tl.constexpr(TileRow._fields.index("finishes"))
TO = tl.constexpr(TileRow._fields.index("to"))
SHIFT = tl.constexpr(TileRow._fields.index("shift"))

# Slices that tiles push: columns of the tile table that hold something else in other plans, and columns of the table of
# addresses (memory/lower.py).
SLICES_BEFORE, CLAIMS_SLICES = COL, WIDTH
SLICE_TARGET = tl.constexpr(0)
SLICE_SIGNALS = tl.constexpr(1)
SLICE_ORIGIN = tl.constexpr(2)
SLICE_WIDTH = tl.constexpr(3)
SLICE_COLUMNS = tl.constexpr(4)
SLICE_CLAIMS = tl.constexpr(3)  # index of their work counter, after those of tiles, sums and pushes
SLICE_BLOCK = tl.constexpr(4096)  # int32 words per copy step

COMPLETE_ASSEMBLY = tl.constexpr(COMPLETE_BULK_STORES)
FROM_OWN_SHARD = tl.constexpr(OWN_SHARD)
SIGNALS_NOBODY = tl.constexpr(NO_SIGNAL)
ADDS_NOTHING = tl.constexpr(NO_ADDENDS)


@triton.jit
def claim_tile(claims):
    """Claim the next row of the table, by an atomic counter: rows run in table order, so that no CTA waits for a tile
    that no resident CTA has claimed."""
    return tl.atomic_add(claims, 1, sem="relaxed", scope="gpu")


@triton.jit
def read_column(table, tile, COLUMN: tl.constexpr, DIVISOR: tl.constexpr = 1):
    """Load a column of a row. DIVISOR: a hint that the value is a multiple of it, as the compiler cannot infer."""
    return tl.multiple_of(tl.load(table + tile * COLUMNS + COLUMN), DIVISOR)


@triton.jit
def wait_for_tile(table, tile, signals, words, limits, world_size):
    """Prologue: wait for the signals of the row, with acquire. Return 1, or 0 if the wait failed."""
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
    """Load which signals a row waits for, ahead of the wait: (low, high, count, one more signal, its count)."""
    low, high = read_column(table, tile, WAIT_LO), read_column(table, tile, WAIT_HI)
    count = read_column(table, tile, WAIT_COUNT)
    return low, high, count, read_column(table, tile, ALSO), read_column(table, tile, ALSO_COUNT)


@triton.jit
def wait_for_duties(duties, operation, signals, words, limits, world_size):
    """Wait for the signals of `read_duties`, one lane polling each. Return 1, or 0 if the wait failed."""
    low, high, count, also, also_count = duties
    return wait_for_signals_by_lanes(
        signals, low, high, count, also, also_count, operation, words, limits, world_size
    )  # fmt: skip


@triton.jit
def finish_tile(table, tile, signals, verdict):
    """Epilogue: add one to the row's signal, with release, unless it has none or a wait failed."""
    signal = read_column(table, tile, SIGNAL)
    if signal != SIGNALS_NOBODY:
        notify(signals + signal * STRIDE, verdict == 1)


@triton.jit
def announce_tile(table, tile, signals):
    """`finish_tile` of a kernel that does not wait."""
    finish_tile(table, tile, signals, tl.full((), 1, tl.int32))


@triton.jit
def place_count(table, tile, places, world_size):
    """Return on how many ranks a tile is stored: 1 (this one or a peer), or all."""
    return tl.load(_place(table, tile, places, 0, world_size) - 1).to(tl.int32)


@triton.jit
def away(table, tile, places, place, world_size, pointer):
    """Return the offset from `pointer` to the tensor on destination rank `place`, in elements; 16-byte aligned."""
    distance = tl.load(_place(table, tile, places, place, world_size))
    return tl.multiple_of(distance, 128 // pointer.dtype.element_ty.primitive_bitwidth)


@triton.jit
def finish_tile_at(table, tile, places, verdict, world_size):
    """Epilogue: add one to the tile's signal on every rank that stores and waits for it, unless a wait failed."""
    signal = read_column(table, tile, SIGNAL)
    if signal != SIGNALS_NOBODY:
        for place in range(place_count(table, tile, places, world_size)):
            address = tl.load(_place(table, tile, places, place, world_size) + 1)
            if address != 0:
                notify(address.to(tl.pointer_type(tl.int32)) + signal * STRIDE, verdict == 1)


@triton.jit
def announce_tile_at(table, tile, places, world_size):
    """`finish_tile_at` of a kernel that does not wait."""
    finish_tile_at(table, tile, places, tl.full((), 1, tl.int32), world_size)


@triton.jit
def _place(table, tile, places, place, world_size):
    """Return the entry of a destination in `places`: per operation a count, then (offset, signal address) a rank."""
    return places + read_column(table, tile, OPERATION) * (1 + 2 * world_size) + 1 + 2 * place


@triton.jit
def push_slices(table, tile, claims, targets, source, first, slices, BULK: tl.constexpr):
    """Before a tile: claim slices from a work counter and push them to peers: at least one, more if the row says so.

    first: the table row of the first slice. slices: how many there are. source: the caller's shard, which is read for
    slices whose row says so. BULK: copy by bulk (TMA) instructions.
    """
    if read_column(table, tile, CLAIMS_SLICES) != 0:
        batch = read_column(table, tile, SLICES_BEFORE)
        slice = claim_tile(claims + SLICE_CLAIMS)
        while slice < slices:
            push_slice(table, first + slice, targets, source, BULK)
            next_slice = slices
            if slice + 1 < batch:
                next_slice = claim_tile(claims + SLICE_CLAIMS)
            slice = next_slice


@triton.jit
def push_slice(table, row, targets, source, BULK: tl.constexpr):
    """Copy a slice of whole rows to a peer, then add one to the peer's signal, with release."""
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
    """Return the author's tile id of a row of the table."""
    return read_column(table, tile, ROW)


@triton.jit
def select_source(table, tile, shard, arrived, row_elements):
    """Return the base pointer of a tile's loads: the shard's, shifted so that global rows index it, or `arrived`.

    arrived: the receive buffer. row_elements: elements of a row.
    """
    offset = read_column(table, tile, SOURCE_ROW).to(tl.int64) * row_elements
    return tl.where(read_column(table, tile, SOURCE) == FROM_OWN_SHARD, shard - offset, arrived)


@triton.jit
def blocks(extent, block):
    """Return `cdiv(extent, block)`."""
    return (extent + block - 1) // block


@triton.jit
def part_low(table, part, low):
    """Return `low`, the start of a loop, clipped to a part of the streamed axis."""
    return tl.maximum(read_column(table, part, ROW), low)


@triton.jit
def part_high(table, part, high):
    """Return `high`, the end of a loop, clipped to a part of the streamed axis."""
    return tl.minimum(read_column(table, part, ROW_END), high)


@triton.jit
def voided(value, verdict):
    """Return the value, or NaN if a wait failed. Integers have no NaN and stay."""
    if value.dtype.is_floating():
        value = tl.where(verdict == 1, value, tl.full(value.shape, float("nan"), tl.float32).to(value.dtype))
    return value


@triton.jit
def complete_bulk_stores():
    """Wait until the bulk-tensor stores of this CTA are complete, as a notify for them requires."""
    tl.inline_asm_elementwise(COMPLETE_ASSEMBLY, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def record_time(trace, tile, COLUMN: tl.constexpr, TRACED: tl.constexpr):
    """Store the device clock into a column of the tile's trace, if TRACED."""
    if TRACED:
        tl.store(trace + tile * TRACE_COLUMNS + COLUMN, read_clock())
