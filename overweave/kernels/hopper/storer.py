"""The storer of the Hopper matmul, one warp: brings addends, stores what the consumers leave, and tells of it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from overweave.compat.triton_names import block_barrier, reinterpret, store_tile, wait_for_stores_read
from overweave.kernels.experts import stored_rows
from overweave.kernels.hopper.shared import LAST, NUMBER, VOID, lacking, receive
from overweave.kernels.hopper.tile_end import await_addends, load_addend
from overweave.kernels.hopper.tiles import place, rectangle
from overweave.kernels.tile_end import AT_ALL, EXPERTS, of_weight, signals_of, weight_of
from overweave.lang.tile_table import (
    ADDS_NOTHING,
    COL,
    INTO,
    MULTIPLIED,
    PLACE,
    RECEIVED,
    ROW,
    ROW_END,
    SIGNAL,
    SIGNALS_NOBODY,
    STORED,
    TO,
    read_column,
    record_time,
)
from overweave.memory.device.ptx import COMPLETE_BULK_STORES, READ_SHORT_CLOCK, SLEEP_UNTIL
from overweave.memory.device.signals import STRIDE

CLOCK_ASSEMBLY = gl.constexpr(READ_SHORT_CLOCK)
REST_ASSEMBLY = gl.constexpr(SLEEP_UNTIL)
UNREAD = gl.constexpr(1)  # strips that a store may leave behind


@gluon.jit
def store_parts(target, c_tiles, half, row, col, lacks, SPLIT_N: gl.constexpr):
    """Stores the rectangles of one consumer's half of a tile, those that it has, from shared memory."""
    PART_N: gl.constexpr = c_tiles.first.type.shape[2]
    for part in gl.static_range(SPLIT_N):
        if part == 0 or lacks < SPLIT_N - part:
            store_tile(target, [row, col + part * PART_N], rectangle(c_tiles, half, part, 2))


