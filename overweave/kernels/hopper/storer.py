"""The storer of the Hopper matmul, one warp: brings addends, stores what the consumers leave, and tells of it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from overweave.compat.triton_names import block_barrier, wait_for_stores_read
from overweave.kernels.hopper.received import await_addends, load_addend
from overweave.kernels.hopper.ring import LAST, NUMBER, VOID, lacking, receive
from overweave.kernels.hopper.scattered import store_rows_of
from overweave.kernels.hopper.shares import hear, is_announced
from overweave.kernels.hopper.stored import (
    announce_everywhere,
    pace_of,
    store_parts_at,
    store_parts_at_peers,
)
from overweave.kernels.shares import LEFT_OUT, SUMMED
from overweave.kernels.stored import AT_ALL, signals_of
from overweave.kernels.weights import EXPERTS, of_weight, weight_of
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
from overweave.memory.device.ptx import COMPLETE_BULK_STORES
from overweave.memory.device.signals import STRIDE

COMPLETE_ASSEMBLY = gl.constexpr(COMPLETE_BULK_STORES)


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
        ended = 0
        for half in gl.static_range(2):
            mbarrier.wait(results.full.index(half), turn & 1)
            if half == 1:
                record_time(work.queue.trace, tile, MULTIPLIED, traits.traced and traits.addends == 0)
            is_ended = True
            if traits.split_k:
                told = hear(work.shares.told.index(half))
                is_ended = told != LEFT_OUT
                is_sound = is_sound & (told <= SUMMED)
                ended += is_ended.to(gl.int32)
            top, left = row + half * STEP_M, col + half * STEP_N
            if traits.addends == 0 or work.sums.tiles is not None or read_column(table, tile, PLACE) == ADDS_NOTHING:
                if traits.weights == EXPERTS:
                    store_rows_of(
                        work.experts, target, products.out, results.tiles, half, top,
                        row_end, left, lacking(message), products.n, SPLIT_N,
                    )  # fmt: skip
                elif is_ended & (top + PART_M <= row_end):
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
            if traits.split_k:
                is_sound = is_announced(work.shares.memory.arrivals, table, tile, ended, is_sound)
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
