"""What a kernel author reads on the device: the columns of the tile table, the tile counter, waits and signals."""

import triton
import triton.language as tl

from overweave.ir.plan import NO_SIGNAL, OWN_SHARD, TileRow
from overweave.memory.device import (
    CLAIMED,
    READY,
    STORED,
    STRIDE,
    TRACE_COLUMNS,
    notify,
    read_clock,
    wait_for_signals,
)

__all__ = [
    "CLAIMED",
    "COLUMNS",
    "READY",
    "STORED",
    "TRACE_COLUMNS",
    "claim_tile",
    "finish_tile",
    "notify",
    "read_clock",
    "read_column",
    "record_time",
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

FROM_OWN_SHARD = tl.constexpr(OWN_SHARD)
SIGNALS_NOBODY = tl.constexpr(NO_SIGNAL)


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
def finish_tile(table, tile, signals, verdict):
    """Epilogue: signals that the tile is stored, unless nobody asked or the tile is void."""
    signal = read_column(table, tile, SIGNAL)
    if signal != SIGNALS_NOBODY:
        notify(signals + signal * STRIDE, verdict == 1)


@triton.jit
def record_time(trace, tile, COLUMN: tl.constexpr, TRACED: tl.constexpr):
    """Writes the device clock into the trace, if there is one."""
    if TRACED:
        tl.store(trace + tile * TRACE_COLUMNS + COLUMN, read_clock())
