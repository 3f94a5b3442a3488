"""The Hopper matmul: the same face, table and signals as the portable one (kernels/matmul.py), warp-specialised.

    producer  one warp: claims rows of the table, waits for their signals, loads tiles of a and b (bulk tensor)
    consumers two groups of four warps, each half of the tile's rows, or, in columns, of the columns of a tile of 64
              rows: tensor cores, then the result to shared memory
    storer    one warp: bulk-tensor store, drain, signal, while the consumers are at the next tile

The first row is claimed before the partitions start (start.py). The producer passes each claimed row to the others
through a ring in shared memory (ring.py). A tile that a chunk's end cuts short is stored by the consumers with a mask
instead, because a bulk store would write into the next chunk.

A tile with addends ends otherwise (received.py): the storer waits for them while the consumers multiply, and the
consumers add them. Of several, they store the sum too, so that nothing but its signal is left to the storer. A product
that belongs to a peer (`TileRow.to`) the storer stores there, by that peer's tensor map, in place of its own; a sum of
two that goes everywhere, by those of all peers besides.

A whole tile is `split_n` rectangles of columns, side by side, a narrow one (`TileRow.width`) as many as its columns
need: `b` is loaded and the result stored rectangle by rectangle, and multiplied in one or two accumulators.
`TileRow.weight` says by which of several weights a tile multiplies, and so which output it writes. A gated tile has two
products of one rectangle of columns: `b`'s lies before the gate's (`b_1`), both are multiplied in one accumulator.

Of experts (kernels/experts.py) `b` is one tensor of all weights, and a tile begins where its expert's do. A group's
last tile, if it has rows for one consumer alone, is loaded and multiplied by that one. Rows that are gathered
two warps more load row by row (gathered.py), and those that are scattered, or end with their group, the storer stores
row by row, so that consumers are at the next tile.
SOURCE: the structure of DeepGEMM and of Triton's Gluon tutorials (producer, two 64-row consumers, storer).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from overweave.kernels.hopper.consumer import consume
from overweave.kernels.hopper.gathered import GATHERING, gather
from overweave.kernels.hopper.producer import produce
from overweave.kernels.hopper.shared import RING, Claim, ReductionArgs, Ring, StagedResults, Stages, TileArgs
from overweave.kernels.hopper.start import begin_claim, fetch_maps, fetch_row, place_for_claim
from overweave.kernels.hopper.storer import store
from overweave.kernels.hopper.tiles import Rectangles, b_parts, count_first
from overweave.kernels.tile_end import EXPERTS
from overweave.lang.tile_table import read_clock


class Outs(NamedTuple):
    """Tensor maps of what is stored: of each weight's output and of the second one; of the first, and of sums, at each
    peer, the next rank first.
    """

    out: Any
    out_1: Any
    out_2: Any
    total: Any
    at_peers: Any
    sums_at_peers: Any


@gluon.constexpr_function
def registers_of(traits):
    """Of a thread of each partition behind the first consumer, which has as many as the second. Addresses of rows that
    are gathered or scattered do not fit 24 registers, and there are 504 for the three groups of four warps.
    """
    return [232, 40, 40] if traits.weights == EXPERTS.value else [240, 24, 24]


@gluon.jit
def matmul_hopper_kernel(
    a_shard, a_workspace, b, b_1, b_2, out, out_1, out_2, total_tiles, tiles_1, tiles_2, tiles_3, tiles_4, tiles_5,
    tiles_6, tiles_7, sums_1, sums_2, sums_3, sums_4, sums_5, sums_6, sums_7, addend_tiles, products, ends, addends,
    peers, experts, queue, protocol, k, first_k, traits: gl.constexpr,
):  # fmt: skip
    """Up to `addend_tiles`, tensor descriptors; behind them as `matmul_kernel`. `out` is what `products.out` points to.

    first_k: None, or of operands in two parts how many columns of a, and rows of b, the first part has, whole steps of
    k; `a_workspace` and `b_1` are the second.
    tiles_1 to tiles_7, sums_1 to sums_7: where tiles and sums go at peers, the next rank first, or None.
    """
    DTYPE: gl.constexpr = a_shard.dtype
    A_SHAPE: gl.constexpr = a_shard.block_type.shape
    B_SHAPE: gl.constexpr = b.block_type.shape
    C_SHAPE: gl.constexpr = out.block_type.shape
    STAGES: gl.constexpr = traits.stages
    A_PARTS: gl.constexpr = 1 if traits.in_columns else 2
    GATED: gl.constexpr = traits.is_gated
    B_PARTS: gl.constexpr = b_parts(traits)
    begun = 0
    if traits.traced:
        begun = read_clock()
    claimed = begin_claim(queue.claims)
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
    messages = gl.allocate_shared_memory(gl.int32, [RING, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ring_full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    ring_empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    c_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    c_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    verdicts = gl.allocate_shared_memory(gl.int32, [1, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    received = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1 + (GATHERING if traits.gathers else 0))
        mbarrier.init(empty.index(stage), count=2)
    for place in gl.static_range(RING):
        mbarrier.init(ring_full.index(place), count=1)
        mbarrier.init(ring_empty.index(place), count=4 if traits.gathers else 3)
    for half in gl.static_range(2):
        mbarrier.init(c_full.index(half), count=1)
        mbarrier.init(c_empty.index(half), count=1)
    if traits.addends > 0:
        mbarrier.init(received.index(0), count=1 if addend_tiles is None else 2)
    first, passed = place_for_claim()
    claim = Claim(first, passed)
    stages = Stages(a_tiles, Rectangles(b_tiles, b_rest), full, empty)
    ring = Ring(messages, ring_full, ring_empty)
    results = StagedResults(Rectangles(c_tiles, c_rest), c_full, c_empty)
    sums = ReductionArgs(addends, addend_tiles, verdicts, received)
    # Tuples of the kernel's arguments stand inline: one kept in a variable would turn its constants into tensors.
    if traits.gathers:
        gl.warp_specialize(
            [
                (consume, (
                    traits, 0, claimed, begun, claim, stages, results, ring,
                    TileArgs(products, ends, sums, peers, experts, queue, k))),
                (consume, (
                    traits, 1, None, None, None, stages, results, ring,
                    TileArgs(products, ends, sums, peers, experts, queue, k))),
                (gather, (traits, stages, ring, experts, queue.table, k)),
                (produce, (
                    traits, a_shard, a_workspace, b, b_1, b_2, stages, ring, experts, queue, claim, protocol, k,
                    first_k)),
                (store, (
                    traits, results, ring, Outs(out, None, None, None, None, None),
                    TileArgs(products, ends, sums, peers, experts, queue, k), protocol)),
            ],
            [4, 2, 1, 1],
            [232, 40, 40, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (
                    traits, 0, claimed, begun, claim, stages, results, ring,
                    TileArgs(products, ends, sums, peers, experts, queue, k))),
                (consume, (
                    traits, 1, None, None, None, stages, results, ring,
                    TileArgs(products, ends, sums, peers, experts, queue, k))),
                (produce, (
                    traits, a_shard, a_workspace, b, b_1, b_2, stages, ring, experts, queue, claim, protocol, k,
                    first_k)),
                (store, (
                    traits, results, ring,
                    Outs(
                        out, out_1, out_2, total_tiles,
                        (tiles_1, tiles_2, tiles_3, tiles_4, tiles_5, tiles_6, tiles_7),
                        (sums_1, sums_2, sums_3, sums_4, sums_5, sums_6, sums_7)),
                    TileArgs(products, ends, sums, peers, experts, queue, k), protocol)),
            ],
            [4, 1, 1],
            registers_of(traits),
        )  # fmt: skip
