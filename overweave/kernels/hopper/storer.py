"""The storer warp of the Hopper matmul: loads addends, stores the consumers' results by TMA, and notifies."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from overweave.compat.triton_names import block_barrier, reinterpret, store_tile, wait_for_stores_read
from overweave.kernels.experts import output_rows
from overweave.kernels.hopper.shared import LAST, TILE_MASK, VOID_BIT, missing_parts, receive_message
from overweave.kernels.hopper.tile_end import load_addend, wait_and_send_verdict
from overweave.kernels.hopper.tiles import locate_box, tma_box
from overweave.kernels.tile_end import AT_ALL, EXPERTS, select_by_weight, signals_at_peer, weight_index
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
SLEEP_ASSEMBLY = gl.constexpr(SLEEP_UNTIL)
MOST_UNREAD = gl.constexpr(1)  # strips whose shared memory may still be unread when the next is stored


@gluon.jit
def tma_store(target, c_tiles, consumer, row, col, missing, SPLIT_N: gl.constexpr):
    """TMA-store one consumer's half of a tile from shared memory, without the `missing` boxes of a narrow tile."""
    PART_N: gl.constexpr = c_tiles.first.type.shape[2]
    for part in gl.static_range(SPLIT_N):
        if part == 0 or missing < SPLIT_N - part:
            store_tile(target, [row, col + part * PART_N], tma_box(c_tiles, consumer, part, 2))


