"""Pushes chunks to peers on few SMs, by loads and stores or by bulk copies: quick to start where a copy engine is not.
Or adds them to what peers hold, in fp32, while others do the same.

`targets` has one row per operation of the table: where its buffer lies on the peer, and where the peer's signals do.
Programs claim rows of the table in order, wait for the signals it names, move whole rows of the source in words of 16
bytes, and add one to the peer's signal once all of a tile is there. The release of a tile is on its way while the
next one is read: what it covers was stored before the barrier in front of it.
SOURCE: TileLink (arXiv 2503.20313) for communication on SMs of its own; mscclpp for pushes with a flag behind them.
"""

import triton
import triton.language as tl

from overweave.ir.plan import COPY_WORD_BYTES
from overweave.lang.tile_table import (
    CLAIMED,
    OPERATION,
    READY,
    ROW,
    ROW_END,
    SIGNAL,
    SIGNALS_NOBODY,
    SOURCE_ROW,
    STORED,
    claim_tile,
    notify,
    read_column,
    record_time,
    wait_for_tile,
)
from overweave.memory.device.copy import add_elements, move_words
from overweave.memory.device.signals import STRIDE

WORD_BITS = tl.constexpr(8 * COPY_WORD_BYTES)  # that a thread loads and stores at once
TARGET = tl.constexpr(0)
PEER_SIGNALS = tl.constexpr(1)
TARGET_COLUMNS = tl.constexpr(2)


@triton.jit
def copy_kernel(
    targets,
    source,
    queue,
    protocol,
    row_words,
    BLOCK: tl.constexpr,
    BULK: tl.constexpr,
    ADDS: tl.constexpr,
    TRACED: tl.constexpr,
):
    """source: the buffer that all operations read, as int32, or where it is added in its own dtype. row_words: 16-byte
    words in a row of it. BULK: bulk copies move it, not loads and stores of BLOCK elements at a time. Tuples:
    kernels/arguments.py."""
    table, claims, trace, tiles = queue
    WORD: tl.constexpr = WORD_BITS // source.dtype.element_ty.primitive_bitwidth
    SUMS: tl.constexpr = tl.pointer_type(tl.float32) if ADDS else source.dtype
    tile = claim_tile(claims)
    while tile < tiles:
        record_time(trace, tile, CLAIMED, TRACED)
        verdict = wait_for_tile(
            table, tile, protocol.signals, protocol.words, protocol.limits, protocol.world_size
        )  # fmt: skip
        record_time(trace, tile, READY, TRACED)
        row = read_column(table, tile, ROW)
        count = (read_column(table, tile, ROW_END) - row) * row_words * WORD
        addresses = targets + read_column(table, tile, OPERATION) * TARGET_COLUMNS
        base = tl.multiple_of(tl.load(addresses + TARGET).to(SUMS), 16)
        target = base + row.to(tl.int64) * row_words * WORD
        origin = source + read_column(table, tile, SOURCE_ROW).to(tl.int64) * row_words * WORD
        if ADDS:
            add_elements(target, origin, count, BLOCK)
        else:
            move_words(target, origin, count, BLOCK, BULK, ALONE=True)

        # The next tile is claimed first: its number is known to all threads before thread 0 stays behind to release.
        following = claim_tile(claims)
        signal = read_column(table, tile, SIGNAL)
        if signal != SIGNALS_NOBODY:
            peer_signals = tl.load(addresses + PEER_SIGNALS).to(tl.pointer_type(tl.int32))
            notify(peer_signals + signal * STRIDE, verdict == 1)
        record_time(trace, tile, STORED, TRACED)
        tile = following
