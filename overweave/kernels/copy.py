"""The copy kernel: pushes chunks to peers on few SMs, by loads and stores or bulk copies (TMA), or adds them in fp32.

Small chunks start sooner than on a copy engine. `targets` has one row per operation of the tile table: the address of
its buffer on the peer, and of the peer's signals. Programs claim rows of the table in order, wait for the signals that
a row names, move whole matrix rows in 16-byte words, and add 1 to the peer's signal when all of a tile is stored. The
release of one tile overlaps the next tile's loads: it covers only what was stored before its barrier.
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
    """Move or add all chunks of a table. source: the buffer that all operations read: as int32, or typed if ADDS.

    row_words: 16-byte words in a row of it. BLOCK: elements that a program loads at a time. BULK: by bulk copies
    instead. ADDS: add to fp32 targets. Tuples: kernels/arguments.py.
    """
    table, claims, trace, tiles = queue
    WORD: tl.constexpr = WORD_BITS // source.dtype.element_ty.primitive_bitwidth
    TARGET_TYPE: tl.constexpr = tl.pointer_type(tl.float32) if ADDS else source.dtype
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
        base = tl.multiple_of(tl.load(addresses + TARGET).to(TARGET_TYPE), 16)
        target = base + row.to(tl.int64) * row_words * WORD
        source_row_pointer = source + read_column(table, tile, SOURCE_ROW).to(tl.int64) * row_words * WORD
        if ADDS:
            add_elements(target, source_row_pointer, count, BLOCK)
        else:
            move_words(target, source_row_pointer, count, BLOCK, BULK, ALONE=True)

        # Claim the next tile first: all threads learn its number before thread 0 is held up by the release.
        next_tile = claim_tile(claims)
        signal = read_column(table, tile, SIGNAL)
        if signal != SIGNALS_NOBODY:
            peer_signals = tl.load(addresses + PEER_SIGNALS).to(tl.pointer_type(tl.int32))
            notify(peer_signals + signal * STRIDE, verdict == 1)
        record_time(trace, tile, STORED, TRACED)
        tile = next_tile