@gluon.jit
def tma_store_paced(target, c_tiles, consumer, row, col, missing, interval_ns, SPLIT_N: gl.constexpr):
    """`tma_store` to a peer, rate-limited: in strips, at most MOST_UNREAD + 1 of them unread, one every `interval_ns`.

    TMA loads that are issued after a store to a peer wait until the link has taken it, and those of the main loop must
    not wait. A strip is as wide as a row of shared memory, so that the strips of a box are contiguous there.
    """
    PART_N: gl.constexpr = c_tiles.first.type.shape[2]
    STRIP_M: gl.constexpr = target.block_type.shape[0]
    STRIP_N: gl.constexpr = target.block_type.shape[1]
    STRIPS_DOWN: gl.constexpr = c_tiles.first.type.shape[1] // STRIP_M
    STRIPS: gl.constexpr = STRIPS_DOWN * (PART_N // STRIP_N)
    for part in gl.static_range(SPLIT_N):
        tiles, box = locate_box(c_tiles, consumer, part, 2)
        strips = reinterpret(tiles, tiles.dtype, [tiles.type.shape[0] * STRIPS, STRIP_M, STRIP_N], tiles.type.layout)
        if part == 0 or missing < SPLIT_N - part:
            due_ns = gl.inline_asm_elementwise(CLOCK_ASSEMBLY, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
            first_strip = box * STRIPS
            for strip in range(STRIPS):
                strip_row, strip_col = strip % STRIPS_DOWN * STRIP_M, part * PART_N + strip // STRIPS_DOWN * STRIP_N
                store_tile(target, [row + strip_row, col + strip_col], strips.index(first_strip + strip))
                wait_for_stores_read(MOST_UNREAD)
                due_ns += interval_ns
                gl.inline_asm_elementwise(SLEEP_ASSEMBLY, "=r,r", [due_ns], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def strip_interval_ns(peers, world_size, tile, tiles):
    """Return the interval between strips (kernel_calls/bind.py); 0 for a program's last tile: no loads follow."""
    is_last = tile + gl.num_programs(0) >= tiles
    return gl.where(is_last, 0, gl.load(peers.peer_table + 2 * world_size + 1)).to(gl.int32)


@gluon.jit
def tma_store_at(
    target_step, own_map, peer_maps, c_tiles, consumer, row, col, missing, interval_ns, SPLIT_N: gl.constexpr, PEERS:
    gl.constexpr
):  # fmt: skip
    """TMA-store to this rank, or to the peer `target_step` ranks after it, by that rank's tensor map.

    One branch for each map: to select among them would take registers that the warp does not have.
    """
    if PEERS == 0 or target_step <= 0:
        tma_store(own_map, c_tiles, consumer, row, col, missing, SPLIT_N)
    for steps in gl.static_range(1, PEERS + 1):
        if target_step == steps:
            tma_store_paced(peer_maps[steps - 1], c_tiles, consumer, row, col, missing, interval_ns, SPLIT_N)


@gluon.jit
def tma_store_at_peers(
    peer_maps, c_tiles, consumer, row, col, missing, interval_ns, SPLIT_N: gl.constexpr, PEERS: gl.constexpr
):  # fmt: skip
    """TMA-store to every peer, rate-limited."""
    for steps in gl.static_range(1, PEERS + 1):
        tma_store_paced(peer_maps[steps - 1], c_tiles, consumer, row, col, missing, interval_ns, SPLIT_N)


@gluon.jit
def notify_all_peers(target_step, signal, peers, is_valid):
    """Notify all peers of a tile that is stored at every rank."""
    if target_step == AT_ALL:
        for steps in range(1, peers.spread_ranks):
            gl.atomic_add(signals_at_peer(peers, steps) + signal * STRIDE, 1, mask=is_valid, sem="release", scope="sys")


COMPLETE_ASSEMBLY = gl.constexpr(COMPLETE_BULK_STORES)


# Tiles of experts whose rows are scattered by an index, or whose group ends within the tile, cannot be stored by TMA:
# the warp loads pieces of eight rows from shared memory, and stores each row at its own address.

PIECE_M = gl.constexpr(8)  # rows: a block of swizzled shared memory


@gluon.jit
def store_expert_rows(
    experts, target, out, c_tiles, consumer, row, row_end, col, missing, n, SPLIT_N: gl.constexpr
):  # fmt: skip
    """Store one consumer's half of an expert's tile from [row, col] on: by TMA if it is whole, else row by row."""
    PART_M: gl.constexpr = c_tiles.first.type.shape[1]
    is_whole = row + PART_M <= row_end
    if experts.out_index is not None:
        store_by_rows(experts, out, c_tiles, consumer, row, row_end, col, missing, n, SPLIT_N)
    elif is_whole:
        tma_store(target, c_tiles, consumer, row, col, missing, SPLIT_N)
    else:
        store_by_rows(experts, out, c_tiles, consumer, row, row_end, col, missing, n, SPLIT_N)


@gluon.jit
def store_by_rows(experts, out, c_tiles, consumer, row, row_end, col, missing, n, SPLIT_N: gl.constexpr):
    """Store one consumer's half of an expert's tile row by row, in pieces of PIECE_M rows of shared memory."""
    PART_M: gl.constexpr = c_tiles.first.type.shape[1]
    PART_N: gl.constexpr = c_tiles.first.type.shape[2]
    BYTES: gl.constexpr = c_tiles.first.dtype.primitive_bitwidth // 8
    PIECE_N: gl.constexpr = min(PART_N, 128 // BYTES)
    WIDTH: gl.constexpr = 16 // BYTES
    ACROSS: gl.constexpr = PIECE_N // WIDTH
    layout: gl.constexpr = gl.BlockedLayout([1, WIDTH], [32 // ACROSS, ACROSS], [1, 1], [1, 0])
    PIECES_DOWN: gl.constexpr = PART_M // PIECE_M
    PIECES: gl.constexpr = PIECES_DOWN * (PART_N // PIECE_N)
    width = n // WIDTH * WIDTH  # a multiple already: tells the compiler
    for part in gl.static_range(SPLIT_N):
        tiles, box = locate_box(c_tiles, consumer, part, 2)
        pieces = reinterpret(tiles, tiles.dtype, [tiles.type.shape[0] * PIECES, PIECE_M, PIECE_N], tiles.type.layout)
        if part == 0 or missing < SPLIT_N - part:
            for piece_row in range(gl.cdiv(gl.minimum(row_end - row, PART_M), PIECE_M)):
                rows = row + piece_row * PIECE_M + gl.arange(0, PIECE_M, layout=gl.SliceLayout(1, layout))
                rows_out, is_stored = output_rows(experts, rows, row_end)
                for piece_col in gl.static_range(PART_N // PIECE_N):
                    piece = pieces.index(box * PIECES + piece_col * PIECES_DOWN + piece_row).load(layout)
                    cols = col + part * PART_N + piece_col * PIECE_N
                    cols = cols // WIDTH * WIDTH + gl.arange(0, PIECE_N, layout=gl.SliceLayout(0, layout))
                    inside = is_stored[:, None] & (cols < width)[None, :]
                    gl.store(out + rows_out[:, None] * width + cols[None, :], piece, mask=inside)


@gluon.jit
def store(traits: gl.constexpr, results, messages, maps, work, protocol):
    """Storer partition: store every tile of the message queue and notify. maps: hopper/matmul.OutputMaps."""
    table, peers, outputs = work.queue.table, work.peers, work.outputs
    PART_M: gl.constexpr = results.tiles.first.type.shape[1]
    STEP_M: gl.constexpr = 0 if traits.in_columns else results.tiles.first.type.shape[1]
    STEP_N: gl.constexpr = results.tiles.first.type.shape[2] if traits.in_columns else 0
    SPLIT_N: gl.constexpr = traits.split_n
    iteration = 0
    message = receive_message(messages, iteration)
    while message != LAST:
        tile = message & TILE_MASK
        is_valid = message < VOID_BIT
        if traits.addends > 0:
            gl.inline_asm_elementwise(COMPLETE_ASSEMBLY, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
            block_barrier()
            verdict = wait_and_send_verdict(work.sums, table, tile, protocol)
            if work.sums.tiles is not None:
                load_addend(traits, work.sums, results.tiles, table, tile, missing_parts(message), verdict)
            is_valid = is_valid & (verdict == 1)
            record_time(work.queue.trace, tile, RECEIVED, traits.traced)
        row = read_column(table, tile, ROW)
        row_end = read_column(table, tile, ROW_END)
        col = read_column(table, tile, COL)
        signal = read_column(table, tile, SIGNAL)
        target = select_by_weight(
            weight_index(table, tile, traits.weights), maps.out, maps.out_1, maps.out_2, traits.weights
        )
        if maps.total is not None:
            if read_column(table, tile, INTO) != 0:
                target = maps.total
        target_step, interval_ns = 0, 0
        if traits.peers > 0:
            target_step, interval_ns = (
                read_column(table, tile, TO),
                strip_interval_ns(peers, protocol.world_size, tile, work.queue.tiles),
            )
        for consumer in gl.static_range(2):
            mbarrier.wait(results.full.index(consumer), iteration & 1)
            if consumer == 1:
                record_time(work.queue.trace, tile, MULTIPLIED, traits.traced and traits.addends == 0)
            row_of_half, col_of_half = row + consumer * STEP_M, col + consumer * STEP_N
            if traits.addends == 0 or work.sums.tiles is not None or read_column(table, tile, PLACE) == ADDS_NOTHING:
                if traits.weights == EXPERTS:
                    store_expert_rows(
                        work.experts, target, outputs.out, results.tiles, consumer, row_of_half,
                        row_end, col_of_half, missing_parts(message), outputs.n, SPLIT_N,
                    )  # fmt: skip
                elif row_of_half + PART_M <= row_end:
                    tma_store_at(
                        target_step, target, maps.at_peers, results.tiles, consumer, row_of_half, col_of_half,
                        missing_parts(message), interval_ns, SPLIT_N, traits.peers,
                    )  # fmt: skip
                    if peers.spread_ranks is not None:
                        if target_step == AT_ALL:
                            tma_store_at_peers(
                                maps.sums_at_peers, results.tiles, consumer, row_of_half, col_of_half,
                                missing_parts(message), interval_ns, SPLIT_N, traits.peers,
                            )  # fmt: skip
        wait_for_stores_read(0)
        if traits.weights == EXPERTS:
            block_barrier()  # one lane arrives for all: after their loads from shared memory
        mbarrier.arrive(results.empty.index(0), count=1)
        mbarrier.arrive(results.empty.index(1), count=1)
        if signal != SIGNALS_NOBODY:
            gl.inline_asm_elementwise(COMPLETE_ASSEMBLY, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
            block_barrier()
            word, is_notified = protocol.signals + signal * STRIDE, is_valid
            if traits.peers > 0:
                word = signals_at_peer(peers, gl.maximum(target_step, 0)) + signal * STRIDE
            if peers.spread_ranks is not None:
                is_notified = is_notified & (target_step != AT_ALL)
            gl.atomic_add(word, 1, mask=is_notified, sem="release", scope="sys")
            if peers.spread_ranks is not None:
                notify_all_peers(target_step, signal, peers, is_valid)
        record_time(work.queue.trace, tile, STORED, traits.traced)
        iteration += 1
        message = receive_message(messages, iteration)
