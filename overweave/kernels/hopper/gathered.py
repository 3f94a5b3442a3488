"""Gather partition of the Hopper matmul: two warps load rows of `a` by an index, with cp.async of 16 bytes a lane.

Hopper's TMA cannot load a list of rows. Each lane reads where its rows begin once a tile, and keeps 32-bit word
offsets, since addresses would not fit the registers. Each lane arrives on the stage's mbarrier when its copies are
done; consumers order them before wgmma by a proxy fence. Two warps: with producer and storer they fill a third
warpgroup, and three warpgroups leave registers for the widest accumulators. SOURCE: CUTLASS,
`MainloopSm90CpAsyncGmmaWarpSpecialized`. MEASURED: by the producer's one warp, which has no registers for rows and so
read their numbers anew at each step, a gathered matmul took 1.8 to 3.5 times one without
(benchmarks/results/grouped.h200.2026-11-29.txt).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from overweave.compat.triton_names import copy_to_shared
from overweave.kernels.experts import source_rows
from overweave.kernels.hopper.shared import LAST, TILE_MASK, receive_message
from overweave.kernels.hopper.tiles import is_short_tile
from overweave.lang.tile_table import ROW, ROW_END, read_column
from overweave.memory.device.ptx import WORDS_BEHIND

ROW_ASSEMBLY = gl.constexpr(WORDS_BEHIND)
GATHER_THREADS = gl.constexpr(64)  # threads that arrive on a stage's full mbarrier, besides the producer


@gluon.jit
def gather(traits: gl.constexpr, stages, messages, experts, table, k):
    """Gather partition: load the rows of `a` of every tile of the message queue into the pipeline stages."""
    PARTS: gl.constexpr = stages.a.type.shape[0] // traits.stages
    PART_M: gl.constexpr = stages.a.type.shape[1]
    BLOCK_K: gl.constexpr = stages.a.type.shape[2]
    WIDTH: gl.constexpr = 16 * 8 // stages.a.dtype.primitive_bitwidth  # elements of a copy
    ACROSS: gl.constexpr = BLOCK_K // WIDTH
    layout: gl.constexpr = gl.BlockedLayout([1, WIDTH], [32 // ACROSS, ACROSS], [2, 1], [1, 0])
    k_offsets = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, layout))
    k_padded = gl.cdiv(k, WIDTH) * WIDTH  # rows are padded to whole 16-byte copies
    step = 0
    iteration = 0
    message = receive_message(messages, iteration)
    while message != LAST:
        tile = message & TILE_MASK
        row, row_end = read_column(table, tile, ROW), read_column(table, tile, ROW_END)
        is_short = is_short_tile(traits, table, tile, PART_M)
        row_offsets = gl.arange(0, PART_M, layout=gl.SliceLayout(1, layout))
        first_words = row_word_offsets(experts, row + row_offsets, row_end, WIDTH)
        second_words = first_words
        if PARTS == 2:
            second_words = row_word_offsets(experts, row + PART_M + row_offsets, row_end, WIDTH)
        for depth in range(0, k, BLOCK_K):
            stage = step % traits.stages
            mbarrier.wait(stages.empty.index(stage), ((step // traits.stages) & 1) ^ 1)
            in_k = (k_offsets < k_padded - depth)[None, :]
            source_k = experts.source + depth
            copy_rows_async(stages.a.index(PARTS * stage), source_k, first_words, k_offsets, in_k)
            if PARTS == 2:
                if is_short == 0:
                    copy_rows_async(stages.a.index(PARTS * stage + 1), source_k, second_words, k_offsets, in_k)
            async_copy.mbarrier_arrive(stages.full.index(stage), increment_count=False)
            step += 1
        iteration += 1
        message = receive_message(messages, iteration)


@gluon.jit
def row_word_offsets(experts, rows, row_end, WIDTH: gl.constexpr):
    """Return each row's source row as a 16-byte word offset in `experts.source`; -1 if its index is out of range."""
    rows_in, is_valid = source_rows(experts, rows, row_end)
    return gl.where(is_valid, rows_in * (experts.source_stride // WIDTH), -1).to(gl.int32)


@gluon.jit
def copy_rows_async(shared_tile, source, words, k_offsets, in_k):
    """Start copies of one step of k of these rows to shared memory; rows with offset -1 become zeros."""
    # In assembly, so that the compiler recomputes addresses instead of keeping them in registers.
    row_starts = gl.inline_asm_elementwise(
        ROW_ASSEMBLY, "=l,r,l", [gl.maximum(words, 0), source], dtype=gl.int64, is_pure=True, pack=1
    )
    row_starts = row_starts.to(source.dtype, bitcast=True)
    addresses = gl.multiple_of(row_starts, 16)[:, None] + k_offsets[None, :]
    copy_to_shared(shared_tile, addresses, (words >= 0)[:, None] & in_k)
