"""The Hopper matmul kernel: arguments, table and signals of the portable one (kernels/matmul.py), warp-specialised.

    producer  one warp: claims rows of the table, waits for their signals, loads tiles of a and b by TMA
    consumers two warpgroups, each half of the tile's rows, or, of a tile of 64 rows, half of its columns
              (`in_columns`): wgmma, epilogue, result to shared memory
    storer    one warp: TMA store, wait for completion, signal, while the consumers compute the next tile

The first row is claimed before the partitions start (start.py). The producer sends each claimed row to the others
through a message queue in shared memory (shared.py). A tile that a chunk's end cuts short is stored by the consumers
with a mask, because a TMA store would write into the next chunk.

A tile with addends (tile_end.py): the storer waits for them while the consumers multiply, and the consumers add them;
if there are several, they also store the sum, and the storer only signals. A product that belongs to a peer
(`TileRow.to`) is stored there by that peer's tensor map; a sum of two that goes to all ranks, by those of all.

A whole tile is `split_n` TMA boxes of columns, a narrow one (`TileRow.width`) has fewer: `b` is loaded and the result
stored box by box, multiplied in one or two accumulators. `TileRow.weight` selects one of several B matrices and its
output. A gated tile multiplies by the same columns of `b` and of the gate weight (`b_1`), in one accumulator.

With experts (kernels/experts.py) `b` stacks all weights, and a tile's rows or columns of it are offset by its expert. A
group's last tile, if it has rows for one consumer alone, is loaded and multiplied by that one. Gathered rows are loaded
by two more warps (gathered.py); scattered rows, or those that end with their group, the storer stores row by row.
SOURCE: the structure of DeepGEMM and of Triton's Gluon tutorials (producer, two 64-row consumers, storer).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from overweave.kernels.hopper.consumer import consume
from overweave.kernels.hopper.gathered import GATHER_THREADS, gather
from overweave.kernels.hopper.producer import produce
from overweave.kernels.hopper.shared import (
    QUEUE_LENGTH,
    FirstClaim,
    MessageQueue,
    ReductionArgs,
    StagedResults,
    Stages,
    TileArgs,
)
from overweave.kernels.hopper.start import allocate_claim, fetch_maps, fetch_row, start_claim
from overweave.kernels.hopper.storer import store
from overweave.kernels.hopper.tiles import TmaBoxes, b_parts, count_first
from overweave.kernels.tile_end import EXPERTS
from overweave.lang.tile_table import read_clock


class OutputMaps(NamedTuple):
    """Tensor maps of outputs, one a B matrix, and of `total`; of the first output, and of sums, at each peer."""

    out: Any
    out_1: Any
    out_2: Any
    total: Any
    at_peers: Any
    sums_at_peers: Any


@gluon.constexpr_function
def registers_per_thread(traits):
    """Return registers per thread of each partition after consumer 0 (consumer 1, producer, storer).

    24 registers do not hold addresses of gathered or scattered rows; three warpgroups share 504.
    """
    return [232, 40, 40] if traits.weights == EXPERTS.value else [240, 24, 24]


@gluon.jit
def matmul_hopper_kernel(
    a_shard, a_workspace, b, b_1, b_2, out, out_1, out_2, total_tiles, tiles_1, tiles_2, tiles_3, tiles_4, tiles_5,
    tiles_6, tiles_7, sums_1, sums_2, sums_3, sums_4, sums_5, sums_6, sums_7, addend_tiles, outputs, epilogue_args,
    addends, peers, experts, queue, protocol, k, first_k, traits: gl.constexpr,
):  # fmt: skip
    """Compute all tiles of a table. Tensor descriptors up to `addend_tiles`, then the arguments of `matmul_kernel`.

    tiles_1 to tiles_7, sums_1 to sums_7: descriptors of the peers' outputs and sums, next rank first, or None.
    addend_tiles: of the matrix of single addends. `out` describes `outputs.out`.
    first_k: None; or, if a and b come in two parts along k, the extent of the first, a multiple of BLOCK_K:
    `a_workspace` and `b_1` are the second part.
    """
    DTYPE: gl.constexpr = a_shard.dtype
    A_SHAPE: gl.constexpr = a_shard.block_type.shape
    B_SHAPE: gl.constexpr = b.block_type.shape
    C_SHAPE: gl.constexpr = out.block_type.shape
    STAGES: gl.constexpr = traits.stages
    A_PARTS: gl.constexpr = 1 if traits.in_columns else 2
    GATED: gl.constexpr = traits.is_gated
    B_PARTS: gl.constexpr = b_parts(traits)
    start_ns = 0
    if traits.traced:
        start_ns = read_clock()
    claimed = start_claim(queue.claims)
    fetch_row(queue.table)
    fetch_maps(2 + 2 * traits.weights + (0 if first_k is None and not GATED else 1))
    a_tiles = gl.allocate_shared_memory(DTYPE, [A_PARTS * STAGES, A_SHAPE[0], A_SHAPE[1]], a_shard.layout)
    FIRST_B: gl.constexpr = count_first(B_PARTS, STAGES)
    FIRST_C: gl.constexpr = count_first(traits.split_n, 2)
    b_tiles = gl.allocate_shared_memory(DTYPE, [FIRST_B, B_SHAPE[0], B_SHAPE[1]], b.layout)
    c_tiles = gl.allocate_shared_memory(out.dtype, [FIRST_C, C_SHAPE[0], C_SHAPE[1]], out.layout)
    b_rest, c_rest = None, None
    if FIRST_B < B_PARTS * STAGES:
        b_rest = gl.allocate_shared_memory(DTYPE, [B_PARTS * STAGES - FIRST_B, B_SHAPE[0], B_SHAPE[1]], b.layout)
    if 2 * traits.split_n > FIRST_C:
        c_rest = gl.allocate_shared_memory(
            out.dtype, [2 * traits.split_n - FIRST_C, C_SHAPE[0], C_SHAPE[1]], out.layout
        )
    message_words = gl.allocate_shared_memory(gl.int32, [QUEUE_LENGTH, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ring_full = gl.allocate_shared_memory(gl.int64, [QUEUE_LENGTH, 1], mbarrier.MBarrierLayout())
    ring_empty = gl.allocate_shared_memory(gl.int64, [QUEUE_LENGTH, 1], mbarrier.MBarrierLayout())
    c_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    c_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    verdicts = gl.allocate_shared_memory(gl.int32, [1, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    received = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1 + (GATHER_THREADS if traits.gathers else 0))
        mbarrier.init(empty.index(stage), count=2)
    for index in gl.static_range(QUEUE_LENGTH):
        mbarrier.init(ring_full.index(index), count=1)
        mbarrier.init(ring_empty.index(index), count=4 if traits.gathers else 3)
    for consumer in gl.static_range(2):
        mbarrier.init(c_full.index(consumer), count=1)
        mbarrier.init(c_empty.index(consumer), count=1)
    if traits.addends > 0:
        mbarrier.init(received.index(0), count=1 if addend_tiles is None else 2)
    slot, sent = allocate_claim()
    claim = FirstClaim(slot, sent)
    stages = Stages(a_tiles, TmaBoxes(b_tiles, b_rest), full, empty)
    message_queue = MessageQueue(message_words, ring_full, ring_empty)
    results = StagedResults(TmaBoxes(c_tiles, c_rest), c_full, c_empty)
    sums = ReductionArgs(addends, addend_tiles, verdicts, received)
    # Tuples of kernel arguments must be built inline: in a variable, their constants would become tensors.
    if traits.gathers:
        gl.warp_specialize(
            [
                (consume, (
                    traits, 0, claimed, start_ns, claim, stages, results, message_queue,
                    TileArgs(outputs, epilogue_args, sums, peers, experts, queue, k))),
                (consume, (
                    traits, 1, None, None, None, stages, results, message_queue,
                    TileArgs(outputs, epilogue_args, sums, peers, experts, queue, k))),
                (gather, (traits, stages, message_queue, experts, queue.table, k)),
                (produce, (
                    traits, a_shard, a_workspace, b, b_1, b_2, stages, message_queue, experts, queue, claim, protocol,
                    k, first_k)),
                (store, (
                    traits, results, message_queue, OutputMaps(out, None, None, None, None, None),
                    TileArgs(outputs, epilogue_args, sums, peers, experts, queue, k), protocol)),
            ],
            [4, 2, 1, 1],
            [232, 40, 40, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (
                    traits, 0, claimed, start_ns, claim, stages, results, message_queue,
                    TileArgs(outputs, epilogue_args, sums, peers, experts, queue, k))),
                (consume, (
                    traits, 1, None, None, None, stages, results, message_queue,
                    TileArgs(outputs, epilogue_args, sums, peers, experts, queue, k))),
                (produce, (
                    traits, a_shard, a_workspace, b, b_1, b_2, stages, message_queue, experts, queue, claim, protocol,
                    k, first_k)),
                (store, (
                    traits, results, message_queue,
                    OutputMaps(
                        out, out_1, out_2, total_tiles,
                        (tiles_1, tiles_2, tiles_3, tiles_4, tiles_5, tiles_6, tiles_7),
                        (sums_1, sums_2, sums_3, sums_4, sums_5, sums_6, sums_7)),
                    TileArgs(outputs, epilogue_args, sums, peers, experts, queue, k), protocol)),
            ],
            [4, 1, 1],
            registers_per_thread(traits),
        )  # fmt: skip