@gluon.jit
def store_parts_away(target, c_tiles, half, row, col, lacks, pace_ns, SPLIT_N: gl.constexpr):
    """The same at a peer, in small strips, few of them under way and none ahead of its time: loads that are asked for
    behind a store wait until the link has taken that, and the main loop's must not.

    A strip is as wide as a row of shared memory, so that those of a rectangle lie behind each other there.
    """
    PART_N: gl.constexpr = c_tiles.first.type.shape[2]
    STRIP_M: gl.constexpr = target.block_type.shape[0]
    STRIP_N: gl.constexpr = target.block_type.shape[1]
    DOWN: gl.constexpr = c_tiles.first.type.shape[1] // STRIP_M
    STRIPS: gl.constexpr = DOWN * (PART_N // STRIP_N)
    for part in gl.static_range(SPLIT_N):
        tiles, number = place(c_tiles, half, part, 2)
        strips = reinterpret(tiles, tiles.dtype, [tiles.type.shape[0] * STRIPS, STRIP_M, STRIP_N], tiles.type.layout)
        if part == 0 or lacks < SPLIT_N - part:
            due = gl.inline_asm_elementwise(CLOCK_ASSEMBLY, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
            first = number * STRIPS
            for strip in range(STRIPS):
                below, beside = strip % DOWN * STRIP_M, part * PART_N + strip // DOWN * STRIP_N
                store_tile(target, [row + below, col + beside], strips.index(first + strip))
                wait_for_stores_read(UNREAD)
                due += pace_ns
                gl.inline_asm_elementwise(REST_ASSEMBLY, "=r,r", [due], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pace_of(peers, world_size, tile, tiles):
    """How far apart a tile's strips are (runtime/kernel_calls/bind.py); behind the last tiles nobody loads."""
    is_last = tile + gl.num_programs(0) >= tiles
    return gl.where(is_last, 0, gl.load(peers.places + 2 * world_size + 1)).to(gl.int32)


@gluon.jit
def store_parts_at(
    to, own, at_peers, c_tiles, half, row, col, lacks, pace_ns, SPLIT_N: gl.constexpr, PEERS: gl.constexpr
):  # fmt: skip
    """The same by an own tensor map, or by that of the peer where the tile belongs.

    There is a branch for each, as a choice among so many maps takes registers that the warp has not.
    """
    if PEERS == 0 or to <= 0:
        store_parts(own, c_tiles, half, row, col, lacks, SPLIT_N)
    for steps in gl.static_range(1, PEERS + 1):
        if to == steps:
            store_parts_away(at_peers[steps - 1], c_tiles, half, row, col, lacks, pace_ns, SPLIT_N)


@gluon.jit
def store_parts_at_peers(
    at_peers, c_tiles, half, row, col, lacks, pace_ns, SPLIT_N: gl.constexpr, PEERS: gl.constexpr
):  # fmt: skip
    """The same at every peer."""
    for steps in gl.static_range(1, PEERS + 1):
        store_parts_away(at_peers[steps - 1], c_tiles, half, row, col, lacks, pace_ns, SPLIT_N)


@gluon.jit
def announce_everywhere(to, signal, peers, is_sound):
    """Tells the peers of a tile that is stored at every rank."""
    if to == AT_ALL:
        for steps in range(1, peers.everyone):
            gl.atomic_add(signals_of(peers, steps) + signal * STRIDE, 1, mask=is_sound, sem="release", scope="sys")


COMPLETE_ASSEMBLY = gl.constexpr(COMPLETE_BULK_STORES)


# What a consumer left of experts is stored whole, or row by row. Rows that are scattered lie apart, and rows of a group
# that ends within the tile must not be followed by others: a bulk store could do neither. So the warp reads pieces of
# eight rows from shared memory, and stores each row where it belongs.

PIECE_M = gl.constexpr(8)  # rows: a block of swizzled shared memory


@gluon.jit
def store_rows_of(
    experts, target, out, c_tiles, half, row, row_end, col, lacks, n, SPLIT_N: gl.constexpr
):  # fmt: skip
    """One consumer's half of a tile from [row, col] on. target: the tensor map of `out`."""
    PART_M: gl.constexpr = c_tiles.first.type.shape[1]
    is_whole = row + PART_M <= row_end
    if experts.into is not None:
        store_pieces(experts, out, c_tiles, half, row, row_end, col, lacks, n, SPLIT_N)
    elif is_whole:
        store_parts(target, c_tiles, half, row, col, lacks, SPLIT_N)
    else:
        store_pieces(experts, out, c_tiles, half, row, row_end, col, lacks, n, SPLIT_N)


@gluon.jit
def store_pieces(experts, out, c_tiles, half, row, row_end, col, lacks, n, SPLIT_N: gl.constexpr):
    """Eight rows at a time, as wide as a row of shared memory."""
    PART_M: gl.constexpr = c_tiles.first.type.shape[1]
    PART_N: gl.constexpr = c_tiles.first.type.shape[2]
    BYTES: gl.constexpr = c_tiles.first.dtype.primitive_bitwidth // 8
    PIECE_N: gl.constexpr = min(PART_N, 128 // BYTES)
    WIDTH: gl.constexpr = 16 // BYTES
    ACROSS: gl.constexpr = PIECE_N // WIDTH
    layout: gl.constexpr = gl.BlockedLayout([1, WIDTH], [32 // ACROSS, ACROSS], [1, 1], [1, 0])
    DOWN: gl.constexpr = PART_M // PIECE_M
    PIECES: gl.constexpr = DOWN * (PART_N // PIECE_N)
    width = n // WIDTH * WIDTH  # rows of the result are whole 16 bytes: known to be a multiple
    for part in gl.static_range(SPLIT_N):
        tiles, number = place(c_tiles, half, part, 2)
        pieces = reinterpret(tiles, tiles.dtype, [tiles.type.shape[0] * PIECES, PIECE_M, PIECE_N], tiles.type.layout)
        if part == 0 or lacks < SPLIT_N - part:
            for below in range(gl.cdiv(gl.minimum(row_end - row, PART_M), PIECE_M)):
                rows = row + below * PIECE_M + gl.arange(0, PIECE_M, layout=gl.SliceLayout(1, layout))
                at, is_stored = stored_rows(experts, rows, row_end)
                for beside in gl.static_range(PART_N // PIECE_N):
                    piece = pieces.index(number * PIECES + beside * DOWN + below).load(layout)
                    cols = col + part * PART_N + beside * PIECE_N
                    cols = cols // WIDTH * WIDTH + gl.arange(0, PIECE_N, layout=gl.SliceLayout(0, layout))
                    inside = is_stored[:, None] & (cols < width)[None, :]
                    gl.store(out + at[:, None] * width + cols[None, :], piece, mask=inside)


@gluon.jit
def store(traits: gl.constexpr, results, ring, outs, work, protocol):
    """Every tile of the ring. outs: hopper/matmul.Outs."""
    table, peers, products = work.queue.table, work.peers, work.products
    PART_M: gl.constexpr = results.tiles.first.type.shape[1]
    STEP_M: gl.constexpr = 0 if traits.in_columns else results.tiles.first.type.shape[1]
    STEP_N: gl.constexpr = results.tiles.first.type.shape[2] if traits.in_columns else 0
    SPLIT_N: gl.constexpr = traits.split_n
    turn = 0
    message = receive(ring, turn)
    while message != LAST:
        tile = message & NUMBER
        is_sound = message < VOID
        if traits.addends > 0:
            gl.inline_asm_elementwise(COMPLETE_ASSEMBLY, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
            block_barrier()
            verdict = await_addends(work.sums, table, tile, protocol)
            if work.sums.tiles is not None:
                load_addend(traits, work.sums, results.tiles, table, tile, lacking(message), verdict)
            is_sound = is_sound & (verdict == 1)
            record_time(work.queue.trace, tile, RECEIVED, traits.traced)
        row = read_column(table, tile, ROW)
        row_end = read_column(table, tile, ROW_END)
        col = read_column(table, tile, COL)
        signal = read_column(table, tile, SIGNAL)
        target = of_weight(weight_of(table, tile, traits.weights), outs.out, outs.out_1, outs.out_2, traits.weights)
        if outs.total is not None:
            if read_column(table, tile, INTO) != 0:
                target = outs.total
        to, pace_ns = 0, 0
        if traits.peers > 0:
            to, pace_ns = read_column(table, tile, TO), pace_of(peers, protocol.world_size, tile, work.queue.tiles)
        for half in gl.static_range(2):
            mbarrier.wait(results.full.index(half), turn & 1)
            if half == 1:
                record_time(work.queue.trace, tile, MULTIPLIED, traits.traced and traits.addends == 0)
            top, left = row + half * STEP_M, col + half * STEP_N
            if traits.addends == 0 or work.sums.tiles is not None or read_column(table, tile, PLACE) == ADDS_NOTHING:
                if traits.weights == EXPERTS:
                    store_rows_of(
                        work.experts, target, products.out, results.tiles, half, top,
                        row_end, left, lacking(message), products.n, SPLIT_N,
                    )  # fmt: skip
                elif top + PART_M <= row_end:
                    store_parts_at(
                        to, target, outs.at_peers, results.tiles, half, top, left, lacking(message), pace_ns,
                        SPLIT_N, traits.peers,
                    )  # fmt: skip
                    if peers.everyone is not None:
                        if to == AT_ALL:
                            store_parts_at_peers(
                                outs.sums_at_peers, results.tiles, half, top, left, lacking(message), pace_ns,
                                SPLIT_N, traits.peers,
                            )  # fmt: skip
        wait_for_stores_read(0)
        if traits.weights == EXPERTS:
            block_barrier()  # one lane arrives for all, who have read what they store
        mbarrier.arrive(results.empty.index(0), count=1)
        mbarrier.arrive(results.empty.index(1), count=1)
        if signal != SIGNALS_NOBODY:
            gl.inline_asm_elementwise(COMPLETE_ASSEMBLY, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
            block_barrier()
            word, is_told = protocol.signals + signal * STRIDE, is_sound
            if traits.peers > 0:
                word = signals_of(peers, gl.maximum(to, 0)) + signal * STRIDE
            if peers.everyone is not None:
                is_told = is_told & (to != AT_ALL)
            gl.atomic_add(word, 1, mask=is_told, sem="release", scope="sys")
            if peers.everyone is not None:
                announce_everywhere(to, signal, peers, is_sound)
        record_time(work.queue.trace, tile, STORED, traits.traced)
        turn += 1
        message = receive(ring, turn)
