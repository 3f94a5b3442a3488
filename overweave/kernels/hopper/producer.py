"""The producer warp of the Hopper matmul: claims tiles, waits for their signals, loads their operands by TMA."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from overweave.compat.triton_names import load_tile
from overweave.kernels.experts import is_valid_tile, tile_count
from overweave.kernels.hopper.shared import LAST, MISSING_UNIT, VOID_BIT, send_message
from overweave.kernels.hopper.start import receive_claim
from overweave.kernels.hopper.tiles import b_parts, is_short_tile, load_rows, may_be_short, tma_box, wait_for_tile
from overweave.kernels.tile_end import EXPERTS, select_by_weight, weight_index
from overweave.lang.tile_table import (
    CLAIMED,
    COL,
    FROM_OWN_SHARD,
    READY,
    SHIFT,
    SOURCE,
    WIDTH,
    read_column,
    record_time,
)


@gluon.jit
def produce(
    traits: gl.constexpr, a_shard, a_workspace, b, b_1, b_2, stages, messages, experts, queue, claim, protocol, k,
    first_k
):  # fmt: skip
    """Producer partition: load every tile that this program claims, in table order; then send LAST.

    Each tile is sent to the other partitions once its wait has ended, with its status. first_k: as of the kernel.
    """
    table, claims, trace, tiles = queue
    tiles = tile_count(tiles, traits.weights)
    GATED: gl.constexpr = traits.is_gated
    PART_M: gl.constexpr = a_shard.block_type.shape[0]
    BLOCK_K: gl.constexpr = a_shard.block_type.shape[1]
    PART_N: gl.constexpr = b.block_type.shape[0] if traits.b_is_transposed else b.block_type.shape[1]
    A_PARTS: gl.constexpr = stages.a.type.shape[0] // traits.stages
    B_PARTS: gl.constexpr = b_parts(traits)
    A_BYTES: gl.constexpr = 0 if traits.gathers else A_PARTS * a_shard.block_type.nbytes
    MAY_BE_SHORT: gl.constexpr = may_be_short(traits)
    B_BYTES: gl.constexpr = b.block_type.nbytes
    step = 0
    iteration = 0
    tile = receive_claim(claim)
    while tile < tiles:
        record_time(trace, tile, CLAIMED, traits.traced)
        col = read_column(table, tile, COL) + read_column(table, tile, SHIFT)
        width = read_column(table, tile, WIDTH) if traits.split_n > 1 else 0
        missing = gl.where(width == 0, 0, B_PARTS - width // PART_N)
        verdict = wait_for_tile(table, tile, protocol)
        if traits.weights == EXPERTS:
            verdict &= is_valid_tile(table, tile)
        record_time(trace, tile, READY, traits.traced)
        send_message(messages, iteration, tile + (1 - verdict) * VOID_BIT + missing * MISSING_UNIT)
        iteration += 1
        a = a_shard
        if traits.two_sources:
            if read_column(table, tile, SOURCE) != FROM_OWN_SHARD:
                a = a_workspace
        weight = weight_index(table, tile, traits.weights)
        b_matrix = select_by_weight(weight, b, b_1, b_2, traits.weights)
        k_row_offset = 0
        if traits.weights == EXPERTS:
            col += weight * experts.rows_per_expert if traits.b_is_transposed else 0
            k_row_offset = 0 if traits.b_is_transposed else weight * experts.rows_per_expert
        top, second_offset = load_rows(traits, table, tile, PART_M, A_PARTS)
        is_short = is_short_tile(traits, table, tile, PART_M)
        for depth in range(0, k, BLOCK_K):
            stage = step % traits.stages
            mbarrier.wait(stages.empty.index(stage), ((step // traits.stages) & 1) ^ 1)
            full = stages.full.index(stage)
            for missing_count in gl.static_range(B_PARTS):
                if MAY_BE_SHORT and A_BYTES > 0:
                    has_all, has_half = (
                        (missing == missing_count) & (is_short == 0),
                        (missing == missing_count) & (is_short != 0),
                    )
                    mbarrier.expect(full, A_BYTES + (B_PARTS - missing_count) * B_BYTES, pred=has_all)
                    mbarrier.expect(full, A_BYTES // 2 + (B_PARTS - missing_count) * B_BYTES, pred=has_half)
                else:
                    mbarrier.expect(full, A_BYTES + (B_PARTS - missing_count) * B_BYTES, pred=missing == missing_count)
            a_map, b_map, k_col = a, b_matrix, depth
            if first_k is not None:
                if depth >= first_k:
                    a_map, b_map, k_col = a_workspace, b_1, depth - first_k
            for part in gl.static_range(0 if traits.gathers else A_PARTS):
                shared_tile = stages.a.index(A_PARTS * stage + part)
                if MAY_BE_SHORT and part == 1:
                    load_tile(a_map, [top + part * second_offset, k_col], full, shared_tile, pred=is_short == 0)
                else:
                    load_tile(a_map, [top + part * second_offset, k_col], full, shared_tile)
            for part in gl.static_range(B_PARTS):
                from_col = col if GATED else col + part * PART_N
                shared_tile = tma_box(stages.b, stage, part, traits.stages)
                map_b = b_map
                if GATED and part == 1:
                    map_b = b_1
                if traits.b_is_transposed:
                    load_tile(map_b, [from_col, k_col], full, shared_tile, pred=missing < B_PARTS - part)
                else:
                    load_tile(map_b, [k_col + k_row_offset, from_col], full, shared_tile, pred=missing < B_PARTS - part)
            step += 1
        tile = gl.atomic_add(claims, 1, sem="relaxed", scope="gpu")
    send_message(messages, iteration, LAST)
