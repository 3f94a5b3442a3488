"""The producer of the Hopper matmul, one warp: claims tiles, waits for what they wait for, loads their operands."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from overweave.compat.triton_names import load_tile
from overweave.kernels.experts import is_sound, tiles_of
from overweave.kernels.hopper.shared import LACKS, LAST, VOID, pass_on
from overweave.kernels.hopper.start import receive_claim
from overweave.kernels.hopper.tiles import b_parts, is_short_tile, may_be_short, rectangle, source_of, wait_for_tile
from overweave.kernels.tile_end import EXPERTS, of_weight, weight_of
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
    traits: gl.constexpr, a_shard, a_workspace, b, b_1, b_2, stages, ring, experts, queue, claim, protocol, k, first_k
):  # fmt: skip
    """Every tile that this program claims, in the order of the table; then tells the others that it was the last."""
    table, claims, trace, tiles = queue
    tiles = tiles_of(tiles, traits.weights)
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
    turn = 0
    tile = receive_claim(claim)
    while tile < tiles:
        record_time(trace, tile, CLAIMED, traits.traced)
        col = read_column(table, tile, COL) + read_column(table, tile, SHIFT)
        width = read_column(table, tile, WIDTH) if traits.split_n > 1 else 0
        lacks = gl.where(width == 0, 0, B_PARTS - width // PART_N)
        verdict = wait_for_tile(table, tile, protocol)
        if traits.weights == EXPERTS:
            verdict &= is_sound(table, tile)
        record_time(trace, tile, READY, traits.traced)
        pass_on(ring, turn, tile + (1 - verdict) * VOID + lacks * LACKS)
        turn += 1
        a = a_shard
        if traits.two_sources:
            if read_column(table, tile, SOURCE) != FROM_OWN_SHARD:
                a = a_workspace
        weight = weight_of(table, tile, traits.weights)
        factor = of_weight(weight, b, b_1, b_2, traits.weights)
        down = 0
        if traits.weights == EXPERTS:
            col += weight * experts.step if traits.b_is_transposed else 0
            down = 0 if traits.b_is_transposed else weight * experts.step
        top, further = source_of(traits, table, tile, PART_M, A_PARTS)
        is_short = is_short_tile(traits, table, tile, PART_M)
        for depth in range(0, k, BLOCK_K):
            stage = step % traits.stages
            mbarrier.wait(stages.empty.index(stage), ((step // traits.stages) & 1) ^ 1)
            arrived = stages.full.index(stage)
            for short in gl.static_range(B_PARTS):
                if MAY_BE_SHORT and A_BYTES > 0:
                    has_all, has_half = (lacks == short) & (is_short == 0), (lacks == short) & (is_short != 0)
                    mbarrier.expect(arrived, A_BYTES + (B_PARTS - short) * B_BYTES, pred=has_all)
                    mbarrier.expect(arrived, A_BYTES // 2 + (B_PARTS - short) * B_BYTES, pred=has_half)
                else:
                    mbarrier.expect(arrived, A_BYTES + (B_PARTS - short) * B_BYTES, pred=lacks == short)
            own_a, own_b, at = a, factor, depth
            if first_k is not None:
                if depth >= first_k:
                    own_a, own_b, at = a_workspace, b_1, depth - first_k
            for part in gl.static_range(0 if traits.gathers else A_PARTS):
                place = stages.a.index(A_PARTS * stage + part)
                if MAY_BE_SHORT and part == 1:
                    load_tile(own_a, [top + part * further, at], arrived, place, pred=is_short == 0)
                else:
                    load_tile(own_a, [top + part * further, at], arrived, place)
            for part in gl.static_range(B_PARTS):
                from_col = col if GATED else col + part * PART_N
                place = rectangle(stages.b, stage, part, traits.stages)
                side = own_b
                if GATED and part == 1:
                    side = b_1
                if traits.b_is_transposed:
                    load_tile(side, [from_col, at], arrived, place, pred=lacks < B_PARTS - part)
                else:
                    load_tile(side, [at + down, from_col], arrived, place, pred=lacks < B_PARTS - part)
            step += 1
        tile = gl.atomic_add(claims, 1, sem="relaxed", scope="gpu")
    pass_on(ring, turn, LAST)
